"""Waiting for clients, never for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sized
from typing import TypeVar

from fedsel_flwr.errors import RunError

logger = logging.getLogger("fedsel_flwr")
Connected = TypeVar("Connected", bound=Sized)
TOLD_AFTER_S, TOLD_EVERY_S = 10.0, 60.0
"""Seconds without enough clients after which the log says so, and says so again."""


def wait_for(
    connected: Callable[[], Connected],
    number: int,
    timeout: float,
    *,
    what: str,
    start: str,
    reason: str,
    poll_s: float,
) -> Connected:
    """Wait until ``number`` clients are connected, at most ``timeout`` seconds.

    Args:
        connected: Returns what is connected at the moment.
        number: How many are needed.
        timeout: Longest wait, seconds.
        what: What is waited for, and ...
        start: ... what the user starts to have more of them, for the message.
        reason: What asks for them, for the message.
        poll_s: Seconds between two looks.

    Returns:
        What was connected at the last look.

    Raises:
        RunError: Fewer were connected when the time was over.
    """
    start_s = time.monotonic()
    deadline, tell = start_s + timeout, start_s + TOLD_AFTER_S
    while len(here := connected()) < number:
        if tell <= time.monotonic() < deadline:
            logger.warning(
                "%d of %d %s are connected (%s); waiting for at most %g s (wait_timeout)",
                len(here), number, what, reason, timeout,
            )  # fmt: skip
            tell += TOLD_EVERY_S
        if time.monotonic() >= deadline:
            raise RunError(
                f"waited {timeout:g} s for {number} {what} ({reason}), but {len(here)} are connected: start more "
                f"{start}, lower min_available or clients_per_round, or raise wait_timeout"
            )
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
    return here
