"""Long vectors made short by random signs, so that their distances stay."""

from __future__ import annotations

import math

import numpy as np

from fedsel_flwr.checks import FloatArray

CHUNK = 1 << 22
"""Random signs that are held at a time (16 MB with what they are made of)."""


def projected(vectors: FloatArray, size: int, seed: int) -> FloatArray:
    """Project vectors on ``size`` random sign vectors, divided by sqrt(size).

    The expected square of a distance stays; :func:`distance_error` bounds how far one is off. The same seed takes the
    same signs.

    Args:
        vectors: Shape (n, d).
        size: Numbers that remain of each vector.
        seed: Seed of the signs, at least 0.

    Returns:
        Shape (n, size).

    >>> short = projected(np.eye(2, 1000), 256, seed=1)
    >>> short.shape, round(float(np.linalg.norm(short[0] - short[1])), 2)
    ((2, 256), 1.45)
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    short = np.zeros((len(vectors), size))
    step = max(1, CHUNK // size)
    for start in range(0, vectors.shape[1], step):
        part = vectors[:, start : start + step]
        signs = generator.integers(0, 2, (part.shape[1], size), dtype=np.int8)
        short += part @ (2.0 * signs - 1.0)
    return short / math.sqrt(size)


def distance_error(size: int, num_vectors: int, failure: float = 0.05) -> float:
    """Return by which part the distances between projected vectors may be off.

    With probability at least 1 - ``failure`` the square of every distance among ``num_vectors`` vectors is within
    (1 - e, 1 + e) of the true one, where n (n - 1) exp(-size (e^2 / 4 - e^3 / 6)) = failure (Achlioptas 2003, a union
    over the pairs).

    Args:
        size: Numbers that remain of each vector.
        num_vectors: n.
        failure: Chance that some distance is further off.

    Returns:
        e; infinite where the bound says nothing (e would be above 1).

    >>> round(distance_error(1024, 100), 2)
    0.24
    """
    exponent = math.log(max(2, num_vectors * (num_vectors - 1)) / failure) / size
    if exponent > 1 / 4 - 1 / 6:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle**2 / 4 - middle**3 / 6 < exponent else (low, middle)
    return high
