"""Questions to many clients of a simulation: few on their way at once, until the first answer very few."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message
from flwr.superlink import grid as superlink

from fedsel_flwr.strategies.wrapping import legacy_transport as legacy
from fedsel_flwr.strategies.wrapping.grids import FIRST_WINDOW, WINDOW, is_simulation
from fedsel_flwr.strategies.wrapping.message_transport import MessageTransport
from tests.strategies.helpers import FakeProxy
from tests.strategies.message.helpers import FakeGrid, FakeNode, crowd

pytestmark = pytest.mark.timeout(30)
MANY = 3 * WINDOW


class InMemoryGrid(FakeGrid):
    """A grid with the name of Flower's own, which counts what is on its way; answers come at the second look.

    Args:
        nodes: Node id -> node; a None never answers.
    """

    def __init__(self, nodes: dict[int, FakeNode]) -> None:
        super().__init__(nodes)
        self.pending: set[str] = set()
        self.sizes: list[int] = []
        self.unanswered = True

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = list(super().push_messages(messages))
        self.pending |= set(ids)
        if self.unanswered:
            assert len(self.pending) <= FIRST_WINDOW
        self.sizes.append(len(self.pending))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        assert set(message_ids) == self.pending
        arrived = list(super().pull_messages(message_ids))
        self.pending -= {reply.metadata.reply_to_message_id for reply in arrived}
        self.unanswered = self.unanswered and not arrived
        return arrived

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("all of them at once")


class Deaf(FakeNode):
    """Never answers."""

    def handle(self, message: Message) -> None:
        return None


def test_the_grid_of_flowers_simulation_is_known_by_its_name() -> None:
    assert is_simulation(object.__new__(superlink.InMemoryGrid))
    assert not is_simulation(FakeGrid())
    assert not is_simulation(None)


# ---- the Message API ---------------------------------------------------------------------------------------------


def test_every_node_is_asked_and_few_at_once() -> None:
    grid = InMemoryGrid(crowd(MANY))
    nodes = [str(node) for node in grid.nodes]
    said, missed = MessageTransport(grid, ArrayRecord([]), 20.0).introduce(nodes)
    assert sorted(said) == sorted(nodes)
    assert missed == []
    assert sorted(int(str(facts["client_id"])) for facts in said.values() if facts) == list(range(MANY))
    assert grid.sizes[0] == FIRST_WINDOW
    assert max(grid.sizes) == WINDOW


def test_a_deployed_grid_gets_all_at_once() -> None:
    grid = FakeGrid(crowd(MANY))
    said, missed = MessageTransport(grid, ArrayRecord([]), 20.0).introduce([str(node) for node in grid.nodes])
    assert (len(said), missed) == (MANY, [])
    assert [len(batch) for batch in grid.sent] == [MANY]


def test_one_that_never_answers_takes_one_place_only() -> None:
    nodes: dict[int, FakeNode] = {7: Deaf(FakeProxy("7", "deaf"))} | crowd(MANY)
    said, missed = MessageTransport(InMemoryGrid(nodes), ArrayRecord([]), 1.5).introduce([str(node) for node in nodes])
    assert missed == ["7"]
    assert len(said) == MANY


def test_where_nobody_answers_the_window_opens_and_those_never_asked_are_not_missed() -> None:
    nodes: dict[int, FakeNode] = {k: Deaf(FakeProxy(str(k), k)) for k in range(10, 10 + 2 * WINDOW)}
    grid = InMemoryGrid(nodes)
    grid.unanswered = False  # no limit before the first answer in this test
    start = time.monotonic()
    said, missed = MessageTransport(grid, ArrayRecord([]), 0.6).introduce([str(node) for node in nodes])
    assert 0.6 <= time.monotonic() - start < 2.0
    assert (said, missed) == ({}, [str(node) for node in nodes][:WINDOW])
    assert grid.sizes == [FIRST_WINDOW, WINDOW]


# ---- the legacy API ----------------------------------------------------------------------------------------------


class Gate:
    """Counts the questions that are being answered at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.lock = seconds, threading.Lock()
        self.now = self.most = self.most_before_an_answer = self.answered = 0

    def __call__(self, proxy: FakeProxy) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if not self.answered:
                self.most_before_an_answer = self.now
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
            self.answered += 1


def proxies(count: int, gate: Any, grid: object) -> dict[str, Any]:
    made = {str(k): FakeProxy(str(k), k, number=k, on_properties=gate) for k in range(count)}
    for proxy in made.values():
        proxy.grid = grid  # type: ignore[attr-defined]
    return made


SIMULATED = InMemoryGrid({})


def test_legacy_clients_are_asked_a_few_and_then_many_at_once() -> None:
    gate = Gate(0.1)
    clients = proxies(MANY, gate, SIMULATED)
    said, missed = legacy.LegacyTransport(clients, SimpleNamespace(), 20.0).introduce(list(clients))  # type: ignore[arg-type]
    assert [said[str(k)] for k in range(MANY)] == [
        {"client_id": k, "num_examples": 10 + 3 * k} for k in range(MANY)
    ]  # fmt: skip
    assert missed == []
    assert gate.most_before_an_answer == FIRST_WINDOW
    assert legacy.MAX_PARALLEL < gate.most <= WINDOW


def test_legacy_clients_of_a_deployment_are_asked_as_before() -> None:
    gate = Gate(0.1)
    clients = proxies(2 * legacy.MAX_PARALLEL, gate, object())
    said, missed = legacy.LegacyTransport(clients, SimpleNamespace(), 20.0).introduce(list(clients))  # type: ignore[arg-type]
    assert (len(said), missed) == (len(clients), [])
    assert gate.most == gate.most_before_an_answer == legacy.MAX_PARALLEL


def test_legacy_clients_that_hang_do_not_keep_the_others_from_being_asked() -> None:
    def hangs(proxy: FakeProxy) -> None:
        if int(proxy.cid) < FIRST_WINDOW:
            time.sleep(1.5)

    clients = proxies(2 * FIRST_WINDOW, hangs, SIMULATED)
    said, missed = legacy.LegacyTransport(clients, SimpleNamespace(), 0.8).introduce(list(clients))  # type: ignore[arg-type]
    assert sorted(said, key=int) == [str(k) for k in range(FIRST_WINDOW, 2 * FIRST_WINDOW)]
    assert missed == [str(k) for k in range(FIRST_WINDOW)]
