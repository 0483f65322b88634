"""The vectorized engine: the choices, the clocks, the models and the answers of clients that train one by one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as flower

from fedsel_flwr.clients.answering import answer
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.models import ModelStack
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.selectors import Random, names
from fedsel_flwr.simulations import vectorized
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.app import drive
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.vectorized import BatchedEvaluation, aggregate, probe_clients, run_vectorized, stack_mean
from fedsel_flwr.simulations.worlds.data import Split
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.strategies.wrapping import bases
from tests.simulations import inprocess

pytestmark = pytest.mark.timeout(120)


def _scenario(selector: str, rounds: int, **overrides: Any) -> Scenario:
    keys = {"num_clients": 30, "clients_per_round": 5, "clients.energy_score_low": 0.5, "data.local_test_fraction": 0.2}
    return load_scenario("digits", {**keys, "selector": selector, "rounds": rounds, **overrides})


def _same(scenario: Scenario) -> None:
    """Both ways choose the same clients, who take the same time and energy, and end at the same model."""
    alone, together = inprocess.play(scenario), simulate(scenario, engine="vectorized")
    exact = ("round", "client_id", "completed", "kept", "latency_s", "energy_j", "num_examples")
    for one, other in zip(alone.history.clients, together.history.clients, strict=True):
        assert [getattr(one, key) for key in exact] == [getattr(other, key) for key in exact]
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-3)
    for one_round, other_round in zip(alone.history.rounds, together.history.rounds, strict=True):
        assert (one_round.simulated_s, one_round.probe_s) == (other_round.simulated_s, other_round.probe_s)
        assert one_round.accuracy == pytest.approx(other_round.accuracy, abs=0.006)  # one or two of 360 examples
    assert max(np.abs(a - b).max() for a, b in zip(alone.arrays, together.arrays, strict=True)) <= 1e-4


@pytest.mark.parametrize(
    "selector", ["bsfl", "pczfl", "power-of-choice", "cpow-d", "rpow-d", "active-fl", "oort", "pisces", "fedcs", "tifl"]
)
def test_as_clients_that_train_one_by_one(selector: str) -> None:
    """Of a model without rectifiers, which a rounding may turn off: over many rounds that would change the model.

    Twelve clients, four a round: TiFL's profiling ends after three rounds, and it asks again before the seventh.
    """
    own = {f"selectors.{name}.candidates": 6 for name in ("power-of-choice", "cpow-d", "rpow-d")}
    own |= {"selectors.tifl.tiers": 2, "selectors.tifl.interval": 6}
    _same(_scenario(selector, 8, **{"model.name": "logistic", "num_clients": 12, "clients_per_round": 4, **own}))


def _in_double(scenario: Scenario) -> World:
    """A scenario's world whose examples and model are in double precision."""

    def doubled(split: Split) -> Split:
        split = copy.copy(split)  # a split refuses other types than single precision
        object.__setattr__(split, "inputs", split.inputs.astype(np.float64))
        return split

    world = World(scenario)
    held = world.dataset
    parts = {name: doubled(getattr(held, name)) for name in ("train", "validation", "test")}
    world.dataset = replace(held, **parts)
    world.model.double()
    world._initial = [array.astype(np.float64) for array in world._initial]
    return world


@pytest.mark.parametrize("selector", ["gpfl", "fedcm-ts"])
def test_in_double_precision_both_ways_are_the_same(selector: str) -> None:
    """A network of rectifiers, which the rounding of single precision may turn off or on."""
    scenario = _scenario(selector, 20, **{"num_clients": 40, "training.local_epochs": 2})
    alone, world = inprocess.play(scenario, _in_double(scenario)), _in_double(scenario)
    together = run_vectorized(world, make_strategy(world))
    chosen = [[(row.round, row.client_id) for row in one.history.clients] for one in (alone, together)]
    assert chosen[0] == chosen[1]
    assert max(np.abs(a - b).max() for a, b in zip(alone.arrays, together.arrays, strict=True)) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("selector", names())
def test_every_selector_as_clients_that_train_one_by_one(selector: str) -> None:
    """See above for why the model is logistic. Intervals are so short that each selector's openings end and recur."""
    steps = {"training.momentum": 0.5, "training.proximal_mu": 0.1, "training.weight_decay": 1e-3}
    own = {"selectors.tifl.interval": 5, "selectors.fedcor.warmup_rounds": 3, "selectors.fedcor.interval": 4}
    _same(_scenario(selector, 12, **{"model.name": "logistic", **steps, **own}))


