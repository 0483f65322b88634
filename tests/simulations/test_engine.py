"""The Ray engine: the smoke scenario, the same run twice, strategies of the user's, and clients that lie or break."""

from __future__ import annotations

import math
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.server.strategy import FedAvg

from fedsel_flwr import strategies as legacy_api
from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import Selector, create
from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower import building, driving
from fedsel_flwr.simulations.on_flower.flower_apis import APIS
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World, world_of
from fedsel_flwr.strategies import RoundRecord
from fedsel_flwr.strategies import message as message_api
from tests.processes import ROOT, Command
from tests.simulations.inprocess import in_process, play
from tests.simulations.ray_runs import KINDS, MAX_LATENCY_S, ROUNDS, SMOKE

pytestmark = pytest.mark.timeout(150)

HONEST = [k for k, kind in enumerate(KINDS) if kind == "honest"]
KEEPS_UPDATE = ("honest", "latency-negative", "latency-text")
ASKED = {kind: [1] if kind == "late" else [1, 2, 3] for kind in KINDS}
"""The rounds in which each kind is asked: the late one sleeps for three rounds, and is not asked while it is busy."""
EXPECTED = {
    "nan": ["arrays: not finite"],
    "shape": ["arrays: expected shape"],
    "latency-negative": ["latency: -1.0 cannot be used"],
    "latency-text": ["latency: 'fast' cannot be used"],
    "latency-infinite": ["late: inf s"],
    "nothing": ["arrays: cannot be decoded", "latency: not reported"],
    "raises": ["exception: "],
    "late": ["no answer within 2 s"],  # Flower's legacy server raises for an answer that is not there in time
}


def outcome(name: str, folder: Path) -> Any:
    """What a run of tests/simulations/ray_runs.py pickled."""
    result = folder / "result"
    argv = (sys.executable, "-m", "tests.simulations.ray_runs", name, str(result))
    command = Command(*argv, folder=folder, cwd=ROOT)
    try:
        status = command.wait(140)
        assert status == 0, command.stderr[-5000:]
        return pickle.loads(result.read_bytes())
    finally:
        command.kill()


# ---- the smoke scenario --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of the smoke scenario, with an actor per core, and what it told ``on_round``."""
    return outcome("once", tmp_path_factory.mktemp("once"))


def test_smoke_has_latency_and_energy_per_client(once: Any) -> None:
    history = once[0].history
    assert [(r.round, r.num_available, r.num_selected, r.num_completed) for r in history.rounds] == [
        (t, 10, 3, 3) for t in (1, 2, 3, 4)
    ]
    assert len(history.clients) == 12
    for row in history.clients:
        delays = SMOKE.system_model().draw(int(row.client_id), row.round)
        assert row.latency_s == delays.download_s + delays.compute_s + delays.upload_s
        assert row.energy_j == SMOKE.system_model().energy_j(delays)
        assert row.energy_j > 0
        assert (row.completed, row.problem) == (True, "")
        assert math.isfinite(row.train_loss)
    assert history.rounds[-1].total_energy_j == pytest.approx(sum(row.energy_j for row in history.clients))
    assert history.problem_counts() == {}


def test_smoke_learns(once: Any) -> None:
    result = once[0]
    world = World(SMOKE)
    before = world.test(world.initial_arrays())[1]
    accuracies = [r.accuracy for r in result.history.rounds]
    assert accuracies[-1] > before + 0.3, (before, accuracies)
    assert accuracies[-1] == world.test(result.arrays)[1]  # the model that is handed out is the one measured last


def assert_the_same_run(first: Any, other: Any) -> None:
    """Bit by bit: choices, latencies, losses and the model."""
    assert repr(other.history.clients) == repr(first.history.clients)
    assert repr(other.history.rounds) == repr(first.history.rounds)
    assert [a.tobytes() for a in other.arrays] == [a.tobytes() for a in first.arrays]
    assert [a.dtype for a in other.arrays] == [a.dtype for a in first.arrays]


def test_the_same_scenario_makes_the_same_run_without_ray(once: Any) -> None:
    assert_the_same_run(once[0], play(SMOKE))


@pytest.mark.slow
def test_other_actors_make_the_same_run(tmp_path: Path) -> None:
    assert_the_same_run(outcome("with_one_actor", tmp_path), play(SMOKE))


def test_rounds_are_told_as_they_end(once: Any) -> None:
    first, told = once
    assert repr(told) == repr(first.history.rounds)


