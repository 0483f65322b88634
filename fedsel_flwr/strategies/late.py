"""Answers that come when their round is over: they are dropped, and whoever sent them can be asked again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from fedsel_flwr.errors import described
from fedsel_flwr.rounds.busy import Busy

if TYPE_CHECKING:
    from flwr.app import Message

logger = logging.getLogger("fedsel_flwr")
Connected = TypeVar("Connected", bound=Collection[str])
POLL_S = 0.25
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

    def settle(self, connected: Callable[[], Connected], number: int, timeout: float) -> Connected:
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
            time.sleep(min(POLL_S, left))
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
