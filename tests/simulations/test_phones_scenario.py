"""The scenarios of phones: what their files claim of times and deadlines, and that they run in both APIs."""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations.inprocess import in_process, play


def test_phones_are_200_of_which_10_learn_digits_in_a_round() -> None:
    s = load_scenario("phones")
    assert (s.num_clients, s.clients_per_round, s.rounds, s.data.dataset) == (200, 10, 300, "digits")
    assert (s.partition.kind, s.partition.alpha, s.model.name, s.system.kind) == ("dirichlet", 0.3, "mlp", "phones")
    assert (s.engine, s.evaluation_every, s.simulated_s, s.joules) == ("ray", 1, 0.0, 0.0)


def test_times_are_those_that_the_file_claims() -> None:
    """Medians of 3, 5 and 4 s, one of 20 above 35 s, one of 100 late; means over ten seeds of 200 phones."""
    draws = []
    for seed in range(10):
        world = World(load_scenario("phones", {"seed": seed}))
        draws.append([world.system.draw(k, r) for k in range(200) for r in (1, 2)])
    parts = np.array([[(d.download_s, d.compute_s, d.upload_s) for d in one] for one in draws])
    down, compute, up = np.median(parts, axis=(0, 1))
    assert down == pytest.approx(14 / 4.3, rel=0.1)
    assert up == pytest.approx(14 / 3.3, rel=0.1)
    assert 4 < compute < 6
    total = parts.sum(axis=2)
    assert 0.03 < (total > 35).mean() < 0.08
    assert 0.003 < (total > 60).mean() < 0.025


def test_fast_and_slow_phones_differ_more_than_rounds() -> None:
    """What a bandit can learn: most of the spread of the latency's logarithm is between phones."""
    system = World(load_scenario("phones")).system
    assert isinstance(system, PhoneModel)
    draws = [[system.draw(k, r) for r in range(1, 21)] for k in range(200)]
    latency = np.log([[d.download_s + d.compute_s + d.upload_s for d in own] for own in draws])
    assert latency.mean(axis=1).std() > 2 * latency.std(axis=1).mean()


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_phones_run(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = load_scenario("phones", {"rounds": 4, "api": api})
    monkeypatch.setattr(engine, "run_simulation", in_process)
    history = engine.simulate(scenario).history if api == "message" else play(scenario).history
    system = World(scenario).system
    assert [r.num_selected for r in history.rounds] == [10] * 4
    for row in history.clients:
        delays = system.draw(int(row.client_id), row.round)
        latency = delays.download_s + delays.compute_s + delays.upload_s
        assert row.latency_s == pytest.approx(min(latency, 60.0), rel=1e-12)
        assert row.completed == (latency < 60.0)
        assert row.energy_j == pytest.approx(system.energy_j(delays), rel=1e-12)
    for record in history.rounds:
        slowest = max(row.latency_s for row in history.clients if row.round == record.round)
        assert record.round_s == pytest.approx(slowest, rel=1e-12)


def test_the_704_phones_walk_through_one_week() -> None:
    s = load_scenario("phones-704")
    assert (s.num_clients, s.clients_per_round, s.data.dataset) == (704, 10, "fashion-mnist")
    assert (s.availability.kind, s.availability.trace) == ("trace", "phones/availability.csv")
    assert (s.rounds - 1) * s.availability.seconds_per_round <= 7 * 86_400
