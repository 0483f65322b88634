"""State of a selector: rows by client that grow with the fleet, free arrays, numbers and the random generator.

An author declares the attributes. Growing, forgetting, saving and loading follow from the declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, IntArray, whole
from fedsel_flwr.errors import StateError

KINDS = "biuf"
"""NumPy kinds that a state may hold: booleans, integers and floats."""
RESERVED = ("round", "registered", "generator")
"""Keys that every selector's state has."""
LOW = (1 << 64) - 1
"""Mask of a 64-bit word: PCG64 has 128 bits of state, and no NumPy integer is as long."""


def state_key(attribute: str) -> str:
    """Return the key of an attribute in a saved state: its name without the leading underscore.

    >>> state_key("_mean")
    'mean'
    """
    return attribute.lstrip("_")


class SavedState:
    """State that grows with the fleet and can be saved; the base of :class:`~fedsel_flwr.selectors.Selector`.

    A subclass declares its attributes. Each is saved under its name without the leading underscore.

    Attributes:
        client_state: Maps an attribute to the value of a new client: a number, a boolean or an array. The attribute
            holds a row for each client. ``{"_plays": 0, "_context": np.zeros(2)}`` makes ``_plays`` of shape (K,) and
            ``_context`` of shape (K, 2), each with the type of its value. A subclass also has the state of its bases.
        scalar_state: Attributes that hold one number each. ``__init__`` sets them, and their types never change.
        free_state: Maps an attribute to (type, shape of one row), for arrays whose length the selector decides.
            ``{"_centre": (float, (2,))}`` makes ``_centre``, of shape (0, 2) at first. All numbers are finite.
    """

    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {}
    scalar_state: ClassVar[tuple[str, ...]] = ()
    free_state: ClassVar[Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]] = {}

    def __init__(self, *, seed: int | None = None) -> None:
        self._generator = np.random.Generator(np.random.PCG64(None if seed is None else whole("seed", seed, 0)))
        self._round = 0
        self._registered: BoolArray = np.zeros(0, dtype=np.bool_)
        for attribute, value in self.client_state.items():
            setattr(self, attribute, _newcomer_rows(value, 0))
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
        """Load a state of :meth:`state_dict`; nothing changes if the state does not fit.

        Args:
            state: The result of :meth:`state_dict` of a selector with the same parameters; arrays may be lists.

        Raises:
            StateError: A key, shape, type or value does not fit this selector.
        """
        # Not from the declarations, because a subclass may add keys in state_dict.
        own = self.state_dict().keys()
        if own != state.keys():
            raise StateError(
                f"the state does not belong to {getattr(self, 'name', type(self).__name__)}: "
                f"missing {sorted(own - state.keys())}, unexpected {sorted(state.keys() - own)}. Load a state that "
                "the same class saved"
            )
        loaded: dict[str, Any] = {
            "_registered": exact_array("registered", state["registered"], np.dtype(np.bool_), (None,)),
            "_round": int(exact_array("round", state["round"], np.dtype(np.int64), ())),
        }
        count = loaded["_registered"].size
        for attribute, value in self.client_state.items():
            new, key = np.asarray(value), state_key(attribute)
            finite = bool(np.isfinite(new).all())
            loaded[attribute] = exact_array(key, state[key], new.dtype, (count, *new.shape), finite=finite)
        for attribute, (dtype, row) in self.free_state.items():
            key = state_key(attribute)
            loaded[attribute] = exact_array(key, state[key], np.dtype(dtype), (None, *row))
        for attribute in self.scalar_state:
            key, mine = state_key(attribute), getattr(self, attribute)
            # Keeps Python numbers, because an np.int64 would be saved and compared differently.
            loaded[attribute] = type(mine)(exact_array(key, state[key], np.asarray(mine).dtype, ()))
        if loaded["_round"] < 0:
            raise StateError(f"state 'round' must be at least 0, got {loaded['_round']}")
        # All checks come before the first change of an attribute.
        self._generator.bit_generator.state = unpack_generator("generator", state["generator"])
        for attribute, checked in loaded.items():
            setattr(self, attribute, checked)

    def _add_rows(self, clients: IntArray) -> None:
        """Add rows until each of ``clients`` has a row."""
        missing = int(clients.max(initial=-1)) + 1 - self._registered.size
        if missing > 0:
            self._registered = np.pad(self._registered, (0, missing))
            for attribute, value in self.client_state.items():
                setattr(self, attribute, np.concatenate([getattr(self, attribute), _newcomer_rows(value, missing)]))

    def _reset_rows(self, clients: IntArray) -> None:
        """Reset the rows of ``clients`` to the values of a new client."""
        self._registered[clients] = False
        for attribute, value in self.client_state.items():
            getattr(self, attribute)[clients] = value


