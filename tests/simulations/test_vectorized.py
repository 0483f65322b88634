"""The vectorized engine: the choices, the clocks and the models of the clients that train one by one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as flower

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.models import ModelStack
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.selectors import Random, names
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.app import ScenarioApp
from fedsel_flwr.simulations.on_flower.driving import drive
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.vectorized import NamedClient, aggregate, stack_mean
from tests.simulations import inprocess

pytestmark = pytest.mark.timeout(120)
BASELINES = ("power-of-choice", "cpow-d", "rpow-d", "active-fl", "oort", "fedcs", "tifl")


def _scenario(selector: str, rounds: int, **overrides: Any) -> Scenario:
    keys = {"num_clients": 30, "clients_per_round": 5, "clients.energy_score_low": 0.5, "data.local_test_fraction": 0.2}
    return load_scenario("digits", {**keys, "selector": selector, "rounds": rounds, **overrides})


def _same(scenario: Scenario) -> None:
    """Both ways choose the same clients, who take the same time and energy, and end at the same model."""
    alone, together = inprocess.play(scenario), simulate(scenario, engine="vectorized")
    pairs = list(zip(alone.history.clients, together.history.clients, strict=True))
    for one, other in pairs:
        assert (one.round, one.client_id, one.completed, one.kept) == (
            other.round, other.client_id, other.completed, other.kept,
        )  # fmt: skip
        assert (one.latency_s, one.energy_j, one.num_examples) == (other.latency_s, other.energy_j, other.num_examples)
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-3)
    for one_round, other_round in zip(alone.history.rounds, together.history.rounds, strict=True):
        assert (one_round.simulated_s, one_round.probe_s) == (other_round.simulated_s, other_round.probe_s)
        assert one_round.accuracy == pytest.approx(other_round.accuracy, abs=0.006)  # one or two of 360 examples
    difference = max(np.abs(a - b).max() for a, b in zip(alone.arrays, together.arrays, strict=True))
    assert difference <= 1e-4


@pytest.mark.parametrize("selector", ["bsfl", "pczfl"])
def test_as_clients_that_train_one_by_one(selector: str) -> None:
    """Of a model without rectifiers, which a rounding may turn off: over many rounds that would change the model."""
    _same(_scenario(selector, 20, **{"model.name": "logistic"}))


@pytest.mark.parametrize("selector", ["bsfl", "gpfl"])
def test_a_network_as_clients_that_train_one_by_one(selector: str) -> None:
    _same(_scenario(selector, 5))


@pytest.mark.parametrize("selector", BASELINES)
def test_baselines_as_clients_that_train_one_by_one(selector: str) -> None:
    """Twelve clients, four a round: TiFL's profiling ends after three rounds, and it asks again before the seventh."""
    own = {f"selectors.{name}.candidates": 6 for name in ("power-of-choice", "cpow-d", "rpow-d")}
    own |= {"selectors.tifl.tiers": 2, "selectors.tifl.interval": 6}
    _same(_scenario(selector, 8, **{"model.name": "logistic", "num_clients": 12, "clients_per_round": 4, **own}))


@pytest.mark.slow
@pytest.mark.parametrize("selector", names())
def test_every_selector_as_clients_that_train_one_by_one(selector: str) -> None:
    """See above for why the model is logistic. Intervals are so short that each selector's openings end and recur."""
    steps = {"training.momentum": 0.5, "training.proximal_mu": 0.1, "training.weight_decay": 1e-3}
    own = {"selectors.tifl.interval": 5, "selectors.fedcor.warmup_rounds": 3, "selectors.fedcor.interval": 4}
    _same(_scenario(selector, 12, **{"model.name": "logistic", **steps, **own}))


def test_absences_failures_and_waves_are_the_same() -> None:
    _same(_scenario("cs-ucb", 8, **{
        "availability.kind": "bernoulli", "availability.probability": 0.4, "wireless.max_latency_s": 0.4,
        "wireless.channels": 2,
    }))  # fmt: skip


@pytest.mark.parametrize("name", ["phones", "ben-ami-unequal"])
def test_other_worlds_are_the_same(name: str) -> None:
    """Phones that learn digits, and a regression on squared loss."""
    _same(load_scenario(name, {"num_clients": 20, "clients_per_round": 4, "rounds": 5, "selector": "cs-ucb"}))


def test_what_clients_are_asked_for_is_the_same() -> None:
    """A selector of losses: what it learns, and what that costs."""

    class Losses(Random):
        needs = frozenset({"loss", "local_accuracy"})
        client_state: ClassVar = {"_loss": -1.0, "_right": -1.0}

        def _observe(self, report: Any) -> None:
            self._loss[report.clients], self._right[report.clients] = report.loss, report.local_accuracy

    scenario, states = _scenario("random", 3), []
    for engine in ("one by one", "vectorized"):
        selector = Losses(clients_per_round=5, seed=2)
        if engine == "vectorized":
            history = simulate(scenario, engine=engine, selector=selector).history
        else:
            history = inprocess.play(scenario, selector=selector).history
        states.append((selector.state_dict(), [record.round_s for record in history.rounds]))
    assert (states[0][0]["loss"] > 0).any()
    np.testing.assert_allclose(states[0][0]["loss"], states[1][0]["loss"], atol=1e-4)
    np.testing.assert_allclose(states[0][0]["right"], states[1][0]["right"], atol=0.05)
    assert states[0][1] == states[1][1]


