"""State dicts: saving, loading and checking lasting state, and packing it as JSON and arrays.

Every owner of lasting state is :class:`Stateful`. A state consists of dicts, lists, tuples, numbers, texts, bytes,
None, and NumPy arrays and numbers. Loading refuses a state that does not fit, with its name and the reason.

:func:`pack_state` turns a state into JSON and arrays, :func:`unpack_state` restores it bit for bit. A value that JSON
cannot hold becomes an object with a key that begins with ``$``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from typing import Any, ClassVar, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import StateError

State = dict[str, Any]
Array = npt.NDArray[Any]
NATIVE: Final = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
"""Types that safetensors supports. Arrays of other types are stored as bytes."""
Scalar = TypeVar("Scalar", bound=np.generic)
Reader = Callable[[str, Any], Any]
"""Function of key and saved value, which returns a copy of the value or raises :class:`StateError`."""


class Stateful(Protocol):
    """Owner of state that outlives a round."""

    def state_dict(self) -> State:
        """Return a copy of the state."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Load a state; raises :class:`StateError` and changes nothing if it does not fit."""

    def forget(self, rows: IntArray, /) -> None:
        """Drop the state of the evicted clients in ``rows``, because new clients take over these rows."""


class NotByClient:
    """Base class for owners of state that is not kept by client."""

    def forget(self, rows: IntArray) -> None:
        """Keep everything when new clients take over the rows of evicted clients."""


class SavedFields(NotByClient):
    """Base class for owners of a few values; saving and loading follow from a declaration.

    Attributes:
        saved: Attribute -> its reader. The attribute's name without the underscore is the key in a saved state.
    """

    saved: ClassVar[Mapping[str, Reader]]

    def state_dict(self) -> State:
        """Return copies of the declared attributes."""
        return {attribute.lstrip("_"): copy(getattr(self, attribute)) for attribute in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        attributes = {attribute.lstrip("_"): attribute for attribute in self.saved}
        # All values are read before the first one is set, so that a refused state changes nothing.
        for key, value in read(state, {key: self.saved[name] for key, name in attributes.items()}).items():
            setattr(self, attributes[key], value)


def save_parts(parts: Mapping[str, Stateful]) -> State:
    """Return the states of several owners, by name."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_parts(parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
    """Load the states of several owners: all of them, or none.

    Raises:
        StateError: A part is missing or unknown, or one does not fit; the message has its name and the reason.
    """
    expect_keys(state, parts)
    before, loaded = save_parts(parts), list[str]()
    try:
        for name, part in parts.items():
            loaded.append(name)
            part.load_state_dict(state[name])
    # The failed part has changed nothing. The parts loaded before it get their old states back.
    except StateError as error:
        for name in loaded[:-1]:
            parts[name].load_state_dict(before[name])
        raise StateError(f"{loaded[-1]}: {error}") from error


def expect_keys(state: object, keys: Collection[str]) -> None:
    """Refuse a state that is not a mapping with exactly these keys."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state must be a mapping with the keys {sorted(keys)}, got {type(state).__name__}")
    if set(state) != set(keys):
        missing, unexpected = sorted(set(keys) - set(state)), sorted(map(str, set(state) - set(keys)))
        raise StateError(f"the state does not fit: missing {missing}, unexpected {unexpected}")


def read(state: Any, readers: Mapping[str, Reader]) -> State:
    """Return copies of the values of a state with exactly these keys, each from its reader."""
    expect_keys(state, readers)
    return {key: reader(key, state[key]) for key, reader in readers.items()}


def records(name: str, value: object, readers: Mapping[str, Reader]) -> list[State]:
    """Return a copy of a state's list of states with the same keys."""
    if not isinstance(value, list):
        raise StateError(f"{name} must be a list, got {value!r:.80}")
    return [read(one, readers) for one in value]


def mapping(name: str, value: object) -> State:
    """Return a copy of a state's mapping, whose keys become texts."""
    if not isinstance(value, Mapping):
        raise StateError(f"{name} must be a mapping, got {value!r:.80}")
    return {str(key): one for key, one in value.items()}


def arrays_of(name: str, value: object) -> list[Array]:
    """Return a copy of a state's list of arrays."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, np.ndarray) for one in value):
        raise StateError(f"{name} must be a list of arrays, got {value!r:.80}")
    return [one.copy() for one in value]


def array(name: str, value: object, dtype: type[Scalar], *, rows: int | None = None) -> npt.NDArray[Scalar]:
    """Return a copy of a state's one-dimensional array, as ``dtype``; of length ``rows`` if that is set."""
    try:
        got = np.array(value)
    except ValueError as error:
        raise StateError(f"{name} must be an array of {dtype.__name__}, got {value!r:.80}") from error
    # An empty list becomes an array of floats, which does not cast to every type.
    if not got.size:
        got = got.astype(dtype)
    if got.ndim != 1 or not np.can_cast(got.dtype, dtype, "same_kind") or rows not in (None, len(got)):
        length = "" if rows is None else f" with {rows} rows"
        raise StateError(f"{name} must be a one-dimensional array of {dtype.__name__}{length}, got {got.dtype} of "
                         f"shape {got.shape}")  # fmt: skip
    return got.astype(dtype)


def texts(name: str, value: object) -> list[str]:
    """Return a copy of a state's list of texts."""
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise StateError(f"{name} must be a list of texts, got {value!r:.80}")
    return list(value)


def optional(reader: Reader) -> Reader:
    """Return a reader that accepts None too."""
    return lambda name, value: None if value is None else reader(name, value)


