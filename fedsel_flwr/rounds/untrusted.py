"""What a client may have meant by a value that it sent: whatever it is, these functions do not raise."""

from __future__ import annotations

import math
from numbers import Integral, Real

import numpy as np

MAX_EXAMPLES = 2**53  # what a float holds exactly


def usable_count(value: object) -> int:
    """A reported number of examples; 0 if it cannot be one.

    >>> usable_count(12), usable_count(-1), usable_count("12"), usable_count(10**400)
    (12, 0, 0, 0)
    """
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
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
