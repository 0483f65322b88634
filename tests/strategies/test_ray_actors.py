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
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from tests.strategies.helpers import FakeProxy, Federation, fedavg
from tests.strategies.message import helpers as message
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id

pytestmark = pytest.mark.timeout(30)
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


def play(api: str, lost: Lost, **options: Any) -> Any:
    """Play all clients for some rounds; returns the strategy and the final model, or raises what ended the run."""
    options = {"max_latency": 9.0, "total_rounds": ROUNDS, **options}
    selector = Random(clients_per_round=CLIENTS, seed=0)
    if api == "legacy":
        strategy: Any = LegacyStrategy(selector, fedavg(), **options)
        clients = [Lossy(str(k), k, number=k) for k in range(CLIENTS)]
        for client in clients:
            client.lost = lost
        federation = Federation(strategy, clients)
        federation.play(ROUNDS)
        return strategy, federation.models[-1]

    def fault(node: FakeNode, sent: Any, content: Any) -> Any:
        reason = lost(int(sent.content["config"]["server-round"]), node.proxy.number)
        return Error(0, reason) if reason else content

    nodes = {node_id(k): FakeNode(FakeProxy(str(k), k, number=k), fault=fault) for k in range(CLIENTS)}
    strategy = message.SelectionStrategy(selector, message.fedavg(), **options)
    result, _ = message.play(strategy, FakeGrid(nodes), ROUNDS)
    return strategy, [array.tobytes() for array in result.arrays.to_numpy_ndarrays()]


@pytest.fixture(params=["legacy", "message"])
def api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either API, in a process in which Ray runs."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    return str(request.param)


@pytest.mark.parametrize(
    ("lost", "completed"),
    [
        (lambda round, k: DEAD.format(actor=ONE) if (round, k) == (2, 1) else None, [4, 3, 4, 4]),
        (lambda round, k: DEAD.format(actor=ONE if k else OTHER) if round == 2 and k < 2 else None, [4, 2, 4, 4]),
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
    strategy, _ = play(api, lambda round, k: DEAD.format(actor=ONE) if k else None)
    assert [record.num_completed for record in strategy.history.rounds] == [1] * ROUNDS


@pytest.mark.parametrize(
    ("lost", "last", "messages"),
    [
        (lambda round, k: DEAD.format(actor=ONE) if round == 3 and k != 2 else None, 2, 3),
        (lambda round, k: DEAD.format(actor=ONE) if round >= 2 and k == 2 else None, 2, 1),
    ],
    ids=["within a round", "in the round after"],
)
def test_a_dead_actor_that_gets_another_message_ends_the_run(
    api: str, lost: Lost, last: int, messages: int, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(RunError) as ended:
        play(api, lost, checkpoint_dir=folder)
    message = str(ended.value)
    assert message.startswith("an actor of Ray has died")
    assert f"{messages} of round 3 " in message
    assert f"resume = true, which resumes it after round {last} from {str(folder)!r}" in message


def test_nothing_is_lost_but_the_round(api: str, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        play(api, lambda round, k: DEAD.format(actor=ONE) if round == 3 and k else None, checkpoint_dir=tmp_path)
    resumed, model = play(api, lambda round, k: None, checkpoint_dir=tmp_path, resume="must")
    straight, expected = play(api, lambda round, k: None)
    assert (resumed.history, model) == (straight.history, expected)


def test_what_is_said_without_a_checkpoint(api: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Start the run again; with a checkpoint_dir"):
        play(api, lambda round, k: DEAD.format(actor=ONE))
    with pytest.raises(RunError, match="no round had a checkpoint"):
        play(api, lambda round, k: DEAD.format(actor=ONE), checkpoint_dir=tmp_path)
