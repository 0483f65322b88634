"""The engine on Flower: the smoke scenario, the same run without Ray, and strategies of the user's own."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr import strategies as legacy_api
from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import Selector, create
from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower import app
from fedsel_flwr.simulations.on_flower.building import APIS
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World, world_of
from fedsel_flwr.strategies import RoundRecord
from fedsel_flwr.strategies import message as message_api
from tests.simulations.cut_off_runs import parts, smoke
from tests.simulations.inprocess import in_process
from tests.simulations.ray_runs import SMOKE, outcome

pytestmark = pytest.mark.timeout(150)


# ---- the smoke scenario --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def once() -> Any:
    """A run of the smoke scenario on Flower, without Ray, and what it told ``on_round``."""
    told: list[RoundRecord] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run_simulation", in_process)
        return simulate(SMOKE, on_round=told.append), told


def test_smoke_has_wall_times(once: Any) -> None:
    timing = dict(once[0].timing)
    assert timing.pop("round").tolist() == [1, 2, 3, 4]
    whole = timing.pop("round_ms")
    assert all((column > 0).all() for column in timing.values())
    assert (whole > sum(timing.values())).all()


def test_smoke_learns(once: Any) -> None:
    result, told = once
    assert repr(told) == repr(result.history.rounds)
    assert [(r.round, r.num_available, r.num_selected, r.num_completed) for r in told] == [
        (t, 10, 3, 3) for t in (1, 2, 3, 4)
    ]
    assert len(result.history.clients) == 12
    assert result.history.problem_counts() == {}
    world = World(SMOKE)
    before = world.test(world.initial_arrays())[1]
    accuracies = [r.accuracy for r in result.history.rounds]
    assert accuracies[-1] > before + 0.3, (before, accuracies)
    assert accuracies[-1] == world.test(result.arrays)[1]  # the model that is handed out is the one measured last


@pytest.mark.slow
def test_one_actor_of_ray_makes_the_same_run(once: Any, tmp_path: Path) -> None:
    """With an actor per core: tests/test_cli.py."""
    assert parts(outcome("with_one_actor", tmp_path)) == parts(once[0])


def test_options_are_keywords_with_the_defaults_of_the_table() -> None:
    parameters = inspect.signature(simulate).parameters
    assert {name: one.default for name, one in parameters.items() if name != "scenario"} == {
        option.name: option.default for option in fields(engine.Arguments) if option.name != "scenario"
    }
    assert len(simulate(scenario=smoke(1), quiet=True).history.rounds) == 1
    with pytest.raises(TypeError, match="positional"):
        simulate(SMOKE, "vectorized")  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'rounds'"):
        simulate(SMOKE, rounds=3)  # type: ignore[call-arg]


# ---- faults before and after the rounds ----------------------------------------------------------------------------


@pytest.fixture
def no_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_simulation", lambda **kwargs: pytest.fail("Flower was started"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"selectors": {"bsfl": {"min_latency": -1}}}, "min_latency must be a finite number above 0, got -1"),
        ({"num_clients": 1294}, "1294 clients cannot share 1293 examples"),
    ],
)
def test_faults_come_before_ray_starts(changed: dict[str, Any], said: str, no_flower: None) -> None:
    with pytest.raises(ParameterError, match=said):
        simulate(SMOKE.model_copy(update=changed))


# ---- a strategy of the user's own ----------------------------------------------------------------------------------


class Neighbours(Selector):
    """A selector of the user's: in round t the clients t, t + 1, ..., round and round."""

    name = "neighbours"

    def _select(self, available: IntArray) -> IntArray:
        return available[(self.round + np.arange(self.clients_per_round)) % len(available)]


def neighbours() -> Neighbours:
    return Neighbours(clients_per_round=2, seed=0)


def own_strategy(api: str, **options: Any) -> Any:
    """A selection strategy of this API, which no scenario made."""
    base = APIS[api].make_base(world_of(SMOKE.model_copy(update={"api": api})))
    package = message_api if api == "message" else legacy_api
    return package.SelectionStrategy(neighbours(), base, **options)


def test_a_strategy_with_a_selector_of_ones_own_runs(api: str, without_ray: None) -> None:
    told: list[RoundRecord] = []
    strategy = own_strategy(api, on_round=told.append)
    result = simulate(SMOKE.model_copy(update={"api": api}), strategy=strategy)
    assert result.history is strategy.history
    assert [(row.round, row.client_id) for row in result.history.clients] == [
        (t, str(k)) for t in (1, 2, 3, 4) for k in (t, t + 1)
    ]
    assert all(row.completed for row in result.history.clients)
    assert told == result.history.rounds
    world = World(SMOKE)
    assert told[-1].accuracy == world.test(result.arrays)[1] > world.test(world.initial_arrays())[1]


def test_a_selector_of_ones_own_takes_the_place_of_the_scenarios(api: str, without_ray: None) -> None:
    """Latencies, limit, channels and availability stay the scenario's: round robin is what the scenario makes of it."""
    overrides = {"api": api, "selector": "round-robin", "availability.kind": "bernoulli", "wireless.channels": 2}
    scenario = load_scenario("smoke", overrides)
    told: list[RoundRecord] = []
    own = simulate(scenario, selector=create("round-robin", clients_per_round=3, seed=1), on_round=told.append)
    assert parts(own) == parts(simulate(scenario))
    assert told == own.history.rounds
    mine = simulate(SMOKE.model_copy(update={"api": api}), selector=neighbours())
    assert [row.client_id for row in mine.history.clients] == ["1", "2", "2", "3", "3", "4", "4", "5"]


@pytest.mark.parametrize("own", [False, True])
def test_a_strategy_is_made_once_a_run_unless_it_is_the_users(own: bool, without_ray: None, monkeypatch: Any) -> None:
    """A second one would be thrown away, with the data it measures on."""
    made: list[Any] = []
    original = engine.make_strategy
    for module in (engine, app):
        monkeypatch.setattr(module, "make_strategy", lambda *args: made.append(args) or original(*args))
    simulate(SMOKE, strategy=own_strategy("legacy") if own else None)
    assert len(made) == (not own)


def test_a_strategy_under_which_nobody_ever_completes_ends_in_an_error(without_ray: None) -> None:
    """Flower's own FedAvg sends no round to legacy clients."""
    strategy = legacy_api.SelectionStrategy(neighbours())
    with pytest.raises(RunError, match=r"no client completed in any of 4 rounds. .*key round.*selector= instead of"):
        simulate(SMOKE, strategy=strategy)
    assert len(strategy.history.clients) == 8  # not lost


@pytest.mark.parametrize(("api", "other"), [("legacy", "message"), ("message", "legacy")])
def test_a_strategy_of_the_other_api_is_refused(api: str, other: str, no_flower: None) -> None:
    package = "fedsel_flwr.strategies" + (".message" if api == "message" else "")
    said = rf"strategy must be of the API '{api}', such as {package}\.SelectionStrategy\(\.\.\.\), got "
    with pytest.raises(ParameterError, match=said):
        simulate(SMOKE.model_copy(update={"api": api}), strategy=own_strategy(other))
