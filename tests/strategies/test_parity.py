"""The same clients through the legacy and the Message API: the same choices, history and model."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.common import ndarrays_to_parameters
from flwr.serverapp import strategy as message_bases

from fedsel_flwr import strategies as legacy_api
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations.on_flower.app import ScenarioApp
from fedsel_flwr.simulations.on_flower.driving import drive
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.availability import BernoulliAvailability
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.strategies import History
from fedsel_flwr.strategies import message as message_api
from tests.processes import ROOT, Command
from tests.simulations import inprocess
from tests.strategies import helpers
from tests.strategies.helpers import Federation, chosen, initial
from tests.strategies.message.helpers import FakeGrid, FakeNode, ProbeProxy, node_id, play

pytestmark = pytest.mark.timeout(60)
FLEET, COHORT, ROUNDS, MAX_LATENCY = 12, 4, 20, 4.0
FAULTY = {3: "raises", 7: "nan", 8: "latency-missing", 10: "shape"}
PARAMS: dict[str, dict[str, Any]] = {
    "random": {},
    "random-by-size": {},
    "round-robin": {},
    "cs-ucb": {"max_latency": MAX_LATENCY},
    "cs-ucb-q": {"max_latency": MAX_LATENCY, "queue_weight": 0.1},
    "bsfl": {"min_latency": 0.1, "alpha": 2.0},
    "local-accuracy": {},
    "power-of-choice": {"candidates": 6},
    "cpow-d": {"candidates": 6},
    "rpow-d": {"candidates": 6},
    "active-fl": {},
    "oort": {},
    "fedcs": {"deadline": 2.0, "clients_per_round": None, "channels": COHORT},
    "tifl": {"tiers": 2, "interval": 6, "credits": 3},
}
WORLDS = ("honest", "failures", "failures and availability", "availability, waves, cooldown", "over-selection")
PAPERS = {"cs-ucb": "CSUCB", "cs-ucb-q": "CSUCBQ", "bsfl": "BSFL"}


def _clients(faulty: bool) -> list[ProbeProxy]:
    """Clients whose latencies change from round to round; some fail always, number 5 in every third round."""

    def latency(k: int) -> Callable[[int], float]:
        def seconds(server_round: int) -> float:
            drawn = 0.2 + 0.2 * k + float(np.random.default_rng([5, k, server_round]).random())
            return 2 * MAX_LATENCY if faulty and k == 5 and server_round % 3 == 0 else drawn

        return seconds

    return [
        ProbeProxy(
            f"node-{k}", k, number=k, latency=latency(k), fault=FAULTY.get(k) if faulty else None,
            extra={"loss": 0.3 + 0.1 * (k % 5), "rms_loss": 0.4 + 0.1 * (k % 7), "train_loss": 0.2 + 0.1 * (k % 6)},
            probe_s=0.1 * (k + 1), answer=(lambda p, m: {} if p.number == 6 else m) if faulty else None,
        )
        for k in range(FLEET)
    ]  # fmt: skip


def _strategy(api: Any, name: str, base: Any, **options: Any) -> Any:
    params = {"clients_per_round": COHORT, "seed": 3, **PARAMS[name]}
    if name in PAPERS:
        return getattr(api, PAPERS[name])(base=base, **{"max_latency": MAX_LATENCY, **params, **options})
    return api.SelectionStrategy(create(name, **params), base, max_latency=MAX_LATENCY, **options)


def _both(name: str, *, faulty: bool, legacy_base: Any = None, message_base: Any = None, **options: Any) -> Any:
    legacy = _strategy(legacy_api, name, legacy_base or helpers.fedavg(), **options)
    federation = Federation(legacy, _clients(faulty)).play(ROUNDS)
    message = _strategy(message_api, name, message_base or message_bases.FedAvg(fraction_evaluate=0.0), **options)
    grid = FakeGrid({node_id(k): FakeNode(proxy) for k, proxy in enumerate(_clients(faulty))})
    result, _ = play(message, grid, ROUNDS)
    return legacy, federation.arrays(), message, result.arrays.to_numpy_ndarrays()


def _comparable(history: History) -> Any:
    rounds = [
        (r.round, r.num_available, r.num_selected, r.num_completed, r.round_s, r.energy_j, r.probe_s, r.probe_j)
        for r in history.rounds
    ]
    clients = [
        (r.round, r.client_id, r.client, r.completed, r.problem.split(":")[0], r.latency_s, repr(r.energy_j),
         r.num_examples)
        for r in history.clients
    ]  # fmt: skip
    return rounds, clients


@pytest.mark.parametrize(
    ("name", "world"),
    [*product(PARAMS, WORLDS), *((name, "availability, warm-up") for name in ("cs-ucb", "tifl", "power-of-choice"))],
)
def test_the_same_choices_for_twenty_rounds_and_the_same_model(name: str, world: str) -> None:
    options: dict[str, Any] = {}
    if "availability" in world:
        options["availability"] = BernoulliAvailability(0.5, seed=9)
    if "waves" in world:
        options |= {"channels": 3, "cooldown": True}
    if "warm" in world:
        options["warmup_rounds"] = 3
    if "over" in world:
        options |= {"over_selection": 0.5, "round_deadline_s": 3.5}
        if PARAMS[name].get("clients_per_round", COHORT) is None:  # decides itself how many
            with pytest.raises(ParameterError, match="over_selection"):
                _both(name, faulty=True, **options)
            return
    legacy, legacy_arrays, message, message_arrays = _both(name, faulty=world != "honest", **options)
    assert len(legacy.history.rounds) == ROUNDS
    assert chosen(legacy) == chosen(message)
    assert len({tuple(cohort) for cohort in chosen(legacy)}) > 1
    assert _comparable(legacy.history) == _comparable(message.history)
    if world != "honest":
        assert not all(row.completed for row in legacy.history.clients)
    for a, b in zip(legacy_arrays, message_arrays, strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    own, other = legacy.selector.state_dict(), message.selector.state_dict()
    assert own.keys() == other.keys()
    for key in own:
        np.testing.assert_array_equal(own[key], other[key])


@pytest.mark.parametrize("base", ["FedProx", "FedAvgM", "FedMedian", "FedTrimmedAvg"])
def test_other_bases_agree_too(base: str) -> None:
    from flwr.server import strategy as legacy_bases

    options: dict[str, Any] = {
        "FedProx": {"proximal_mu": 0.1}, "FedAvgM": {"server_learning_rate": 0.5, "server_momentum": 0.0},
    }.get(base, {})  # fmt: skip
    legacy, legacy_arrays, message, message_arrays = _both(
        "cs-ucb", faulty=True,
        legacy_base=getattr(legacy_bases, base)(fraction_evaluate=0.0, initial_parameters=initial(), **options),
        message_base=getattr(message_bases, base)(fraction_evaluate=0.0, **options),
    )  # fmt: skip
    assert chosen(legacy) == chosen(message)
    for a, b in zip(legacy_arrays, message_arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- a scenario with its real torch clients, without Ray -------------------------------------------------------------


class _Constant:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def __call__(self, context: Context) -> Scenario:
        return self.scenario


def _played(scenario: Scenario) -> Any:
    return drive(inprocess.AppGrid(ScenarioApp(_Constant(scenario)), scenario.num_clients), scenario)


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
    common = {"selector": selector, "rounds": ROUNDS, "partition.kind": "dirichlet", **overrides}
    message = _played(load_scenario("smoke", {**common, "api": "message"}))
    legacy = _legacy_play(load_scenario("smoke", common))
    assert _comparable(legacy.history) == _comparable(message.history)
    assert message.history.problem_counts() == {}
    for a, b in zip(legacy.arrays, message.arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    accuracies = [[r.accuracy for r in h.rounds] for h in (legacy.history, message.history)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.005)


def _legacy_play(scenario: Scenario) -> Any:
    """As tests/simulations/inprocess.py, with clients that answer probes."""

    class Probed(inprocess.LocalProxy):
        def evaluate(self, ins: Any, timeout: Any, group_id: Any) -> Any:
            with self._turn:
                return self._world.client(self._partition_id).to_client().evaluate(ins)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inprocess, "LocalProxy", Probed)
        return inprocess.play(scenario)


# ---- on Ray, in a process of its own, as Ray leaves threads and warnings behind -------------------------------------

RAY = """
import pickle, sys
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
scenarios = [load_scenario("smoke", {"rounds": 5, "selector": "cs-ucb", "api": api}) for api in sys.argv[2:]]
results = [simulate(scenario) for scenario in scenarios]
with open(sys.argv[1], "wb") as file:
    pickle.dump(results, file)
