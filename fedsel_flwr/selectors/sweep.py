"""The exact maximizer of BSFL's objective, equation (13) of Ben Ami et al., in O(K log K)."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray, real, whole
from fedsel_flwr.selectors._instance import checked_instance, finite_bounds
from fedsel_flwr.selectors._top import top

SLICE = 4096
"""Clients that the sweep looks at together."""


def maximize(ucb: FloatArray, generalization: FloatArray, clients_per_round: int, alpha: float) -> IntArray:
    """Solve (13) exactly: the set S of m clients with the largest min ucb + (alpha / m) sum of g over S.

    With the clients sorted by falling ucb, the best set whose slowest member is the i-th consists of the m largest g
    among the first i. One sweep with a heap of m visits every i in O(K log K). Deterministic: among equal sets, the
    one with the larger smallest ucb, then members of larger ucb, then the order of the input. Among sets of infinite
    value the one of larger g.

    Args:
        ucb: Optimistic speeds, shape (K,); +inf for clients never observed.
        generalization: g_k, shape (K,), finite.
        clients_per_round: m; all K clients are returned when m >= K.
        alpha: Weight of the generalization term, at least 0.

    Returns:
        Indices of the chosen clients, ascending, shape (min(m, K),).

    Raises:
        ParameterError: Shapes differ, ``ucb`` holds NaN or -inf, ``generalization`` is not finite, m < 1, alpha < 0.

    References:
        Ben Ami et al., equation (13).

    >>> maximize(np.array([0.9, 0.8, 0.1]), np.array([0.0, -0.1, 0.9]), 2, 1.0)  # 0.75, 0.55 with the slow one
    array([0, 1])
    >>> maximize(np.array([0.9, 0.8, 0.1]), np.array([0.0, -0.1, 0.9]), 2, 3.0)
    array([0, 2])
    """
    m, alpha = whole("clients_per_round", clients_per_round, 1), real("alpha", alpha, at_least=0.0)
    ucb, g = checked_instance(ucb, generalization)
    if m >= len(ucb):
        return np.arange(len(ucb))
    ucb, _ = finite_bounds(ucb, g, alpha)
    sweep = _Sweep(ucb, g, m, alpha / m)
    end, length = m, max(4 * m, SLICE)
    order = top(ucb, length)  # as far as the sweep gets: sorting everybody takes longer than all the rest
    sweep.begin(order)
    while end < len(ucb) and not sweep.over(float(ucb[order[end - 1]])):
        if end == len(order):
            length *= 16
            order = top(ucb, length)
        sweep.on(order, end, min(end + SLICE, len(order)))
        end = min(end + SLICE, len(order))
    ahead = order[: sweep.best_end]
    return np.sort(ahead[top(g[ahead], m)])


class _Sweep:
    """The best set of the fastest i clients, for growing i.

    Args:
        ucb: Bounds, finite.
        g: Generalization values, finite.
        m: Size of a set.
        scale: alpha / m.

    Attributes:
        best_end: The i of the best set so far.
    """

    def __init__(self, ucb: FloatArray, g: FloatArray, m: int, scale: float) -> None:
        self._ucb, self._g, self._m, self._scale = ucb, g, m, scale
        largest, fastest = float(np.abs(g).max()), float(np.abs(ucb).max())
        self._most: float = sum(np.partition(g, len(g) - m)[len(g) - m :].tolist())  # no set has a larger sum of g
        additions = 2.0 * len(g) + m
        self._rounding = 2.0**-50 * (scale * additions * (m + 2.0) * largest + fastest)  # of a value, at most

    def begin(self, order: IntArray) -> None:
        """Take in the m fastest clients; ``order`` holds everybody's index from fast to slow, or a beginning of it."""
        self._heap: list[float] = self._g[order[: self._m]].tolist()  # the m largest g so far, smallest on top
        self._total: float = sum(self._heap)
        heapify(self._heap)
        self._best: float = float(self._ucb[order[self._m - 1]]) + self._scale * self._total  # (13)
        self.best_end = self._m

    def over(self, speed: float) -> bool:
        """Whether no set with a client as slow as ``speed`` can be better than the best so far."""
        return speed + self._scale * self._most + self._rounding <= self._best  # (13)

    def on(self, order: IntArray, start: int, end: int) -> None:
        """Take in the clients at these places of ``order``."""
        values = self._g[order[start:end]]
        better = np.flatnonzero(values > self._heap[0])  # the others change nothing; the smallest only rises
        for i, value, speed in zip(
            better.tolist(), values[better].tolist(), self._ucb[order[start + better]].tolist(), strict=True
        ):
            if value > self._heap[0]:
                self._total += value - heapreplace(self._heap, value)
                score = speed + self._scale * self._total  # (13)
                if score > self._best:
                    self._best, self.best_end = score, start + i + 1
