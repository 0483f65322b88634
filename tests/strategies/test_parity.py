"""The same clients through both of Flower's APIs and a third adapter: the same choices, history and model."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import create, names
from fedsel_flwr.simulations.on_flower.app import drive
from fedsel_flwr.simulations.scenario_files import load_scenario
from tests.processes import ROOT, Command, run_python
from tests.simulations import inprocess
from tests.strategies import flower_world
from tests.strategies import numpy_world as world
from tests.strategies.either_api import make
from tests.strategies.flower_world import comparable


def _played(api: str, name: str, base: Any = None, params: Any = None, **options: Any) -> tuple[Any, Any]:
    """A strategy, by a selector's or a paper's name, and its models; the third adapter drives the core alone."""
    flower = "legacy" if api == "third" else api
    options = {"max_latency": world.MAX_LATENCY, "validation": world.validation(), "availability": world.available} | (
        options if name in names() else {**(params or {}), **options}
    )
    selector: Any = name
    if name in names():
        selector = create(name, **{**world.selector_params(name), **(params or {})})
        options = {"learning_rate": world.ETA, **options}
    strategy = make(flower, selector, base or flower_world.base(flower), **options)
    if api == "third":
        return strategy, world.play_stacked(strategy.core, world.ROUNDS)
    return strategy, flower_world.play(api, strategy, world.ROUNDS)


def _assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    (strategy, models), (another, others) = one, other
    assert comparable(strategy.history) == comparable(another.history)
    assert [r.probe_j for r in strategy.history.rounds] == [r.probe_j for r in another.history.rounds]
    for ours, theirs in zip(models, others, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    own, state = strategy.selector.state_dict(), another.selector.state_dict()
    assert own.keys() == state.keys()
    for key in own:
        np.testing.assert_allclose(own[key], state[key], rtol=1e-9, atol=1e-9, err_msg=key)


PAPERS: list[tuple[str, dict[str, Any]]] = [
    ("CSUCB", {"clients_per_round": 3, "seed": 3}),
    ("CSUCBQ", {"clients_per_round": 3, "seed": 3, "queue_weight": 0.1}),
    ("BSFL", {"clients_per_round": 3, "seed": 3, "min_latency": 0.1, "alpha": 2.0}),
    ("FedCA", {"clients_per_round": 3, "seed": 3}),
    ("FedCA", {"clients_per_round": 4, "seed": 1, "score": "accuracy", "averaging": "fedpdp-exact"}),
    ("FedCA", {"clients_per_round": 3, "seed": 2, "averaging": "fedavg-absent"}),
    ("FedCM", {"clients_per_round": 3, "seed": 3}),
    ("FedCM", {"clients_per_round": 3, "seed": 3, "sampler": "ts", "score": "accuracy"}),
    ("PCZFL", {"warmup_rounds": 3, "uncertainty": 0.01, "seed": 3, "channels": 3}),
    ("PCZFL", {"uncertainty": 0.01, "seed": 3, "clients_per_round": 2}),
    ("GPFL", {"clients_per_round": 3, "total_rounds": world.ROUNDS, "learning_rate": world.ETA, "seed": 3}),
    (
        "GPFL",
        {"clients_per_round": 2, "total_rounds": world.ROUNDS, "learning_rate": 0.1, "momentum": 0.9,
         "loss_sign": "paper", "seed": 5, "channels": 3},
    ),
]  # fmt: skip
FILTERED: dict[str, Any] = {"filter": Filter(score="loss"), "averaging": "fedpdp"}
CASES: list[tuple[str, dict[str, Any]]] = [
    *[(name, FILTERED if name.startswith("fedcm") else {}) for name in names()],
    *[
        (name, {"channels": 2, "cooldown": True})
        for name in ("bsfl", "divfl", "oort", "pczfl", "random-by-size", "tifl")
    ],
    *[(name, FILTERED) for name in ("random", "gpfl", "cs-ucb", "bsfl")],
    *[(name, {"warmup_rounds": 3}) for name in ("cs-ucb", "tifl", "power-of-choice")],
    *[(name, {"params": params}) for name, params in PAPERS],
    *[(name, {"params": params, "availability": None, "cooldown": True}) for name, params in PAPERS],
    ("cs-ucb", {"availability": None}),
    ("gpfl", {"averaging": "mean"}),
    ("fedcm-ts", {"filter": Filter(score="accuracy"), "averaging": "fedpdp-exact"}),
    ("random", {"filter": Filter(score="accuracy"), "averaging": "fedavg-absent"}),
    ("cs-ucb", {"averaging": "fedavg-absent"}),
]
LATE = {"over_selection": 0.5, "round_deadline_s": 3.5}


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CASES)])
def test_the_same_choices_and_the_same_models(name: str, options: dict[str, Any]) -> None:
    third, legacy, message = (_played(api, name, **options) for api in ("third", "legacy", "message"))
    history = legacy[0].history
    assert len(history.rounds) == world.ROUNDS
    assert not all(row.completed for row in history.clients)
    assert len({tuple(r.client for r in history.clients if r.round == t) for t in range(1, world.ROUNDS + 1)}) > 1
    assert not np.allclose(legacy[1][-1], world.initial(), atol=0.05)
    _assert_same(third, legacy)
    _assert_same(legacy, message)
    problems = [[row.problem.split(":")[0] for row in one[0].history.clients] for one in (legacy, message)]
    assert problems[0] == problems[1]


@pytest.mark.parametrize(
    "name", ["active-fl", "cs-ucb", "fedcm-ucb", "fedcs", "gpfl", "oort", "pczfl", "pisces", "rpow-d", "tifl"]
)
def test_over_selection_under_a_deadline_too(name: str) -> None:
    if world.selector_params(name)["clients_per_round"] is None:  # decides itself how many
        with pytest.raises(ParameterError, match="over_selection"):
            _played("legacy", name, **LATE)
        return
    options = LATE | (FILTERED if name.startswith("fedcm") else {})
    _assert_same(_played("legacy", name, **options), _played("message", name, **options))


@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("FedProx", {"proximal_mu": 0.1}), ("FedAvgM", {"server_learning_rate": 0.5, "server_momentum": 0.0}),
        ("FedMedian", {}), ("FedTrimmedAvg", {}),
    ],
)  # fmt: skip
def test_other_bases_agree_too(base: str, options: dict[str, Any]) -> None:
    runs = [_played(api, "cs-ucb", base=flower_world.base(api, base, **options)) for api in ("legacy", "message")]
    _assert_same(runs[0], runs[1])


@pytest.mark.parametrize("name", ["random", "cs-ucb"])
def test_the_filter_changes_which_models_are_averaged_but_nobodys_choice(name: str) -> None:
    filtered, plain = _played("third", name, **FILTERED), _played("third", name, averaging="fedpdp")
    assert comparable(filtered[0].history) == comparable(plain[0].history)
    assert not np.allclose(filtered[1][-1], plain[1][-1], atol=1e-3)


FRESH = """
import sys
from fedsel_flwr.selectors import create
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.settings import resolve_settings
from tests.strategies import numpy_world as world
selector = create("gpfl", **world.selector_params("gpfl"))
settings = resolve_settings(
    selector, max_latency=world.MAX_LATENCY, validation=world.validation(), learning_rate=world.ETA,
    availability=world.available,
)
own = SelectionCore(selector, settings)
models = world.play_stacked(own, world.ROUNDS)
assert not {"flwr", "torch", "ray"} & sys.modules.keys(), sorted(sys.modules)
print(len(models), len(own.parts.history.rounds))
"""


def test_core_and_measuring_run_in_a_process_without_flower_and_torch() -> None:
    assert run_python("-c", FRESH).stdout.split() == ["10", "10"]


def _scenario_played(**overrides: Any) -> Any:
    scenario = load_scenario("smoke", overrides)
    return inprocess.play(scenario) if scenario.api == "legacy" else drive(inprocess.grid_of(scenario), scenario)


def _assert_same_results(one: Any, other: Any) -> None:
    assert comparable(one.history) == comparable(other.history)
    assert other.history.problem_counts() == {}
    for a, b in zip(one.arrays, other.arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("selector", "overrides"),
    [
        ("bsfl", {}),
        ("cs-ucb", {"availability.kind": "bernoulli", "availability.probability": 0.7}),
        ("cs-ucb-q", {"aggregation.base": "fedprox", "training.proximal_mu": 0.1}),
        ("local-accuracy", {"wireless.channels": 2}),
        ("random", {"aggregation.base": "fedavgm", "aggregation.server_learning_rate": 0.5}),
    ],
)
def test_a_scenario_through_both_apis(selector: str, overrides: dict[str, Any]) -> None:
    common = {"selector": selector, "rounds": 10, "partition.kind": "dirichlet", **overrides}
    legacy, message = (_scenario_played(**common, api=api) for api in ("legacy", "message"))
    _assert_same_results(legacy, message)
    accuracies = [[r.accuracy for r in h.rounds] for h in (legacy.history, message.history)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.005)


RAY = """
import pickle, sys
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
scenarios = [load_scenario("smoke", {"rounds": 5, "selector": "cs-ucb", "api": api}) for api in sys.argv[2:]]
results = [simulate(scenario) for scenario in scenarios]
with open(sys.argv[1], "wb") as file:
    pickle.dump(results, file)
"""


@pytest.mark.slow
@pytest.mark.e2e_ci
@pytest.mark.timeout(280)
def test_on_ray(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", RAY, str(tmp_path / "result"), "legacy", "message")
    with Command(*argv, folder=tmp_path, cwd=ROOT) as command:
        assert command.wait(240) == 0, command.stderr[-5000:]
    legacy = _scenario_played(rounds=5, selector="cs-ucb", api="legacy")
    assert len(legacy.history.rounds) == 5
    for result in pickle.loads((tmp_path / "result").read_bytes()):
        _assert_same_results(legacy, result)
