"""Late replies and uploads in simulated time: what hangs holds up no answer, and keeps no other client busy."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message

from fedsel_flwr.rounds.deadlines import Deadline
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.strategies.message import TimedGrid
from fedsel_flwr.strategies.wrapping import waiting
from fedsel_flwr.strategies.wrapping.grids import EarlyEnd, LateReplyGrid
from fedsel_flwr.strategies.wrapping.message_transport import MessageTransport
from fedsel_flwr.strategies.wrapping.waiting import LateReplies
from tests.strategies.message.simulated_link import SimulatedLink, SimulatedTime, simulated, to_node

__all__ = ["simulated"]
ROUND_S = 10.0


class Fleet:
    """Twenty nodes whose answers may be late, and whose uploads may be interrupted.

    Args:
        world: The time.
        late: Share of answers that come after their round.
        lost: Share of uploads that are interrupted.
        hanging: Number of nodes that never answer.
    """

    def __init__(self, world: SimulatedTime, late: float = 0.1, lost: float = 0.05, hanging: int = 0) -> None:
        self.world, self._late, self._lost, self._hanging = world, late, lost, hanging
        self._random = np.random.default_rng(1)
        self.link = SimulatedLink(world, self._answer)
        self.busy = Busy()
        self.late = LateReplies(self.busy)
        self.late.grid = self.link
        # Node -> when its last answer was complete, for honest answers.
        self.answered: dict[str, float] = {}
        self.slowest_s, self.trained = 0.0, 0

    def _answer(self, message: Message) -> tuple[float, float]:
        random, node = self._random, message.metadata.dst_node_id
        late, lost = random.random() < self._late, random.random() < self._lost
        seconds = random.uniform(ROUND_S + 0.5, 2.5 * ROUND_S) if late else random.uniform(1.0, 9.0)
        if node <= self._hanging:
            return inf, 0.0
        if not lost:
            self.answered[str(node)] = self.world.now + seconds
        return seconds, inf if lost else 0.0

    def play(self, rounds: int, poll_s: float = 1.0) -> Fleet:
        """Play rounds with the nodes that are free; the server asks for replies every ``poll_s`` seconds."""
        nodes = [str(node) for node in range(1, 21)]
        grid = TimedGrid(self.link)
        grid.late, grid.poll_s = self.late, poll_s
        for _ in range(rounds):
            self.late.wait_for_free(lambda: nodes, 1, ROUND_S)
            waited = [self.world.now - when for node, when in self.answered.items() if node in self.busy]
            self.slowest_s = max(self.slowest_s, *waited, 0.0)
            sent = [to_node(int(node)) for node in self.busy.free(nodes)]
            self.answered = {node: when for node, when in self.answered.items() if node in self.busy}
            grid.early_end = EarlyEnd(deadline=Deadline(ROUND_S))
            arrived = {one.metadata.reply_to_message_id for one in grid.send_and_receive(sent, timeout=60.0)}
            self.trained += len(arrived)
            self.link.sent.clear()
            self.late.owe(one for one in sent if one.metadata.message_id not in arrived)
        return self


def test_every_honest_client_is_free_within_two_rounds_of_its_answer(simulated: SimulatedTime) -> None:
    fleet = Fleet(simulated).play(300)
    assert fleet.slowest_s <= 2 * ROUND_S
    assert simulated.most_threads <= 64
    assert fleet.trained >= 10 * 300


def test_many_interrupted_uploads_take_no_more_threads_than_allowed(simulated: SimulatedTime) -> None:
    assert Fleet(simulated, lost=0.2).play(100).slowest_s <= 2 * ROUND_S
    Fleet(simulated, late=0.5, lost=0.5).play(50)
    assert simulated.most_threads <= 64


def _owed(world: SimulatedTime, *answers: tuple[float, float]) -> tuple[SimulatedLink, LateReplies]:
    """A link, and late replies of the nodes 1, 2, …, given as seconds until the announcement and from then on."""
    link = SimulatedLink(world, lambda message: answers[message.metadata.dst_node_id - 1])
    late = LateReplies(Busy())
    late.grid, sent = link, [to_node(1 + k) for k in range(len(answers))]
    link.push_messages(sent)
    late.owe(sent)
    return link, late


def _freed(world: SimulatedTime, late: LateReplies, seconds: float, pause: float = 3.0) -> dict[str, float]:
    """Node -> seconds until it was free; the server asks every few seconds."""
    begin, busy, freed = world.now, [*late.busy.state_dict()["until"]], dict[str, float]()
    while world.now < begin + seconds:
        late.fetch()
        freed |= {node: world.now - begin for node in late.busy.free(busy) if node not in freed}
        world.sleep(pause)
    return freed


def test_an_interrupted_upload_does_not_hold_answers_that_come_with_it(simulated: SimulatedTime) -> None:
    _, late = _owed(simulated, (1.0, inf), (1.0, 0.0), (1.0, 0.0), (2.0, inf), (2.0, 0.0))
    simulated.sleep(2.0)
    freed = _freed(simulated, late, 30.0)
    assert freed.keys() == {"2", "3", "5"}
    assert max(freed.values()) <= 10.0


def test_a_slow_upload_keeps_its_client_busy_until_its_end(simulated: SimulatedTime) -> None:
    _, late = _owed(simulated, (1.0, 100.0), (1.0, 0.0))
    freed = _freed(simulated, late, 150.0)
    assert freed["2"] <= 7.0
    assert freed["1"] == pytest.approx(101.0, abs=4.0)


def test_a_request_that_hangs_for_good_is_given_up_after_the_superlinks_own_time(simulated: SimulatedTime) -> None:
    link, late = _owed(simulated, *[(1.0, inf)] * 3, (1.0, 0.0))
    link.session_s = 1e6
    freed = _freed(simulated, late, 300.0)
    assert freed.pop("4") <= 15.0
    assert freed == {node: pytest.approx(190.0, abs=12.0) for node in "123"}
    assert not late._requests._running


@pytest.mark.parametrize("status", [500, 503, None])
def test_one_error_of_the_superlink_gives_up_no_late_reply(status: int | None, simulated: SimulatedTime) -> None:
    link, late = _owed(simulated, *[(1.0, 0.0)] * 5)
    error: Any = ConnectionError("the SuperLink is away")
    error.response = SimpleNamespace(status_code=status)
    link.errors = [error]
    simulated.sleep(2.0)
    assert _freed(simulated, late, 10.0).keys() == {"1", "2", "3", "4", "5"}


def test_a_change_of_the_date_does_not_give_up_late_replies(simulated: SimulatedTime) -> None:
    _, late = _owed(simulated, (5.0, 0.0))
    simulated.wall += 2 * 86_400.0
    assert _freed(simulated, late, 10.0).keys() == {"1"}


def test_in_the_legacy_api_a_client_that_breaks_off_its_uploads_keeps_no_other_busy(simulated: SimulatedTime) -> None:
    """Client 1 breaks off every upload, with a new node id each time; client 2 answers after its rounds."""
    link = SimulatedLink(simulated, lambda message: (12.0, 0.0) if message.metadata.dst_node_id == 2 else (1.0, inf))
    late, asked = LateReplies(Busy()), 0
    for number in range(30):
        for node in [100 + number, *([] if "2" in late.busy else [2])]:
            asked += node == 2
            LateReplyGrid(link, ROUND_S, late).send_and_receive([to_node(node)])
        late.wait_for_free(lambda: ["2", *(str(100 + k) for k in range(30))], 1, ROUND_S)
    assert asked >= 15
    assert simulated.most_threads <= 64


@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_a_question_does_not_wait_behind_an_interrupted_upload(seconds: float, simulated: SimulatedTime) -> None:
    link = SimulatedLink(simulated, lambda m: (0.5, inf) if m.metadata.dst_node_id == 1 else (seconds, 0.0))
    begin, nodes = simulated.now, [str(node) for node in range(1, 6)]
    late = LateReplies(Busy())
    late.grid = link
    transport = MessageTransport(link, ArrayRecord([]), timeout=20.0, late=late)
    answers, asked = transport._ask([to_node(int(n)) for n in nodes])
    assert simulated.now - begin <= 21.0
    assert ([*answers], asked) == (nodes[1:], nodes)
    assert late.busy.free(nodes) == nodes[1:]


# ---- uploads that take long ------------------------------------------------------------------------------------------

Sending = Callable[..., list[int]]


def _sending(world: SimulatedTime, upload_s: float) -> tuple[TimedGrid, Sending]:
    """A grid over four nodes, of which node 6 announces its answer before 7 and 8; and the nodes of the answers."""
    answers = {5: (0.0, 0.0), 6: (1.0, upload_s), 7: (4.0, 0.0), 8: (7.0, 0.0)}
    timed = TimedGrid(SimulatedLink(world, lambda message: answers[message.metadata.dst_node_id]))

    def send(timeout: float | None = None) -> list[int]:
        sent = {node: to_node(node) for node in answers}
        replies = timed.send_and_receive(list(sent.values()), timeout=timeout)
        node_of = {message.metadata.message_id: node for node, message in sent.items()}
        return [node_of[reply.metadata.reply_to_message_id] for reply in replies]

    return timed, send


def test_the_other_answers_arrive_in_time_while_one_is_uploaded(simulated: SimulatedTime) -> None:
    (timed, send), begin = _sending(simulated, inf), simulated.now
    assert send(timeout=20.0) == [5, 7, 8]
    assert 20.0 <= simulated.now - begin < 24.0
    assert timed.elapsed_s.keys() == {"5", "7", "8"}
    for node, ready in (("5", 0.0), ("7", 4.0), ("8", 7.0)):
        assert ready <= timed.elapsed_s[node] < ready + waiting.HANG_S + 1.0, timed.elapsed_s


def test_an_upload_that_ends_in_time_counts_from_its_end(simulated: SimulatedTime) -> None:
    timed, send = _sending(simulated, 30.0)
    assert sorted(send(timeout=100.0)) == [5, 6, 7, 8]
    assert timed.elapsed_s["8"] < 20.0 < 31.0 <= timed.elapsed_s["6"] < 35.0


@pytest.mark.parametrize("end", [EarlyEnd(answers=3), EarlyEnd(deadline=Deadline(15.0))])
def test_an_upload_does_not_hold_up_a_round_that_ends_early(simulated: SimulatedTime, end: EarlyEnd) -> None:
    (timed, send), begin = _sending(simulated, inf), simulated.now
    timed.early_end = end
    assert send(timeout=150.0) == [5, 7, 8]
    assert simulated.now - begin < 20.0
    assert timed.straggler_reply is not None


@pytest.mark.parametrize("pause_s", [0.0, 60.0])
def test_an_upload_that_ends_after_its_round_makes_its_client_free(simulated: SimulatedTime, pause_s: float) -> None:
    """Whether the server asks before or after its end."""
    (timed, send), busy = _sending(simulated, 40.0), Busy()
    timed.late = late = LateReplies(busy)
    late.grid = timed
    send(timeout=10.0)
    assert "6" in busy
    simulated.sleep(pause_s)
    for _ in range(20):
        late.fetch()
        simulated.sleep(2.0)
    assert "6" not in busy


def test_the_number_of_waiting_requests_is_bounded(simulated: SimulatedTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_REQUESTS", 3)
    link = SimulatedLink(simulated, lambda message: (5.0 * message.metadata.dst_node_id, 100.0))
    assert len(TimedGrid(link).send_and_receive([to_node(node) for node in range(10)], timeout=1500.0)) == 10
    assert simulated.most_threads == 3


@pytest.mark.parametrize("error", [OSError("the SuperLink is gone"), SystemExit(3)])
def test_an_error_of_a_request_is_raised_in_the_callers_thread(simulated: SimulatedTime, error: BaseException) -> None:
    timed, send = _sending(simulated, inf)
    vars(timed._grid)["pull_messages"] = Mock(side_effect=error)
    with pytest.raises(type(error)) as raised:
        send(timeout=5.0)
    assert raised.value is error
