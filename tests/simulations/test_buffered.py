"""Buffered rounds in simulations: C = B is a synchronous run, both engines agree, and a resumed run goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.advice import advise
from fedsel_flwr.report.page.deployment_tables import read_deployment
from fedsel_flwr.report.summary import mean_staleness
from fedsel_flwr.selectors import names
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.simulations.diagnosis import derived_tables
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import world_of
from tests.simulations import inprocess
from tests.simulations.cut_off_runs import cut_off, parts
from tests.simulations.inprocess import simulated

pytestmark = pytest.mark.timeout(120)
BUFFERED = sorted(name for name in names() if selector_class(name).buffers)
MANY = {"num_clients": 24, "clients_per_round": 3, "aggregation.concurrency": 12, "rounds": 20}


def run(way: str = "vectorized", **keys: Any) -> RunResult:
    return simulated(load_scenario("smoke", {key.replace("__", "."): value for key, value in keys.items()}), way)


def test_the_selectors_that_need_whole_rounds() -> None:
    assert sorted({*names()} - {*BUFFERED}) == ["everyone", "fedcor", "fedcs", "gpfl", "pczfl"]


@pytest.mark.parametrize(
    ("way", "selector"),
    [*(("vectorized", name) for name in BUFFERED), *(("message", name) for name in ("bsfl", "oort", "fedcm-ts"))],
)
def test_as_many_at_work_as_arrive_is_a_synchronous_run(way: str, selector: str, without_ray: None) -> None:
    """The same choices and models bit for bit, with failures, absences and probes; the times may differ by rounding."""
    keys = {
        "selector": selector, "rounds": 6, "clients.failure_probability": 0.1, "availability.kind": "bernoulli",
        "availability.probability": 0.8,
    }  # fmt: skip
    plain, buffered = run(way, **keys), run(way, **keys, aggregation__concurrency=3)
    assert [array.tobytes() for array in plain.arrays] == [array.tobytes() for array in buffered.arrays]
    for one, other in zip(plain.history.clients, buffered.history.clients, strict=True):
        assert (one.round, one.client, one.latency_s, one.problem) == (
            other.round, other.client, other.latency_s, other.problem,
        )  # fmt: skip
        assert other.staleness == 0
    for one_round, other_round in zip(plain.history.rounds, buffered.history.rounds, strict=True):
        assert one_round.simulated_s == pytest.approx(other_round.simulated_s, abs=1e-9)
        assert (one_round.num_available, one_round.probe_s) == (other_round.num_available, other_round.probe_s)


@pytest.mark.parametrize("base", ["fedavg", "fedadam"])
def test_a_resumed_run_is_the_uninterrupted_one(base: str, tmp_path: Path) -> None:
    scenario = load_scenario("smoke", MANY | {"engine": "vectorized", "aggregation.base": base, "selector": "oort"})
    cut_off(scenario, 7, checkpoint_dir=tmp_path)
    rest = simulate(scenario, checkpoint_dir=tmp_path, resume="must")
    assert parts(rest) == parts(simulate(scenario))
    assert all(np.isfinite(array).all() for array in rest.arrays)


def test_a_resumed_run_of_flower_reaches_the_clients_at_work_by_their_new_nodes(
    tmp_path: Path, without_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run of Flower gives its clients other node ids."""
    scenario = load_scenario("smoke", MANY | {"engine": "ray", "api": "message", "rounds": 12})
    straight = simulate(scenario)
    cut_off(scenario, 5, checkpoint_dir=tmp_path)
    monkeypatch.setattr(inprocess, "node_id", lambda number: 5000 + 3 * number)
    assert parts(simulate(scenario, checkpoint_dir=tmp_path, resume="must")) == parts(straight)


def test_fewer_clients_than_places() -> None:
    history = run(**MANY | {"num_clients": 5}).history
    assert [record.num_selected for record in history.rounds] == [3] * 20
    assert max(row.staleness for row in history.clients) >= 1


def test_when_everybody_fails_every_step_ends() -> None:
    history = run(**MANY | {"clients.failure_probability": 1.0, "rounds": 5}).history
    assert [(record.num_completed, record.num_failed) for record in history.rounds] == [(0, 3)] * 5
    assert [record.simulated_s for record in history.rounds] == sorted(record.simulated_s for record in history.rounds)


def test_the_legacy_api_refuses_buffered_rounds(without_ray: None) -> None:
    with pytest.raises(RunError, match=r"legacy API.*api = 'message'"):
        run("legacy", **MANY)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"wireless.channels": 4}, "channels = 4"),
        ({"selector": "fedcs"}, "fedcs needs rounds that wait"),
        ({"aggregation.warmup_rounds": 2}, "warmup_rounds"),
        ({"aggregation.concurrency": 13}, "multiple of the 3"),
    ],
)
def test_scenarios_that_cannot_be_buffered(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        run(**MANY | keys)


def test_reports_count_no_waiting_for_the_slowest(tmp_path: Path) -> None:
    """A buffered round waits for arrivals. The seconds of its clients began earlier, and are no parts of it."""
    keys = MANY | {"clients.failure_probability": 0.2}
    buffered = simulate(load_scenario("smoke", keys), engine="vectorized", checkpoint_dir=tmp_path / "kept")
    found = read_deployment(tmp_path / "kept")
    used = [row.staleness for row in buffered.history.clients if row.completed]
    assert found.staleness == pytest.approx(np.mean(used))
    assert found.staleness > 0.3
    assert found.waiting.rounds == 0
    assert not found.slowest["round"]
    assert min(found.parts["seconds"]) >= 0.0
    assert np.sum(found.parts["seconds"]) == pytest.approx(found.seconds)
    with pytest.raises(ParameterError, match="holds buffered rounds, which wait for no client"):
        advise(tmp_path / "kept")
    world, waits = world_of(load_scenario("smoke", keys)), run(num_clients=24)
    assert (math.isnan(mean_staleness(waits.history)), mean_staleness(buffered.history)) == (True, found.staleness)
    assert "regret" not in derived_tables(world, buffered)
    assert "regret" in derived_tables(world, waits)
