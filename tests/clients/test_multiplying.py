"""Time and energy of computing that follow the model's multiplications."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario, scenario_names
from fedsel_flwr.simulations.worlds.architectures import count_multiplications
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations import inprocess

KEYS = {"num_clients": 10, "clients_per_round": 4, "rounds": 3, "selector": "cs-ucb"}


@pytest.mark.parametrize(
    ("model", "shape", "count"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 3)), (1, 8, 8), 64 * 10 + 10 * 3),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), (1, 8, 8), 6 * 6 * 2 * 9),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), (4,), 16),
    ],
)
def test_they_are_those_of_products_and_convolutions(model: nn.Module, shape: tuple[int, ...], count: int) -> None:
    before, state = torch.random.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    assert count_multiplications(model, np.ones(shape, dtype=np.float32)) == count
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("scenario", ["digits", "phones"])
def test_computing_takes_twice_as_long_and_twice_the_joules(scenario: str) -> None:
    """Digits' logistic regression multiplies 64 x 10 times an example; transfers stay as they are."""
    keys: dict[str, Any] = {**KEYS, "model.name": "logistic", "wireless.max_latency_s": 1e6}
    plain = World(load_scenario(scenario, keys)).system
    for factor in (1, 2):
        system = World(load_scenario(scenario, keys | {"clients.reference_multiplications": 640 / factor})).system
        for k, round in ((0, 1), (7, 2)):
            one, other = plain.draw(k, round), system.draw(k, round)
            assert other.compute_s == pytest.approx(factor * one.compute_s)
            assert (other.download_s, other.upload_s) == (one.download_s, one.upload_s)
            radio = plain.energy_j(one, 0.0)
            assert system.energy_j(other) - radio == pytest.approx(factor * (plain.energy_j(one) - radio))


def test_both_engines_take_the_same_time() -> None:
    scenario = load_scenario("digits", {**KEYS, "clients.reference_multiplications": 100.0})
    one, other = inprocess.play(scenario).history, simulate(scenario, engine="vectorized").history
    assert [row.latency_s for row in one.clients] == [row.latency_s for row in other.clients]
    plain = simulate(load_scenario("digits", KEYS), engine="vectorized").history
    assert other.rounds[0].round_s > plain.rounds[0].round_s


def test_it_is_off_in_every_scenario_and_refused_with_measured_times_or_nothing_to_count() -> None:
    assert all(load_scenario(name).clients.reference_multiplications == 0 for name in scenario_names())
    with pytest.raises(ParameterError, match="reference_multiplications"):
        count_multiplications(nn.ReLU(), np.ones(4, dtype=np.float32))
    with pytest.raises(ParameterError, match="latency_mode"):
        World(load_scenario("smoke", {"clients.reference_multiplications": 1.0, "clients.latency_mode": "measured"}))