@pytest.mark.parametrize("base", ["fedadam", "fedyogi", "fedavgm"])
def test_other_bases_aggregate_through_flowers_types(base: str) -> None:
    _same(_scenario("random", 4, **{"aggregation.base": base}))


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_either_api_of_a_scenario_gives_the_same_run(api: str) -> None:
    """The engine has no use for Flower's messages: the API decides nothing."""
    scenario = _scenario("random", 3)
    expected = simulate(scenario, engine="vectorized")
    got = simulate(scenario.model_copy(update={"api": api}), engine="vectorized")
    assert repr(got.history) == repr(expected.history)
    for one, other in zip(got.arrays, expected.arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_on_round_sees_every_round_and_evaluation_may_be_rare() -> None:
    seen: list[tuple[int, bool]] = []
    scenario = _scenario("random", 5, evaluation_every=2)
    simulate(
        scenario, engine="vectorized", on_round=lambda record: seen.append((record.round, np.isfinite(record.accuracy)))
    )
    assert seen == [(1, False), (2, True), (3, False), (4, True), (5, True)]


@pytest.mark.parametrize("engine", ["one by one", "vectorized", "message"])
def test_a_budget_ends_the_run_and_what_flower_counts_after_it_leaves_no_trace(engine: str) -> None:
    """Evaluated are every second round, and the one that ends the run."""
    scenario = _scenario("cs-ucb", 9, evaluation_every=2)
    whole = simulate(scenario, engine="vectorized").history
    limit = (whole.rounds[3].simulated_s + whole.rounds[4].simulated_s) / 2  # used up in round 5
    seen: list[int] = []
    short = scenario.model_copy(update={"simulated_s": limit, "api": "message" if engine == "message" else "legacy"})
    if engine == "vectorized":
        history = simulate(short, engine=engine, on_round=lambda record: seen.append(record.round)).history
        assert seen == [1, 2, 3, 4, 5]
    else:
        history = inprocess.play(short).history if engine == "one by one" else _messages(short).history
    assert [record.round for record in history.rounds] == [1, 2, 3, 4, 5]
    assert [np.isfinite(record.accuracy) for record in history.rounds] == [False, True, False, True, True]
    assert [record.client_id for record in history.clients] == [
        record.client_id for record in whole.clients if record.round <= 5
    ]
    joules = scenario.model_copy(update={"joules": whole.rounds[1].total_energy_j})
    assert len(simulate(joules, engine="vectorized").history.rounds) == 2


def _messages(scenario: Scenario) -> Any:
    app = ScenarioApp(lambda context: scenario)
    return drive(inprocess.AppGrid(app, scenario.num_clients), scenario)


def test_a_selector_may_say_that_it_is_done() -> None:
    class Twice(Random):
        @property
        def done(self) -> bool:
            return self.round >= 2

    result = simulate(_scenario("random", 9), engine="vectorized", selector=Twice(clients_per_round=3, seed=0))
    assert [record.round for record in result.history.rounds] == [1, 2]
    assert np.isfinite(result.history.rounds[-1].accuracy)


@pytest.mark.parametrize(("key", "value"), [("latency_mode", "measured"), ("delay", "sleep")])
def test_what_only_single_clients_can_do_is_refused(key: str, value: str) -> None:
    with pytest.raises(ParameterError, match=rf"clients\.{key} = '{value}'"):
        simulate(_scenario("random", 1, **{f"clients.{key}": value}), engine="vectorized")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ParameterError, match="engine must be one of ray, vectorized, got 'steam'"):
        simulate(_scenario("random", 1), engine="steam")


@pytest.mark.parametrize("base", [flower.FedAvg(), flower.FedProx(proximal_mu=0.1)])
def test_the_mean_of_a_stack_is_flowers_own(base: Any) -> None:
    rng = np.random.default_rng(3)
    stack = ModelStack([rng.normal(size=(4, *shape)).astype(np.float32) for shape in ((64, 30), (30,), ())])
    weights = np.array([10.0, 1.0, 250.0, 37.0])
    results = [
        (NamedClient(str(i)), FitRes(Status(Code.OK, ""), ndarrays_to_parameters(list(one)), int(weight), {}))
        for i, (one, weight) in enumerate(zip(stack.as_list(), weights, strict=True))
    ]
    parameters, _ = base.aggregate_fit(1, results, [])
    assert parameters is not None
    for ours, theirs in zip(stack_mean(stack, weights), parameters_to_ndarrays(parameters), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_too_few_models_for_krum_are_refused() -> None:
    from fedsel_flwr.errors import RunError

    outcome = Outcome(results={}, usable=["0"], enough=True, models=ModelStack([np.zeros((1, 2))]))
    with pytest.raises(RunError, match="Krum with f = 1"):
        aggregate(flower.Krum(num_malicious_clients=1, num_clients_to_keep=1), 1, outcome)
