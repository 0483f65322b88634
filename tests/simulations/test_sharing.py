"""The world that the server has built, and its actors take over."""

from __future__ import annotations

import logging
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.common import Context, RecordDict
from ray import cloudpickle

from fedsel_flwr.simulations.engine import SameScenario
from fedsel_flwr.simulations.on_flower import ray_session
from fedsel_flwr.simulations.on_flower.app import ScenarioApp, client_of
from fedsel_flwr.simulations.on_flower.ray_session import SharedWorld, receive_world, share_world
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds import world
from fedsel_flwr.simulations.worlds.world import World, WorldCache, world_of

SMOKE = load_scenario("smoke", {"data.local_test_fraction": 0.2, "clients.energy_score_low": 0.5})
PHONES = load_scenario("smoke", {"system.kind": "phones"})


class FakeRay:
    """Keeps what it is given as bytes, as Ray does; each connection has a job of its own."""

    def __init__(self) -> None:
        self.objects: list[bytes] = []
        self.connected, self.job = True, "01000000"

    def is_initialized(self) -> bool:
        return self.connected

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(
            get_node_id=lambda: "node", get_job_id=lambda: self.job, get_accelerator_ids=lambda: {"GPU": []}
        )

    def put(self, value: Any) -> int:
        self.objects.append(cloudpickle.dumps(value))
        return len(self.objects) - 1

    def get(self, reference: int) -> Any:
        return pickle.loads(self.objects[reference])


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A connection to Ray, and a process that has not built anything."""
    fake, kept = FakeRay(), WorldCache()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_session, "_WORLD_STORE", type(ray_session._WORLD_STORE)())
    for module in (ray_session, world):
        monkeypatch.setattr(module, "WORLD_CACHE", kept)
    return fake


def in_another_process(monkeypatch: pytest.MonkeyPatch) -> WorldCache:
    """From here on nothing is built yet, and nothing can be."""
    kept = WorldCache()
    for module in (ray_session, world):
        monkeypatch.setattr(module, "WORLD_CACHE", kept)
    monkeypatch.setattr(World, "__init__", lambda *_: pytest.fail("the actor built a world of its own"))
    return kept


def context(partition_id: int) -> Context:
    return Context(
        run_id=1, node_id=9, node_config={"partition-id": partition_id}, state=RecordDict(), run_config={}
    )  # fmt: skip


@pytest.mark.parametrize("scenario", [SMOKE, PHONES], ids=["xia", "phones"])
def test_an_actor_takes_the_servers_world_and_its_clients_do_the_same(
    scenario: Scenario, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = world_of(scenario)
    config = {"round": 3, "needs": "loss,gradient,local_accuracy"}
    expected = []
    for client in (built.client(k) for k in (0, 7)):
        trained = client.fit(built.initial_arrays(), dict(config))
        expected.append((client.get_properties({}), trained, client.evaluate(built.initial_arrays(), {})))
    sent = cloudpickle.dumps(ScenarioApp(SameScenario(scenario)))
    in_another_process(monkeypatch)
    app = pickle.loads(sent)
    receive_world(app._shared)
    for k, (properties, (arrays, count, metrics), evaluation) in zip((0, 7), expected, strict=True):
        client = client_of(scenario, context(k))
        assert client.get_properties({}) == properties
        ours, our_count, our_metrics = client.fit(built.initial_arrays(), dict(config))
        assert [a.tobytes() for a in ours] == [a.tobytes() for a in arrays]
        assert (our_count, our_metrics) == (count, metrics)
        assert client.evaluate(built.initial_arrays(), {}) == evaluation


def test_the_app_takes_the_world_over_when_it_answers(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    world_of(SMOKE)
    sent = cloudpickle.dumps(ScenarioApp(SameScenario(SMOKE)))
    kept = in_another_process(monkeypatch)
    app = pickle.loads(sent)
    app._apps = {"legacy": lambda message, context: (message, kept.latest is not None)}
    assert app("hello", context(0)) == ("hello", True)


def test_a_world_is_put_away_once_a_connection_however_many_messages_there_are(ray: FakeRay) -> None:
    world_of(SMOKE)
    offers = [share_world() for _ in range(5)]
    assert offers == [SharedWorld(SMOKE.model_dump_json(), 0)] * 5
    ray.job = "02000000"  # Ray was started anew: the old reference is nothing to the new one
    assert share_world() == share_world() == SharedWorld(SMOKE.model_dump_json(), 1)
    world_of(PHONES)
    assert share_world() == SharedWorld(PHONES.model_dump_json(), 2)
    assert len(ray.objects) == 3


def test_an_app_that_was_offered_a_world_passes_the_same_offer_on(ray: FakeRay) -> None:
    app = ScenarioApp(SameScenario(SMOKE), SharedWorld("a", 5))
    assert pickle.loads(cloudpickle.dumps(app))._shared == SharedWorld("a", 5)


def test_without_ray_or_a_world_nothing_is_offered(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_world() is None  # no world yet
    world_of(SMOKE)
    ray.connected = False
    assert share_world() is None
    monkeypatch.delitem(sys.modules, "ray")
    assert share_world() is None
    app = pickle.loads(cloudpickle.dumps(ScenarioApp(SameScenario(SMOKE))))
    assert app._shared is None
    assert ray.objects == []


def test_a_world_that_cannot_be_pickled_is_built_by_each_actor(
    ray: FakeRay, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn(World):
        def for_clients(self) -> World:
            raise TypeError("cannot pickle 'generator' object")

    monkeypatch.setattr(world, "World", Stubborn)
    world_of(SMOKE)
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        assert [share_world() for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "each actor builds the data by itself, as they cannot be pickled: cannot pickle 'generator' object"
    ]


def test_clients_are_not_given_what_no_client_sees() -> None:
    whole = World(SMOKE)
    part = whole.for_clients()
    assert len(part.dataset.validation) == len(part.dataset.test) == 0
    assert part.dataset.train is whole.dataset.train  # no copy
    assert len(whole.dataset.test) > 0
    assert len(whole.dataset.validation) > 0
    for ours, theirs in zip(part.examples(3), whole.examples(3), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
