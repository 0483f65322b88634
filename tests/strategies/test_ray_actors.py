"""Actors of Ray that died: the run goes on where it can, and ends with an explanation where it cannot. Both APIs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Error
from flwr.common import FitIns, FitRes

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import Probe, Random
from tests.strategies import either_api
from tests.strategies.helpers import FakeProxy
from tests.strategies.message.helpers import FakeNode, ProbeProxy

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
            raise ValueError(
                f"Message contains an Error (reason: {reason}). It originated during client-side execution"
            )
        return super().fit(ins, timeout, group_id)


class LossyNode(FakeNode):
    """The same in the Message API."""

    def _train(self, message: Any) -> Any:
        assert isinstance(self.proxy, Lossy)
        reason = self.proxy.lost(int(message.content["config"]["server-round"]), self.proxy.number)
        return Error(0, reason) if reason else super()._train(message)


def play(api: str, lost: Lost, **options: Any) -> Any:
    """Play all clients for some rounds; returns the strategy and the final model, or raises what ended the run."""
    clients = [Lossy(str(k), k, number=k) for k in range(CLIENTS)]
    for client in clients:
        client.lost = lost
    selector = Random(clients_per_round=CLIENTS, seed=0)
    options = {"total_rounds": ROUNDS, "base": either_api.base_of(api), **options}
    played = either_api.play(api, selector, clients, ROUNDS, node=LossyNode, **options)
    return played.strategy, played.models[-1:]


@pytest.fixture(params=either_api.APIS)
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
    strategy, _ = play(api, lost)
    assert [record.num_completed for record in strategy.history.rounds] == completed


def test_what_a_deployments_clients_write_is_not_believed(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    strategy, _ = play(api, lambda round, k: dead() if k else None)
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
        play(api, lost, checkpoint_dir=tmp_path)
    message = str(ended.value)
    assert message.startswith("a Ray actor has died")
    assert f"Messages lost in round 3: {messages}. " in message
    assert f"resume = true: it then continues after round 2 from {str(tmp_path)!r}" in message
    if messages > 1:
        resumed, model = play(api, lambda round, k: None, checkpoint_dir=tmp_path, resume="must")
        straight, expected = play(api, lambda round, k: None)
        assert (resumed.history, model) == (straight.history, expected)


class Asks(Random):
    """Asks everybody before each choice."""

    name = "asks"

    def _probe(self, available: Any) -> Probe:
        return Probe(clients=available, columns=("loss",))


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
            raise ValueError(
                f"Message contains an Error (reason: {reason}). It originated during client-side execution"
            )
        return metrics

    def in_training(round: int, k: int) -> str | None:
        return dead() if "probe" not in lost_in and (round, k) == (2, 3) else None

    class LossyProbed(ProbeProxy, Lossy):
        """Its errors come in place of answers to probes too."""

    clients = [LossyProbed(str(k), k, number=k, answer=answer) for k in range(CLIENTS)]
    for client in clients:
        client.lost = in_training
    with pytest.raises(RunError) as ended:
        either_api.play(
            api, Asks(clients_per_round=CLIENTS), clients, ROUNDS, node=LossyNode, base=either_api.base_of(api)
        )
    message = str(ended.value)
    assert message.startswith("a Ray actor has died in the probe before round 2 (")
    assert f"Messages lost in {lost_in}. " in message


def test_what_is_said_without_a_checkpoint(api: str, tmp_path: Path) -> None:
    for options, said in (
        ({}, "Start the run again. With checkpoint_dir set"),
        ({"checkpoint_dir": tmp_path}, "no round had a checkpoint"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=said):
            play(api, lambda round, k: dead(), **options)
