"""What the owners of a run's lasting state have in common: they save, load and forget.

A state is a dict of numbers, texts, lists and NumPy arrays. Loading refuses what does not fit by name and reason, and
then changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import StateError

State = dict[str, Any]
Scalar = TypeVar("Scalar", bound=np.generic)


class Owner(Protocol):
    """Owns something that outlives a round."""

    def state_dict(self) -> State:
        """A copy of the state."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue from a state; raises :class:`StateError` and changes nothing if it does not fit."""

    def forget(self, rows: IntArray, /) -> None:
        """Drop what is known of the clients in ``rows``, which are given to newcomers."""


def save_parts(parts: Mapping[str, Owner]) -> State:
    """The states of several owners, by name."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_parts(parts: Mapping[str, Owner], state: Mapping[str, Any]) -> None:
    """Load several owners' states; all of them, or none.

    Raises:
        StateError: A part is missing or unknown, or one does not fit; says which and why.
    """
    expect_keys(state, parts)
    before, loaded = save_parts(parts), list[str]()
    try:
        for name, part in parts.items():
            loaded.append(name)
            part.load_state_dict(state[name])
    except StateError as error:
        for name in loaded[:-1]:
            parts[name].load_state_dict(before[name])
        raise StateError(f"{loaded[-1]}: {error}") from error


def expect_keys(state: object, keys: Collection[str]) -> None:
    """Refuse a state that is no mapping with exactly these keys."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state must be a mapping with the keys {sorted(keys)}, got {type(state).__name__}")
    if set(state) != set(keys):
        missing, unexpected = sorted(set(keys) - set(state)), sorted(map(str, set(state) - set(keys)))
        raise StateError(f"the state does not fit: missing {missing}, unexpected {unexpected}")


def array(name: str, value: object, dtype: type[Scalar], *, rows: int | None = None) -> npt.NDArray[Scalar]:
    """A copy of the one-dimensional array in a state, in its type; ``rows`` long where that is given."""
    try:
        got = np.array(value)
    except ValueError as error:
        raise StateError(f"{name} must be an array of {dtype.__name__}, got {value!r:.80}") from error
    if not got.size:
        got = got.astype(dtype)
    if got.ndim != 1 or not np.can_cast(got.dtype, dtype, "same_kind") or rows not in (None, len(got)):
        length = "" if rows is None else f" with {rows} rows"
        raise StateError(f"{name} must be a one-dimensional array of {dtype.__name__}{length}, got {got.dtype} of "
                         f"shape {got.shape}")  # fmt: skip
    return got.astype(dtype)


def texts(name: str, value: object) -> list[str]:
    """A copy of the list of texts in a state."""
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise StateError(f"{name} must be a list of texts, got {value!r:.80}")
    return list(value)


def plain_number(name: str, value: object, *, or_none: bool = False) -> float | None:
    """The number in a state; None where that is allowed."""
    if or_none and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise StateError(f"{name} must be a number, got {value!r:.80}")
    return float(value)


def whole_number(name: str, value: object) -> int:
    """The whole number, 0 or above, in a state."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise StateError(f"{name} must be a whole number of at least 0, got {value!r:.80}")
    return int(value)


def whole_numbers(name: str, value: object) -> dict[str, int]:
    """A copy of the mapping from text to whole numbers in a state."""
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(number, int) and not isinstance(number, bool)
        for key, number in value.items()
    ):
        raise StateError(f"{name} must be a mapping from text to whole numbers, got {value!r:.80}")
    return dict(value)


def long_enough(values: npt.NDArray[Scalar], rows: int, fill: object) -> npt.NDArray[Scalar]:
    """``values``, one a row, or a longer copy filled up to ``rows`` rows."""
    missing = rows - len(values)
    return values if missing <= 0 else np.append(values, np.full(missing, fill, dtype=values.dtype))
