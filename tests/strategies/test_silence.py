"""Clients of whom nothing comes, and actors of Ray that died: what the history says, and whether the run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters
from flwr.common.constant import ErrorCode
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.superlink.linkstate import utils as link

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies.message import TimedGrid
from fedsel_flwr.strategies.wrapping.failure_reasons import reason_in, reason_of
from fedsel_flwr.strategies.wrapping.grids import with_late_replies
from fedsel_flwr.strategies.wrapping.legacy_transport import LegacyTransport
from fedsel_flwr.strategies.wrapping.message_transport import MessageTransport
from fedsel_flwr.strategies.wrapping.waiting import LateReplies
from tests.strategies import either_api
from tests.strategies.either_api import APIS, Server, base_of, selection
from tests.strategies.helpers import FakeProxy, fleet, within
from tests.strategies.message.helpers import FakeGrid, FakeNode, ProbeProxy, crowd, play
from tests.strategies.scripted import Curious

EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, link.MESSAGE_UNAVAILABLE_ERROR_REASON)
LATE_REPLY = (ErrorCode.REPLY_MESSAGE_UNAVAILABLE, link.REPLY_MESSAGE_UNAVAILABLE_ERROR_REASON)
GONE = (ErrorCode.NODE_UNAVAILABLE, link.NODE_UNAVAILABLE_ERROR_REASON)
NOT_REACHED = "not reached: the SuperLink did not take the message"
LATE, GONE_SAYS = "no answer within 0.05 s", "node unavailable: its SuperNode stopped reporting"
EXPIRED_SAYS = "message unavailable: it expired, or its SuperNode was removed"
LATE_REPLY_SAYS = "reply unavailable: it expired before it was fetched"
RAISED = "Message contains an Error (reason: {}). It originated during client-side execution of a message."
"""What Flower's own proxy raises of a client's error."""


class AnswersWithError:
    """A grid that answers every message with an error of the SuperLink, after a while; without one with nothing."""

    def __init__(self, error: tuple[int, str] | None, seconds: float) -> None:
        self.error, self.seconds = error, seconds

    def send_and_receive(self, messages: list[Message]) -> list[Message]:
        time.sleep(self.seconds)
        return [Message(Error(*self.error), reply_to=one) for one in messages] if self.error else []


class Behind(FakeProxy):
    """A client whose ``fit`` is that of Flower's own proxy over such a grid."""

    def __init__(self, cid: str, grid: Any) -> None:
        super().__init__(cid, cid, number=1)
        FakeGrid()  # without the task identity that it sets, no message can be made
        self.own = GridClientProxy(1, grid, 7)
        self.own.cid = cid

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        return self.own.fit(ins, timeout, group_id)


@pytest.mark.parametrize(
    ("error", "seconds", "timeout", "said"),
    [
        (EXPIRED, 0.06, 0.05, LATE), (LATE_REPLY, 0.06, 0.05, LATE), (None, 0.06, 0.05, LATE),
        (None, 0.0, None, "no answer"), (EXPIRED, 0.0, 30.0, EXPIRED_SAYS), (EXPIRED, 0.0, None, EXPIRED_SAYS),
        (LATE_REPLY, 0.0, None, LATE_REPLY_SAYS), (GONE, 0.06, 0.05, GONE_SAYS), (GONE, 0.0, 30.0, GONE_SAYS),
    ],
)  # fmt: skip
def test_what_flowers_own_proxy_raises_is_said_in_plain_words(
    error: tuple[int, str] | None, seconds: float, timeout: float | None, said: str
) -> None:
    strategy = selection("legacy", 2)
    Server("legacy", strategy, [Behind("a", AnswersWithError(error, seconds)), FakeProxy("b", "b")], timeout).play(1)
    rows = {row.client_id: row for row in strategy.history.clients}
    assert (rows["a"].completed, rows["a"].problem, rows["a"].latency_s) == (False, said, 9.0)
    assert rows["b"].completed


