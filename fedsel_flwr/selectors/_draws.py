"""Draws and numbers that several selectors need: top scores, weighted draws, numbers of examples by client."""

from __future__ import annotations

import math

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray


def top(score: FloatArray, count: int | None) -> IntArray:
    """Return the positions of the ``count`` largest scores, the largest first; equal scores keep their order.

    The result equals ``np.argsort(-score, kind="stable")[:count]``, in O(K + count log count).

    Args:
        score: Scores, shape (K,); NaN ranks last.
        count: Number of positions, at least 1; None or K and more return all.

    Returns:
        Positions, shape (min(count, K),).

    >>> top(np.array([0.5, 2.0, 0.5, 1.0]), 3)
    array([1, 3, 0])
    """
    rank = -score
    if count is None or count >= rank.size:
        return np.argsort(rank, kind="stable")
    last = np.partition(rank, count - 1)[count - 1]
    # NaN equals nothing, so the comparison below would drop clients with NaN.
    if np.isnan(last):
        return np.argsort(rank, kind="stable")[:count]
    above = np.flatnonzero(rank < last)
    equal = np.flatnonzero(rank == last)[: count - above.size]
    return np.concatenate([above[np.argsort(rank[above], kind="stable")], equal])


def draw(generator: np.random.Generator, clients: IntArray, log_weight: FloatArray, count: int) -> IntArray:
    """Draw clients one after the other without replacement, with probabilities in proportion to their weights.

    The draws are the largest values of ln(weight) + Gumbel noise (W. Kool et al., Stochastic beams and where to find
    them, ICML 2019). Clients of weight 0 come after all others, in random order.

    Args:
        generator: Generator of the draws.
        clients: Clients to draw from, shape (n,).
        log_weight: Logarithm of each client's weight (any scale), -inf for weight 0, shape (n,).
        count: Number of draws, at least 0; n and more draw every client.

    Returns:
        Clients in the order of the draws, shape (min(count, n),).

    >>> import numpy as np
    >>> generator = np.random.default_rng(0)
    >>> first = [int(draw(generator, np.array([4, 7]), np.log([1.0, 9.0]), 1)[0]) for _ in range(2000)]
    >>> round(first.count(7) / 2000, 1)
    0.9
    """
    if count < 1 or not clients.size:
        return clients[:0]
    # The random order breaks ties between clients of weight 0, whose scores are all -inf.
    order = generator.permutation(clients.size)
    noise = generator.gumbel(size=clients.size)
    return clients[order[top(log_weight[order] + noise, count)]]


def tolerant_floor(number: float) -> int:
    """Return floor(number), but treat a number that rounding put just below a whole number as that whole number.

    >>> tolerant_floor(10 * (1 - 0.9)), tolerant_floor(0.75 * 7)
    (1, 5)
    """
    return math.floor(number + 1e-9)
