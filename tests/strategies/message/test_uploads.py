"""A SuperNode announces its answer before it uploads it; the server keeps fetching the other answers meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
from flwr.app import Message

from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.strategies.message import TimedGrid
from fedsel_flwr.strategies.wrapping import waiting
from fedsel_flwr.strategies.wrapping.grids import EarlyEnd
from fedsel_flwr.strategies.wrapping.waiting import LateReplies
from tests.strategies.message.simulated_link import SimulatedLink, SimulatedTime, simulated, to_node

__all__ = ["simulated"]
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


@pytest.mark.parametrize("end", [EarlyEnd(answers=3), EarlyEnd(seconds=15.0)])
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
    def fail(*ids: object) -> list[Message]:
        raise error

    timed, send = _sending(simulated, inf)
    vars(timed._grid)["pull_messages"] = fail
    with pytest.raises(type(error)) as raised:
        send(timeout=5.0)
    assert raised.value is error
