"""Bounded waiting: for clients to connect, for requests that hang, and for replies that arrive after their round."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from threading import Event, Lock, Thread
from threading import enumerate as living_threads
from typing import TYPE_CHECKING, Any, TypeVar

from fedsel_flwr.errors import RunError, described
from fedsel_flwr.flower import ErrorCode
from fedsel_flwr.rounds.eligibility import Busy

if TYPE_CHECKING:
    from flwr.app import Message

logger = logging.getLogger("fedsel_flwr")
Connected = TypeVar("Connected", bound=Sized)
Clients = TypeVar("Clients", bound=Collection[str])
Item = TypeVar("Item")
WARN_AFTER_S, WARN_EVERY_S = 10.0, 60.0
"""Seconds without enough clients before the first warning, and between further warnings."""
CONNECTED_POLL_S = 0.25
"""Seconds between two checks of the connected clients, or of the free ones among them."""
REPEATS, REPEAT_PAUSE_S = 3, 1.0
"""Repetitions of a request that the SuperLink answered with an internal error, and the pause before each, seconds."""
HANG_S = 3.0
"""Seconds after which a request for replies counts as hanging, so that another one may start."""
SHARED_S = 10.0
"""Seconds for which a client stays busy if a hanging request holds its answer together with those of others."""
GIVE_UP_S = 180.0
"""Seconds after which a hanging request is given up: the time after which the SuperLink ends an interrupted upload."""
MOST_REQUESTS, MOST_THREADS = 8, 64
"""Largest number of requests for replies at the same time: in a round, and in the whole process."""
MOST_GROUPS = 32
"""Largest number of requests one after the other that ask for a few messages each."""
THREAD = "fedsel-replies"
"""Name of the threads that request replies, by which they are counted."""
_STARTING = Lock()
"""Held while threads are counted and one is started."""
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


def repeated(request: Callable[[], Iterable[Item]]) -> list[Item]:
    """Send a request to the SuperLink, and repeat it after an internal error of the SuperLink (HTTP 500).

    If a SuperLink with a database has much to do, its database is locked for too long, and single requests fail. Flower
    does not repeat them, so each would end the run.

    Args:
        request: Sends the request. Its effect must be the same if it is sent again.

    Raises:
        Exception: Any other error, and the last internal error if no repetition succeeded.
    """
    for _ in range(REPEATS):
        try:
            return list(request())
        except Exception as error:
            # By attribute, because the error's class depends on Flower's version.
            if getattr(getattr(error, "response", None), "status_code", None) != HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            logger.warning("internal error of the SuperLink, so the request is repeated: %s", described(error))
            time.sleep(REPEAT_PAUSE_S)
    return list(request())


@dataclass(eq=False)
class _Request:
    """A thread that requests replies, for one group of messages after the other.

    Attributes:
        asked: The messages of its last request.
        began: When its last request began, in monotonic seconds.
        outcome: The unread replies, with one list for each request.
        error: The error that ended it.
        ended: Set when it has ended.
    """

    asked: Sequence[str]
    began: float
    outcome: deque[list[Message]] = field(default_factory=deque)
    error: BaseException | None = None
    ended: Event = field(default_factory=Event)

    def run(self, pull: Callable[[Sequence[str]], Iterable[Message]], further: Iterator[Sequence[str]]) -> None:
        """Send the requests; after a request that hung, another thread sends the further ones."""
        try:
            while True:
                self.outcome.append(repeated(partial(pull, self.asked)))
                if time.monotonic() - self.began >= HANG_S or (group := next(further, None)) is None:
                    break
                self.asked, self.began = group, time.monotonic()
        # The caller's thread raises it. Flower ends a run with SystemExit, which would end only this thread.
        except BaseException as error:
            self.error = error
        self.ended.set()


class ReplyRequests:
    """Requests for replies, each in its own thread, so that one that hangs does not hold up the others.

    A SuperNode announces its answer, and uploads it after that. Flower's request for replies claims the announced
    answers, and returns when all of them are complete. If a node disconnects during its upload, the request takes three
    minutes (``OBJECT_PUSH_SESSION_TTL_SECONDS``). Further requests get the other answers.

    A request also holds the complete answers that it claimed. So late replies, and all replies after a request that
    hung, are requested in small groups: of one message each, unless there are many.

    Args:
        pull: Returns the replies to the messages with these ids that have arrived.
        late: Whether the replies are late. Requests that hang then leave room for others, and are given up in the end.
    """

    def __init__(self, pull: Callable[[Sequence[str]], Iterable[Message]], *, late: bool = False) -> None:
        self._pull, self._late = pull, late
        self._running: list[_Request] = []
        self._last: _Request | None = None
        self._groups: Iterator[Sequence[str]] = iter(())
        self._errors: list[BaseException] = []

    def fetch(self, message_ids: Iterable[str], patience_s: float) -> list[Message] | None:
        """Start a request, and return the replies that requests have brought; None if none has brought or ended.

        Starts no request while the last one runs without hanging, or while too many run.

        Args:
            message_ids: The ids of messages that have no reply yet.
            patience_s: Longest wait, seconds. The wait also ends when the last request begins to hang.

        Raises:
            BaseException: The error of a request.
        """
        now = time.monotonic()
        if all(now - one.began >= HANG_S for one in self._running):
            self._start(message_ids, now)
        if not self._running:
            time.sleep(min(patience_s, FETCH_PATIENCE_S))
            return None
        last = max(self._running, key=lambda one: one.began)
        last.ended.wait(min(patience_s, last.began + HANG_S - now) if last.began + HANG_S > now else patience_s)
        return self._arrived()

    def take_over(self, other: ReplyRequests) -> None:
        """Continue with the requests of ``other`` that still run."""
        self._running += other._running

    def _start(self, message_ids: Iterable[str], now: float) -> None:
        """Start a thread, unless too many run or every message is requested already."""
        with _STARTING:
            free = MOST_THREADS - sum(thread.name == THREAD for thread in living_threads())
            # If many hang, a round starts fewer, so that later rounds and late replies have threads too.
            most = MOST_THREADS if self._late else min(MOST_REQUESTS, max(1, free // MOST_REQUESTS))
            if free <= 0 or sum(now - one.began < GIVE_UP_S for one in self._running) >= most:
                return
            if (group := next(self._groups, None)) is None:
                # A message that was requested alone needs no further request.
                ids = sorted({*message_ids}.difference(*(one.asked for one in self._running if len(one.asked) == 1)))
                hung = self._last is not None and not self._last.ended.is_set()
                number = min(len(ids), MOST_GROUPS if self._late or hung else 1)
                self._groups = iter([ids[first::number] for first in range(number)])
                if (group := next(self._groups, None)) is None:
                    return
            self._last = _Request(group, now)
            self._running.append(self._last)
            Thread(target=self._last.run, args=(self._pull, self._groups), name=THREAD, daemon=True).start()

    def _arrived(self) -> list[Message] | None:
        now, running = time.monotonic(), self._running
        # Before the outcomes, so that an ended request has no more of them.
        ended = [one for one in running if one.ended.is_set()]
        replies: list[Message] = []
        for request in running:
            # What another request has claimed is "unavailable" to this one.
            claims = [one.asked for one in running if one.began < request.began and self._holds(one, now)]
            claimed = frozenset[str]().union(*claims)
            while request.outcome:
                replies += [
                    reply
                    for reply in request.outcome.popleft()
                    if not (is_unavailable(reply) and reply.metadata.reply_to_message_id in claimed)
                ]
        given_up = [one for one in running if self._late and now - one.began >= GIVE_UP_S]
        self._running = [one for one in running if one not in ended and one not in given_up]
        self._errors += [one.error for one in ended if one.error is not None]
        # Replies come first, because an error must not cost them.
        if self._errors and not replies:
            raise self._errors.pop(0)
        return replies if replies or ended else None

    def _holds(self, request: _Request, now: float) -> bool:
        """Return whether the answers that a request has claimed are still expected from it."""
        return not self._late or len(request.asked) == 1 or now - request.began < SHARED_S


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
        kept: Message id -> what was sent, of messages whose late replies are kept; the other late replies are dropped.
        arrived: The kept replies that have arrived, each with what was sent and its seconds.
    """

    def __init__(self, busy: Busy) -> None:
        self.busy = busy
        self.grid: Any = None
        self.kept: dict[str, Any] = {}
        self.arrived: list[tuple[Any, Message, float]] = []
        # Message id -> the node that was asked, when, and the monotonic time until which its reply is fetched.
        self._owed: dict[str, tuple[str, float, float]] = {}
        self._requests = ReplyRequests(lambda message_ids: self.grid.pull_messages(message_ids), late=True)
        self._lock, self._next, self._error = Lock(), 0.0, ""

    def owe(self, messages: Iterable[Message], since: float | None = None) -> None:
        """Add messages whose replies the server no longer waits for.

        Args:
            messages: The messages.
            since: When they were sent, in monotonic seconds; None for now, or for the time that is known already.
        """
        now = time.monotonic()
        with self._lock:
            for data in (message.metadata for message in messages):
                _, sent, _ = self._owed.get(data.message_id, ("", now if since is None else since, 0.0))
                self._owed[data.message_id] = (str(data.dst_node_id), sent, now + data.ttl - EXPIRY_MARGIN_S)
                self.busy.owe([str(data.dst_node_id)])

    def take_arrived(self) -> list[tuple[Any, Message, float]]:
        """Return and forget the kept replies that have arrived."""
        with self._lock:
            arrived, self.arrived = self.arrived, []
        return arrived

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
            time.sleep(min(CONNECTED_POLL_S, left))
        logger.warning(
            "%d of %d clients have not answered an earlier message after another %g s. A round needs %d clients "
            "(min_completed), so these clients are asked again",
            len(here) - len(self.busy.free(here)), len(here), timeout, number,
        )  # fmt: skip
        self.busy.clear()
        return here

    def _fetch(self) -> None:
        now = time.monotonic()
        self._next = now + FETCH_EVERY_S
        self._owed = {message: owed for message, owed in self._owed.items() if now < owed[2]}
        self.kept = {message: sent for message, sent in self.kept.items() if message in self._owed}
        if not self._owed or self.grid is None:
            return
        try:
            replies = self._requests.fetch(self._owed, FETCH_PATIENCE_S) or []
        # A late reply must not end the run. The next call fetches it.
        except Exception as error:
            if self._error != described(error):
                self._error = described(error)
                logger.warning("late replies cannot be fetched now; they will be fetched later: %s", self._error)
            return
        for reply in replies:
            answered = reply.metadata.reply_to_message_id
            node, since, _ = self._owed.pop(answered, ("", now, 0.0))
            if (sent := self.kept.pop(answered, None)) is not None:
                self.arrived.append((sent, reply, time.monotonic() - since))
            # A node may owe replies to several messages, and is free after the last of them.
            if node and all(node != other for other, _, _ in self._owed.values()):
                self.busy.answered(node)
