"""The largest of many scores, without sorting the others."""

from __future__ import annotations

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray


def top(score: FloatArray, count: int | None) -> IntArray:
    """Return the positions of the ``count`` largest scores, largest first, equal ones in their order.

    The answer is ``np.argsort(-score, kind="stable")[:count]``, in O(K + count log count).

    Args:
        score: Scores, shape (K,); NaN ranks last.
        count: How many, at least 1; None, or K and more, for all.

    Returns:
        Positions, shape (min(count, K),).

    >>> top(np.array([0.5, 2.0, 0.5, 1.0]), 3)
    array([1, 3, 0])
    """
    rank = -score
    if count is None or count >= rank.size:
        return np.argsort(rank, kind="stable")
    best = np.flatnonzero(rank == rank.min())
    if best.size >= count:  # as where most clients have an infinite bound
        return best[:count]
    last = np.partition(rank, count - 1)[count - 1]
    if np.isnan(last):  # NaN equals nothing
        return np.argsort(rank, kind="stable")[:count]
    above = np.flatnonzero(rank < last)
    equal = np.flatnonzero(rank == last)[: count - above.size]
    return np.concatenate([above[np.argsort(rank[above], kind="stable")], equal])
