"""Batched evaluation equals single evaluations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.answering import answer
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.vectorized import BatchedEvaluation, probe_clients
from fedsel_flwr.simulations.worlds.world import World

WORLDS: dict[str, dict[str, Any]] = {
    "digits": {"data.local_test_fraction": 0.25},
    "phones": {},
    "ben-ami-linear": {},
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(
    "columns",
    [
        "local_accuracy",
        "loss,rms_loss",
        "local_accuracy,rms_loss",
        "gradient,loss",
        "sketch",
        "sketch,loss",
        "batch_loss",
        "batch_loss,loss",
        "batch_loss,local_accuracy",
        "gradient,batch_loss",
    ],
)
def test_a_probe_costs_and_says_the_same(name: str, columns: str) -> None:
    """Of a few clients, whose rows are gathered, and of all, whose outputs come from all examples."""
    world = World(load_scenario(name, {"num_clients": 10, "clients_per_round": 2} | WORLDS[name]))
    arrays = [array + np.float32(0.01) for array in world.initial_arrays()]
    config: dict[str, str | int] = {"probe": columns, "round": 3}
    for ids in ([7, 2], list(range(10))):
        for k, together in zip(ids, probe_clients(world, arrays, ids, config), strict=True):
            loss, _, metrics = world.client(k).evaluate(arrays, dict(config))
            alone: dict[str, Any] = {"loss": loss, **metrics}
            assert together.keys() == alone.keys()
            assert {key: together[key] for key in ("latency_s", "energy_j", "client_id")} == {
                key: alone[key] for key in ("latency_s", "energy_j", "client_id")
            }
            assert together.get("sketch") == alone.get("sketch")
            for key in together.keys() - {"gradient", "sketch"}:
                assert together[key] == pytest.approx(alone[key], rel=1e-5, abs=1e-7), key


def test_answers_of_a_training_round() -> None:
    world = World(load_scenario("digits", {"num_clients": 10, "clients_per_round": 2, "data.local_test_fraction": 0.2}))
    arrays, asked = world.initial_arrays(), {"loss", "rms_loss", "local_accuracy"}
    together = BatchedEvaluation(world, arrays, [4, 1], asked)
    set_arrays(world.model, arrays)
    for k in (1, 4):
        alone = answer(world.model, asked, *world.examples(k), world.objective)
        assert together.columns(k, asked) == pytest.approx(alone, rel=1e-5)
        assert together.columns(k, {"loss"}).keys() == {"loss"}
        for column in asked:  # the model sees only the examples that the column is about
            (one,) = BatchedEvaluation(world, arrays, [4, 1], {column}).columns(k, {column}).items()
            assert one == (column, pytest.approx(alone[column], rel=1e-5))
