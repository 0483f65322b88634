"""Backend and threads of the vectorized engine, and the refusal of what it cannot do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples, numba_kernels
from fedsel_flwr.clients.batched.backends import Backend, Choice, choose_backend
from fedsel_flwr.clients.threads import using_threads
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.parallelism import run_size, threads_for
from fedsel_flwr.simulations.worlds.world import World

SMOKE = {"engine": "vectorized", "rounds": 4}


@pytest.mark.parametrize(
    ("keys", "backend", "said"),
    [
        ({}, "fast", "backend must be one of auto, numba, manual, vmap, sequential, got 'fast'"),
        ({"engine": "ray"}, "manual", "backend = 'manual' is for the vectorized engine, but the engine is 'ray'"),
        ({"model.name": "cnn"}, "numba", "backend = 'numba' cannot train this model"),
    ],
)
def test_a_backend_that_cannot_train_is_refused(keys: dict[str, Any], backend: Any, said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        simulate(load_scenario("smoke", SMOKE | keys), backend=backend)
    assert str(caught.value).startswith(said)


def world(rounds: int, cohort: int, model: Any) -> World:
    from fedsel_flwr.simulations.worlds.ingredients import OwnParts

    keys = {"rounds": rounds, "clients_per_round": cohort, "num_clients": 100, "training.batch_size": 10}
    keys |= {"partition.kind": "iid", "training.local_epochs": 1}
    return World(load_scenario("digits", SMOKE | keys), OwnParts(model))


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 800), nn.ReLU(), nn.Linear(800, 10))


def convolving() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 800, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800 * 36, 10))


def chosen(world: World, backend: Backend | None) -> Choice:
    """What trains a world's clients."""
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


@pytest.mark.skipif(bool(numba_kernels.MISSING), reason="Numba is not installed (no wheel for this platform)")
def test_numba_by_kind_and_length_alone() -> None:
    # 100 clients of some 10 examples, batches of 10: two steps a round at most
    assert chosen(world(3000, 25, wide), None).backend == "numba"
    short = chosen(world(300, 25, wide), None)
    assert short.backend == "manual"  # over before the loops are loaded
    assert "25,000" in short.reasons["numba"]
    assert chosen(world(3000, 25, wide), "auto").backend == "manual"
    assert chosen(world(3000, 25, convolving), None).backend == "manual"


@pytest.mark.skipif(bool(numba_kernels.MISSING), reason="Numba is not installed (no wheel for this platform)")
def test_a_run_with_numba_makes_the_same_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = load_scenario("smoke", SMOKE | {"selector": "bsfl"})
    alone = simulate(scenario)
    taken: list[str] = []
    train = BatchedTrainer.train

    def watched(self: BatchedTrainer, *arguments: Any) -> Any:
        result = train(self, *arguments)
        taken.append(self.backend)
        return result

    monkeypatch.setattr(BatchedTrainer, "train", watched)
    runs = [simulate(scenario, backend="numba") for _ in range(2)]
    assert taken == ["numba"] * 8
    for layer, repeated, expected in zip(*(run.arrays for run in (*runs, alone)), strict=True):
        np.testing.assert_allclose(layer, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(layer, repeated)
    chosen, expected_chosen = ([(row.round, row.client_id) for row in run.history.clients] for run in (runs[0], alone))
    assert chosen == expected_chosen
