"""Seconds that a selector takes from what it has seen: a parameter's value "auto"."""

from __future__ import annotations

from typing import Final, Literal

from fedsel_flwr.checks import real
from fedsel_flwr.errors import ParameterError

AUTO: Final = "auto"
Seconds = float | Literal["auto"]


def seconds(name: str, value: object) -> Seconds:
    """Return ``value`` as a number of seconds above 0, or "auto".

    Args:
        name: The parameter, for the message.
        value: What was given.

    Raises:
        ParameterError: It is neither.

    >>> seconds("min_latency", 2), seconds("min_latency", "auto")
    (2.0, 'auto')
    """
    if isinstance(value, str) and value == AUTO:
        return AUTO
    try:
        return real(name, value, above=0.0)
    except ParameterError as error:
        raise ParameterError(f'{error}; "auto" takes it from the observed times') from None
