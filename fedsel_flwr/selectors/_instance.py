"""What the solvers of Ben Ami et al., equation (13), share: their input, checked, and without infinite bounds."""

from __future__ import annotations

import numpy as np

from fedsel_flwr.checks import FloatArray, column
from fedsel_flwr.errors import ParameterError


def checked_instance(ucb: FloatArray, generalization: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return copies of both arrays; raise :class:`ParameterError` if (13) has no meaning for them."""
    ucb = column("ucb", ucb, len(np.atleast_1d(ucb)))
    g = column("generalization", generalization, len(ucb))
    if np.isnan(ucb).any() or np.isneginf(ucb).any() or not np.isfinite(g).all():
        raise ParameterError("ucb must hold numbers or +inf and generalization finite numbers, got NaN or an infinity")
    return ucb, g


def finite_bounds(ucb: FloatArray, g: FloatArray, alpha: float) -> tuple[FloatArray, float]:
    """Replace infinite bounds by a finite one so large that the order of any two sets stays the same.

    Args:
        ucb: Bounds, shape (K,), K >= 1, some perhaps +inf.
        g: Generalization values, shape (K,).
        alpha: Weight of the generalization term.

    Returns:
        The bounds; and the range of the finite bounds + alpha times the range of ``g``, in place of Delta_max (14),
        which needs the true means. No two sets of finite bounds differ by more; sets with a replaced bound may.
    """
    finite = ucb[np.isfinite(ucb)]
    spread = float((np.ptp(finite) if finite.size else 0.0) + alpha * np.ptp(g))  # stands in for Delta_max (14)
    return np.where(np.isfinite(ucb), ucb, finite.max(initial=0.0) + spread + 1.0), spread
