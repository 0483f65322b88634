"""Messages that the SuperLink does not take: nobody waits for their answers. And the two forms of ``pull_messages``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.server.compat.grid_client_proxy import GridClientProxy

from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.strategies.message import TimedGrid
from fedsel_flwr.strategies.wrapping.client_manager import with_late_replies
from fedsel_flwr.strategies.wrapping.legacy_transport import ask_all, introduce_client
from fedsel_flwr.strategies.wrapping.message_transport import send_windowed
from fedsel_flwr.strategies.wrapping.waiting import LateReplies
from tests.strategies.either_api import Server, selection
from tests.strategies.helpers import FakeProxy
from tests.strategies.message.helpers import FakeGrid, FakeNode, crowd, play

pytestmark = pytest.mark.timeout(30)
NOT_REACHED = "not reached: the SuperLink did not take the message"


@contextmanager
def _soon(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


class Refusing(FakeGrid):
    """A grid whose SuperLink takes no message to one node: its id is "", or is left out, and no answer comes.

    Args:
        refused: The node.
        left_out: Leave the id out, as the grid of Flower's simulation does.
        kinds: Types of messages that are refused; None: all.
    """

    def __init__(self, nodes: dict[int, FakeNode], refused: int, left_out: bool = False, kinds: Any = ("train",)):
        super().__init__(nodes)
        self.refused, self.left_out, self.kinds = refused, left_out, kinds
        self.pulled: list[set[str]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids: list[str] = []
        for message in messages:
            data = message.metadata
            if data.dst_node_id != self.refused or not (self.kinds is None or data.message_type in self.kinds):
                ids += super().push_messages([message])
            elif not self.left_out:
                ids.append("")
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.pulled.append(set(message_ids))
        return super().pull_messages(message_ids)


@pytest.mark.parametrize("left_out", [False, True])
def test_the_timed_grid_does_not_wait_for_a_rejected_message(left_out: bool) -> None:
    nodes = crowd(3)
    refused, *_ = nodes
    inner = Refusing(nodes, refused, left_out)
    strategy = selection("message", clock="server", identity="claim")
    with _soon(3.0):
        play(strategy, inner, 2, timeout=6.0)
    rows = [row for row in strategy.history.clients if row.client_id == str(nodes[refused].proxy.client_id)]
    assert [(row.completed, row.timed_out, row.problem) for row in rows] == [(False, False, NOT_REACHED)] * 2
    assert [one.num_completed for one in strategy.history.rounds] == [2, 2]
    assert not any("" in ids for ids in inner.pulled)
    assert not strategy.core.parts.busy.state_dict()["until"]  # who was not reached owes nothing


def test_questions_in_turn_do_not_wait_for_a_rejected_message() -> None:
    nodes = crowd(3)
    refused, *_ = nodes
    grid = Refusing(nodes, refused, kinds=None)
    record = RecordDict({"config": ConfigRecord()})
    questions = [Message(record, dst_node_id=node, message_type="query") for node in nodes]
    with _soon(1.0):
        replies, sent = send_windowed(grid, questions, timeout=6.0)
    assert (len(replies), len(sent)) == (2, 3)


class Rejecting:
    """A SuperLink that takes nothing and never answers."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return ["" for _ in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return []


class Behind(FakeProxy):
    """A client behind Flower's own proxy over such a SuperLink."""

    def __init__(self, cid: str) -> None:
        super().__init__(cid, cid, number=1)
        FakeGrid()  # without the task identity that it sets, no message can be made
        self.own = GridClientProxy(1, Rejecting(), 7)  # type: ignore[arg-type]
        self.own.cid = cid
        self.late = LateReplies(Busy())

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return with_late_replies(self.own, timeout, self.late).fit(ins, timeout, group_id)


def test_the_legacy_api_does_not_wait_for_a_rejected_message() -> None:
    strategy = selection("legacy", 2)
    with _soon(3.0):
        Server("legacy", strategy, [Behind("a"), FakeProxy("b", "b")], timeout=6.0).play(1)
    rows = {row.client_id: row for row in strategy.history.clients}
    assert (rows["a"].completed, rows["a"].timed_out, rows["a"].problem) == (False, False, NOT_REACHED)
    assert rows["b"].completed


def test_who_could_not_be_asked_in_the_legacy_api_is_not_busy() -> None:
    client, busy = Behind("a"), Busy()

    def question(one: Any) -> Any:
        return introduce_client(with_late_replies(one, 6.0, client.late), 6.0)

    with _soon(1.0):
        answers, missed = ask_all([client.own], question, timeout=6.0, busy=busy)
    assert (answers, missed, "a" in busy) == ({}, [], False)


# ---- pull_messages up to flwr 1.42, and from 1.43 on -----------------------------------------------------------------


class Old(FakeGrid):
    """Takes ``message_ids`` alone, by position or by name."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [("old", sorted(message_ids))]  # type: ignore[list-item]


class New(FakeGrid):
    """Takes both names; everything there is without any."""

    def pull_messages(  # type: ignore[override]
        self, reply_to_message_ids: Iterable[str] | None = None, *, message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        return [(reply_to_message_ids and sorted(reply_to_message_ids), message_ids and sorted(message_ids))]  # type: ignore[list-item]


def test_pulls_are_forwarded_in_the_form_of_either_flower() -> None:
    old, new = TimedGrid(Old()), TimedGrid(New())
    assert old.pull_messages(["b", "a"]) == old.pull_messages(message_ids=["a", "b"]) == [("old", ["a", "b"])]
    assert old.pull_messages(reply_to_message_ids=["a"]) == [("old", ["a"])]
    assert new.pull_messages(["a"]) == new.pull_messages(reply_to_message_ids=["a"]) == [(["a"], None)]
    assert new.pull_messages(message_ids=["a"]) == [(None, ["a"])]
    assert new.pull_messages() == [(None, None)]
