"""Checks of arguments for the whole package. Each error names the expected value and the received value."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import ParameterError

AUTO: Final = "auto"
"""Value of a time parameter that the selector estimates from the times that it has observed."""
Seconds = float | Literal["auto"]
LOCALHOST: Final = "127.0.0.1"
"""The host of an address without one: only programs on this machine can connect."""
ADDRESS: Final = re.compile(r"(?:(?P<host>[^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})")
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def whole(name: str, value: object, minimum: int) -> int:
    """Return ``value`` as an int of at least ``minimum``."""
    integral = isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())
    if isinstance(value, bool | np.bool_) or not integral or int(value) < minimum:  # type: ignore[call-overload]
        raise ParameterError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def real(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return ``value`` as a finite float within these limits.

    >>> real("rate", 2, above=1.0, at_most=2.0)
    2.0
    """
    limits: list[tuple[str, float | None, Callable[[float, float], bool]]] = [
        ("above", above, operator.gt),
        ("of at least", at_least, operator.ge),
        ("below", below, operator.lt),
        ("of at most", at_most, operator.le),
    ]
    given = [(words, limit, holds) for words, limit, holds in limits if limit is not None]
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool | np.bool_):
        # An integer of 400 digits cannot become a float.
        with suppress(OverflowError):
            number = float(value)
    if not math.isfinite(number) or not all(holds(number, limit) for _, limit, holds in given):
        wanted = " and ".join(f"{words} {limit:g}" for words, limit, _ in given)
        raise ParameterError(f"{name} must be a finite number{' ' if wanted else ''}{wanted}, got {value!r}")
    return number


def fraction(name: str, value: object) -> float:
    """Return ``value`` as a float in [0, 1]."""
    return real(name, value, at_least=0.0, at_most=1.0)


def seconds(name: str, value: object) -> Seconds:
    """Return ``value`` as a number of seconds above 0, or "auto".

    Args:
        name: Name of the parameter, for the message.
        value: The value to check.

    Raises:
        ParameterError: The value is neither of the two.

    >>> seconds("min_latency", 2), seconds("min_latency", "auto")
    (2.0, 'auto')
    """
    if isinstance(value, str) and value == AUTO:
        return AUTO
    try:
        return real(name, value, above=0.0)
    except ParameterError as error:
        raise ParameterError(f'{error}. Give "auto" to estimate it from the observed times') from None


def indices(name: str, value: Any) -> IntArray:
    """Return ``value`` as a one-dimensional array of unique client indices (a copy)."""
    array = np.asarray(value)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ParameterError(
            f"{name} must be a one-dimensional array of client indices (integers), "
            f"got {array.dtype} of shape {array.shape}"
        )
    if array.min() < 0:
        raise ParameterError(f"{name} must hold indices of at least 0, got {int(array.min())}")
    # Ascending indices, the common case, are unique and need no sort.
    if not _ascends(array) and np.unique(array).size != array.size:
        raise ParameterError(f"{name} must name each client once, got {array.size - np.unique(array).size} repeated")
    return array.astype(np.int64)


def ascending(name: str, value: Any) -> IntArray:
    """Return ``value`` as an array of unique client indices in ascending order (see :func:`indices`).

    >>> ascending("clients", [2, 0, 1])
    array([0, 1, 2])
    """
    array = indices(name, value)
    return array if _ascends(array) else np.sort(array)


def _ascends(array: npt.NDArray[Any]) -> bool:
    return bool((array[1:] > array[:-1]).all())


def column(name: str, value: Any, num_rows: int, *, ndim: int = 1) -> FloatArray:
    """Return ``value`` as a float column with ``num_rows`` rows (a copy)."""
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{name} must be an array of numbers, got {value!r}") from error
    if array.ndim != ndim or array.shape[0] != num_rows:
        raise ParameterError(
            f"{name} must have one row per client: expected {num_rows} rows and {ndim} dimension(s), "
            f"got shape {array.shape}"
        )
    return array


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``allowed``."""
    if value not in allowed:
        raise ParameterError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is closest to a given one, beginning with a space; "" if none is close.

    >>> did_you_mean("randm", ("bsfl", "random"))
    " (did you mean 'random'?)"
    """
    return "".join(f" (did you mean {close!r}?)" for close in difflib.get_close_matches(given, list(known), n=1))


def parse_address(name: str, value: object) -> tuple[str, int]:
    """Return the host and port of an address.

    Args:
        name: Name of the option, for the error.
        value: A port, or HOST:PORT. An IPv6 address has brackets.

    Raises:
        ParameterError: The value is no such address.

    >>> parse_address("metrics_address", 9464), parse_address("metrics_address", "0.0.0.0:0")
    (('127.0.0.1', 9464), ('0.0.0.0', 0))
    """
    as_text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    found = ADDRESS.fullmatch(as_text)
    if found is None or int(found["port"]) > 65535:
        raise ParameterError(
            f"{name} must be a port or HOST:PORT, such as 9464 or '0.0.0.0:9464', with a port from 0 to 65535, got "
            f"{value!r}"
        )
    return (found["host"] or LOCALHOST).strip("[]"), int(found["port"])


def by_client(name: str, values: Any) -> Mapping[int, float]:
    """Return a number of at least 0 per client as a mapping from index; ``values`` is a mapping or an array by index.

    A mapping is not copied, because it may be a view that is empty at first and grows with the number of clients.
    :func:`lookup` checks the numbers of new clients.
    """
    items: Mapping[int, float] = values
    if not isinstance(values, Mapping):
        items = dict(enumerate(column(name, values, len(np.atleast_1d(values))).tolist()))
    _check_not_negative(name, list(items.values()))
    return items


def lookup(name: str, values: Mapping[int, float], clients: IntArray) -> FloatArray:
    """Return the numbers of ``clients``, shape (n,); every client must have a number."""
    try:
        found = [values[k] for k in clients.tolist()]
    except KeyError:
        missing = [int(k) for k in clients if int(k) not in values]
        raise ParameterError(
            f"{name} covers {len(values)} clients, but lacks {missing}. Give one number per client"
        ) from None
    return _check_not_negative(name, found)


def _check_not_negative(name: str, values: Sequence[object]) -> FloatArray:
    """Return numbers of at least 0 as an array; refuse any other value."""
    # Numbers of Python's own types are checked at once, because there may be a million of them.
    if set(map(type, values)) <= {int, float}:
        with suppress(OverflowError):
            numbers = np.array(values, dtype=np.float64)
            if (np.isfinite(numbers) & (numbers >= 0.0)).all():
                return numbers
    return np.array([real(f"each value of {name}", value, at_least=0.0) for value in values], dtype=np.float64)
