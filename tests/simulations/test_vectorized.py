"""The vectorized engine: the choices, the clocks, the models and the answers of clients that train one by one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as flower
from torch import nn

from fedsel_flwr.clients.answering import answer
from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.backends import Backend, Choice, choose_backend
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.clients.training import using_threads
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.models import ModelStack
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.selectors import Random, names
from fedsel_flwr.simulations import vectorized
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.vectorized import BatchedEvaluation, aggregate, probe_clients, run_vectorized, stack_mean
from fedsel_flwr.simulations.worlds.data import Split
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World, run_size, threads_for
from fedsel_flwr.strategies.wrapping import bases
from tests.clients.batched.helpers import COMPILES
from tests.simulations.cut_off_runs import parts, smoke
from tests.simulations.inprocess import WAYS, choices, distance, play, simulated
from tests.simulations.ray_runs import outcome

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("without_ray")]


def _scenario(selector: str, rounds: int, **overrides: Any) -> Scenario:
    keys = {"num_clients": 30, "clients_per_round": 5, "clients.energy_score_low": 0.5, "data.local_test_fraction": 0.2}
    return load_scenario("digits", {**keys, "selector": selector, "rounds": rounds, **overrides})


# ---- each way: both of Flower's APIs, without Ray, and the vectorized engine -----------------------------------------

ROUND = (
    "num_available", "num_selected", "num_completed", "num_kept", "num_spares", "num_late", "deadline_s", "round_s",
    "simulated_s", "probe_s",
)  # fmt: skip
CLIENT = (
    "round", "client_id", "completed", "kept", "spare", "problem_kinds", "staleness", "arrived_s", "latency_s",
    "energy_j", "num_examples",
)  # fmt: skip


def _texts(records: Any, names: tuple[str, ...]) -> list[list[str]]:
    """In texts NaN is equal to NaN."""
    return [[str(getattr(record, name)) for name in names] for record in records]


def _same(scenario: Scenario, *apis: str) -> RunResult:
    """The same choices, clocks and problems each way, and the same model but for rounding; the engine's own result."""
    together = simulate(scenario, engine="vectorized")
    for api in apis or ("legacy", "message"):
        alone = simulated(scenario, api)
        one, other = alone.history, together.history
        assert _texts(one.clients, CLIENT) == _texts(other.clients, CLIENT), api
        assert _texts(one.rounds, ROUND) == _texts(other.rounds, ROUND), api
        losses = ([row.train_loss for row in history.clients] for history in (one, other))
        np.testing.assert_allclose(*losses, rtol=1e-3)
        accuracies = ([record.accuracy for record in history.rounds] for history in (one, other))
        np.testing.assert_allclose(*accuracies, atol=0.006)  # one or two of 360 examples
        assert distance(alone, together) <= 1e-4, api
    return together


LOGISTIC: dict[str, Any] = {
    "model.name": "logistic", "num_clients": 12, "clients_per_round": 4, "selectors.nccb.clusters": 3,
    "selectors.tifl.tiers": 2, "selectors.tifl.interval": 6, "selectors.fedcor.warmup_rounds": 2,
    "selectors.fedcor.interval": 3,
    **{f"selectors.{name}.candidates": 6 for name in ("power-of-choice", "cpow-d", "rpow-d")},
}  # fmt: skip
"""A model without rectifiers, which a rounding may turn off: over many rounds that would change the model."""
ALWAYS = [1, 2, 3, 4, 5, 6, 7, 8]
PROBED: dict[str, list[int]] = {
    **{name: [] for name in ("bsfl", "fedcs", "oort", "pczfl", "pisces", "rpow-d")},
    **{name: [1] for name in ("active-fl", "divfl", "lsh", "nccb")},
    "tifl": [1, 7], "fedcor": [1, 2, 3, 5, 6, 8], "cpow-d": ALWAYS, "power-of-choice": ALWAYS,
}  # fmt: skip
"""The rounds that probe. FedCor: two rounds of warm-up and every third after it are samples, asked before and after."""
UTILITY: dict[str, list[int]] = {"active-fl": [], "divfl": [1], "power-of-choice": []}
"""With PCZFL's utility: losses are not asked for; accuracies come from the server, and energy scores from replies."""


