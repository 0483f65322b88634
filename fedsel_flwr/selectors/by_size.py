"""Random selection in proportion to data sizes, a baseline of Ben Ami et al."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedsel_flwr.selectors._check import FloatArray, IntArray
from fedsel_flwr.selectors.base import Selector


class RandomBySize(Selector):
    """Draws clients one after the other without replacement, each in proportion to its number of examples.

    The draws are the m largest of ln(size) + Gumbel noise, which has the same distribution.

    Deviations: none. Sizes come by ``inform(clients, num_examples=...)``; a client of unknown size counts as one of
    average size.

    Args:
        clients_per_round: How many clients to choose each round (m).
        seed: Seed of the selector's generator.

    References:
        Ben Ami et al., section VI (non-i.i.d. baseline); W. Kool et al., Stochastic beams and where to find them, ICML
        2019 (Gumbel top-k).

    >>> import numpy as np
    >>> selector = RandomBySize(clients_per_round=1, seed=0)
    >>> selector.inform(np.arange(2), num_examples=np.array([1.0, 9.0]))
    >>> float(np.mean([selector.select(np.arange(2))[0] for _ in range(1000)]).round(2))
    0.89
    """

    name: ClassVar[str] = "random-by-size"
    client_state: ClassVar[dict[str, float | int]] = {"_size": -1.0}  # -1 for unknown

    _size: FloatArray

    def _select(self, available: IntArray) -> IntArray:
        with np.errstate(divide="ignore"):
            weight = np.log(filled_sizes(self._size, self._registered))
        noise = np.full(weight.shape, -np.inf)
        noise[available] = self._generator.gumbel(size=available.size)
        return self._largest(weight + noise, available)

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        if "num_examples" in columns:
            self._size[clients] = np.maximum(columns["num_examples"], 0.0)


def filled_sizes(size: FloatArray, registered: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> FloatArray:
    """Return ``size`` with the unknown entries (-1) of registered clients at the mean of the known, or at 1."""
    known = registered & (size >= 0)
    mean = float(size[known].mean()) if known.any() else 1.0
    return np.where(size >= 0, size, mean)
