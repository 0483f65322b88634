"""The scenario keys against hostile clients, in both APIs and the vectorized engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import FedSelError
from fedsel_flwr.rounds.models import update_norm
from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations.inprocess import in_process

WAYS = pytest.mark.parametrize("way", ["legacy", "message", "vectorized"])


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_simulation", in_process)


def _run(way: str, rounds: int, fleet: Any = None, **aggregation: Any) -> Any:
    keys = {f"aggregation.{key}": value for key, value in aggregation.items()}
    api = {} if way == "vectorized" else {"api": way}
    scenario = load_scenario("smoke", {"rounds": rounds, "selector": "round-robin", **(fleet or {}), **api, **keys})
    return simulate(scenario, engine="vectorized" if way == "vectorized" else "ray")


@WAYS
def test_updates_above_the_limit_are_refused_and_the_model_stays(way: str) -> None:
    start = World(load_scenario("smoke")).initial_arrays()
    free = _run(way, 1)
    assert free.history.problem_counts() == {}
    moved = update_norm(free.arrays, start)
    assert moved > 1e-3
    held = _run(way, 1, max_update_norm=1e-6)
    (record,) = held.history.rounds
    assert (record.num_completed, held.history.problem_counts()) == (0, {"update norm": record.num_selected})
    for array, own in zip(held.arrays, start, strict=True):
        np.testing.assert_array_equal(array, own)
    wide = _run(way, 1, max_update_norm=1e6)
    assert [a.tobytes() for a in wide.arrays] == [a.tobytes() for a in free.arrays]


@WAYS
def test_clients_that_fail_are_left_in_peace(way: str) -> None:
    """Everybody fails: out for two rounds after the first failure, for four after the second."""
    everybody = {"num_clients": 4, "clients_per_round": 4}
    history = _run(way, 9, everybody, max_update_norm=1e-6, cooldown=True).history
    assert [record.num_selected for record in history.rounds] == [4, 0, 0, 4, 0, 0, 0, 0, 4]
    assert [record.num_available for record in history.rounds] == [4, 0, 0, 4, 0, 0, 0, 0, 4]
    without = _run(way, 2, everybody, max_update_norm=1e-6).history
    assert [record.num_selected for record in without.rounds] == [4, 4]


@WAYS
def test_claims_above_the_limit_weigh_as_the_limit(way: str) -> None:
    """With one example each the mean is that of equal weights."""
    skewed = {"partition.kind": "dirichlet"}
    free, held = _run(way, 1, skewed), _run(way, 1, skewed, max_examples=1)
    assert {row.num_examples for row in held.history.clients} == {1}
    assert all(row.completed for row in held.history.clients)
    assert held.history.problem_counts() == {"max_examples": len(held.history.clients)}
    assert len({row.num_examples for row in free.history.clients}) > 1
    assert any((a != b).any() for a, b in zip(free.arrays, held.arrays, strict=True))


@WAYS
def test_claims_above_the_automatic_limit_are_counted(way: str) -> None:
    """Of 4 clients with 2, 2, 2 and 40 examples the last one counts as 8."""
    sizes = {"num_clients": 4, "clients_per_round": 4, "partition.kind": "sizes", "partition.sizes": [2, 2, 2, 40]}
    history = _run(way, 1, sizes, max_examples="auto").history
    assert [row.num_examples for row in history.clients] == [2, 2, 2, 8]
    assert history.problem_counts() == {"max_examples": 1}


@WAYS
def test_a_client_is_asked_in_no_larger_share_than_the_cap(way: str) -> None:
    """CS-UCB without exploration takes the quickest: without the cap the same ones in every round."""
    fleet = {"num_clients": 8, "clients_per_round": 2, "selector": "cs-ucb", "selectors.cs-ucb.exploration": 0.0}
    shares = {}
    for cap in (0.0, 0.5):
        history = _run(way, 40, fleet, max_participation=cap).history
        assert {record.num_selected for record in history.rounds} == {2}
        counts = np.bincount([row.client for row in history.clients if row.round > 20], minlength=8)
        shares[cap] = counts.max() / 20
    assert shares[0.0] == 1.0
    assert 0.4 <= shares[0.5] <= 0.55


@pytest.mark.parametrize("key", ["cooldown", "max_update_norm", "max_examples", "max_participation"])
@pytest.mark.parametrize("value", ["yes", -1.0, float("nan"), "1"])
def test_other_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(FedSelError, match=key):
        load_scenario("smoke", {f"aggregation.{key}": value})