# ---- faults before and after the rounds ----------------------------------------------------------------------------


def test_faults_come_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_simulation", lambda **kwargs: pytest.fail("Flower was started"))
    faulty = SMOKE.model_copy(update={"selectors": {"bsfl": {"min_latency": -1}}})
    with pytest.raises(ParameterError, match="min_latency must be a finite number above 0, got -1"):
        simulate(faulty)
    with pytest.raises(ParameterError, match="1294 clients cannot share 1293 examples"):
        simulate(SMOKE.model_copy(update={"num_clients": 1294}))


def test_a_simulation_that_breaks_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_simulation", lambda **kwargs: None)
    with pytest.raises(RunError, match="ended after 0 of 4 rounds"):
        simulate(SMOKE)


# ---- a strategy of the user's own ----------------------------------------------------------------------------------


class Neighbours(Selector):
    """A selector of the user's: in round t the clients t, t + 1, ..., round and round."""

    name = "neighbours"

    def _select(self, available: IntArray) -> IntArray:
        return available[(self.round + np.arange(self.clients_per_round)) % len(available)]


def own_strategy(api: str, **options: Any) -> Any:
    """A selection strategy of this API, which no scenario made."""
    scenario = SMOKE.model_copy(update={"api": api})
    base = APIS[api].make_base(world_of(scenario))
    package = message_api if api == "message" else legacy_api
    return package.SelectionStrategy(Neighbours(clients_per_round=2, seed=0), base, **options)


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_a_strategy_with_a_selector_of_ones_own_runs(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_simulation", in_process)
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


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_a_selector_of_ones_own_takes_the_place_of_the_scenarios(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latencies, limit, channels and availability stay the scenario's: round robin is what the scenario makes of it."""
    monkeypatch.setattr(engine, "run_simulation", in_process)
    overrides = {"api": api, "selector": "round-robin", "availability.kind": "bernoulli", "wireless.channels": 2}
    scenario = load_scenario("smoke", overrides)
    told: list[RoundRecord] = []
    own = simulate(scenario, selector=create("round-robin", clients_per_round=3, seed=1), on_round=told.append)
    theirs = simulate(scenario)
    assert repr(own.history.clients) == repr(theirs.history.clients)
    assert repr(own.history.rounds) == repr(theirs.history.rounds)
    assert told == own.history.rounds
    mine = simulate(SMOKE.model_copy(update={"api": api}), selector=Neighbours(clients_per_round=2, seed=0))
    assert [row.client_id for row in mine.history.clients] == ["1", "2", "2", "3", "3", "4", "4", "5"]


@pytest.mark.parametrize("own", [False, True])
def test_a_strategy_is_checked_or_made_once_a_run(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would be thrown away, with the data it measures on."""
    monkeypatch.setattr(engine, "run_simulation", in_process)
    calls: list[str] = []
    for module, name in ((engine, "resolve_strategy"), (building, "make_strategy"), (driving, "make_strategy")):
        original = getattr(module, name)

        def counted(*args: Any, original: Any = original, name: str = name) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(module, name, counted)
    simulate(SMOKE, strategy=own_strategy("legacy") if own else None)
    assert calls == (["resolve_strategy"] if own else ["resolve_strategy", "make_strategy"])


def test_a_strategy_under_which_nobody_ever_completes_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own FedAvg sends no round to legacy clients."""
    monkeypatch.setattr(engine, "run_simulation", in_process)
    strategy = legacy_api.SelectionStrategy(Neighbours(clients_per_round=2, seed=0))
    with pytest.raises(RunError, match=r"no client completed in any of 4 rounds, .*key round.*selector= in place of"):
        simulate(SMOKE, strategy=strategy)
    assert len(strategy.history.clients) == 8  # not lost


@pytest.fixture
def no_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_simulation", lambda **kwargs: pytest.fail("Flower was started"))


def test_on_round_belongs_to_a_strategy_of_ones_own(no_flower: None) -> None:
    with pytest.raises(ParameterError, match="strategy and on_round cannot be given together"):
        simulate(SMOKE, strategy=own_strategy("legacy"), on_round=lambda record: None)


def test_a_selector_belongs_to_a_strategy_of_ones_own(no_flower: None) -> None:
    with pytest.raises(ParameterError, match="strategy and selector cannot be given together"):
        simulate(SMOKE, strategy=own_strategy("legacy"), selector=Neighbours(clients_per_round=2))


def test_the_name_of_a_scenario_is_no_scenario(no_flower: None) -> None:
    with pytest.raises(ParameterError, match=r"scenario must be a Scenario, got str"):
        simulate("smoke")  # type: ignore[arg-type]


@pytest.mark.parametrize(("api", "other"), [("legacy", "message"), ("message", "legacy")])
def test_a_strategy_of_the_other_api_is_refused(api: str, other: str, no_flower: None) -> None:
    package = "fedsel_flwr.strategies" + (".message" if api == "message" else "")
    said = rf"strategy .* API '{api}', got .*Strategy\. .*{package}\.SelectionStrategy\("
    with pytest.raises(ParameterError, match=said):
        simulate(SMOKE.model_copy(update={"api": api}), strategy=own_strategy(other))


@pytest.mark.parametrize("thing", [FedAvg(), create("random", clients_per_round=2), "bsfl"])
def test_what_is_no_selection_strategy_is_refused(thing: object, no_flower: None) -> None:
    """A strategy of Flower's own has no history, and a selector or its name is no strategy."""
    with pytest.raises(ParameterError, match=rf"strategy must be .*{type(thing).__name__}\."):
        simulate(SMOKE, strategy=thing)


# ---- hostile clients -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three rounds of three honest clients and one of each other kind, all of them chosen whenever they are free."""
    return outcome("hostile", tmp_path_factory.mktemp("hostile"))


@pytest.mark.slow
def test_hostile_the_run_goes_on(aftermath: Any) -> None:
    rounds = aftermath["history"].rounds
    assert [r.round for r in rounds] == [1, 2, 3]
    assert [r.num_selected for r in rounds] == [sum(r.round in ASKED[kind] for kind in KINDS) for r in rounds]
    assert [r.num_completed for r in rounds] == [sum(kind in KEEPS_UPDATE for kind in KINDS)] * ROUNDS
    assert aftermath["ids"] == [str(k) for k in range(len(KINDS))]


@pytest.mark.slow
def test_hostile_only_usable_updates_reach_the_model(aftermath: Any) -> None:
    """Each usable update adds one to every number."""
    for array, shape in zip(aftermath["arrays"], [(3, 2), (2,)], strict=True):
        np.testing.assert_array_equal(array, np.full(shape, ROUNDS, np.float32))
    assert [r.accuracy for r in aftermath["history"].rounds] == [1.0, 2.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPECTED)
def test_hostile_each_kind_is_counted_and_named(kind: str, aftermath: Any) -> None:
    k = KINDS.index(kind)
    rows = [row for row in aftermath["history"].clients if row.client_id == str(k)]
    assert [row.round for row in rows] == ASKED[kind]
    # Simulated delays are no faults: the log counts these once, after the run.
    named = kind != "latency-infinite"
    for row in rows:
        problems = row.problem.split("; ")
        assert len(problems) == len(EXPECTED[kind]), row
        assert all(map(str.startswith, problems, EXPECTED[kind])), row
        assert row.completed == (kind in KEEPS_UPDATE)
        assert row.latency_s == MAX_LATENCY_S
        for problem in EXPECTED[kind]:
            said = f"round {row.round}, client {k}: {problem}"
            assert sum(message.startswith(said) for message in aftermath["messages"]) == named, said


@pytest.mark.slow
def test_hostile_history_adds_up(aftermath: Any) -> None:
    expected = Counter(p.split(":")[0] for kind, named in EXPECTED.items() for p in named * len(ASKED[kind]))
    assert aftermath["history"].problem_counts() == expected
    for row in aftermath["history"].clients:
        if int(row.client_id) in HONEST:
            assert (row.completed, row.problem, row.energy_j) == (True, "", 0.25)
            assert row.latency_s == 0.5 + 0.25 * int(row.client_id)


@pytest.mark.slow
def test_hostile_the_selector_knows_the_honest_from_honest_rows_alone(aftermath: Any) -> None:
    state = aftermath["state"]
    for k, kind in enumerate(KINDS):
        latency = 0.5 + 0.25 * k if kind == "honest" else MAX_LATENCY_S
        assert state["mean"][k] == pytest.approx(1 - latency / MAX_LATENCY_S, abs=1e-15)
        assert state["plays"][k] == len(ASKED[kind])
    assert all(np.isfinite(np.asarray(value, dtype=float)).all() for value in state.values())