def test_an_exception_of_the_client_stays_one() -> None:
    for text in ["division by zero", "Message contains an Error (reason: disk full)"]:
        assert reason_in(ValueError(text), 0.5, 1.0) == f"exception: ValueError: {text}"
    told = "<class 'RuntimeError'>:<'the battery\nis empty'>"
    assert reason_in(ValueError(RAISED.format(told)), 0.5, 1.0) == "exception: RuntimeError: the battery\nis empty"
    crashed = RAISED.format("ClientApp stopped responding.")
    assert reason_in(ValueError(crashed), 0.5, 1.0) == "exception: ClientApp stopped responding."
    code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert reason_of(Error(code, told)) == "exception: RuntimeError: the battery\nis empty"
    assert reason_of(Error(code, "<class 'app.errors.Empty'>:<'0 %'>")) == "exception: Empty: 0 %"
    assert reason_in(KeyError("Message Unavailable"), 0.5, 1.0) == "exception: KeyError: 'Message Unavailable'"


RAYS = """<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'\x1b[36mray::ClientAppActor.run()\x1b[39m (p=2,\
 ip=192.0.2.2, actor_id=8f)
                  ^^^^^^^^^^^^^
  File "/home/me/site-packages/torch/nn/modules/module.py", line 1789, in _call_impl
    return forward_call(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/mine.py", line 10, in forward
    raise KeyError("camera")
KeyError: 'camera'

The above exception was the direct cause of the following exception:

\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=26, ip=192.0.2.2, actor_id=8f)
  File "/home/me/site-packages/flwr/simulation/ray_transport/ray_actor.py", line 65, in run
    raise ClientAppException(str(ex)) from ex
flwr.clientapp.client_app.ClientAppException:
Exception ClientAppException occurred. Message: 'camera'
'>"""
"""What Flower says of a client that raised in an actor of Ray."""


@pytest.mark.parametrize("extra", ["", "x" * 20_000])
def test_what_a_client_raised_in_an_actor_of_ray_is_said_with_its_line(extra: str) -> None:
    said = "exception: KeyError: 'camera' (mine.py, line 10)"
    told = RAYS.replace("ip=192.0.2.2", f"ip=192.0.2.2{extra}")
    assert reason_of(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, told)) == said
    assert reason_in(ValueError(RAISED.format(told)), 0.5, 1.0) == said
    cut = RAYS.replace("KeyError: 'camera'\n", "").replace('  File "/home/me', '  file "/home/me')
    assert reason_of(Error(0, cut)).startswith("exception: ")


INCOMPLETE = "Reply message objects are unavailable. The sender may not have completed"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EXPIRED, EXPIRED_SAYS),
        (LATE_REPLY, LATE_REPLY_SAYS),
        (GONE, GONE_SAYS),
        ((ErrorCode.MESSAGE_UNAVAILABLE, INCOMPLETE), f"exception: {INCOMPLETE}"),
        ((ErrorCode.CLIENT_APP_CRASHED, "exit code -9"), "exception: exit code -9"),
        ((ErrorCode.UNKNOWN, None), "exception: error code 0, without a reason"),
        (None, LATE),
    ],
)
def test_an_error_message_is_said_in_plain_words(error: Any, said: str) -> None:
    server = Server("message", selection("message", 2), fleet(1), timeout=0.05)
    if error is None:
        server.connect(FakeProxy("1", 1, number=1), ready=20.0)
    else:
        assert reason_of(Error(*error)) == said
        server.connect(FakeProxy("1", 1, number=1), fault=lambda node, sent, content: Error(*error))
    server.play(1)
    assert [row.problem for row in server.strategy.history.clients] == ["", said]


