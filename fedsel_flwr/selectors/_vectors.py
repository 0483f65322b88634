"""A vector for each client, of a length that only the first answer tells; kept, saved and forgotten with the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.selectors.base import Selector

ATTEMPTS = 3
"""How often a client that does not answer is asked for its vector."""


class VectorSelector(Selector):
    """A selector that keeps the latest vector of each client.

    A subclass adds to :attr:`client_state`, :attr:`free_state` and :attr:`scalar_state`. Vectors of another length than
    those that are held, and vectors with a number that is not finite, count as not given.
    """

    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_known": False, "_asked": 0}
    free_state: ClassVar[Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]] = {"_numbers": (float, ())}
    scalar_state: ClassVar[tuple[str, ...]] = ("_length",)

    _known: BoolArray
    _asked: IntArray
    _numbers: FloatArray  # the rows one after the other: a state's shapes are known beforehand
    _length: int = 0

    @property
    def vectors(self) -> FloatArray:
        """The vectors by client, shape (K, length), zeros where unknown; a view."""
        return self._numbers.reshape(len(self._known), self._length)

    def _keep(self, clients: IntArray, given: FloatArray) -> IntArray:
        """Keep the usable rows of ``given``, shape (n, d); returns whose they are."""
        usable = np.isfinite(given).all(axis=1) & (given.shape[1] > 0)
        if not usable.any():
            return np.zeros(0, dtype=np.int64)
        if not self._known.any() and given.shape[1] != self._length:
            self._length = int(given.shape[1])
            self._numbers = np.zeros(len(self._known) * self._length)
        if given.shape[1] != self._length:
            return np.zeros(0, dtype=np.int64)
        kept: IntArray = clients[usable]
        self.vectors[kept] = given[usable]
        self._known[kept] = True
        return kept

    def _to_ask(self, available: IntArray) -> IntArray:
        """Those whose vector is unknown, but for clients that were asked often enough; counts the question."""
        asked: IntArray = available[~self._known[available] & (self._asked[available] < ATTEMPTS)]
        self._asked[asked] += 1
        return asked

    def _make_room(self, clients: IntArray) -> None:
        super()._make_room(clients)
        if missing := len(self._known) * self._length - len(self._numbers):
            self._numbers = np.pad(self._numbers, (0, missing))

    def _clear(self, clients: IntArray) -> None:
        super()._clear(clients)
        self.vectors[clients] = 0.0

    def _check_loaded(self, loaded: Mapping[str, Any]) -> None:
        super()._check_loaded(loaded)
        length, numbers = loaded["_length"], loaded["_numbers"]
        if length < 0 or numbers.size != length * loaded["_registered"].size:
            raise StateError(
                f"state 'numbers' must hold {length} numbers for each of {loaded['_registered'].size} clients, "
                f"got {numbers.size}"
            )
