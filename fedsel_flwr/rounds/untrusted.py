"""Values that clients sent, and what they may have meant: whatever comes, these functions do not raise."""

from __future__ import annotations

import math
from numbers import Integral, Real

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.selectors.columns import Column

MAX_EXAMPLES = 2**53  # what a float holds exactly


def usable_count(value: object) -> int:
    """A reported number of examples; 0 if it cannot be one.

    >>> usable_count(12), usable_count(-1), usable_count("12"), usable_count(10**400)
    (12, 0, 0, 0)
    """
    if type(value) is int:  # the common case first: fleets are large
        return value if 1 <= value <= MAX_EXAMPLES else 0
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral) or not 1 <= int(value) <= MAX_EXAMPLES:
        return 0
    return int(value)


def finite_number(value: object) -> float | None:
    """``value`` as a float; None if it is no finite number."""
    as_float = number(value)
    return as_float if as_float is not None and math.isfinite(as_float) else None


def fraction(value: object) -> float | None:
    """``value`` as a float in [0, 1]; None if it is none.

    >>> fraction(0.25), fraction(1.5), fraction("0.25")
    (0.25, None, None)
    """
    as_float = finite_number(value)
    return as_float if as_float is not None and 0.0 <= as_float <= 1.0 else None


def one_line(text: str) -> str:
    """A client's text on one line of at most 300 characters, so that it cannot forge log lines."""
    return " ".join(text.split())[:300]


def shown(value: object) -> str:
    """A client's value in at most 80 characters, for a message."""
    try:
        return f"{value!r:.80}"
    except Exception:  # whatever a client sent
        return f"a {type(value).__name__} that cannot be shown"


def number(value: object) -> float | None:
    """``value`` as a float, NaN and infinities included; None if it is no number."""
    if type(value) is float:  # the common case first
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def vector(value: object) -> FloatArray | None:
    """A vector of finite numbers, from an array or the bytes of one in float32; None if it is none.

    >>> vector(np.array([1.0, 2.0], dtype=np.float32).tobytes()).tolist(), vector(b"abc"), vector(b"")
    ([1.0, 2.0], None, None)
    """
    if isinstance(value, bytes):
        value = np.frombuffer(value, dtype="<f4") if len(value) % 4 == 0 else None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf" or not value.size:
        return None
    as_floats = value.astype(np.float64).ravel()
    return as_floats if np.isfinite(as_floats).all() else None


def within(column: Column, value: object) -> float | FloatArray | None:
    """What a column may hold of a value; None if it is nothing of the kind.

    >>> from fedsel_flwr.selectors.columns import COLUMNS
    >>> within(COLUMNS["local_accuracy"], 0.5), within(COLUMNS["local_accuracy"], 1.5)
    (0.5, None)
    """
    if column.shape == "vector":
        return vector(value)
    as_float = finite_number(value)
    return as_float if as_float is not None and column.admits(as_float) else None
