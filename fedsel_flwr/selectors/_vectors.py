"""A vector for each client, whose length the first answer decides, and random projections of long vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.selectors.base import Selector

ATTEMPTS = 3
"""Times that a client without a vector is asked for it."""
CHUNK = 1 << 22
"""Random signs in memory at a time, 16 MB with temporaries."""


class VectorSelector(Selector):
    """A selector that keeps the latest vector of each client.

    A subclass extends :attr:`client_state`, :attr:`free_state` and :attr:`scalar_state`. Vectors of another length than
    the stored ones, and vectors with NaN or infinities, are ignored.
    """

    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_known": False, "_asked": 0}
    free_state: ClassVar[Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]] = {"_numbers": (float, ())}
    scalar_state: ClassVar[tuple[str, ...]] = ("_length",)

    _known: BoolArray
    _asked: IntArray
    # One flat array of all rows: the shape of a row must be declared, and the vectors' length is not known then.
    _numbers: FloatArray
    _length: int = 0

    @property
    def vectors(self) -> FloatArray:
        """The vectors by client, shape (K, length), zeros if unknown; a view."""
        return self._numbers.reshape(len(self._known), self._length)

    def _store_vectors(self, clients: IntArray, given: FloatArray) -> IntArray:
        """Store the usable rows of ``given``, shape (n, d), and return the clients they belong to."""
        usable = np.isfinite(given).all(axis=1) & (given.shape[1] > 0)
        if not usable.any():
            return np.zeros(0, dtype=np.int64)
        # The first vector stored decides the length.
        if not self._known.any() and given.shape[1] != self._length:
            self._length = int(given.shape[1])
            self._numbers = np.zeros(len(self._known) * self._length)
        if given.shape[1] != self._length:
            return np.zeros(0, dtype=np.int64)
        kept: IntArray = clients[usable]
        self.vectors[kept] = given[usable]
        self._known[kept] = True
        return kept

    def _ask_unknown(self, available: IntArray) -> IntArray:
        """Return the clients to ask for their vectors, and count the request: at most :data:`ATTEMPTS` each."""
        asked: IntArray = available[~self._known[available] & (self._asked[available] < ATTEMPTS)]
        self._asked[asked] += 1
        return asked

    def _add_rows(self, clients: IntArray) -> None:
        super()._add_rows(clients)
        if missing := len(self._known) * self._length - len(self._numbers):
            self._numbers = np.pad(self._numbers, (0, missing))

    def _reset_rows(self, clients: IntArray) -> None:
        super()._reset_rows(clients)
        self.vectors[clients] = 0.0

    def _check_loaded(self, loaded: Mapping[str, Any]) -> None:
        super()._check_loaded(loaded)
        length, numbers = loaded["_length"], loaded["_numbers"]
        if length < 0 or numbers.size != length * loaded["_registered"].size:
            raise StateError(
                f"state 'numbers' must hold {length} numbers for each of {loaded['_registered'].size} clients, "
                f"got {numbers.size}. Load a state that the same class saved"
            )


def projected(vectors: FloatArray, size: int, seed: int) -> FloatArray:
    """Project vectors on ``size`` random sign vectors, divided by sqrt(size).

    The expected square of a distance stays; :func:`distance_error` bounds the error. The same seed gives the
    same signs.

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
    # Not the selector's generator: vectors of later rounds must meet the same signs.
    generator = np.random.Generator(np.random.PCG64(seed))
    short = np.zeros((len(vectors), size))
    step = max(1, CHUNK // size)
    for start in range(0, vectors.shape[1], step):
        part = vectors[:, start : start + step]
        signs = generator.integers(0, 2, (part.shape[1], size), dtype=np.int8)
        short += part @ (2.0 * signs - 1.0)
    return short / math.sqrt(size)


def distance_error(size: int, num_vectors: int, failure: float = 0.05) -> float:
    """Return the bound on the relative error of squared distances between projected vectors.

    With probability at least 1 - ``failure`` the square of every distance among ``num_vectors`` vectors is within
    (1 - e, 1 + e) of the true one, where n (n - 1) exp(-size (e^2 / 4 - e^3 / 6)) = failure (Achlioptas 2003, a union
    over the pairs).

    Args:
        size: Length of the projected vectors.
        num_vectors: n.
        failure: Chance that some distance exceeds the bound.

    Returns:
        e; infinite if the bound holds for no e up to 1.

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
