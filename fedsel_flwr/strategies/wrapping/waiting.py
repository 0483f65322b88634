"""Bounded waiting: for clients to connect, for requests that hang, and for replies that arrive after their round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sized
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from fedsel_flwr.errors import RunError, described
from fedsel_flwr.flower import ErrorCode
from fedsel_flwr.rounds.eligibility import Busy

if TYPE_CHECKING:
    from flwr.app import Message

logger = logging.getLogger("fedsel_flwr")
Connected = TypeVar("Connected", bound=Sized)
Clients = TypeVar("Clients", bound=Collection[str])
WARN_AFTER_S, WARN_EVERY_S = 10.0, 60.0
"""Seconds without enough clients before the first warning, and between further warnings."""
CONNECTED_POLL_S = 0.25
"""Seconds between two checks of the connected clients."""
FREE_POLL_S = 0.25
"""Seconds between two checks for free clients before a round."""
HANG_S = 3.0
"""Seconds after which a request for replies counts as hanging, so that another one may start."""
MOST_REQUESTS = 8
"""Largest number of requests for replies at the same time."""
FETCH_EVERY_S, FETCH_PATIENCE_S = 3.0, 0.25
"""Seconds between two requests for late replies during a round, and longest wait for one of these requests."""
EXPIRY_MARGIN_S = 60.0
"""Seconds before a message's expiry at which its reply is given up, because the machines' clocks differ."""


def wait_for(connected: Callable[[], Connected], number: int, timeout: float, *, what: str, reason: str) -> Connected:
    """Wait until ``number`` clients are connected, at most ``timeout`` seconds.

    Args:
        connected: Returns the current connections.
        number: Number of clients that are needed.
        timeout: Longest wait, seconds.
        what: The API's word for clients, for the message.
        reason: The setting that requires them, for the message.

    Returns:
        The connections at the last check.

    Raises:
        RunError: Fewer clients were connected at the end of the wait.
    """
    start_s = time.monotonic()
    deadline, warn_at = start_s + timeout, start_s + WARN_AFTER_S
    while len(here := connected()) < number:
        if warn_at <= time.monotonic() < deadline:
            logger.warning(
                "%d of %d %s are connected (%s); waiting for at most %g s (wait_timeout)",
                len(here), number, what, reason, timeout,
            )  # fmt: skip
            warn_at += WARN_EVERY_S
        if time.monotonic() >= deadline:
            raise RunError(
                f"waited {timeout:g} s for {number} {what} ({reason}), but {len(here)} are connected. Start more of "
                "them, lower min_available, the base's own minimum or clients_per_round, or raise wait_timeout"
            )
        time.sleep(min(CONNECTED_POLL_S, max(0.0, deadline - time.monotonic())))
    return here


@dataclass
class Startup:
    """The start of a simulation's actors, which answer no message before.

    Args:
        wait_s: Longest time that the actors may take, seconds.

    Attributes:
        first_s: When the first answer came, in monotonic seconds; None before.

    >>> startup = Startup(600.0)
    >>> startup.deadline(0.0, 60.0)
    660.0
    >>> startup.first_s = 100.0
    >>> startup.deadline(0.0, 60.0), startup.deadline(500.0, 60.0)
    (160.0, 560.0)
    """

    wait_s: float = 0.0
    first_s: float | None = None

    def answered(self) -> None:
        """Note an answer; only the first one counts."""
        if self.first_s is None:
            self.first_s = time.monotonic()

    def deadline(self, sent_s: float, timeout: float) -> float:
        """Return when a wait ends: ``timeout`` seconds after the first answer, or after the longest start.

        Args:
            sent_s: When the messages were sent, in monotonic seconds.
            timeout: Seconds that clients may take to answer.
        """
        latest = sent_s + self.wait_s
        return timeout + (latest if self.first_s is None else min(latest, max(sent_s, self.first_s)))


@dataclass(eq=False)
class _Request:
    """A request for replies in its own thread.

    Attributes:
        message_ids: The messages whose replies it asks for.
        began: When it began, in monotonic seconds.
        ended: Set when ``outcome`` is there.
        outcome: The replies, or the error.
    """

    message_ids: frozenset[str]
    began: float
    ended: Event = field(default_factory=Event)
    outcome: list[Message] | BaseException = field(default_factory=list)

    def run(self, pull: Callable[[list[str]], Iterable[Message]]) -> None:
        """Send the request."""
        try:
            self.outcome = list(pull(sorted(self.message_ids)))
        # The caller's thread raises it. Flower ends a run with SystemExit, which would end only this thread.
        except BaseException as error:
            self.outcome = error
        self.ended.set()


class ReplyRequests:
    """Requests for replies, each in its own thread, so that one that hangs does not hold up the others.

    A SuperNode announces its answer, and uploads it after that. Flower's request for replies claims the announced
    answers, and returns when all of them are complete. If a node disconnects during its upload, the request takes three
    minutes (``OBJECT_PUSH_SESSION_TTL_SECONDS``). Further requests get the other answers.

    Args:
        pull: Returns the replies to the messages with these ids that have arrived.
    """

    def __init__(self, pull: Callable[[list[str]], Iterable[Message]]) -> None:
        self._pull = pull
        self._running: list[_Request] = []

    def fetch(self, message_ids: Iterable[str], patience_s: float) -> list[Message] | None:
        """Start a request, and return the replies of all requests that have ended; None if none has ended.

        Starts no request while the last one runs without hanging, or while too many run.

        Args:
            message_ids: The ids of messages that have no reply yet.
            patience_s: Longest wait, seconds. The wait also ends when the last request begins to hang.

        Raises:
            BaseException: The error of a request.
        """
        now = time.monotonic()
        hangs = all(now - one.began >= HANG_S for one in self._running[-1:])
        if hangs and len(self._running) < MOST_REQUESTS:
            self._running.append(_Request(frozenset(message_ids), now))
            Thread(target=self._running[-1].run, args=(self._pull,), daemon=True).start()
        last = self._running[-1]
        last.ended.wait(min(patience_s, last.began + HANG_S - now) if last.began + HANG_S > now else patience_s)
        return self._ended()

    def take_over(self, other: ReplyRequests) -> None:
        """Continue with the requests of ``other`` that still run."""
        self._running += other._running

    def _ended(self) -> list[Message] | None:
        requests, self._running = self._running, [one for one in self._running if not one.ended.is_set()]
        ended = [one for one in requests if one not in self._running]
        replies: list[Message] = []
        for request in ended:
            if isinstance(request.outcome, BaseException):
                raise request.outcome
            # What an earlier request has claimed is "unavailable" to a later one.
            claimed = frozenset[str]().union(*(one.message_ids for one in requests if one.began < request.began))
            replies += [
                reply
                for reply in request.outcome
                if not (is_unavailable(reply) and reply.metadata.reply_to_message_id in claimed)
            ]
        return replies if ended else None


def is_unavailable(reply: Message) -> bool:
    """Return whether a reply says that the SuperLink does not have the message any more."""
    return reply.has_error() and reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE


class LateReplies:
    """Fetches late replies, which are dropped, to find out that their clients are free again.

    Threads that wait for a round's replies may fetch at the same time.

    Args:
        busy: The clients that have not answered.

    Attributes:
        grid: Flower's grid, through which replies are fetched; None while there is none.
    """

    def __init__(self, busy: Busy) -> None:
        self.busy = busy
        self.grid: Any = None
        # Message id -> the node that was asked, and the time until which its reply is fetched.
        self._owed: dict[str, tuple[str, float]] = {}
        self._requests = ReplyRequests(lambda message_ids: self.grid.pull_messages(message_ids))
        self._lock, self._next = Lock(), 0.0

    def owe(self, messages: Iterable[Message]) -> None:
        """Add messages whose replies the server no longer waits for."""
        with self._lock:
            for data in (message.metadata for message in messages):
                self._owed[data.message_id] = (str(data.dst_node_id), data.created_at + data.ttl - EXPIRY_MARGIN_S)
                self.busy.owe([str(data.dst_node_id)])

    def take_over(self, requests: ReplyRequests) -> None:
        """Continue with the requests of a round that has ended."""
        with self._lock:
            self._requests.take_over(requests)

    def fetch(self) -> None:
        """Fetch the replies that have arrived since, in one request; without a request if no client owes a reply."""
        with self._lock:
            self._fetch()

    def fetch_if_due(self) -> None:
        """Fetch as :meth:`fetch` does, but at most once every few seconds, and in one thread."""
        # Non-blocking: in the legacy API one thread waits per client, and one of these can fetch for all.
        if self._owed and time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                self._fetch()
            finally:
                self._lock.release()

    def wait_for_free(self, connected: Callable[[], Clients], number: int, timeout: float) -> Clients:
        """Wait until a round has enough free clients, at most ``timeout`` seconds; after that all clients are free.

        Args:
            connected: Returns the current connections; it may wait for some, and raise.
            number: Number of clients that must be free; all of them if there are fewer.
            timeout: Longest wait, seconds.

        Returns:
            The connections at the last check.
        """
        deadline = time.monotonic() + timeout
        while True:
            here = connected()
            self.busy.release(here)
            self.fetch()
            if len(self.busy.free(here)) >= min(number, len(here)):
                return here
            if (left := deadline - time.monotonic()) <= 0:
                break
            time.sleep(min(FREE_POLL_S, left))
        logger.warning(
            "%d of %d clients have not answered an earlier message after another %g s. A round needs %d clients "
            "(min_completed), so these clients are asked again",
            len(here) - len(self.busy.free(here)), len(here), timeout, number,
        )  # fmt: skip
        self.busy.clear()
        return here

    def _fetch(self) -> None:
        # ``monotonic`` for our own pauses, but ``time`` for expiry, because messages carry the wall clock of their
        # creation.
        self._next, now = time.monotonic() + FETCH_EVERY_S, time.time()
        self._owed = {message: owed for message, owed in self._owed.items() if now < owed[1]}
        if not self._owed or self.grid is None:
            return
        try:
            replies = self._requests.fetch(self._owed, FETCH_PATIENCE_S) or []
        # A late reply must not end the run. Its client becomes free after busy_timeout at the latest.
        except Exception as error:
            logger.warning("late replies cannot be fetched: %s", described(error))
            self._owed.clear()
            return
        for reply in replies:
            node, _ = self._owed.pop(reply.metadata.reply_to_message_id, ("", 0.0))
            # A node may owe replies to several messages, and is free after the last of them.
            if node and all(node != other for other, _ in self._owed.values()):
                self.busy.answered(node)
