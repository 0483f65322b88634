"""The exact maximizer of BSFL's objective, equation (13) of Ben Ami et al., in O(K log K)."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray, real, whole
from fedsel_flwr.selectors._instance import checked_instance, finite_bounds


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
    order = np.argsort(-ucb, kind="stable")
    speeds, values = ucb[order].tolist(), g[order].tolist()
    heap = values[:m]  # the m largest g so far, smallest on top
    total, scale = sum(heap), alpha / m
    heapify(heap)
    best, best_end = speeds[m - 1] + scale * total, m  # (13)
    for i in range(m, len(speeds)):
        if values[i] > heap[0]:
            total += values[i] - heapreplace(heap, values[i])
            value = speeds[i] + scale * total  # (13)
            if value > best:
                best, best_end = value, i + 1
    chosen = np.argsort(-g[order[:best_end]], kind="stable")[:m]
    return np.sort(order[chosen])
