"""Numbers of examples by client, as selectors keep them: -1 where unknown."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray


def take_sizes(size: FloatArray, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
    """Enter the finite numbers of ``num_examples`` into ``size``, in place; the others leave what was known."""
    if "num_examples" in columns:
        told = columns["num_examples"]
        known = np.isfinite(told)
        size[clients[known]] = told[known]


def filled_sizes(size: FloatArray, registered: BoolArray) -> FloatArray:
    """Return ``size`` with the unknown entries (-1) at the mean of the registered clients' known ones, or at 1."""
    known = registered & (size >= 0)
    mean = float(size[known].mean()) if known.any() else 1.0
    return np.where(size >= 0, size, mean)
