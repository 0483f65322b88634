"""k-means over hashes with the Hamming distance."""

from __future__ import annotations

import numpy as np

from fedsel_flwr.checks import BoolArray, IntArray

MOST_STEPS = 100
"""Steps after which the clusters stay as they are; in practice they settle in a few."""


def distances(bits: BoolArray, centres: BoolArray) -> IntArray:
    """Hamming distances, shape (n, k).

    >>> distances(np.array([[True, False, True]]), np.array([[True, True, True], [False, True, False]])).tolist()
    [[1, 3]]
    """
    one, other = bits.astype(np.float64), centres.astype(np.float64)
    apart = one.sum(axis=1)[:, None] + other.sum(axis=1) - 2.0 * one @ other.T
    return np.asarray(np.rint(apart), dtype=np.int64)


def majority(bits: BoolArray) -> BoolArray:
    """The centre of some hashes: each bit as most have it, 0 where as many have 1; no other is nearer in the sum.

    >>> majority(np.array([[True, True], [True, False], [False, True], [False, True]])).tolist()
    [False, True]
    """
    return np.asarray(2 * bits.sum(axis=0) > len(bits))


def cluster(bits: BoolArray, count: int, generator: np.random.Generator) -> IntArray:
    """Group hashes into at most ``count`` clusters.

    The first centre is a hash drawn at random, each further one a hash that is farthest from all centres so far; then
    each hash goes to its nearest centre (the first of equals) and each centre to the majority of its hashes, until
    nothing changes.

    Args:
        bits: Hashes, shape (n, bits), n at least 1.
        count: At least 1.
        generator: Draws the first centre.

    Returns:
        The cluster of each hash, shape (n,); fewer clusters where there are fewer different hashes.

    >>> cluster(np.eye(3, dtype=bool)[[0, 0, 1]], 2, np.random.default_rng(0)).tolist()
    [1, 1, 0]
    """
    centres = bits[[int(generator.integers(len(bits)))]]
    while len(centres) < count:
        nearest = distances(bits, centres).min(axis=1)
        if not nearest.any():
            break
        centres = np.vstack([centres, bits[[int(np.argmax(nearest))]]])
    group = np.argmin(distances(bits, centres), axis=1)
    for _ in range(MOST_STEPS):
        centres = np.stack(
            [majority(bits[group == c]) if (group == c).any() else centre for c, centre in enumerate(centres)]
        )
        moved = np.argmin(distances(bits, centres), axis=1)
        if np.array_equal(moved, group):
            break
        group = moved
    return np.asarray(group, dtype=np.int64)
