"""Grids of our own: timing each node, a bounded wait, and what a base is shown."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsel_flwr.errors import RunError
from fedsel_flwr.strategies.message import TimedGrid
from fedsel_flwr.strategies.wrapping import grids, waiting
from fedsel_flwr.strategies.wrapping.grids import SnapshotGrid, wait_for_nodes
from fedsel_flwr.strategies.wrapping.message_transport import addressed
from tests.strategies.either_api import Server, selection
from tests.strategies.helpers import FakeProxy, fleet, within
from tests.strategies.message.helpers import FakeGrid, FakeNode, arrays_of, crowd, train_message

POLL_S = 0.25  # how often the grid looks


def _slow(ready: dict[int, float], **kwargs: Any) -> FakeGrid:
    return FakeGrid({k: FakeNode(FakeProxy(str(k), k, number=k), ready=s, **kwargs) for k, s in ready.items()})


def test_each_node_is_timed_by_itself_at_the_last_sending() -> None:
    grid = TimedGrid(_slow({5: 0.0, 6: 0.3, 7: 0.6}))
    replies = grid.send_and_receive((train_message(k) for k in (7, 5, 6)), timeout=5.0)
    assert {reply.metadata.src_node_id for reply in replies} == {5, 6, 7}
    assert grid.elapsed_s.keys() == {"5", "6", "7"}
    for node, least in (("5", 0.0), ("6", 0.3), ("7", 0.6)):
        assert least <= grid.elapsed_s[node], grid.elapsed_s
    assert grid.elapsed_s["5"] < 0.3 + POLL_S, grid.elapsed_s
    grid.send_and_receive([train_message(5)], timeout=1.0)
    assert grid.elapsed_s.keys() == {"5"}


@pytest.mark.parametrize("timeout", [0.4, 0.0])
def test_after_the_timeout_the_rest_are_missing_and_untimed(timeout: float) -> None:
    """A timeout of zero looks once."""
    grid = TimedGrid(_slow({5: 0.0, 6: 30.0}))
    with within(timeout, 20.0):
        replies = grid.send_and_receive([train_message(5), train_message(6)], timeout=timeout)
    assert [reply.metadata.src_node_id for reply in replies] == [5]
    assert grid.elapsed_s.keys() == {"5"}
    assert grid.send_and_receive([], timeout=None) == []
    assert grid.elapsed_s == {}


def test_errors_from_the_superlink_are_timed_for_the_node_that_was_asked() -> None:
    grid = TimedGrid(_slow({5: 0.0}, fault="error-unavailable"))
    (reply,) = grid.send_and_receive([train_message(5)], timeout=1.0)
    assert reply.metadata.src_node_id == 1
    assert grid.elapsed_s.keys() == {"5"}


class Slow(FakeGrid):
    """A grid whose pulls take long, on a clock of its own that stands still otherwise.

    Args:
        pull_s: Seconds that each pull takes.
        answers: From which pull on there is an answer.
    """

    def __init__(self, pull_s: float, answers: int) -> None:
        super().__init__()
        self.now, self.pauses, self._pull_s, self._answers, self._pulls = 0.0, list[float](), pull_s, answers, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return ["a", "b"]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.now += self._pull_s
        self._pulls += 1
        if self._pulls < self._answers:
            return []
        self._answers, pushed = self._answers + 2, train_message(5)
        pushed.metadata.__dict__["_message_id"] = min(message_ids)
        return [Message(Error(0), reply_to=pushed)]


@pytest.mark.parametrize(("pull_s", "pause"), [(0.01, 0.25), (0.0625, 0.25), (0.5, 2.0), (9.0, 3.0)])
def test_a_slow_superlink_is_asked_less_often(pull_s: float, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Slow(pull_s, answers=3)
    monkeypatch.setattr(grids, "time", inner)
    assert len(TimedGrid(inner).send_and_receive([train_message(5), train_message(6)])) == 2
    assert inner.pauses == pytest.approx([pause, pause, 0.25, pause])  # an answer came: the others are near


class Overloaded(FakeGrid):
    """A grid whose first requests fail, as Flower's do if the SuperLink answers with an error.

    Args:
        nodes: The nodes.
        failing: Number of requests that fail.
        status: The HTTP status of the failures.
    """

    def __init__(self, nodes: dict[int, FakeNode], failing: int, status: int) -> None:
        super().__init__(nodes)
        self.requests, self._failing, self._status = 0, failing, status

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._request()
        return super().pull_messages(message_ids)

    def get_node_ids(self) -> list[int]:
        self._request()
        return super().get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        self._request()
        return super().get_nodes()

    def _request(self) -> None:
        self.requests += 1
        if self.requests <= self._failing:
            error = OSError("Server error '500 Internal Server Error'")
            error.response = SimpleNamespace(status_code=self._status)  # type: ignore[attr-defined]
            raise error


def test_an_internal_error_of_the_superlink_does_not_end_the_run(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(waiting, "REPEAT_PAUSE_S", 0.01)
    nodes = _slow({5: 0.0, 6: 0.0}).nodes
    grid = TimedGrid(Overloaded(nodes, failing=3, status=500))
    replies = grid.send_and_receive([train_message(5), train_message(6)], timeout=5.0)
    assert sorted(reply.metadata.src_node_id for reply in replies) == [5, 6]
    assert len([one for one in caplog.messages if "internal error of the SuperLink" in one]) == 3
    assert wait_for_nodes(Overloaded(nodes, failing=3, status=500), 2, 1.0, "a test") == ["5", "6"]
    assert (grids.registrations(Overloaded(nodes, failing=3, status=500)) or {}).keys() == {"5", "6"}


@pytest.mark.parametrize(("failing", "status", "requests"), [(4, 500, 4), (1, 403, 1)])
def test_other_errors_and_lasting_ones_end_it(failing: int, status: int, requests: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(waiting, "REPEAT_PAUSE_S", 0.01)
    inner = Overloaded(_slow({5: 0.0}).nodes, failing, status)
    with pytest.raises(OSError, match="Internal Server Error"):
        TimedGrid(inner).send_and_receive([train_message(5)], timeout=5.0)
    assert inner.requests == requests


def test_everything_else_is_the_inner_grids() -> None:
    inner = FakeGrid(crowd(3), seed=None)
    grid = TimedGrid(inner)
    assert isinstance(grid, Grid)
    assert sorted(grid.get_node_ids()) == sorted(inner.nodes)
    if hasattr(Grid, "get_nodes"):  # Flower's oldest has ids alone
        assert sorted(info.node_id for info in grid.get_nodes()) == sorted(inner.nodes)
    assert grid.run.run_id == 7
    with pytest.raises(NotImplementedError, match="deprecated"):
        grid.create_message(RecordDict(), "train", 1, "")


def test_on_the_virtual_clock_the_grid_is_not_replaced() -> None:
    server = Server("message", selection("message", 2), fleet(3)).play(1)
    assert [len(batch) for batch in server.grid.sent if batch] == [1, 2, 2]  # Flower's own sending: roll call, training


def test_a_base_cannot_send_while_it_configures() -> None:
    with pytest.raises(RunError, match="while it configures"):
        SnapshotGrid(FakeGrid(), [], 1.0).send_and_receive([])


def test_even_at_no_patience_the_nodes_are_shown_once() -> None:
    shown = SnapshotGrid(FakeGrid(), ["5"], 0.0)
    assert shown.get_node_ids() == [5]
    with pytest.raises(RunError, match="wait_timeout = 0 s"):
        shown.get_node_ids()


def test_waiting_orders_ids_as_numbers_and_ends_when_enough_are_there() -> None:
    grid = FakeGrid({k: FakeNode(FakeProxy(str(k))) for k in (100, 9, 20)})
    assert wait_for_nodes(grid, 3, 60.0, "a test") == ["9", "20", "100"]
    with pytest.raises(RunError, match=r"4 nodes \(a test\), but 3 are connected"):
        wait_for_nodes(grid, 4, 0.1, "a test")


def test_an_addressed_copy_shares_arrays_only() -> None:
    template = Message(
        RecordDict({"a": arrays_of(), "c": ConfigRecord({"list": [1]}), "m": MetricRecord({"list": [1]})}),
        dst_node_id=5, message_type="train", ttl=9.0, group_id="g",
    )  # fmt: skip
    FakeGrid()
    twin = addressed(template, "77")
    assert (twin.metadata.dst_node_id, twin.metadata.ttl, twin.metadata.group_id) == (77, 9.0, "g")
    assert list(twin.content) == list(template.content)
    twin.content["c"]["list"].append(2)
    twin.content["m"]["list"].append(2)
    assert template.content["c"]["list"] == template.content["m"]["list"] == [1]
    assert twin.content["a"] is template.content["a"]
    assert template.metadata.dst_node_id == 5