AWAY = {
    "availability.kind": "bernoulli", "availability.probability": 0.4, "wireless.max_latency_s": 0.4,
    "wireless.channels": 2,
}  # fmt: skip
TWENTY = {"num_clients": 20, "clients_per_round": 4, "rounds": 5, "selector": "cs-ucb"}
OTHERS = {
    "absences, failures and waves": _scenario("cs-ucb", 8, **AWAY),
    "phones that learn digits": load_scenario("phones", TWENTY),
    "a regression on squared loss": load_scenario("ben-ami-unequal", TWENTY),
    **{base: _scenario("random", 4, **{"aggregation.base": base}) for base in ("fedadam", "fedyogi", "fedavgm")},
}


@pytest.mark.parametrize("scenario", OTHERS.values(), ids=OTHERS)
def test_other_scenarios_are_the_same(scenario: Scenario) -> None:
    _same(scenario)


def test_the_api_of_a_scenario_decides_nothing() -> None:
    """The engine has no use for Flower's messages. Evaluation may be rare."""
    scenario, seen = _scenario("random", 5, evaluation_every=2), list[tuple[int, bool]]()
    expected, got = (
        simulate(
            scenario.model_copy(update={"api": api}), engine="vectorized",
            on_round=lambda record: seen.append((record.round, bool(np.isfinite(record.accuracy)))),
        )
        for api in ("legacy", "message")
    )  # fmt: skip
    assert repr(got.history) == repr(expected.history)
    assert [one.tobytes() for one in got.arrays] == [one.tobytes() for one in expected.arrays]
    assert seen == [(1, False), (2, True), (3, False), (4, True), (5, True)] * 2


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
    elif engine == "one by one":
        history = inprocess.play(short).history
    else:
        history = drive(inprocess.grid_of(short), short).history
    assert [record.round for record in history.rounds] == [1, 2, 3, 4, 5]
    assert [np.isfinite(record.accuracy) for record in history.rounds] == [False, True, False, True, True]
    until = [record.client_id for record in whole.clients if record.round <= 5]
    assert [record.client_id for record in history.clients] == until
    joules = scenario.model_copy(update={"joules": whole.rounds[1].total_energy_j})
    assert len(simulate(joules, engine="vectorized").history.rounds) == 2


def test_a_selector_may_say_that_it_is_done() -> None:
    class Twice(Random):
        @property
        def done(self) -> bool:
            return self.round >= 2

    result = simulate(_scenario("random", 9), engine="vectorized", selector=Twice(clients_per_round=3, seed=0))
    assert [record.round for record in result.history.rounds] == [1, 2]
    assert np.isfinite(result.history.rounds[-1].accuracy)


