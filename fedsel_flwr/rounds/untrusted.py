"""Values that clients sent, and what they may have meant: whatever comes, these functions do not raise.

The log's lines for what was wrong with clients: some are named, the rest are counted.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.selectors.columns import Column

if TYPE_CHECKING:
    from fedsel_flwr.rounds.history import History

MAX_EXAMPLES = 2**53  # what a float holds exactly
MAX_METRICS = 10_000
"""Metrics of a reply; one with more of them is refused unread."""
MAX_SKETCH = 2**16
"""Numbers of a client's sketch."""
MAX_NUMBERS = 2**24
"""Numbers of a vector where nobody can say how many the model has."""
LONG = 1000
"""Characters of a client's text that are looked at for a message."""
FEW = 8
"""Elements of a client's list that are written into a message."""
LINES = 20
"""Lines that the log gets of one thing in one round, whatever number of connections there are."""


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
    as_float = to_float(value)
    return as_float if as_float is not None and math.isfinite(as_float) else None


def fraction(value: object) -> float | None:
    """``value`` as a float in [0, 1]; None if it is none.

    >>> fraction(0.25), fraction(1.5), fraction("0.25")
    (0.25, None, None)
    """
    as_float = finite_number(value)
    return as_float if as_float is not None and 0.0 <= as_float <= 1.0 else None


def one_line(text: str) -> str:
    r"""A client's text as at most 300 printable characters on one line: it can neither forge nor colour log lines.

    >>> one_line("done\n\x1b[31mround 7: all well\x00")
    'done [31mround 7: all well'
    """
    return " ".join("".join([c if c.isprintable() else " " for c in text[:LONG]]).split())[:300]


def indented_lines(text: str) -> str:
    r"""A client's text for a log of several lines: all but the first are indented, so that none can be forged.

    >>> indented_lines("Traceback:\n\x1b[31mINFO : all well")
    'Traceback:\n     [31mINFO : all well'
    """
    lines = without_middle(text).splitlines()
    return "\n    ".join(["".join([c if c.isprintable() else " " for c in line]) for line in lines])


def without_middle(text: str) -> str:
    """A text, or the beginning and the end of one that is too long to be looked at as a whole."""
    return text if len(text) <= 20 * LONG else f"{text[: 10 * LONG]}\n...\n{text[-10 * LONG :]}"


def first_lines(lines: Sequence[str]) -> list[str]:
    """Lines for the log, of many the first ones and how many more there are.

    >>> first_lines(["a"] * 25)[-1], len(first_lines(["a"] * 25))
    ('and 5 more of the kind', 21)
    """
    more = len(lines) - LINES
    return [*lines] if more <= 0 else [*lines[:LINES], f"and {more} more of the kind"]


def shown(value: object) -> str:
    """A client's value in at most 80 printable characters, for a message; a long one is not written out for that.

    >>> shown("fast"), shown([1.0] * 10**6), shown(10**400)
    ("'fast'", 'a list of 1000000', 'an integer of 1329 bits')
    """
    try:
        return _shown(value)[:80]
    except Exception:  # whatever a client sent
        return f"a {type(value).__name__} that cannot be shown"


def _shown(value: object) -> str:
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:80])
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {one_line(str(value))}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}" if value.size > FEW else repr(value.tolist())
    if isinstance(value, list | tuple | dict | set | frozenset):
        if len(value) > FEW or isinstance(value, dict):
            return f"a {type(value).__name__} of {len(value)}"
        return f"[{', '.join([_shown(one) for one in value])}]"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def max_vector_length(column: str, model: Sequence[npt.NDArray[Any]] | None) -> int:
    """How many numbers a client's vector of a column may have: a gradient no more than the model has.

    >>> max_vector_length("gradient", [np.zeros((2, 3)), np.zeros(2)]), max_vector_length("gradient", None)
    (8, 16777216)
    """
    if column == "sketch":
        return MAX_SKETCH
    return MAX_NUMBERS if model is None else sum(array.size for array in model)


