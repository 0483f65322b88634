"""Random selection in proportion to data sizes, a baseline of Ben Ami et al. and FedProx's sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors._sizes import filled_sizes, take_sizes
from fedsel_flwr.selectors.base import Selector


class RandomBySize(Selector):
    """Draws clients one after the other, each in proportion to its number of examples, p_k.

    Without replacement the draws are the m largest of ln(p_k) + Gumbel noise, which has the same distribution. With
    replacement a client may be drawn c times: it is asked once, and :meth:`draws` tells c, its weight in the plain mean
    over the multiset (averaging scheme ``"mean"``). Together they are FedProx in Table 1 of Kim et al.; fewer than m
    different clients may be chosen. FedCA's filter averages and searches the c copies.

    Deviations: none. Sizes come by ``inform(clients, num_examples=...)``; a client of unknown (or NaN)
    size counts as one of average size. Among the available clients the p_k are made to sum to 1.

    Args:
        clients_per_round: How many clients to draw each round (m).
        replacement: Whether a client may be drawn again.
        seed: Seed of the selector's generator.

    Raises:
        ParameterError: ``clients_per_round`` < 1, or ``replacement`` is not a boolean.

    References:
        Ben Ami et al., section VI (non-i.i.d. baseline, without replacement); W. Kool et al., Stochastic beams and
        where to find them, ICML 2019 (Gumbel top-k); T. Li et al., Federated optimization in heterogeneous networks,
        MLSys 2020, Algorithm 2 (with replacement).

    >>> import numpy as np
    >>> selector = RandomBySize(clients_per_round=1, seed=0)
    >>> selector.inform(np.arange(2), num_examples=np.array([1.0, 9.0]))
    >>> float(np.mean([selector.select(np.arange(2))[0] for _ in range(1000)]).round(2))
    0.89
    """

    name: ClassVar[str] = "random-by-size"
    client_state: ClassVar[dict[str, float | int]] = {"_size": -1.0, "_draws": 0}  # size -1 for unknown

    _size: FloatArray
    _draws: IntArray

    def __init__(self, *, clients_per_round: int, replacement: bool = False, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        if not isinstance(replacement, bool):
            raise ParameterError(f"replacement must be True or False, got {replacement!r}")
        self.replacement = replacement

    def expected_count(self, num_available: int) -> int | None:
        """How many clients are chosen; only the draws know where they are with replacement."""
        warmup = self.round < self.common_warmup
        return None if self.replacement and num_available and not warmup else super().expected_count(num_available)

    def draws(self, clients: IntArray) -> IntArray:
        """How often each of ``clients`` was drawn in the round chosen last."""
        return self._draws[clients]

    def _advance(self) -> None:
        self._draws[:] = 0

    def _join(self, available: IntArray) -> None:
        self._draws[available] = 1

    def _select(self, available: IntArray) -> IntArray:
        size = filled_sizes(self._size, self._registered)
        if self.replacement:
            weight = size[available] if size[available].any() else np.ones(available.size)
            drawn = self._generator.choice(available, size=self.asked_per_round, p=weight / weight.sum())
            chosen, times = np.unique(drawn, return_counts=True)
            self._draws[chosen] = times
            return chosen
        with np.errstate(divide="ignore"):
            score = np.log(size)
        noise = np.full(score.shape, -np.inf)
        noise[available] = self._generator.gumbel(size=available.size)
        chosen = self._largest(score + noise, available)
        self._draws[chosen] = 1
        return chosen

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        take_sizes(self._size, clients, columns)
