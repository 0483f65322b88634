"""Averaging schemes of Kim et al., Table 1, as weights of the round's models and of the old global model.

A scheme sets each model's weight in the mean of the base strategy, then mixes that mean with the old model:
``w^t = old * w^{t-1} + new * mean``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import ParameterError

FloatArray = npt.NDArray[np.float64]
SCHEMES = ("fedpdp", "fedpdp-exact", "fedavg-absent", "mean")
"""The schemes by name."""
READS_TOTAL_EXAMPLES = frozenset({"fedpdp-exact", "fedavg-absent"})
"""The schemes that read the number of examples of all clients, absent ones included."""


@dataclass(frozen=True)
class Averaging:
    """Weights and mix that turn a round's models into the new global one.

    Attributes:
        weights: Weight of each model in the base strategy's mean, shape (n,), positive.
        old: Factor of the old global model.
        new: Factor of the mean.
    """

    weights: FloatArray
    old: float
    new: float

    @property
    def mixes(self) -> bool:
        """Whether the new model differs from the mean."""
        return not (self.old == 0.0 and self.new == 1.0)

    def mix(self, before: Sequence[npt.NDArray[Any]], mean: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Return the new model: a mix of the old model and the mean of the round's models."""
        if not self.mixes:
            return list(mean)
        pairs = zip(before, mean, strict=True)
        return [np.asarray(self.old * b + self.new * m, dtype=m.dtype) for b, m in pairs]  # (3), (5)


def averaging(
    scheme: str,
    num_examples: FloatArray,
    total_examples: float,
    num_clients: int,
    draws: npt.ArrayLike | None = None,
) -> Averaging:
    """Return a scheme's weights for the models of a round.

    ====================  ================  ==================================================
    scheme                Table 1           new model
    ====================  ================  ==================================================
    ``"fedpdp"``          FedPdp            mean weighted by p_k, with weights that sum to 1
    ``"fedpdp-exact"``    FedPdp            ``sum over S^t of p_k |S| / |S^t| w_k``, as printed
    ``"fedavg-absent"``   FedAvg            clients not in S^t keep the old model, p_k w^{t-1}
    ``"mean"``            FedProx           plain mean over the multiset of drawn clients
    ====================  ================  ==================================================

    The printed weights of FedPdp sum to 1 only on average, so the model grows and shrinks from round to round. The
    default is therefore normalized. FedProx samples by p_k with replacement
    (:class:`~fedsel_flwr.selectors.RandomBySize`). A client drawn c times counts c times in its mean.

    Args:
        scheme: One of the names above.
        num_examples: Number of examples behind each model of the round, shape (n,).
        total_examples: Number of examples of all clients, absent ones included.
        num_clients: Number of clients, ``|S|``.
        draws: Number of draws of the client behind each model, shape (n,), whole numbers of at least 1; None for once.

    Returns:
        The weights and the mix.

    Raises:
        ParameterError: The scheme is unknown, or a number is not positive.

    >>> averaging("fedavg-absent", np.array([10.0, 30.0]), 100.0, 5)
    Averaging(weights=array([10., 30.]), old=0.6, new=0.4)
    """
    if scheme not in SCHEMES:
        raise ParameterError(f"unknown averaging scheme {scheme!r}. Choose one of {', '.join(SCHEMES)}")
    weights = np.asarray(num_examples, dtype=np.float64)
    if weights.ndim != 1 or not weights.size or not (weights > 0).all() or not total_examples > 0:
        raise ParameterError(f"num_examples must be positive, one per model, got {weights}")
    counts = np.ones_like(weights) if draws is None else np.asarray(draws, dtype=np.float64)
    if counts.shape != weights.shape or not (counts >= 1).all():
        raise ParameterError(f"draws must be at least 1, one per model, got {counts}")
    share = float(weights.sum() / total_examples)  # sum of p_k over S^t
    if scheme == "fedpdp":
        return Averaging(weights, 0.0, 1.0)  # normalized (5)
    if scheme == "fedpdp-exact":
        return Averaging(weights, 0.0, share * num_clients / weights.size)  # (5)
    if scheme == "fedavg-absent":
        return Averaging(weights, round(1.0 - share, 15), share)  # (3)
    return Averaging(counts, 0.0, 1.0)  # Table 1, FedProx