@pytest.mark.parametrize(
    ("selector", "probed", "option"),
    [
        *((selector, probed, {}) for selector, probed in PROBED.items()),
        *((selector, probed, {f"selectors.{selector}.accuracy_weight": 0.5}) for selector, probed in UTILITY.items()),
    ],
)
def test_as_clients_that_train_one_by_one(selector: str, probed: list[int], option: dict[str, float]) -> None:
    """And probes are charged in the rounds that ask."""
    together = _same(_scenario(selector, 8, **LOGISTIC, **option))
    rounds = together.history.rounds
    assert [record.round for record in rounds if record.probe_s > 0] == probed
    assert all(record.round_s > record.probe_s for record in rounds)
    assert together.history.problem_counts() == {}
    assert option or len({tuple(r.client for r in together.history.clients if r.round == t) for t in ALWAYS}) > 1
    assert not option or choices(together) != choices(simulate(_scenario(selector, 8, **LOGISTIC), engine="vectorized"))


def test_the_utility_of_pczfl_starts_with_the_energy_scores_of_the_roll_call() -> None:
    """The initial accuracy is the same for all clients, so that the four highest scores come first."""
    keys = {"selectors.power-of-choice.candidates": 12, "selectors.power-of-choice.accuracy_weight": 0.5}
    scenario = _scenario("power-of-choice", 1, **LOGISTIC | keys)
    chosen = [row.client for row in simulate(scenario, engine="vectorized").history.clients]
    assert sorted(chosen) == sorted(np.argsort(World(scenario).energy_scores(range(12)))[-4:])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("selector", "warmup"), [("divfl", 0), ("fedcor", 0), ("lsh", 0), ("nccb", 0), ("fedcor", 2), ("gpfl", 2)]
)
def test_ray_chooses_as_the_vectorized_engine(selector: str, warmup: int, tmp_path: Path) -> None:
    """Also with a warm-up that all selectors share."""
    rounds = 8 if warmup else 5
    scenario = _scenario(selector, rounds, **LOGISTIC, **{"aggregation.warmup_rounds": warmup})
    ray, together = outcome("played", tmp_path, scenario.model_dump_json()), simulate(scenario, engine="vectorized")
    assert choices(ray) == choices(together)
    assert [record.probe_s for record in ray.history.rounds] == [record.probe_s for record in together.history.rounds]
    assert [record.num_selected for record in ray.history.rounds] == [12] * warmup + [4] * (rounds - warmup)
    assert distance(ray, together) <= 1e-4


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
    alone, world = play(scenario, _in_double(scenario)), _in_double(scenario)
    together = run_vectorized(world, make_strategy(world))
    assert choices(alone) == choices(together)
    assert distance(alone, together) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("selector", names())
def test_every_selector_as_clients_that_train_one_by_one(selector: str) -> None:
    """See above for why the model is logistic. Intervals are so short that each selector's openings end and recur."""
    steps = {"training.momentum": 0.5, "training.proximal_mu": 0.1, "training.weight_decay": 1e-3}
    own = {"selectors.tifl.interval": 5, "selectors.fedcor.warmup_rounds": 3, "selectors.fedcor.interval": 4}
    _same(_scenario(selector, 12, **{"model.name": "logistic", **steps, **own}), "legacy")


AWAY = {
    "availability.kind": "bernoulli", "availability.probability": 0.4, "wireless.max_latency_s": 0.4,
    "wireless.channels": 2,
}  # fmt: skip
TWENTY = {"num_clients": 20, "clients_per_round": 4, "rounds": 5, "selector": "cs-ucb"}
OTHERS = {
    "absences, failures and waves": _scenario("cs-ucb", 8, **AWAY),
    "phones that learn digits": load_scenario("phones", TWENTY),
    "a regression on squared loss": load_scenario("ben-ami-unequal", TWENTY),
}


@pytest.mark.parametrize("scenario", OTHERS.values(), ids=OTHERS)
def test_other_scenarios_are_the_same(scenario: Scenario) -> None:
    _same(scenario)


