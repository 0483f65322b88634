"""DivFL from its definition: every distance, every step of the greedy choice and every set, in plain Python.

And the plain greedy choice in NumPy, which sums every candidate in every step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Gradients = Mapping[int, Sequence[float]]
EQUAL: Mapping[int, float] = defaultdict(lambda: 1.0)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The Euclidean distance, not squared."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def uncovered(gradients: Gradients, chosen: Iterable[int], weight: Mapping[int, float] = EQUAL) -> float:
    """(4): what is left between every client and the nearest chosen one, times the weight of the client."""
    chosen = list(chosen)
    return sum(weight[i] * min(apart(gradients[i], gradients[j]) for j in chosen) for i in gradients)


def greedy(
    gradients: Gradients, available: Iterable[int], count: int, weight: Mapping[int, float] = EQUAL
) -> set[frozenset[int]]:
    """(5): whoever leaves the least, one after the other; all sets that this may end in, as two may leave the same."""
    candidates, sets = [k for k in available if k in gradients], {frozenset[int]()}
    for _ in range(min(count, len(candidates))):
        longer = set()
        for chosen in sets:
            left = {k: uncovered(gradients, {*chosen, k}, weight) for k in candidates if k not in chosen}
            longer |= {chosen | {k} for k, value in left.items() if value <= min(left.values()) * (1 + 1e-6)}
        sets = longer
    return sets


def best(gradients: Gradients, count: int) -> float:
    """The least that any set of this size leaves."""
    return min(uncovered(gradients, chosen) for chosen in combinations(gradients, count))


def plain_greedy(distances: Array, candidates: Array, count: int, looked_at: Callable[[Array], Array]) -> list[int]:
    """(5), step by step: the first candidate whose sum is the least, to one in a million.

    Args:
        distances: From each candidate to everybody, shape (n, K).
        candidates: Shape (n,).
        count: Steps.
        looked_at: Places of the candidates that are left -> those that a step sums.
    """
    nearest, left, chosen = np.full(distances.shape[1], np.inf), np.ones(len(candidates), dtype=np.bool_), list[int]()
    for _ in range(count):
        places = looked_at(np.flatnonzero(left))
        uncovered = np.minimum(nearest, distances[places]).sum(axis=1)
        best = places[np.argmax(uncovered <= uncovered.min() * (1 + 1e-6))]
        nearest, left[best] = np.minimum(nearest, distances[best]), False
        chosen.append(int(candidates[best]))
    return chosen
