"""FedCor, DivFL, LSH and NCCB on torch clients: both APIs and both engines choose the same, and probes are charged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.app import drive
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations import inprocess
from tests.simulations.ray_runs import outcome

pytestmark = pytest.mark.timeout(120)
KEYS: dict[str, Any] = {
    "num_clients": 12, "clients_per_round": 4, "clients.energy_score_low": 0.5, "model.name": "logistic",
    "partition.kind": "dirichlet", "partition.alpha": 0.3, "selectors.fedcor.warmup_rounds": 2,
    "selectors.fedcor.interval": 3, "selectors.nccb.clusters": 3,
}  # fmt: skip


def choices(result: Any) -> list[tuple[Any, ...]]:
    """Who was chosen, and what it took."""
    return [(row.round, row.client_id, row.completed, row.latency_s, row.energy_j) for row in result.history.clients]


PROBED = {"divfl": [1], "lsh": [1], "nccb": [1], "fedcor": [1, 2, 3, 5, 6, 8]}
"""The rounds that probe. FedCor: two rounds of warm-up and every third after it are samples, asked before and after."""


def scenario_of(selector: str, rounds: int, **changes: Any) -> Scenario:
    return load_scenario("digits", {**KEYS, "selector": selector, "rounds": rounds, **changes})


UTILITY = [("active-fl", []), ("divfl", [1]), ("power-of-choice", [])]
"""With PCZFL's utility: losses are not asked for; accuracies come from the server, and energy scores from replies."""


@pytest.mark.parametrize(
    ("selector", "probed", "option"),
    [
        *((selector, probed, {}) for selector, probed in PROBED.items()),
        *((selector, probed, {f"selectors.{selector}.accuracy_weight": 0.5}) for selector, probed in UTILITY),
    ],
)
def test_both_apis_and_both_engines_choose_the_same(selector: str, probed: list[int], option: dict[str, float]) -> None:
    """And probes are charged in the rounds that ask."""
    rounds = max(5, *probed, 0)
    scenario, message = scenario_of(selector, rounds, **option), scenario_of(selector, rounds, api="message", **option)
    together = simulate(scenario, engine="vectorized")
    flower = drive(inprocess.grid_of(message), message)
    assert choices(together) == choices(flower) == choices(inprocess.play(scenario))
    assert [r.round for r in together.history.rounds if r.probe_s > 0] == probed
    assert all(r.round_s > r.probe_s for r in together.history.rounds)
    assert [r.probe_s for r in together.history.rounds] == [r.probe_s for r in flower.history.rounds]
    assert together.history.problem_counts() == flower.history.problem_counts() == {}
    cohorts = {tuple(r.client for r in together.history.clients if r.round == t) for t in range(1, rounds + 1)}
    assert option or len(cohorts) > 1
    assert max(np.abs(a - b).max() for a, b in zip(together.arrays, flower.arrays, strict=True)) <= 1e-4
    assert not option or choices(together) != choices(simulate(scenario_of(selector, rounds), engine="vectorized"))


def test_the_utility_of_pczfl_starts_with_the_energy_scores_of_the_roll_call() -> None:
    """The initial accuracy is the same for all clients, so that the four highest scores come first."""
    scenario = scenario_of("power-of-choice", 1, **{"selectors.power-of-choice.accuracy_weight": 0.5})
    everyone = scenario_of("power-of-choice", 2, **{"aggregation.warmup_rounds": 1})
    scores = {r.client: r.energy_score for r in simulate(everyone, engine="vectorized").history.clients}
    assert len(set(scores.values())) == 12
    chosen = [row.client for row in simulate(scenario, engine="vectorized").history.clients]
    assert sorted(chosen) == sorted(sorted(scores, key=lambda k: -scores[k])[:4])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("selector", "warmup"), [("divfl", 0), ("fedcor", 0), ("lsh", 0), ("nccb", 0), ("fedcor", 2), ("gpfl", 2)]
)
def test_ray_chooses_as_the_vectorized_engine(selector: str, warmup: int, tmp_path: Path) -> None:
    """Also with a warm-up that all selectors share."""
    rounds = 8 if warmup else 5
    scenario = scenario_of(selector, rounds, **{"aggregation.warmup_rounds": warmup})
    ray, together = outcome("played", tmp_path, scenario.model_dump_json()), simulate(scenario, engine="vectorized")
    assert choices(ray) == choices(together)
    assert [record.probe_s for record in ray.history.rounds] == [record.probe_s for record in together.history.rounds]
    sizes = [record.num_selected for record in ray.history.rounds]
    assert sizes == [12] * warmup + [4] * (rounds - warmup)
    assert max(np.abs(a - b).max() for a, b in zip(ray.arrays, together.arrays, strict=True)) <= 1e-4


def test_a_gradient_is_charged_as_one_more_upload() -> None:
    """And as three forward passes over all training examples, as long as training on these: download once."""
    scenario = scenario_of("divfl", 3)
    world = World(scenario)
    for row in simulate(scenario, engine="vectorized").history.clients:
        delays = world.system.draw(int(row.client_id), row.round)
        (share,) = world.shares([int(row.client_id)])
        expected = delays.download_s + (1 + share.train) * delays.compute_s + 2 * delays.upload_s
        assert row.latency_s == pytest.approx(min(expected, scenario.wireless.max_latency_s), rel=1e-12)
