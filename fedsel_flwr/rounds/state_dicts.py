"""State dicts: saving, loading and checking what outlives a round, and packing it as JSON and arrays.

Every owner of lasting state is :class:`Stateful`. A state is made of dicts, lists, tuples, numbers, texts, bytes, None,
and NumPy arrays and numbers. Loading refuses a state that does not fit, by name and reason, and then changes nothing.

:func:`pack_state` turns a state into JSON and arrays, :func:`unpack_state` restores it bit for bit. What JSON cannot
hold becomes an object with a key that begins with ``$``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import StateError

State = dict[str, Any]
Array = npt.NDArray[Any]
NATIVE: Final = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
"""Types that safetensors has; arrays of other types are stored as bytes."""
PLAIN: Final = frozenset({bool, int, float, str, type(None)})
"""Types that JSON holds unchanged; a list or dict of these alone, which may be long, is not walked in Python."""
Scalar = TypeVar("Scalar", bound=np.generic)


class Stateful(Protocol):
    """Owner of state that outlives a round."""

    def state_dict(self) -> State:
        """Return a copy of the state."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Load a state; raises :class:`StateError` and changes nothing if it does not fit."""

    def forget(self, rows: IntArray, /) -> None:
        """Drop what is known of the clients in ``rows``, which are given to newcomers."""


def save_parts(parts: Mapping[str, Stateful]) -> State:
    """Return the states of several owners, by name."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_parts(parts: Mapping[str, Stateful], state: Mapping[str, Any]) -> None:
    """Load the states of several owners: all of them, or none.

    Raises:
        StateError: A part is missing or unknown, or one does not fit; says which and why.
    """
    expect_keys(state, parts)
    before, loaded = save_parts(parts), list[str]()
    try:
        for name, part in parts.items():
            loaded.append(name)
            part.load_state_dict(state[name])
    # The failed part has changed nothing; those loaded before it get their old states back.
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


def array(name: str, value: object, dtype: type[Scalar], *, rows: int | None = None) -> npt.NDArray[Scalar]:
    """Return a copy of a state's one-dimensional array, as ``dtype``; of length ``rows``, if that is given."""
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


def plain_number(name: str, value: object, *, or_none: bool = False) -> float | None:
    """Return a state's number; None if that is allowed."""
    if or_none and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise StateError(f"{name} must be a number, got {value!r:.80}")
    return float(value)


def whole_number(name: str, value: object) -> int:
    """Return a state's whole number, 0 or above."""
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
    """Return ``values`` itself if it has ``rows`` rows or more, else a longer copy filled with ``fill``."""
    missing = rows - len(values)
    return values if missing <= 0 else np.append(values, np.full(missing, fill, dtype=values.dtype))


def pack_state(tree: object, name: str) -> tuple[Any, dict[str, Array]]:
    """Split a state into JSON and arrays.

    Args:
        tree: The state.
        name: Prefix of the arrays' names.

    Returns:
        The JSON content, and the arrays by name, each contiguous.

    Raises:
        StateError: The state holds something that cannot be saved; says where and what.

    >>> text, arrays = pack_state({"plays": np.arange(3), "mean": 0.5}, "selector")
    >>> text
    {'plays': {'$array': 'selector/plays'}, 'mean': 0.5}
    >>> arrays
    {'selector/plays': array([0, 1, 2])}
    """
    arrays: dict[str, Array] = {}
    return _pack(tree, name, arrays), arrays


def unpack_state(text: Any, arrays: Mapping[str, Array]) -> Any:
    """Restore a state from JSON and arrays; its arrays are copies.

    Raises:
        StateError: An array is missing, or is not what was saved.
    """
    if isinstance(text, list):
        return text if _is_plain(text) else [unpack_state(one, arrays) for one in text]
    if not isinstance(text, dict):
        return text
    if "$array" in text:
        return _unpack_array(text, arrays)
    if "$number" in text:
        return unpack_state(text["$number"], arrays)[()]
    if "$bytes" in text:
        return unpack_state(text["$bytes"], arrays).tobytes()
    if "$tuple" in text:
        return tuple(unpack_state(text["$tuple"], arrays))
    if "$items" in text:
        return {unpack_state(key, arrays): unpack_state(value, arrays) for key, value in text["$items"]}
    return text if _is_plain(text.values()) else {key: unpack_state(value, arrays) for key, value in text.items()}


