"""The learning rate that is halved from given rounds on, in both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from tests.simulations import inprocess

SETTINGS = TrainingSettings(learning_rate=0.4, batch_size=2, halved_at=(3, 5))


@pytest.mark.parametrize(("round", "rate"), [(1, 0.4), (2, 0.4), (3, 0.2), (4, 0.2), (5, 0.1), (900, 0.1)])
def test_the_rate_of_a_round(round: int, rate: float) -> None:
    assert SETTINGS.at(round).learning_rate == rate
    assert SETTINGS.at(round).batch_size == 2


@pytest.mark.parametrize("rounds", [(5, 3), (3, 3), (0,), (1.5,)])
def test_wrong_rounds(rounds: Any) -> None:
    with pytest.raises(ParameterError, match="halved_at"):
        TrainingSettings(learning_rate=0.4, batch_size=2, halved_at=rounds)


def _scenario(**keys: Any) -> Any:
    common = {"num_clients": 12, "clients_per_round": 3, "rounds": 4, "model.name": "logistic", "selector": "random"}
    return load_scenario("digits", {**common, **keys})


def test_both_engines_halve_it_in_the_same_round() -> None:
    scenario = _scenario(**{"training.halved_at": [3]})
    alone, together = inprocess.play(scenario), simulate(scenario, engine="vectorized")
    for one, other in zip(alone.arrays, together.arrays, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    never, always = (
        simulate(_scenario(), engine="vectorized"),
        simulate(_scenario(**{"training.halved_at": [1]}), engine="vectorized"),
    )
    for result in (never, always):
        assert max(np.abs(a - b).max() for a, b in zip(together.arrays, result.arrays, strict=True)) > 1e-3