class Refusing(FakeGrid):
    """A grid whose SuperLink takes no message of a kind to one node, and no answer comes.

    The message's id is "", or left out, as by the grid of Flower's simulation.
    """

    def __init__(self, nodes: dict[int, FakeNode], kind: str, left_out: bool = False) -> None:
        super().__init__(nodes)
        self.refused, self.left_out, self.kind = next(iter(nodes)), left_out, kind
        self.pulled: list[set[str]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids: list[str] = []
        for message in messages:
            if (message.metadata.dst_node_id, message.metadata.message_type) != (self.refused, self.kind):
                ids += super().push_messages([message])
            elif not self.left_out:
                ids.append("")
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.pulled.append(set(message_ids))
        return super().pull_messages(message_ids)


@pytest.mark.parametrize("left_out", [False, True])
def test_the_timed_grid_does_not_wait_for_a_rejected_message(left_out: bool) -> None:
    inner = Refusing(crowd(3), "train", left_out)
    strategy = selection("message", clock="server", identity="claim")
    with within(0.0, 3.0):
        play(strategy, inner, 2, timeout=6.0)
    rows = [row for row in strategy.history.clients if row.client_id == str(inner.nodes[inner.refused].proxy.client_id)]
    assert [(row.completed, row.timed_out, row.problem) for row in rows] == [(False, False, NOT_REACHED)] * 2
    assert [one.num_completed for one in strategy.history.rounds] == [2, 2]
    assert not any("" in ids for ids in inner.pulled)
    assert not strategy.core.parts.busy.state_dict()["until"]  # who was not reached owes nothing


def test_questions_in_turn_do_not_wait_for_a_rejected_message() -> None:
    grid, record = Refusing(crowd(3), "query"), RecordDict({"config": ConfigRecord()})
    questions = [Message(record, dst_node_id=node, message_type="query") for node in grid.nodes]
    with within(0.0, 1.0):
        replies, sent = MessageTransport(grid, ArrayRecord([]), timeout=6.0)._send_windowed(questions)
    assert (len(replies), len(sent)) == (2, 3)


class Late(Behind):
    """As the strategy sees it: late replies are taken."""

    late = LateReplies(Busy())

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        return with_late_replies(self.own, timeout, self.late).fit(ins, timeout, group_id)


def test_the_legacy_api_does_not_wait_for_a_rejected_message_and_the_client_is_not_busy() -> None:
    rejecting = SimpleNamespace(push_messages=lambda messages: [""] * len(list(messages)), pull_messages=lambda ids: [])
    client, strategy, busy = Late("a", rejecting), selection("legacy", 2), Busy()
    transport = LegacyTransport({"a": client.own}, Parameters([], ""), timeout=6.0, late=LateReplies(busy))
    with within(0.0, 3.0):
        answers, missed = transport.introduce(["a"])
        Server("legacy", strategy, [client, FakeProxy("b", "b")], timeout=6.0).play(1)
    assert (answers, missed, "a" in busy) == ({}, [], False)
    rows = {row.client_id: row for row in strategy.history.clients}
    assert (rows["a"].completed, rows["a"].timed_out, rows["a"].problem) == (False, False, NOT_REACHED)
    assert rows["b"].completed


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


# ---- actors of Ray that died -----------------------------------------------------------------------------------------

CLIENTS, ROUNDS = 4, 4
DEAD = (
    "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing this task.\n\tclass_name: "
    "ClientAppActor\n\tactor_id: {actor}\n\tpid: 19539\n\tnamespace: 73ee6280-0c20-4bf0-a05d-92565629245f\n\tip: "
    "192.0.2.2\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR'>"
)
"""What Flower 1.41 and Ray 2.55 say of an actor that was killed."""
UNAVAILABLE = (
    "<class 'ray.exceptions.ActorUnavailableError'>:<'The actor {actor} is unavailable: The actor is temporarily "
    "unavailable: IOError: The actor is restarting.. The task may or may not have been executed on the actor.'>"
)
"""The same of one that is being started again."""
ONE, OTHER = "1322dcb323ef5b51ddd2357c01000000", "c0c3caf57d592002e659a6f001000000"
Lost = Callable[[int, int], str | None]
"""From round and client to what comes in place of its answer."""


def dead(actor: str = ONE) -> str:
    return DEAD.format(actor=actor)


class Lossy(FakeProxy):
    """A legacy client whose ``fit`` raises what Flower's proxy does."""

    lost: Lost

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        assert group_id is not None
        if reason := self.lost(group_id, self.number):
            raise ValueError(RAISED.format(reason))
        return super().fit(ins, timeout, group_id)


class LossyNode(FakeNode):
    """The same in the Message API."""

    def _train(self, message: Any) -> Any:
        assert isinstance(self.proxy, Lossy)
        reason = self.proxy.lost(int(message.content["config"]["server-round"]), self.proxy.number)
        return Error(0, reason) if reason else super()._train(message)


def play_losing(api: str, lost: Lost, **options: Any) -> Any:
    """Play all clients for some rounds; returns the strategy and the final model, or raises what ended the run."""
    clients = [Lossy(str(k), k, number=k) for k in range(CLIENTS)]
    for client in clients:
        client.lost = lost
    selector = Random(clients_per_round=CLIENTS, seed=0)
    options = {"total_rounds": ROUNDS, "base": base_of(api), **options}
    played = either_api.play(api, selector, clients, ROUNDS, node=LossyNode, **options)
    return played.strategy, [array.tobytes() for array in played.models[-1]]


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either API, in a process in which Ray runs."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    return str(request.param)


@pytest.mark.parametrize(
    ("lost", "completed"),
    [
        (lambda round, k: dead() if (round, k) == (2, 1) else None, [4, 3, 4, 4]),
        (lambda round, k: dead(ONE if k else OTHER) if round == 2 and k < 2 else None, [4, 2, 4, 4]),
        (lambda round, k: UNAVAILABLE.format(actor=ONE) if round > 1 and k else None, [4, 1, 1, 1]),
        (lambda round, k: "MemoryError: the actor died" if round > 1 and k else None, [4, 1, 1, 1]),
    ],
    ids=["one message", "one message of each actor", "started again", "a client's own words"],
)
def test_the_run_goes_on(api: str, lost: Lost, completed: list[int]) -> None:
    strategy, _ = play_losing(api, lost)
    assert [record.num_completed for record in strategy.history.rounds] == completed


def test_what_a_deployments_clients_write_is_not_believed(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    strategy, _ = play_losing(api, lambda round, k: dead() if k else None)
    assert [record.num_completed for record in strategy.history.rounds] == [1] * ROUNDS


@pytest.mark.parametrize(
    ("lost", "messages"),
    [
        (lambda round, k: dead() if round == 3 and k != 2 else None, 3),
        (lambda round, k: dead() if round >= 2 and k == 2 else None, 1),
    ],
    ids=["within a round", "in the round after"],
)
def test_a_dead_actor_that_gets_another_message_ends_the_run_and_nothing_is_lost_but_the_round(
    api: str, lost: Lost, messages: int, tmp_path: Path
) -> None:
    with pytest.raises(RunError) as ended:
        play_losing(api, lost, checkpoint_dir=tmp_path)
    message = str(ended.value)
    assert message.startswith("a Ray actor has died")
    assert f"Messages lost in round 3: {messages}. " in message
    assert f"resume = true: it then continues after round 2 from {str(tmp_path)!r}" in message
    if messages > 1:
        resumed, model = play_losing(api, lambda round, k: None, checkpoint_dir=tmp_path, resume="must")
        straight, expected = play_losing(api, lambda round, k: None)
        assert (resumed.history, model) == (straight.history, expected)


@pytest.mark.parametrize(
    ("lost", "lost_in"),
    [
        (lambda round, k: dead() if round == 2 and k else None, "the probe before round 2: 3"),
        (lambda round, k: dead() if round == 2 and k == 1 else None, "round 2: 1"),
    ],
    ids=["within the probe", "in the round after"],
)
def test_a_message_names_the_probe_in_which_an_actor_died(api: str, lost: Lost, lost_in: str) -> None:
    def answer(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
        if reason := lost(int(proxy.probed[-1]["round"]), proxy.number):
            raise ValueError(RAISED.format(reason))
        return metrics

    def in_training(round: int, k: int) -> str | None:
        return dead() if "probe" not in lost_in and (round, k) == (2, 3) else None

    class LossyProbed(ProbeProxy, Lossy):
        """Its errors come in place of answers to probes too."""

    clients = [LossyProbed(str(k), k, number=k, answer=answer) for k in range(CLIENTS)]
    for client in clients:
        client.lost = in_training
    with pytest.raises(RunError) as ended:
        either_api.play(api, Curious(clients_per_round=CLIENTS), clients, ROUNDS, node=LossyNode, base=base_of(api))
    message = str(ended.value)
    assert message.startswith("a Ray actor has died in the probe before round 2 (")
    assert f"Messages lost in {lost_in}. " in message


def test_what_is_said_without_a_checkpoint(api: str, tmp_path: Path) -> None:
    for options, said in (
        ({}, "Start the run again. With checkpoint_dir set"),
        ({"checkpoint_dir": tmp_path}, "no round had a checkpoint"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=said):
            play_losing(api, lambda round, k: dead(), **options)
