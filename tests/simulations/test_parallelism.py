"""Backend and threads of the vectorized engine, and the refusal of what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.backends import Backend, Choice, choose_backend
from fedsel_flwr.clients.training import using_threads
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World, run_size, threads_for
from tests.clients.batched.helpers import COMPILES
from tests.simulations.cut_off_runs import parts, smoke
from tests.simulations.inprocess import choices, distance


@pytest.mark.parametrize(
    ("keys", "backend", "said"),
    [
        ({}, "fast", "backend must be one of auto, numba, manual, vmap, sequential, got 'fast'"),
        ({"engine": "ray"}, "manual", "backend = 'manual' is for the vectorized engine"),
        ({"model__name": "cnn"}, "numba", "backend = 'numba' cannot train this model"),
        # Only clients that train one by one can do this.
        ({"clients__latency_mode": "measured"}, None, "clients.latency_mode = 'measured' is for the engine 'ray'"),
        ({"clients__delay": "sleep"}, None, "clients.delay = 'sleep' is for the engine 'ray'"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(keys: dict[str, Any], backend: Any, said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        simulate(smoke(4, **keys), backend=backend)
    assert str(caught.value).startswith(said)


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 800), nn.ReLU(), nn.Linear(800, 10))


def convolving() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 800, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800 * 36, 10))


def chosen(rounds: int, model: Any, backend: Backend | None = None) -> Choice:
    """What trains 25 of 100 clients with some 10 examples in batches of 10: two steps a round at most."""
    keys = {"rounds": rounds, "clients_per_round": 25, "num_clients": 100, "training.batch_size": 10}
    keys |= {"partition.kind": "iid", "training.local_epochs": 1, "engine": "vectorized"}
    world = World(load_scenario("digits", keys), OwnParts(model))
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


@COMPILES
def test_numba_by_kind_and_length_alone() -> None:
    assert chosen(3000, wide).backend == "numba"
    short = chosen(300, wide)
    assert short.backend == "manual"  # over before the loops are loaded
    assert "25,000" in short.reasons["numba"]
    assert chosen(3000, wide, "auto").backend == "manual"
    assert chosen(3000, convolving).backend == "manual"


@COMPILES
def test_a_run_with_numba_makes_the_same_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = smoke(4, selector="bsfl")
    alone = simulate(scenario)
    taken: list[str] = []
    train = BatchedTrainer.train

    def watched(self: BatchedTrainer, *arguments: Any) -> Any:
        taken.append(self.backend)
        return train(self, *arguments)

    monkeypatch.setattr(BatchedTrainer, "train", watched)
    run, repeated = (simulate(scenario, backend="numba") for _ in range(2))
    assert taken == ["numba"] * 8
    assert parts(run) == parts(repeated)
    assert choices(run) == choices(alone)
    assert distance(run, alone) <= 1e-6
