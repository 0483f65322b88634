"""Untrusted values from clients: reading them, showing them in messages, and logging clients' faults.

No value from a client makes these functions raise, or take longer than its size allows. Log lines name the first
clients and count the others.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.selectors.columns import COLUMNS, Column

logger = logging.getLogger("fedsel_flwr")
MAX_NAMED = 8
"""Number of clients named for each kind of problem in a round. The history has all of them."""
SIMULATED_FAULTS = ("late", "lost", "crashed")
"""Kinds of problems that a simulation draws itself. One warning at the end of the run counts them."""
MAX_EXAMPLES = int(COLUMNS["num_examples"].high)
"""Largest number of examples of a client."""
MAX_METRICS = 10_000
"""Largest number of metrics in a reply. A reply with more is refused unread."""
MAX_SKETCH = 2**16
"""Largest length of a client's sketch."""
MAX_NUMBERS = 2**24
"""Largest length of a client's gradient if the global model cannot be decoded."""
MAX_CHARACTERS = 1000
"""Number of characters of a client's text that are read for a message."""
MAX_SHOWN = 8
"""Largest number of elements of a client's list that a message shows."""
MAX_LINES = 20
"""Largest number of log lines of one kind in a round, for any number of connections."""


def usable_count(value: object) -> int:
    """Return a reported number of examples; 0 if the value is not valid.

    >>> usable_count(12), usable_count(-1), usable_count("12"), usable_count(10**400)
    (12, 0, 0, 0)
    """
    # The common case comes first, because fleets are large.
    if type(value) is int:
        return value if 1 <= value <= MAX_EXAMPLES else 0
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral) or not 1 <= int(value) <= MAX_EXAMPLES:
        return 0
    return int(value)


def finite_number(value: object) -> float | None:
    """Return ``value`` as a float; None if it is not a finite number."""
    as_float = to_float(value)
    return as_float if as_float is not None and math.isfinite(as_float) else None


def is_finite(value: object) -> bool:
    """Return whether a metric has no NaN or infinity; texts and bytes have none."""
    if isinstance(value, list):
        return all(is_finite(one) for one in value)
    return not isinstance(value, float | np.floating) or math.isfinite(value)


def to_float(value: object) -> float | None:
    """Return ``value`` as a float, NaN and infinities included; None if it is not a number."""
    if type(value) is float:
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite_vector(value: object, max_length: int | None = None, high: float = math.inf) -> FloatArray | None:
    """Return a vector of finite numbers, from an array or the bytes of a float32 array; None if it is not valid.

    Args:
        value: The value from a client.
        max_length: Largest length of the vector. A longer one is not copied. None for no limit.
        high: Largest magnitude of a number.

    >>> sent = np.array([1.0, 2.0], dtype=np.float32).tobytes()
    >>> finite_vector(sent).tolist(), finite_vector(b"abc"), finite_vector(b"")
    ([1.0, 2.0], None, None)
    """
    if isinstance(value, bytes):
        value = np.frombuffer(value, dtype="<f4") if len(value) % 4 == 0 else None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf" or not value.size:
        return None
    if max_length is not None and value.size > max_length:
        return None
    as_floats = value.astype(np.float64).ravel()
    return as_floats if np.isfinite(as_floats).all() and np.abs(as_floats).max() <= high else None


def column_value(column: Column, value: object, max_length: int | None = None) -> float | FloatArray | None:
    """Return a client's value if it is valid for the column, else None.

    Args:
        column: The column.
        value: The value from a client.
        max_length: Largest length of a vector; None for no limit.

    >>> column_value(COLUMNS["local_accuracy"], 0.5), column_value(COLUMNS["local_accuracy"], 1.5)
    (0.5, None)
    """
    if column.shape == "vector":
        return finite_vector(value, max_length, column.high)
    as_float = finite_number(value)
    return as_float if as_float is not None and column.admits(as_float) else None


def decoded(read: Callable[[], Iterable[object]]) -> list[npt.NDArray[Any]] | None:
    """Return the arrays that ``read`` returns; None if it raises, or returns something else."""
    try:
        found = list(read())
    # A client may send any content, so any error may be raised.
    except Exception:
        return None
    arrays = [one for one in found if isinstance(one, np.ndarray)]
    return arrays if len(arrays) == len(found) else None