def _newcomer_rows(value: npt.ArrayLike, count: int) -> npt.NDArray[Any]:
    """Return ``count`` rows with the value of a new client."""
    array = np.asarray(value)
    return np.full((count, *array.shape), array)


def exact_array(
    key: str, value: Any, dtype: np.dtype[Any], shape: tuple[int | None, ...], *, finite: bool = True
) -> npt.NDArray[Any]:
    """Return the state ``value`` as a new array of ``dtype`` and ``shape``, without changing a number.

    Args:
        key: Key of the state, for the message.
        value: An array, a number or lists of numbers; an empty array fits any type.
        dtype: Type to return. Integers may have another width, but floats never become integers.
        shape: Expected shape; None means any length.
        finite: Whether to refuse NaN and infinities.

    Raises:
        StateError: The value does not fit.

    >>> exact_array("plays", [1, 2], np.dtype(np.uint64), (None,)).dtype
    dtype('uint64')
    """
    try:
        array = _whole_numbers(value, dtype) if dtype.kind in "iu" else np.array(value)
    except (ValueError, TypeError, OverflowError):
        # For example, nested lists of different lengths.
        raise _refusal(key, value, dtype, finite) from None
    if array.size:
        converted = _converted(array, dtype)
        if converted is None or (finite and not np.isfinite(converted).all()):
            raise _refusal(key, value, dtype, finite)
    else:
        converted = array.astype(dtype)
    if array.ndim != len(shape) or any(want not in (None, have) for want, have in zip(shape, array.shape, strict=True)):
        sizes = str(tuple("any" if size is None else size for size in shape)).replace("'", "")
        wanted = "one-dimensional" if shape == (None,) else f"{dtype} of shape {sizes}"
        raise StateError(f"state {key!r} must be {wanted}, got {array.dtype} of shape {array.shape}")
    return converted


def _refusal(key: str, value: Any, dtype: np.dtype[Any], finite: bool) -> StateError:
    """Return the error. It is made only when needed, because printing a large array takes longer than all checks."""
    numbers = f"finite {dtype} numbers" if finite and dtype.kind != "b" else f"{dtype} values"
    return StateError(f"state {key!r} must hold {numbers}, got {value!r}")


def _whole_numbers(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return ``value`` as an array; lists of large integers remain integers."""
    array = np.array(value)
    # NumPy converts a list with integers on both sides of 2^63 to floats, and larger integers to objects.
    if isinstance(value, list) and array.dtype.kind in "fO":
        numbers, info = np.array(value, dtype=object), np.iinfo(dtype)
        if all(type(one) is int and info.min <= one <= info.max for one in numbers.flat):
            return numbers.astype(dtype)
    return array


def _converted(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Return ``array`` as ``dtype``; None if a number would change, or a float would become an integer."""
    order = {"b": 0, "i": 1, "u": 1, "f": 2}
    if array.dtype.kind not in order or order[array.dtype.kind] > order[dtype.kind]:
        return None
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
        # The conversion back shows overflow and lost digits that a comparison of the two types may round away.
        there_and_back = converted.astype(array.dtype)
    nan = array.dtype.kind == "f"
    same = np.array_equal(converted, array, equal_nan=nan) and np.array_equal(there_and_back, array, equal_nan=nan)
    return converted if same else None


def pack_generator(generator: np.random.Generator) -> npt.NDArray[np.uint64]:
    """Return the state of a PCG64 generator, shape (6,)."""
    state: Any = generator.bit_generator.state
    words = [state["state"]["state"], state["state"]["inc"]]
    packed = [part for word in words for part in (word >> 64, word & LOW)]
    return np.array([*packed, state["has_uint32"], state["uinteger"]], dtype=np.uint64)


def unpack_generator(key: str, value: Any) -> dict[str, Any]:
    """Return the value for ``bit_generator.state`` of a PCG64 generator; raise :class:`StateError` if it is invalid."""
    words = [int(part) for part in exact_array(key, value, np.dtype(np.uint64), (6,))]
    if words[4] > 1 or words[5] >= 1 << 32:
        raise StateError(f"state {key!r} must be the state of a PCG64 generator, got {words}")
    return {
        "bit_generator": "PCG64",
        "state": {"state": words[0] << 64 | words[1], "inc": words[2] << 64 | words[3]},
        "has_uint32": words[4],
        "uinteger": words[5],
    }
