"""Waiting for clients, never for ever.

How many questions may be on their way at once.

In Flower's simulation the SuperLink lives in the server's process and looks, for each node in turn, through every
message that is on its way: nodes times messages, ten times a second, while nothing else runs there. With questions to
500 nodes on their way, that takes the cores from the actors for as long as these start: the roll call took 50 s on 2
cores, where 20 suffice to start Ray and the actors. A deployed SuperLink has a process of its own.

Answers that come when their round is over: they are dropped, and whoever sent them can be asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sized
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from fedsel_flwr.errors import RunError, described
from fedsel_flwr.rounds.eligibility import Busy

if TYPE_CHECKING:
    from flwr.app import Message

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


FIRST = 8
"""Questions before the first answer: until the simulation's actors have started, each look through would slow them."""
WINDOW = 96
"""Questions on their way at once after that: with 500 nodes, 64 to 128 take about the same time, 32 and 256 longer."""
POLL_S = 0.05
"""Seconds between two looks for answers."""


def crowds(grid: object) -> bool:
    """Whether messages that are on their way slow down all others: a grid of Flower's simulation.

    Args:
        grid: Flower's grid; None if there is none.
    """
    return type(grid).__name__ == "InMemoryGrid"


Clients = TypeVar("Clients", bound=Collection[str])
LATE_POLL_S = 0.25
EVERY_S = 3.0
"""Seconds between two looks while a round goes on."""
MARGIN_S = 60.0
"""Seconds before a message expires after which it is not looked for any more: clocks differ."""


class LateAnswers:
    """Looks for the answers to messages that were not answered in time.

    Threads that wait for a round's answers may look at the same time.

    Args:
        busy: Who has not answered.

    Attributes:
        grid: Flower's, through which answers are fetched; None as long as there is none.
    """

    def __init__(self, busy: Busy) -> None:
        self.busy = busy
        self.grid: Any = None
        self._owed: dict[str, tuple[str, float]] = {}  # message -> who was asked, and until when it is looked for
        self._lock, self._next = Lock(), 0.0

    def owe(self, messages: Iterable[Message]) -> None:
        """Note messages that the server gave up waiting for."""
        with self._lock:
            for data in (message.metadata for message in messages):
                self._owed[data.message_id] = (str(data.dst_node_id), data.created_at + data.ttl - MARGIN_S)
                self.busy.owe([str(data.dst_node_id)])

    def look(self) -> None:
        """Fetch what has come since, in one request; none if nobody owes anything."""
        with self._lock:
            self._look()

    def look_now_and_then(self) -> None:
        """The same, but only a few seconds after the last look, and in one thread."""
        if self._owed and time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()

    def settle(self, connected: Callable[[], Clients], number: int, timeout: float) -> Clients:
        """Wait until a round has enough free clients, at most ``timeout`` seconds; then all of them are free.

        Args:
            connected: Returns the connections there are; may wait for some, and raise.
            number: How many must be free, or all where there are fewer.
            timeout: Longest wait, seconds.

        Returns:
            The connections at the last look.
        """
        deadline = time.monotonic() + timeout
        while True:
            here = connected()
            self.busy.release(here)
            self.look()
            if len(self.busy.free(here)) >= min(number, len(here)):
                return here
            if (left := deadline - time.monotonic()) <= 0:
                break
            time.sleep(min(LATE_POLL_S, left))
        logger.warning(
            "%d of %d clients still owe the answer to an earlier question after another %g s, and a round needs %d "
            "(min_completed): they are asked again", len(here) - len(self.busy.free(here)), len(here), timeout, number,
        )  # fmt: skip
        self.busy.clear()
        return here

    def _look(self) -> None:
        self._next, now = time.monotonic() + EVERY_S, time.time()
        self._owed = {message: owed for message, owed in self._owed.items() if now < owed[1]}
        if not self._owed or self.grid is None:
            return
        try:
            arrived = list(self.grid.pull_messages(list(self._owed)))
        except Exception as error:  # what is late must not end the run; the bound is left
            logger.warning("late answers cannot be fetched: %s", described(error))
            self._owed.clear()
            return
        for reply in arrived:
            node, _ = self._owed.pop(reply.metadata.reply_to_message_id, ("", 0.0))
            if node and all(node != other for other, _ in self._owed.values()):
                self.busy.answered(node)