def _pack(tree: object, name: str, arrays: dict[str, Array]) -> Any:
    if isinstance(tree, np.ndarray):
        return _pack_array(tree, name, arrays)
    # Before float, of which np.float64 is a subclass.
    if isinstance(tree, np.generic):
        return {"$number": _pack_array(np.asarray(tree), name, arrays)}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, bytes | bytearray):
        return {"$bytes": _pack_array(np.frombuffer(tree, np.uint8), name, arrays)}
    if isinstance(tree, list):
        return tree if _is_plain(tree) else [_pack(one, f"{name}/{i}", arrays) for i, one in enumerate(tree)]
    if isinstance(tree, tuple):
        return {"$tuple": [_pack(one, f"{name}/{i}", arrays) for i, one in enumerate(tree)]}
    if isinstance(tree, Mapping):
        # JSON's keys are texts, and "$" is ours: other keys are stored as pairs.
        if not _has_plain_keys(tree):
            pairs = [
                [_pack(key, f"{name}/key", arrays), _pack(one, f"{name}/{key}", arrays)] for key, one in tree.items()
            ]
            return {"$items": pairs}
        if _is_plain(tree.values()):
            return dict(tree)
        return {key: _pack(one, f"{name}/{key}", arrays) for key, one in tree.items()}
    raise StateError(
        f"{name} cannot be saved: a state holds numbers, texts, bytes, lists, dicts and NumPy arrays, got "
        f"{type(tree).__name__}"
    )


def _is_plain(values: Collection[object]) -> bool:
    # By exact type, at the speed of C: states hold lists of every client's id.
    return PLAIN.issuperset(map(type, values))


def _has_plain_keys(tree: Mapping[Any, object]) -> bool:
    """Return whether all keys are texts that do not begin with a dollar sign."""
    # One search in the joined keys is faster than a look at each.
    return {str}.issuperset(map(type, tree)) and "\n$" not in "\n" + "\n".join(tree)


def _pack_array(array: Array, name: str, arrays: dict[str, Array]) -> dict[str, Any]:
    """Add an array to the others; return the JSON that says how to restore it."""
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise StateError(f"{name} cannot be saved: expected an array of numbers or texts, got {array.dtype}")
    if not array.size:
        return {"$array": None, "dtype": array.dtype.str, "shape": list(array.shape)}
    entry: dict[str, Any] = {}
    # The order in memory is restored too: the rounding of sums may depend on it.
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        array, entry["order"] = array.T, "F"
    if array.dtype.str not in NATIVE:
        entry |= {"dtype": array.dtype.str, "shape": list(array.shape)}
        array = np.frombuffer(array.tobytes(), np.uint8)
    name = name.encode("ascii", "backslashreplace").decode("ascii")
    # Keys with slashes can give two arrays one name.
    while name in arrays:
        name += "_"
    arrays[name] = array if array.flags.c_contiguous else array.copy(order="C")
    return {"$array": name, **entry}


def _unpack_array(entry: dict[str, Any], arrays: Mapping[str, Array]) -> Array:
    name = entry["$array"]
    if name is None:
        return np.zeros(entry["shape"], np.dtype(entry["dtype"]))
    if name not in arrays:
        raise StateError(f"the array {name!r} is missing")
    array = arrays[name]
    if "dtype" in entry:
        array = np.frombuffer(array.tobytes(), np.dtype(entry["dtype"])).reshape(entry["shape"])
    array = array.copy()
    return array.T if entry.get("order") == "F" else array
