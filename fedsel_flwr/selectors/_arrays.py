"""Arrays and the generator in a saved state: taken as they are or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import StateError

KINDS = "biuf"
"""Types that a state may hold: booleans, integers, floats."""
LOW = (1 << 64) - 1


def exactly(
    key: str, value: Any, dtype: np.dtype[Any], shape: tuple[int | None, ...], *, finite: bool = True
) -> npt.NDArray[Any]:
    """Return the state ``value`` as a new array of ``dtype`` and ``shape``, without changing a number.

    Args:
        key: The state's key, for the message.
        value: An array, a number or lists of numbers; an empty one fits any type.
        dtype: The type to return; integers may come in another width, and as floats never.
        shape: The shape; None stands for any length.
        finite: Whether NaN and infinities are refused.

    Raises:
        StateError: It does not fit.

    >>> exactly("plays", [1, 2], np.dtype(np.uint64), (None,)).dtype
    dtype('uint64')
    """
    try:
        array = _whole_numbers(value, dtype) if dtype.kind in "iu" else np.array(value)
    except (ValueError, TypeError, OverflowError):  # rows of different lengths
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
    """The error, made when it is needed: to write a large array out takes longer than everything else here."""
    numbers = f"finite {dtype} numbers" if finite and dtype.kind != "b" else f"{dtype} values"
    return StateError(f"state {key!r} must hold {numbers}, got {value!r}")


def _whole_numbers(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``value`` as an array; lists of large integers, which NumPy would take for floats, as integers."""
    array = np.array(value)
    if isinstance(value, list) and array.dtype.kind in "fO":
        numbers, info = np.array(value, dtype=object), np.iinfo(dtype)
        if all(type(one) is int and info.min <= one <= info.max for one in numbers.flat):
            return numbers.astype(dtype)
    return array


def _converted(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """``array`` as ``dtype``; None where a number would become another, or a fraction an integer."""
    order = {"b": 0, "i": 1, "u": 1, "f": 2}
    if array.dtype.kind not in order or order[array.dtype.kind] > order[dtype.kind]:
        return None
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
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
    """Return what ``bit_generator.state`` of a PCG64 generator takes; raise :class:`StateError` if it is none."""
    words = [int(part) for part in exactly(key, value, np.dtype(np.uint64), (6,))]
    if words[4] > 1 or words[5] >= 1 << 32:
        raise StateError(f"state {key!r} must be the state of a PCG64 generator, got {words}")
    return {
        "bit_generator": "PCG64",
        "state": {"state": words[0] << 64 | words[1], "inc": words[2] << 64 | words[3]},
        "has_uint32": words[4],
        "uinteger": words[5],
    }