@pytest.mark.parametrize(
    ("keys", "engine", "said"),
    [
        ({"clients.latency_mode": "measured"}, "vectorized", r"clients\.latency_mode = 'measured'"),
        ({"clients.delay": "sleep"}, "vectorized", r"clients\.delay = 'sleep'"),
        ({}, "steam", "engine must be one of ray, vectorized, got 'steam'"),
    ],
)
def test_what_only_single_clients_can_do_and_other_engines_are_refused(keys: Any, engine: str, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        simulate(_scenario("random", 1, **keys), engine=engine)


@pytest.mark.parametrize("base", [flower.FedAvg(), flower.FedProx(proximal_mu=0.1)])
def test_the_mean_of_a_stack_is_flowers_own(base: Any) -> None:
    rng = np.random.default_rng(3)
    stack = ModelStack([rng.normal(size=(4, *shape)).astype(np.float32) for shape in ((64, 30), (30,), ())])
    weights = np.array([10.0, 1.0, 250.0, 37.0])
    results = [
        (bases.NamedClient(str(i)), FitRes(Status(Code.OK, ""), ndarrays_to_parameters(list(one)), int(weight), {}))
        for i, (one, weight) in enumerate(zip(stack.as_list(), weights, strict=True))
    ]
    parameters, _ = base.aggregate_fit(1, results, [])
    assert parameters is not None
    for ours, theirs in zip(stack_mean(stack, weights), parameters_to_ndarrays(parameters), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_too_few_models_for_krum_are_refused() -> None:
    outcome = Outcome(results={}, usable=["0"], enough=True, models=ModelStack([np.zeros((1, 2))]))
    with pytest.raises(RunError, match="Krum with f = 1"):
        aggregate(flower.Krum(num_malicious_clients=1, num_clients_to_keep=1), 1, outcome)


# ---- answers ------------------------------------------------------------------------------------------------------

COLUMNS = (
    "local_accuracy", "loss,rms_loss", "gradient,loss", "sketch,loss", "batch_loss", "batch_loss,local_accuracy",
    "gradient,batch_loss",
)  # fmt: skip


@pytest.mark.parametrize("name", ["digits", "phones", "ben-ami-linear"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_probe_costs_and_says_the_same(name: str, columns: str) -> None:
    """Of a few clients, whose rows are gathered, and of all, whose outputs come from all examples."""
    keys = {"num_clients": 10, "clients_per_round": 2, "data.local_test_fraction": 0.25 if name == "digits" else 0.0}
    world = World(load_scenario(name, keys))
    arrays = [array + np.float32(0.01) for array in world.initial_arrays()]
    config: dict[str, str | int] = {"probe": columns, "round": 3}
    for ids in ([7, 2], list(range(10))):
        for k, together in zip(ids, probe_clients(world, arrays, ids, config), strict=True):
            loss, _, metrics = world.client(k).evaluate(arrays, dict(config))
            alone: dict[str, Any] = {"loss": loss, **metrics}
            assert together.keys() == alone.keys()
            for key in together.keys() - {"gradient"}:
                if key in ("latency_s", "energy_j", "client_id", "sketch"):
                    assert together[key] == alone[key], key
                else:
                    assert together[key] == pytest.approx(alone[key], rel=1e-5, abs=1e-7), key


def test_answers_of_a_training_round() -> None:
    world = World(load_scenario("digits", {"num_clients": 10, "clients_per_round": 2, "data.local_test_fraction": 0.2}))
    arrays, asked = world.initial_arrays(), {"loss", "rms_loss", "local_accuracy"}
    together = BatchedEvaluation(world, arrays, [4, 1], asked)
    set_arrays(world.model, arrays)
    for k in (1, 4):
        alone = answer(world.model, asked, *world.examples(k), world.objective)
        assert together.columns(k, asked) == pytest.approx(alone, rel=1e-5)
        for column in asked:  # the model sees only the examples that the column is about
            (one,) = BatchedEvaluation(world, arrays, [4, 1], {column}).columns(k, {column}).items()
            assert one == (column, pytest.approx(alone[column], rel=1e-5))


@pytest.mark.parametrize("selector", ["oort", "active-fl", "power-of-choice", "cpow-d", "local-accuracy", "nccb"])
def test_answers_are_the_same_in_blocks_of_clients(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that train and clients that are probed, more than have their rows in memory at once."""
    keys: dict[str, Any] = {"selector": selector, "clients_per_round": 5, "data.local_test_fraction": 0.2}
    if selector in ("power-of-choice", "cpow-d"):
        keys[f"selectors.{selector}.candidates"] = 8
    scenario = load_scenario("smoke", keys)
    whole = simulate(scenario, engine="vectorized")
    monkeypatch.setattr(vectorized, "AT_ONCE", 2)
    blocks = simulate(scenario, engine="vectorized")
    # By repr, in which NaN is equal to NaN.
    assert repr(list(blocks.history.clients)) == repr(list(whole.history.clients))
    assert repr(list(blocks.history.rounds)) == repr(list(whole.history.rounds))
    for one, other in zip(blocks.arrays, whole.arrays, strict=True):
        np.testing.assert_array_equal(one, other)


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))


@pytest.mark.parametrize("device", ["cpu:0", GPU])
@pytest.mark.parametrize("selector", ["gpfl", "divfl", "power-of-choice"])
def test_a_run_on_another_device(selector: str, device: str) -> None:
    """Selectors that read the models, gradients and losses, which are all computed on the device."""
    scenario = _scenario(selector, 4, **{"num_clients": 8, "engine": "vectorized"})
    here, there = simulate(scenario), simulate(scenario, device=device)
    assert [row.client_id for row in here.history.clients] == [row.client_id for row in there.history.clients]
    for one, other in zip(here.history.rounds, there.history.rounds, strict=True):
        assert one.accuracy == pytest.approx(other.accuracy, abs=0.0 if device == "cpu:0" else 0.006)
    tolerance = 0.0 if device == "cpu:0" else 1e-4
    assert max(np.abs(a - b).max() for a, b in zip(here.arrays, there.arrays, strict=True)) <= tolerance


def test_a_world_on_a_device_leaves_the_first_one_where_it_is() -> None:
    world = World(_scenario("gpfl", 1))
    there = world.on("meta")  # holds shapes only
    assert {part.device.type for part in there.model.parameters()} == {"meta"}
    assert {part.device.type for part in world.model.parameters()} == {"cpu"}
    assert world.on("cpu") is world
    assert np.isfinite(world.test(world.initial_arrays())).all()


def test_examples_stay_on_the_device_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[Any, Any]] = []
    train = vectorized.BatchedTrainer.train

    def watched(self: Any, start: Any, examples: Any, generators: Any) -> Any:
        held.append((examples.inputs, examples.labels))
        return train(self, start, examples, generators)

    monkeypatch.setattr(vectorized.BatchedTrainer, "train", watched)
    simulate(_scenario("random", 2), engine="vectorized")
    assert held[0][0] is held[1][0]
    assert all(isinstance(part, torch.Tensor) for part in held[0])