"""


@pytest.mark.timeout(280)
@pytest.mark.parametrize("apis", [["message"], pytest.param(["legacy", "message"], marks=pytest.mark.slow)])
def test_on_ray(apis: list[str], tmp_path: Path) -> None:
    """The legacy run is played in this process, and, as a slow test, on Ray too."""
    command = Command(sys.executable, "-c", RAY, str(tmp_path / "result"), *apis, folder=tmp_path, cwd=ROOT)
    try:
        assert command.wait(240) == 0, command.stderr[-5000:]
    finally:
        command.kill()
    results = pickle.loads((tmp_path / "result").read_bytes())
    legacy = _legacy_play(load_scenario("smoke", {"rounds": 5, "selector": "cs-ucb"}))
    assert len(legacy.history.rounds) == 5
    for result in results:
        assert _comparable(legacy.history) == _comparable(result.history)
        assert result.history.problem_counts() == {}
        for a, b in zip(legacy.arrays, result.arrays, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_queries_and_probes_of_the_scenarios_app_are_what_the_strategy_reads() -> None:
    """The Message API's app says who it is, with ``num_examples`` and no text."""
    scenario = load_scenario("smoke", {"api": "message"})
    node = inprocess.AppNode(ScenarioApp(_Constant(scenario)), 4)
    FakeGrid()
    answer = node.handle(Message(RecordDict(), dst_node_id=6, message_type=MessageType.QUERY))
    assert isinstance(answer, RecordDict)
    (facts,) = answer.metric_records.values()
    assert facts["client_id"] == 4
    assert facts["num_examples"] == World(scenario).num_examples()[4]
    assert ndarrays_to_parameters(list(World(scenario).initial_arrays())).tensors
