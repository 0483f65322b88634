"""A SuperLink in simulated time: requests for replies that hang cost no seconds, and each run is the same.

The clock stands still while a thread works. It advances when the server sleeps or waits, and ends the uploads whose
time has come. Nothing sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any

import pytest
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.server.superlink.linkstate.utils import MESSAGE_UNAVAILABLE_ERROR_REASON

from fedsel_flwr.rounds import eligibility
from fedsel_flwr.strategies.wrapping import grids, waiting
from tests.strategies.message.helpers import FakeGrid

SESSION_S = 180.0
"""Seconds after which Flower's SuperLink ends an interrupted upload."""


class SimulatedTime:
    """Stands for the modules ``time`` and ``threading`` of the package's files.

    Attributes:
        now: Monotonic seconds.
        wall: The machine's date at the beginning, in seconds; it may be changed.
        most_threads: Largest number of threads at the same time.
        may_block: Whether a request that begins now may hang.
    """

    def __init__(self) -> None:
        self.now, self.wall, self.most_threads = 1000.0, 1.8e9, 0
        self.may_block: Callable[[], bool] = lambda: True
        self._changed, self._working = threading.Condition(), 0
        self._blocked: list[tuple[float, int, threading.Event]] = []
        self._threads: list[threading.Thread] = []
        self._ended: list[threading.Thread] = []
        self._number = 0
        world = self

        class Thread(threading.Thread):
            def start(self) -> None:
                # A request that cannot hang needs no thread, which saves most of the time of a test.
                if not world.may_block():
                    threading.Thread.run(self)
                    return
                world._working += 1
                world._threads.append(self)
                super().start()
                world._settle()
                world.most_threads = max(world.most_threads, len(world._threads))

            def run(self) -> None:
                try:
                    super().run()
                finally:
                    world._ended.append(self)
                    world._work(-1)

        class Event(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                until = world.now + (inf if timeout is None else timeout)
                while not self.is_set() and world.now < until:
                    world.advance(min([until, *(when for when, *_ in world._blocked if when > world.now)]) - world.now)
                return self.is_set()

        self.Thread, self.Event = Thread, Event

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall + self.now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass, and end what ends in it."""
        until = self.now + seconds
        while self._blocked and min(self._blocked)[0] <= until:
            when, _, over = first = min(self._blocked)
            self.now = max(self.now, when)
            self._blocked.remove(first)
            self._work(1)
            over.set()
            self._settle()
        self.now = until

    def block(self, until: float) -> None:
        """Block this thread; the server's own thread lets time pass instead."""
        if threading.current_thread() not in self._threads:
            self.advance(max(0.0, until - self.now))
            return
        over = threading.Event()
        with self._changed:
            self._number += 1
            self._blocked.append((until, self._number, over))
        self._work(-1)
        over.wait()

    def _work(self, change: int) -> None:
        with self._changed:
            self._working += change
            self._changed.notify_all()

    def _settle(self) -> None:
        """Wait until every thread has ended or is blocked."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)
        while self._ended:
            (thread := self._ended.pop()).join()
            self._threads.remove(thread)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedTime]:
    """Simulated time in the files that wait."""
    world = simulate(monkeypatch.setattr)
    yield world
    # Threads that still hang would count in other tests.
    world.advance(1e9)


def simulate(replace: Callable[[Any, str, Any], None]) -> SimulatedTime:
    """Put simulated time into the files that wait."""
    world = SimulatedTime()
    for module in (waiting, grids, eligibility):
        replace(module, "time", world)
    replace(waiting, "Thread", world.Thread)
    made = waiting._Request.__init__

    def make(request: Any, *args: Any, **kwargs: Any) -> None:
        made(request, *args, **kwargs)
        request.ended = world.Event()

    replace(waiting._Request, "__init__", make)
    return world


class SimulatedLink(FakeGrid):
    """A SuperLink whose requests claim the announced answers, and return when all of them are complete.

    Args:
        world: The time.
        answer: Called for each message: seconds until its answer is announced, and seconds from then until it is
            complete; infinite if the upload is interrupted.

    Attributes:
        session_s: Seconds until a request for an interrupted upload returns.
        errors: Errors of the next requests.
    """

    def __init__(self, world: SimulatedTime, answer: Callable[[Message], tuple[float, float]]) -> None:
        super().__init__({}, seed=None)
        self.world, self._answer, self.pulls = world, answer, 0
        self.announced: dict[str, tuple[float, float, Message]] = {}
        self.session_s, self.errors = SESSION_S, list[Exception]()
        self._claimed, self._slow = set[str](), set[str]()
        world.may_block = lambda: any(self.announced[one][0] <= world.now for one in self._slow)

    def _deliver(self, message: Message) -> None:
        seconds, upload = self._answer(message)
        self.announced[message.metadata.message_id] = (self.world.now + seconds, upload, message)
        if upload:
            self._slow.add(message.metadata.message_id)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Wait for each request, as Flower's own grid does."""
        pending, replies = {*self.push_messages(messages)}, list[Message]()
        until = self.world.now + (inf if timeout is None else timeout)
        while pending and self.world.now < until:
            replies += (arrived := self.pull_messages(pending))
            pending -= {one.metadata.reply_to_message_id for one in arrived}
            self.world.sleep(3.0 if pending else 0.0)
        return replies

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.pulls += 1
        if self.errors:
            raise self.errors.pop()
        ids, now = {*message_ids}, self.world.now
        replies = [_lost(self.announced[one][2]) for one in sorted(ids & self._claimed)]
        unclaimed = sorted(ids & self.announced.keys() - self._claimed)
        claimed = [one for one in unclaimed if self.announced[one][0] <= now]
        self._claimed |= {*claimed}
        self._slow.difference_update(claimed)
        for one in claimed:
            when, upload, message = self.announced[one]
            lost = upload == inf
            if (complete := when + (self.session_s if lost else upload)) > self.world.now:
                self.world.block(complete)
            replies.append(_lost(message) if lost else Message(RecordDict(), reply_to=message))
        # Nobody asks again for what has been delivered.
        for one in (one for one in claimed if self.announced[one][1] < inf):
            del self.announced[one]
            self._claimed.remove(one)
        return replies


def _lost(message: Message) -> Message:
    return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, MESSAGE_UNAVAILABLE_ERROR_REASON), reply_to=message)


def to_node(node: int) -> Message:
    """A message without content."""
    return Message(RecordDict(), dst_node_id=node, message_type=MessageType.TRAIN, ttl=43_200.0)