@pytest.mark.parametrize("base", ["fedadam", "fedyogi", "fedavgm"])
def test_other_bases_are_the_same(base: str) -> None:
    """Those of the legacy API, which the engine has. Flower's adaptive bases of the Message API take other steps."""
    _same(_scenario("random", 4, **{"aggregation.base": base}), "legacy")


UNEQUAL = {"partition.kind": "sizes", "partition.sizes": [20] * 7 + [400]}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "some updates above the limit": ("update norm", {"aggregation.max_update_norm": 2.5}),
    "all updates above the limit": ("update norm", {"aggregation.max_update_norm": 1e-6}),
    "a cooldown": ("update norm", {"aggregation.max_update_norm": 1e-6, "aggregation.cooldown": True}),
    "claims above the limit": ("max_examples", {"aggregation.max_examples": 100}),
    "claims above the automatic limit": ("max_examples", UNEQUAL | {"aggregation.max_examples": "auto"}),
    "the largest share of rounds": ("", {"aggregation.max_participation": 0.5}),
}
"""The only kind of problem, and keys of which the last one changes the run."""


@pytest.mark.parametrize(("kind", "keys"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_has_the_same_effect_each_way(kind: str, keys: dict[str, Any]) -> None:
    """CS-UCB without exploration takes the quickest: without a cap the same ones in every round."""
    small = {"num_clients": 8, "clients_per_round": 2, "selectors.cs-ucb.exploration": 0.0, "model.name": "logistic"}
    found, without = _same(_scenario("cs-ucb", 12, **small, **keys)), dict(list(keys.items())[:-1])
    assert {*found.history.problem_counts()} == ({kind} if kind else set())
    assert parts(found) != parts(simulate(_scenario("cs-ucb", 12, **small, **without), engine="vectorized"))


@pytest.mark.parametrize("selector", ["bsfl", "pisces", "power-of-choice"])
def test_buffered_steps_are_the_same(selector: str) -> None:
    """20 steps, of whose updates more than 30 % are stale, and some fail."""
    many = {"num_clients": 24, "clients_per_round": 3, "aggregation.concurrency": 12}
    keys = LOGISTIC | many | {"clients.failure_probability": 0.2}
    history = _same(_scenario(selector, 20, **keys), "message").history
    assert np.mean([row.staleness > 0 for row in history.clients]) > 0.3
    assert not all(row.completed for row in history.clients)


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
    assert parts(got) == parts(expected)
    assert seen == [(1, False), (2, True), (3, False), (4, True), (5, True)] * 2


@pytest.mark.parametrize("way", WAYS)
def test_a_budget_ends_the_run_and_what_flower_counts_after_it_leaves_no_trace(way: str) -> None:
    scenario = _scenario("cs-ucb", 9, evaluation_every=2)
    whole = simulate(scenario, engine="vectorized").history
    limit = (whole.rounds[3].simulated_s + whole.rounds[4].simulated_s) / 2  # used up in round 5
    seen: list[int] = []
    short = scenario.model_copy(update={"simulated_s": limit})
    history = simulated(short, way, on_round=lambda record: seen.append(record.round)).history
    assert seen == [record.round for record in history.rounds] == [1, 2, 3, 4, 5]
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
    assert parts(simulate(scenario, engine="vectorized")) == parts(whole)


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))


@pytest.mark.parametrize("device", ["cpu:0", GPU])
@pytest.mark.parametrize("selector", ["gpfl", "divfl", "power-of-choice"])
def test_a_run_on_another_device(selector: str, device: str) -> None:
    """Selectors that read the models, gradients and losses, which are all computed on the device."""
    scenario = _scenario(selector, 4, **{"num_clients": 8, "engine": "vectorized"})
    here, there = simulate(scenario), simulate(scenario, device=device)
    assert choices(here) == choices(there)
    if device == "cpu:0":
        assert parts(here) == parts(there)
    for one, other in zip(here.history.rounds, there.history.rounds, strict=True):
        assert one.accuracy == pytest.approx(other.accuracy, abs=0.006)
    assert distance(here, there) <= 1e-4


