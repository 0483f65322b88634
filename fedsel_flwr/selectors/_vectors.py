"""Vectors by client, with the length of the first vector received, and random projections of long vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.selectors.base import Probe, Selector

ATTEMPTS = 3
"""Number of requests to a client without a vector."""
CHUNK = 1 << 22
"""Number of random signs in memory at a time; 16 MB with temporaries."""


class VectorSelector(Selector):
    """A selector that stores the latest vector of each client.

    A subclass extends :attr:`free_state` and :attr:`scalar_state`. The selector ignores vectors whose length differs
    from the stored ones, and vectors with NaN or infinities.
    """

    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_known": False, "_asked": 0}
    free_state: ClassVar[Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]] = {"_numbers": (float, ())}
    scalar_state: ClassVar[tuple[str, ...]] = ("_length",)

    _known: BoolArray
    _asked: IntArray
    # One flat array of all rows, because a row's shape must be declared before the vectors' length is known.
    _numbers: FloatArray
    _length: int = 0

    @property
    def vectors(self) -> FloatArray:
        """Vectors by client, shape (K, length), zeros if unknown; a view."""
        return self._numbers.reshape(len(self._known), self._length)

    def _store_vectors(self, clients: IntArray, given: FloatArray) -> IntArray:
        """Store the usable rows of ``given``, shape (n, d), and return their clients."""
        usable = np.isfinite(given).all(axis=1) & (given.shape[1] > 0)
        if not usable.any():
            return np.zeros(0, dtype=np.int64)
        # The first stored vector sets the length.
        if not self._known.any() and given.shape[1] != self._length:
            self._length = int(given.shape[1])
            self._numbers = np.zeros(len(self._known) * self._length)
        if given.shape[1] != self._length:
            return np.zeros(0, dtype=np.int64)
        kept: IntArray = clients[usable]
        self.vectors[kept] = given[usable]
        self._known[kept] = True
        return kept

    def _probe(self, available: IntArray) -> Probe | None:
        # Clients with unknown vectors are asked, at most ATTEMPTS times each.
        asked: IntArray = available[~self._known[available] & (self._asked[available] < ATTEMPTS)]
        self._asked[asked] += 1
        return Probe(clients=asked, columns=tuple(self.asks)) if asked.size else None

    def _add_rows(self, clients: IntArray) -> None:
        super()._add_rows(clients)
        if missing := len(self._known) * self._length - len(self._numbers):
            self._numbers = np.pad(self._numbers, (0, missing))

    def _reset_rows(self, clients: IntArray) -> None:
        super()._reset_rows(clients)
        self.vectors[clients] = 0.0


def projected(vectors: FloatArray, size: int, seed: int) -> FloatArray:
    """Project vectors on ``size`` random sign vectors, divided by sqrt(size).

    The projection preserves the expected square of a distance. The same seed gives the same signs.

    Args:
        vectors: Shape (n, d).
        size: Length of the projected vectors.
        seed: Seed of the signs, at least 0.

    Returns:
        Shape (n, size).

    >>> short = projected(np.eye(2, 1000), 256, seed=1)
    >>> short.shape, round(float(np.linalg.norm(short[0] - short[1])), 2)
    ((2, 256), 1.45)
    """
    # A separate generator, because vectors of later rounds need the same signs.
    generator = np.random.Generator(np.random.PCG64(seed))
    short = np.zeros((len(vectors), size))
    step = max(1, CHUNK // size)
    for start in range(0, vectors.shape[1], step):
        part = vectors[:, start : start + step]
        signs = generator.integers(0, 2, (part.shape[1], size), dtype=np.int8)
        short += part @ (2.0 * signs - 1.0)
    return short / math.sqrt(size)