def max_vector_length(column: str, model: Sequence[npt.NDArray[Any]] | None) -> int:
    """Return the largest length of a client's vector in a column: for a gradient, the model's parameters.

    >>> max_vector_length("gradient", [np.zeros((2, 3)), np.zeros(2)]), max_vector_length("gradient", None)
    (8, 16777216)
    """
    if column == "sketch":
        return MAX_SKETCH
    return MAX_NUMBERS if model is None else sum(array.size for array in model)


def one_line(text: str) -> str:
    r"""Return a client's text as at most 300 printable characters on one line, so that it cannot forge log lines.

    >>> one_line("done\n\x1b[31mround 7: all well\x00")
    'done [31mround 7: all well'
    """
    return " ".join("".join([c if c.isprintable() else " " for c in text[:MAX_CHARACTERS]]).split())[:300]


def indented_lines(text: str) -> str:
    r"""Return a client's text with all lines after the first indented, so that none looks like a line of the log.

    >>> indented_lines("Traceback:\n\x1b[31mINFO : all well")
    'Traceback:\n     [31mINFO : all well'
    """
    lines = without_middle(text).splitlines()
    return "\n    ".join(["".join([c if c.isprintable() else " " for c in line]) for line in lines])


def without_middle(text: str) -> str:
    """Return a short text unchanged, and only the beginning and the end of a long one."""
    most = 10 * MAX_CHARACTERS
    return text if len(text) <= 2 * most else f"{text[:most]}\n...\n{text[-most:]}"


def warn_of(beginning: str, lines: Sequence[str]) -> None:
    """Log lines as warnings with a common beginning, at most :data:`MAX_LINES` and the number of further lines."""
    more = len(lines) - MAX_LINES
    for line in [*lines[:MAX_LINES], *([f"and {more} more like these"] if more > 0 else [])]:
        logger.warning("%s%s", beginning, line)


def shown(value: object) -> str:
    """Return a client's value in at most 80 characters, for a message; a large value is described, not written out.

    >>> shown("fast"), shown([1.0] * 10**6), shown(10**400)
    ("'fast'", 'a list of 1000000', 'an integer of 1329 bits')
    """
    try:
        return _shown(value)[:80]
    # The value is a client's object, and printing it may raise anything.
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def _shown(value: object) -> str:
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:80])
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {one_line(str(value))}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}" if value.size > MAX_SHOWN else repr(value.tolist())
    if isinstance(value, list | tuple | dict | set | frozenset):
        if len(value) > MAX_SHOWN or isinstance(value, dict):
            return f"a {type(value).__name__} of {len(value)}"
        return f"[{', '.join([_shown(one) for one in value])}]"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def log_faults(where: str, faults: Iterable[tuple[str, str]], simulated: bool = False) -> None:
    """Log clients' problems as warnings.

    Args:
        where: Name of the round, as text.
        faults: Client id and problem. The text before a problem's colon is its kind.
        simulated: Whether a simulation draws the problems. Those of :data:`SIMULATED_FAULTS` then have the level INFO.
    """
    drawn, faults = SIMULATED_FAULTS if simulated else (), list(faults)
    for level in (logging.INFO, logging.WARNING):
        met: Counter[str] = Counter()
        for client_id, problem in faults:
            kind = problem.split(":")[0]
            if (kind in drawn) is not (level == logging.INFO):
                continue
            met[kind] += 1
            if met[kind] <= MAX_NAMED:
                logger.log(level, "%s, client %s: %s", where, client_id, problem)
        more = {kind: count - MAX_NAMED for kind, count in met.most_common() if count > MAX_NAMED}
        if more:
            told = ", ".join(f"{kind} ({count})" for kind, count in more.items())
            logger.log(level, "%s: %d more problems, counted by kind: %s", where, sum(more.values()), told)


def first_ids(ids: Sequence[str], most: int = MAX_NAMED) -> str:
    """Return a list of client ids for a message; for a long list the first ``most``, and the number of the others.

    >>> first_ids(["a", "b"]), first_ids(list("abcdefghijk"))
    ("['a', 'b']", "['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'] and 3 more")
    """
    rest = len(ids) - most
    return str(list(ids)) if rest <= 0 else f"{list(ids[:most])} and {rest} more"
