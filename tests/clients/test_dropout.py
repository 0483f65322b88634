"""Clients that fail or crash at random: the same ones in both engines, at the cost that the page states."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.clients.device import REPLIED, ClientDropout
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.replies import CRASHED, FAILED
from fedsel_flwr.simulations.diagnosis import regret
from fedsel_flwr.simulations.engine import SameScenario, simulate
from fedsel_flwr.simulations.on_flower.app import ScenarioApp, drive
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations import inprocess


def _scenario(failure: float, crash: float, api: str = "legacy") -> Scenario:
    keys = {"num_clients": 12, "clients_per_round": 6, "rounds": 6, "model.name": "logistic", "selector": "cs-ucb"}
    own = {"clients.failure_probability": failure, "clients.crash_probability": crash, "api": api}
    return load_scenario("digits", keys | own)


def test_the_draws_are_the_clients_own() -> None:
    """The shares are those asked for, of 20,000 draws, and a draw does not depend on who else is drawn."""
    failing = ClientDropout(seed=3, failure_probability=0.2, crash_probability=0.1)
    outcomes = np.array([failing.outcomes(range(1000), round) for round in range(1, 21)])
    error = 3 / np.sqrt(outcomes.size)
    assert np.mean(outcomes == CRASHED) == pytest.approx(0.1, abs=error)
    assert np.mean(outcomes == FAILED) == pytest.approx(0.9 * 0.2, abs=error)
    assert np.mean(outcomes != REPLIED) == pytest.approx(failing.probability, abs=error)
    assert failing.outcomes([7, 400, 3], 5) == outcomes[4, [7, 400, 3]].tolist()
    assert ClientDropout(seed=3).outcomes(range(5), 1) == [REPLIED] * 5
    more = ClientDropout(seed=3, failure_probability=0.4, crash_probability=0.1).outcomes(range(1000), 1)
    assert all(new != REPLIED for new, old in zip(more, outcomes[0], strict=True) if old != REPLIED)


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan])
def test_no_probability_is_refused(probability: float) -> None:
    with pytest.raises(ParameterError, match="crash_probability"):
        ClientDropout(seed=1, crash_probability=probability)
    with pytest.raises(ParameterError, match="crash_probability"):
        load_scenario("digits", {"clients.crash_probability": probability})


@pytest.mark.parametrize("probabilities", [(0.3, 0.3), (1.0, 0.0)])
def test_both_engines_lose_the_same_answers_at_the_same_cost(probabilities: tuple[float, float], api: str) -> None:
    """A failed client has spent time and energy, a crashed one has not."""
    scenario = _scenario(*probabilities, api)
    together = simulate(scenario, engine="vectorized")
    if api == "legacy":
        alone = inprocess.play(scenario)
    else:
        app = ScenarioApp(SameScenario(scenario))
        alone = drive(inprocess.AppGrid(app, scenario.num_clients), scenario)  # type: ignore[arg-type]
    for one, other in zip(alone.history.clients, together.history.clients, strict=True):
        assert (one.client_id, one.completed, one.problem) == (other.client_id, other.completed, other.problem)
        np.testing.assert_array_equal([one.latency_s, one.energy_j], [other.latency_s, other.energy_j])
    assert inprocess.distance(alone, together) <= 1e-4

    world, rows = World(scenario), together.history.clients
    failed, crashed = ([row for row in rows if row.problem.startswith(kind)] for kind in ("lost:", "crashed:"))
    assert len(failed) > 3
    assert len(crashed) > 3 or probabilities[1] == 0.0
    for row in failed:
        delays = world.system.draw(int(row.client_id), row.round)
        assert (row.compute_s, row.upload_s) == (delays.compute_s, delays.upload_s)
        assert row.energy_j == world.system.energy_j(delays)
    assert all(math.isnan(row.energy_j) and math.isnan(row.compute_s) for row in crashed)
    for row in failed + crashed:
        assert (row.completed, row.latency_s, row.latency_source) == (False, 5.0, "max_latency")
        assert (math.isnan(row.train_loss), row.num_examples) == (True, 0)
    expected = np.nansum([row.energy_j for row in together.history.clients])
    assert together.history.rounds[-1].total_energy_j == pytest.approx(expected)


def test_regret_counts_with_the_failures() -> None:
    """Whoever is chosen loses its whole reward in half of the rounds, so a bad choice costs half as much."""
    sure, unsure = World(_scenario(0.0, 0.0)), World(_scenario(0.5, 0.0))
    rows = simulate(sure.scenario, engine="vectorized").history.clients
    np.testing.assert_allclose(2 * regret(unsure, rows, 6)["Theta"], regret(sure, rows, 6)["Theta"])