def test_a_world_on_a_device_leaves_the_first_one_where_it_is() -> None:
    world = World(_scenario("gpfl", 1))
    there = world.on("meta")  # holds shapes only
    assert {part.device.type for part in there.model.parameters()} == {"meta"}
    assert {part.device.type for part in world.model.parameters()} == {"cpu"}
    assert world.on("cpu") is world
    assert np.isfinite(world.test(world.initial_arrays())).all()


def test_examples_stay_on_the_device_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[Any, Any]] = []
    train = BatchedTrainer.train

    def watched(self: Any, start: Any, examples: Any, generators: Any) -> Any:
        held.append((examples.inputs, examples.labels))
        return train(self, start, examples, generators)

    monkeypatch.setattr(BatchedTrainer, "train", watched)
    simulate(_scenario("random", 2), engine="vectorized")
    assert held[0][0] is held[1][0]
    assert all(isinstance(part, torch.Tensor) for part in held[0])


# ---- backends and threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "options", "said"),
    [
        ({}, {"engine": "steam"}, "engine must be one of ray, vectorized, got 'steam'"),
        ({}, {"backend": "fast"}, "backend must be one of auto, numba, manual, vmap, sequential, got 'fast'"),
        ({"engine": "ray"}, {"backend": "manual"}, "backend = 'manual' is for the vectorized engine"),
        ({"model__name": "cnn"}, {"backend": "numba"}, "backend = 'numba' cannot train this model"),
        # Only clients that train one by one can do this.
        ({"clients__latency_mode": "measured"}, {}, "clients.latency_mode = 'measured' is for the engine 'ray'"),
        ({"clients__delay": "sleep"}, {}, "clients.delay = 'sleep' is for the engine 'ray'"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(keys: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        simulate(smoke(4, **keys), **options)
    assert str(caught.value).startswith(said)


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 800), nn.ReLU(), nn.Linear(800, 10))


def convolving() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 800, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800 * 36, 10))


def chosen(rounds: int, model: Any, backend: Backend | None = None) -> Choice:
    """What trains 25 of 100 clients with some 10 examples in batches of 10: two steps a round at most."""
    keys = {"rounds": rounds, "clients_per_round": 25, "num_clients": 100, "training.batch_size": 10}
    keys |= {"partition.kind": "iid", "training.local_epochs": 1, "engine": "vectorized"}
    world = World(load_scenario("digits", keys), OwnParts(model))
    train = world.dataset.train
    data = Examples(train.inputs, train.labels, []).to(torch.device("cpu"))
    settings = world.scenario.training.settings()
    return choose_backend(world.model, world.objective.loss, *data, settings, backend=backend, size=run_size(world))


@pytest.mark.parametrize(
    ("keys", "threads"),
    [
        ({}, 1),
        ({"model.name": "cnn"}, 2),
        ({"training.batch_size": 4_000, "clients_per_round": 20, "num_clients": 40}, 2),
    ],
)
def test_small_products_take_one_thread(keys: dict[str, Any], threads: int) -> None:
    with using_threads(2):
        assert threads_for(World(load_scenario("digits", keys))) == threads
        assert torch.get_num_threads() == 2


@COMPILES
def test_numba_by_kind_and_length_alone() -> None:
    assert chosen(3000, wide).backend == "numba"
    short = chosen(300, wide)
    assert short.backend == "manual"  # over before the loops are loaded
    assert "25,000" in short.reasons["numba"]
    assert chosen(3000, wide, "auto").backend == "manual"
    assert chosen(3000, convolving).backend == "manual"


@COMPILES
def test_a_run_with_numba_makes_the_same_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = smoke(4, selector="bsfl")
    alone = simulate(scenario)
    taken: list[str] = []
    train = BatchedTrainer.train

    def watched(self: BatchedTrainer, *arguments: Any) -> Any:
        taken.append(self.backend)
        return train(self, *arguments)

    monkeypatch.setattr(BatchedTrainer, "train", watched)
    run, repeated = (simulate(scenario, backend="numba") for _ in range(2))
    assert taken == ["numba"] * 8
    assert parts(run) == parts(repeated)
    assert choices(run) == choices(alone)
    assert distance(run, alone) <= 1e-6