def to_float(value: object) -> float | None:
    """``value`` as a float, NaN and infinities included; None if it is no number."""
    if type(value) is float:  # the common case first
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite_vector(value: object, max_length: int | None = None, high: float = math.inf) -> FloatArray | None:
    """A vector of finite numbers, from an array or the bytes of one in float32; None if it is none.

    Args:
        value: What a client sent.
        max_length: Numbers that it may have; one with more is not copied. None for no limit.
        high: Largest size of a number.

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
    """What a column may hold of a value; None if it is nothing of the kind.

    Args:
        column: The column.
        value: What a client sent.
        max_length: Numbers that a vector may have; None for no limit.

    >>> from fedsel_flwr.selectors.columns import COLUMNS
    >>> column_value(COLUMNS["local_accuracy"], 0.5), column_value(COLUMNS["local_accuracy"], 1.5)
    (0.5, None)
    """
    if column.shape == "vector":
        return finite_vector(value, max_length, column.high)
    as_float = finite_number(value)
    return as_float if as_float is not None and column.admits(as_float) else None


logger = logging.getLogger("fedsel_flwr")
NAMED = 8
"""Clients that are named for each kind of problem in a round; the history has all of them."""


SIMULATED_FAULTS = ("late", "lost", "crashed")
"""Kinds of problems that a simulation's own clocks and draws bring about: a warning tells them once a run."""


def log_faults(where: str, faults: Iterable[tuple[str, str]], modelled: bool = False) -> None:
    """Warn of clients' problems.

    Args:
        where: The round, in words.
        faults: Client id and problem; the text before a problem's colon is its kind.
        modelled: Whether a simulation draws them: problems of :data:`SIMULATED_FAULTS` are then logged at level INFO.
    """
    faults = list(faults)
    if modelled:
        own = [fault for fault in faults if _kind(fault[1]) in SIMULATED_FAULTS]
        faults = [fault for fault in faults if _kind(fault[1]) not in SIMULATED_FAULTS]
        _log(logging.INFO, where, own)
    _log(logging.WARNING, where, faults)


def log_simulated_faults(history: History, spares: bool = False) -> None:
    """Warn once, when a simulation is over, of the answers that were late or lost.

    Args:
        history: The run's.
        spares: Whether rounds asked more clients than they waited for; the others count as late there.
    """
    counts = history.problem_counts()
    told = [f"{counts[kind]:,} {kind}" for kind in SIMULATED_FAULTS if counts[kind]]
    if told:
        asked = sum(record.num_selected for record in history.rounds)
        more = ", those included that no round waited for" if spares else ""
        logger.warning("%s of %s answers in %s rounds%s; the history names the clients", ", ".join(told), f"{asked:,}",
                       f"{len(history.rounds):,}", more)  # fmt: skip


def _log(level: int, where: str, faults: Iterable[tuple[str, str]]) -> None:
    met: Counter[str] = Counter()
    for client_id, problem in faults:
        kind = _kind(problem)
        met[kind] += 1
        if met[kind] <= NAMED:
            logger.log(level, "%s, client %s: %s", where, client_id, problem)
    more = {kind: count - NAMED for kind, count in met.most_common() if count > NAMED}
    if more:
        told = ", ".join(f"{kind} ({count})" for kind, count in more.items())
        logger.log(level, "%s: %d more problems that are not listed one by one: %s", where, sum(more.values()), told)


def _kind(problem: str) -> str:
    return problem.split(":")[0]


def first_ids(ids: Sequence[str]) -> str:
    """A list of clients for a message; of a long one the first.

    >>> first_ids(["a", "b"]), first_ids(list("abcdefghijk"))
    ("['a', 'b']", "['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'] and 3 more")
    """
    rest = len(ids) - NAMED
    return str(list(ids)) if rest <= 0 else f"{list(ids[:NAMED])} and {rest} more"