def plain_number(name: str, value: object) -> float:
    """Return a state's number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise StateError(f"{name} must be a number, got {value!r:.80}")
    return float(value)


def flag(name: str, value: object) -> bool:
    """Return a state's True or False."""
    if not isinstance(value, bool):
        raise StateError(f"{name} must be True or False, got {value!r:.80}")
    return value


def whole_number(name: str, value: object) -> int:
    """Return a state's whole number, at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise StateError(f"{name} must be a whole number of at least 0, got {value!r:.80}")
    return int(value)


def whole_numbers(name: str, value: object) -> dict[str, int]:
    """Return a copy of a state's mapping from text to whole numbers."""
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(number, int) and not isinstance(number, bool)
        for key, number in value.items()
    ):
        raise StateError(f"{name} must be a mapping from text to whole numbers, got {value!r:.80}")
    return dict(value)


def extended(values: npt.NDArray[Scalar], rows: int, fill: object) -> npt.NDArray[Scalar]:
    """Return ``values`` itself if it has at least ``rows`` rows, else a longer copy filled with ``fill``."""
    missing = (rows - len(values), *values.shape[1:])
    return values if missing[0] <= 0 else np.concatenate([values, np.full(missing, fill, dtype=values.dtype)])


def pack_state(tree: object, name: str, arrays: dict[str, Array]) -> Any:
    """Split a state into JSON and arrays.

    Args:
        tree: The state.
        name: Prefix of the arrays' names.
        arrays: Gets the state's arrays by name, each contiguous.

    Returns:
        The JSON content.

    Raises:
        StateError: The state holds a value that cannot be saved; the message has its place and type.

    >>> arrays = {}
    >>> pack_state({"plays": np.arange(3), "mean": 0.5}, "selector", arrays)
    {'plays': {'$array': 'selector/plays'}, 'mean': 0.5}
    >>> arrays
    {'selector/plays': array([0, 1, 2])}
    """
    if isinstance(tree, np.ndarray):
        return _pack_array(tree, name, arrays)
    # Before float, of which np.float64 is a subclass.
    if isinstance(tree, np.generic):
        return {"$number": _pack_array(np.asarray(tree), name, arrays)}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, bytes | bytearray):
        return {"$bytes": _pack_array(np.frombuffer(tree, np.uint8), name, arrays)}
    if isinstance(tree, tuple):
        return {"$tuple": pack_state(list(tree), name, arrays)}
    if isinstance(tree, list):
        return [pack_state(one, f"{name}/{i}", arrays) for i, one in enumerate(tree)]
    if isinstance(tree, Mapping):
        # JSON's keys are texts, and keys with "$" are reserved.
        if all(type(key) is str and key[:1] != "$" for key in tree):
            return {key: pack_state(one, f"{name}/{key}", arrays) for key, one in tree.items()}
        keys = pack_state([*tree], f"{name}/keys", arrays)
        return {"$keys": keys, "values": pack_state([*tree.values()], f"{name}/values", arrays)}
    raise StateError(
        f"{name} cannot be saved: a state has numbers, texts, bytes, lists, dicts and arrays, got {type(tree).__name__}"
    )


def unpack_state(text: Any, arrays: Mapping[str, Array]) -> Any:
    """Restore a state from JSON and arrays; its arrays are copies.

    Raises:
        StateError: An array is missing, or differs from the saved one.
    """
    match text:
        case list():
            return [unpack_state(one, arrays) for one in text]
        case {"$array": name}:
            return _unpack_array(name, text, arrays)
        case {"$number": number}:
            return unpack_state(number, arrays)[()]
        case {"$bytes": content}:
            return unpack_state(content, arrays).tobytes()
        case {"$tuple": items}:
            return tuple(unpack_state(items, arrays))
        case {"$keys": keys, "values": values}:
            return dict(zip(unpack_state(keys, arrays), unpack_state(values, arrays), strict=True))
        case dict():
            return {key: unpack_state(value, arrays) for key, value in text.items()}
    return text


def _pack_array(array: Array, name: str, arrays: dict[str, Array]) -> dict[str, Any]:
    """Add an array to the others; return the JSON that describes how to restore it."""
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise StateError(f"{name} cannot be saved: expected an array of numbers or texts, got {array.dtype}")
    if not array.size:
        return {"$array": None, "dtype": array.dtype.str, "shape": list(array.shape)}
    entry: dict[str, Any] = {}
    # The order in memory is restored too, because the rounding of sums may depend on it.
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        array, entry["order"] = array.T, "F"
    if array.dtype.str not in NATIVE:
        entry |= {"dtype": array.dtype.str, "shape": list(array.shape)}
        array = np.frombuffer(array.tobytes(), np.uint8)
    # Keys with slashes can give two arrays one name.
    while name in arrays:
        name += "_"
    arrays[name] = np.asarray(array, order="C")
    return {"$array": name, **entry}


def _unpack_array(name: str | None, entry: Mapping[str, Any], arrays: Mapping[str, Array]) -> Array:
    if name is None:
        return np.zeros(entry["shape"], np.dtype(entry["dtype"]))
    if name not in arrays:
        raise StateError(f"the array {name!r} is missing")
    array = arrays[name]
    if "dtype" in entry:
        array = np.frombuffer(array.tobytes(), np.dtype(entry["dtype"])).reshape(entry["shape"])
    array = array.copy()
    return array.T if entry.get("order") == "F" else array
