"""What a selector keeps from round to round: rows of clients that come and go, free arrays, numbers, a generator.

An author declares names; making room for newcomers, forgetting, saving and loading follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, IntArray, whole
from fedsel_flwr.errors import StateError
from fedsel_flwr.selectors._arrays import exactly, pack_generator, unpack_generator

RESERVED = ("round", "registered", "generator")
"""Keys of every selector's state."""


def state_key(attribute: str) -> str:
    """The key of an attribute in a saved state: its name without the leading underscore.

    >>> state_key("_mean")
    'mean'
    """
    return attribute.lstrip("_")


class SavedState:
    """State that grows with the fleet and can be carried away; the base of :class:`~fedsel_flwr.selectors.Selector`.

    A subclass declares what it keeps; each attribute is saved under its name without the leading underscore.

    Attributes:
        client_state: Attribute -> what a new client has: a number, a boolean or an array. The attribute holds a row
            for each client: ``{"_plays": 0, "_context": np.zeros(2)}`` makes ``_plays`` of shape (K,) and ``_context``
            of shape (K, 2), each with the type of its value.
        scalar_state: Attributes that hold one number each; ``__init__`` sets them, with the type they keep.
        free_state: Attribute -> (type, shape of one row) of arrays whose length is the selector's own business:
            ``{"_centre": (float, (2,))}`` makes ``_centre``, at first of shape (0, 2). Their numbers are finite.
    """

    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {}
    scalar_state: ClassVar[tuple[str, ...]] = ()
    free_state: ClassVar[Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]] = {}

    def __init__(self, *, seed: int | None = None) -> None:
        self._generator = np.random.Generator(np.random.PCG64(None if seed is None else whole("seed", seed, 0)))
        self._round = 0
        self._registered: BoolArray = np.zeros(0, dtype=np.bool_)
        for attribute, value in self.client_state.items():
            setattr(self, attribute, _rows(value, 0))
        for attribute, (dtype, row) in self.free_state.items():
            setattr(self, attribute, np.zeros((0, *row), dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, generator included, as a flat dict of arrays and numbers (copies)."""
        state: dict[str, Any] = {
            "round": self._round,
            "registered": self._registered.copy(),
            "generator": pack_generator(self._generator),
        }
        for attribute in (*self.client_state, *self.free_state):
            state[state_key(attribute)] = getattr(self, attribute).copy()
        return state | {state_key(attribute): getattr(self, attribute) for attribute in self.scalar_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`; nothing changes if it does not fit.

        Args:
            state: What :meth:`state_dict` of a selector with the same parameters returned; arrays may be lists.

        Raises:
            StateError: Keys, shapes, types or values differ from what this selector's state may hold.
        """
        own = self.state_dict().keys()  # a subclass may add its own
        if own != state.keys():
            raise StateError(
                f"the state does not belong to {getattr(self, 'name', type(self).__name__)}: "
                f"missing {sorted(own - state.keys())}, unexpected {sorted(state.keys() - own)}"
            )
        loaded: dict[str, Any] = {
            "_registered": exactly("registered", state["registered"], np.dtype(np.bool_), (None,)),
            "_round": int(exactly("round", state["round"], np.dtype(np.int64), ())),
        }
        count = loaded["_registered"].size
        for attribute, value in self.client_state.items():
            new, key = np.asarray(value), state_key(attribute)
            finite = bool(np.isfinite(new).all())
            loaded[attribute] = exactly(key, state[key], new.dtype, (count, *new.shape), finite=finite)
        for attribute, (dtype, row) in self.free_state.items():
            key = state_key(attribute)
            loaded[attribute] = exactly(key, state[key], np.dtype(dtype), (None, *row))
        for attribute in self.scalar_state:
            key, mine = state_key(attribute), getattr(self, attribute)
            loaded[attribute] = type(mine)(exactly(key, state[key], np.asarray(mine).dtype, ()))
        if loaded["_round"] < 0:
            raise StateError(f"state 'round' must be at least 0, got {loaded['_round']}")
        self._check_loaded(loaded)
        generator = unpack_generator("generator", state["generator"])
        self._generator.bit_generator.state = generator
        for attribute, checked in loaded.items():
            setattr(self, attribute, checked)

    def _check_loaded(self, loaded: Mapping[str, Any]) -> None:
        """Raise :class:`StateError` where attributes that each fit (attribute -> value) do not fit together."""

    def _make_room(self, clients: IntArray) -> None:
        """Lengthen the rows so that ``clients`` have theirs."""
        missing = int(clients.max(initial=-1)) + 1 - self._registered.size
        if missing > 0:
            self._registered = np.pad(self._registered, (0, missing))
            for attribute, value in self.client_state.items():
                setattr(self, attribute, np.concatenate([getattr(self, attribute), _rows(value, missing)]))

    def _clear(self, clients: IntArray) -> None:
        """Give the rows of ``clients`` what a newcomer has."""
        self._registered[clients] = False
        for attribute, value in self.client_state.items():
            getattr(self, attribute)[clients] = value


def _rows(value: npt.ArrayLike, count: int) -> npt.NDArray[Any]:
    """``count`` rows of a newcomer's value."""
    array = np.asarray(value)
    return np.full((count, *array.shape), array)
