"""A SuperNode announces its answer before it uploads it; the server keeps fetching the other answers meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from threading import Event, Timer

import pytest
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.server.superlink.linkstate.utils import MESSAGE_UNAVAILABLE_ERROR_REASON

from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.strategies.message import TimedGrid
from fedsel_flwr.strategies.wrapping import waiting
from fedsel_flwr.strategies.wrapping.grids import EarlyEnd
from fedsel_flwr.strategies.wrapping.waiting import LateReplies
from tests.e2e.fleet import wait_until
from tests.strategies.either_api import Server, selection
from tests.strategies.helpers import FakeProxy, fleet
from tests.strategies.message.helpers import FakeGrid, FakeNode, train_message

pytestmark = pytest.mark.timeout(30)
HANG_S = 0.2


class Uploads(FakeGrid):
    """A grid whose request for an answer waits until the answer has been uploaded.

    As in Flower's SuperLink, a request claims the answers that it gets: to another request they are unavailable.

    Args:
        nodes: The nodes.
        uploading: The nodes whose upload lasts until ``uploaded`` is set.
    """

    def __init__(self, nodes: dict[int, FakeNode], uploading: Iterable[int]) -> None:
        super().__init__(nodes)
        self.uploading, self.uploaded = {*uploading}, Event()
        self.waiting = self.most_waiting = 0
        self._claimed = set[str]()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ids = {*message_ids}
        replies = [_unavailable(one) for one in sorted(ids & self._claimed)]
        claimed = list(super().pull_messages(ids - self._claimed))
        self._claimed |= {reply.metadata.reply_to_message_id for reply in claimed}
        trained = [reply for reply in claimed if reply.metadata.message_type == MessageType.TRAIN]
        if any(reply.metadata.src_node_id in self.uploading for reply in trained):
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
            assert self.uploaded.wait(20.0)
            self.waiting -= 1
        return replies + claimed


def _unavailable(message_id: str) -> Message:
    """What the SuperLink answers for a message that it does not have."""
    asked = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    asked.metadata.__dict__["_message_id"] = message_id
    return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, MESSAGE_UNAVAILABLE_ERROR_REASON), reply_to=asked)


def _uploads(ready: dict[int, float], *uploading: int) -> Uploads:
    nodes = {k: FakeNode(FakeProxy(str(k), k, number=k), ready=seconds) for k, seconds in ready.items()}
    return Uploads(nodes, uploading)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "HANG_S", HANG_S)


@pytest.fixture
def grid() -> Iterator[Uploads]:
    """Node 6 announces its answer before nodes 7 and 8 answer."""
    one = _uploads({5: 0.0, 6: 0.1, 7: 0.4, 8: 0.7}, 6)
    yield one
    one.uploaded.set()


def _train(grid: FakeGrid) -> list[Message]:
    return [train_message(node) for node in grid.nodes]


def _timed(grid: FakeGrid) -> TimedGrid:
    timed = TimedGrid(grid)
    timed.poll_s = 0.05
    return timed


def test_the_other_answers_arrive_in_time_while_one_is_uploaded(grid: Uploads) -> None:
    timed, start = _timed(grid), time.monotonic()
    replies = timed.send_and_receive(_train(grid), timeout=2.0)
    assert 2.0 <= time.monotonic() - start < 3.0
    assert [reply.metadata.src_node_id for reply in replies] == [5, 7, 8]
    assert timed.elapsed_s.keys() == {"5", "7", "8"}
    for node, ready in (("5", 0.0), ("7", 0.4), ("8", 0.7)):
        assert ready <= timed.elapsed_s[node] < ready + 2 * HANG_S + 0.4, timed.elapsed_s


def test_an_upload_that_ends_in_time_counts_from_its_end(grid: Uploads) -> None:
    timed = _timed(grid)
    Timer(1.5, grid.uploaded.set).start()
    start = time.monotonic()
    replies = timed.send_and_receive(_train(grid), timeout=15.0)
    assert time.monotonic() - start < 3.0
    assert sorted(reply.metadata.src_node_id for reply in replies) == [5, 6, 7, 8]
    assert timed.elapsed_s["8"] < 1.4 <= timed.elapsed_s["6"]


@pytest.mark.parametrize("end", [EarlyEnd(answers=3), EarlyEnd(seconds=1.5)])
def test_an_upload_does_not_hold_up_a_round_that_ends_early(grid: Uploads, end: EarlyEnd) -> None:
    timed = _timed(grid)
    timed.early_end, start = end, time.monotonic()
    replies = timed.send_and_receive(_train(grid), timeout=15.0)
    assert time.monotonic() - start < 2.5
    assert [reply.metadata.src_node_id for reply in replies] == [5, 7, 8]
    assert timed.straggler_reply is not None


@pytest.mark.parametrize("owed_first", [True, False])
def test_an_upload_that_ends_after_its_round_makes_its_client_free(grid: Uploads, owed_first: bool) -> None:
    busy, timed = Busy(), _timed(grid)
    timed.late = late = LateReplies(busy)
    late.grid, sent = grid, _train(grid)
    timed.send_and_receive(sent, timeout=1.0)
    if not owed_first:
        grid.uploaded.set()
        wait_until(lambda: not grid.waiting, 5.0, "the end of the upload")
    late.owe([message for message in sent if message.metadata.dst_node_id == 6])
    if owed_first:
        start = time.monotonic()
        late.fetch()
        assert time.monotonic() - start < 1.0
        assert "6" in busy
        grid.uploaded.set()
    wait_until(lambda: late.fetch() is None and "6" not in busy, 5.0, "the end of the upload")


def test_a_late_upload_does_not_hold_up_the_search_for_free_clients() -> None:
    grid, busy = _uploads({5: 0.0, 6: 0.0}, 6), Busy()
    late, sent = LateReplies(busy), _train(grid)
    late.grid = grid
    grid.push_messages(sent)
    late.owe(sent)
    start = time.monotonic()
    late.fetch()
    assert late.wait_for_free(lambda: ["5", "6", "7"], 1, 10.0) == ["5", "6", "7"]
    assert time.monotonic() - start < 2.0
    assert "6" in busy
    grid.uploaded.set()
    wait_until(lambda: late.fetch() is None and "6" not in busy, 5.0, "the end of the upload")
    assert "5" not in busy


def test_the_number_of_waiting_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_REQUESTS", 3)
    monkeypatch.setattr(waiting, "HANG_S", 0.05)
    grid = _uploads({k: 0.15 * k for k in range(10)}, *range(10))
    Timer(2.5, grid.uploaded.set).start()
    replies = _timed(grid).send_and_receive(_train(grid), timeout=15.0)
    assert len(replies) == 10
    assert grid.most_waiting == 3


@pytest.mark.parametrize("error", [OSError("the SuperLink is gone"), SystemExit(3)])
def test_an_error_of_a_request_is_raised_in_the_callers_thread(
    grid: Uploads, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Iterable[str]) -> list[Message]:
        raise error

    monkeypatch.setattr(grid, "pull_messages", fail)
    with pytest.raises(type(error)) as raised:
        _timed(grid).send_and_receive(_train(grid), timeout=5.0)
    assert raised.value is error


def test_a_round_trains_with_the_others_and_its_history_names_the_uploading_client() -> None:
    strategy = selection("message", 4, clock="server", identity="claim", max_latency=3.0)
    server = Server("message", strategy, timeout=1.5)
    first, *others = fleet(4)
    server.connect(first, ready=0.0)
    for proxy in others:
        server.connect(proxy, ready=0.4)
    server.grid = grid = Uploads(server.grid.nodes, [next(iter(server.grid.nodes))])
    server.play(1)
    rows = {row.client_id: row for row in strategy.history.clients}
    assert [name for name, row in rows.items() if row.completed] == [str(proxy.client_id) for proxy in others]
    assert rows[str(first.client_id)].timed_out
    grid.uploaded.set()
