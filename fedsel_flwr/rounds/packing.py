"""A state as JSON and arrays, and back, bit for bit.

A state is made of dicts, lists, tuples, numbers, texts, bytes, None, and NumPy arrays and numbers. What JSON has no
word for becomes an object with a key that begins with ``$``; everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import StateError

Array = npt.NDArray[Any]
NATIVE: Final = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
"""Types that safetensors has; arrays of others are kept as their bytes."""
PLAIN: Final = frozenset({bool, int, float, str, type(None)})
"""What JSON holds as it is; a list or dict of these alone, which may be long, is not looked at one by one."""


def packed(tree: object, name: str) -> tuple[Any, dict[str, Array]]:
    """Take a state apart.

    Args:
        tree: The state.
        name: What the names of its arrays begin with.

    Returns:
        What JSON can hold, and the arrays by name, each contiguous.

    Raises:
        StateError: There is something in it that cannot be saved; says where and what.

    >>> text, arrays = packed({"plays": np.arange(3), "mean": 0.5}, "selector")
    >>> text
    {'plays': {'$array': 'selector/plays'}, 'mean': 0.5}
    >>> arrays
    {'selector/plays': array([0, 1, 2])}
    """
    arrays: dict[str, Array] = {}
    return _packed(tree, name, arrays), arrays


def unpacked(text: Any, arrays: Mapping[str, Array]) -> Any:
    """Put a state together again; its arrays are copies.

    Raises:
        StateError: An array is missing, or is not what was saved.
    """
    if isinstance(text, list):
        return text if _is_plain(text) else [unpacked(one, arrays) for one in text]
    if not isinstance(text, dict):
        return text
    if "$array" in text:
        return _array(text, arrays)
    if "$number" in text:
        return unpacked(text["$number"], arrays)[()]
    if "$bytes" in text:
        return unpacked(text["$bytes"], arrays).tobytes()
    if "$tuple" in text:
        return tuple(unpacked(text["$tuple"], arrays))
    if "$items" in text:
        return {unpacked(key, arrays): unpacked(value, arrays) for key, value in text["$items"]}
    return text if _is_plain(text.values()) else {key: unpacked(value, arrays) for key, value in text.items()}


def _packed(tree: object, name: str, arrays: dict[str, Array]) -> Any:
    if isinstance(tree, np.ndarray):
        return _kept(tree, name, arrays)
    if isinstance(tree, np.generic):  # before float: float64 is one
        return {"$number": _kept(np.asarray(tree), name, arrays)}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, bytes | bytearray):
        return {"$bytes": _kept(np.frombuffer(tree, np.uint8), name, arrays)}
    if isinstance(tree, list):
        return tree if _is_plain(tree) else [_packed(one, f"{name}/{i}", arrays) for i, one in enumerate(tree)]
    if isinstance(tree, tuple):
        return {"$tuple": [_packed(one, f"{name}/{i}", arrays) for i, one in enumerate(tree)]}
    if isinstance(tree, Mapping):
        if not _has_names(tree):
            pairs = [
                [_packed(key, f"{name}/key", arrays), _packed(one, f"{name}/{key}", arrays)]
                for key, one in tree.items()
            ]
            return {"$items": pairs}
        if _is_plain(tree.values()):
            return dict(tree)
        return {key: _packed(one, f"{name}/{key}", arrays) for key, one in tree.items()}
    raise StateError(
        f"{name} cannot be saved: a state holds numbers, texts, bytes, lists, dicts and NumPy arrays, got "
        f"{type(tree).__name__}"
    )


def _is_plain(values: Collection[object]) -> bool:
    return PLAIN.issuperset(map(type, values))


def _has_names(tree: Mapping[Any, object]) -> bool:
    """Whether all keys are texts that do not begin with a dollar sign."""
    return {str}.issuperset(map(type, tree)) and "\n$" not in "\n" + "\n".join(tree)


def _kept(array: Array, name: str, arrays: dict[str, Array]) -> dict[str, Any]:
    """Put an array among the others; what stands in its place says how to read it again."""
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise StateError(f"{name} cannot be saved: expected an array of numbers or texts, got {array.dtype}")
    if not array.size:
        return {"$array": None, "dtype": array.dtype.str, "shape": list(array.shape)}
    said: dict[str, Any] = {}
    if array.flags.f_contiguous and not array.flags.c_contiguous:  # sums may depend on the order in memory
        array, said["order"] = array.T, "F"
    if array.dtype.str not in NATIVE:
        said |= {"dtype": array.dtype.str, "shape": list(array.shape)}
        array = np.frombuffer(array.tobytes(), np.uint8)
    name = name.encode("ascii", "backslashreplace").decode("ascii")
    while name in arrays:  # a key with a slash
        name += "_"
    arrays[name] = array if array.flags.c_contiguous else array.copy(order="C")
    return {"$array": name, **said}


def _array(said: dict[str, Any], arrays: Mapping[str, Array]) -> Array:
    name = said["$array"]
    if name is None:
        return np.zeros(said["shape"], np.dtype(said["dtype"]))
    if name not in arrays:
        raise StateError(f"the array {name!r} is missing")
    array = arrays[name]
    if "dtype" in said:
        array = np.frombuffer(array.tobytes(), np.dtype(said["dtype"])).reshape(said["shape"])
    array = array.copy()
    return array.T if said.get("order") == "F" else array
