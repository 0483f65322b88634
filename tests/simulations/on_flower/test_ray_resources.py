"""Resources of Ray and of each client: shares, and what there is no room for."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import TrainingSettings, evaluate, train
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations import compare, load_scenario, simulate
from fedsel_flwr.simulations.on_flower import ray_resources
from fedsel_flwr.simulations.on_flower.app import assigned_device
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, actors_that_fit, flower_actor_count

SMOKE = load_scenario("smoke")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("cpus", [1, 2, 3, 6, 7, 16])
@pytest.mark.parametrize("given", [1, 2, 3, 4, 8])
def test_shares_let_as_many_clients_work_as_flower_starts(
    cpus: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share lies on one GPU; Flower counts as if the rests could be put together, and would wait for ever."""
    monkeypatch.setattr(ray_resources, "visible_gpus", lambda: 8)
    shared = RayResources(num_cpus=cpus, num_gpus=given)
    shared.check()
    with pytest.raises(ParameterError, match=r"client_gpus = 0.3 leaves a remainder .* such as 0.25"):
        RayResources(num_cpus=16, num_gpus=4, client_gpus=0.3).check()
    assert actors_that_fit(cpus, given, shared) == flower_actor_count(cpus, given, shared) == cpus
    assert shared.gpus_per_client() * cpus <= given


def test_by_default_clients_take_a_core_and_no_gpu() -> None:
    expected = {"num_cpus": 1, "num_gpus": 0.0, "max_restarts": -1, "max_task_retries": 1}
    assert RayResources().client_resources() == expected
    assert RayResources().non_default == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_gpus": 2}, "num_gpus = 2 asks for a GPU that is not there: torch sees 1"),
        ({"client_gpus": 2.0}, "client_gpus = 2.0 asks for a GPU that is not there: torch sees 1"),
        ({"client_gpus": 1.5}, "client_gpus must be whole, or a fraction of one GPU, got 1.5"),
        ({"client_gpus": -1}, "client_gpus must be .* at least 0"),
        ({"client_cpus": 0}, "client_cpus must be .* above 0"),
        ({"client_cpus": float("nan")}, "client_cpus must be"),
        ({"num_cpus": 0}, "num_cpus must be a whole number of at least 1, got 0"),
        ({"num_gpus": -1}, "num_gpus must be a whole number of at least 0"),
        ({"num_cpus": 2, "client_cpus": 4}, "no client fits: Ray gets 2 cores and 0 GPUs, but a client takes 4 and 0"),
        ({"engine": "vectorized", "device": "nosuch"}, "device = 'nosuch' cannot be used on this machine"),
        ({"engine": "ray", "device": "cuda"}, "device = 'cuda' .*client_gpus"),
    ],
)
def test_what_there_is_no_room_for_is_said_before_anything_starts(
    asked: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_resources, "visible_gpus", lambda: 1)
    monkeypatch.setattr("fedsel_flwr.simulations.engine.world_of", lambda *_: pytest.fail("something started"))
    with pytest.raises(ParameterError, match=said):
        simulate(SMOKE, **asked)


@pytest.mark.parametrize("name", ["num_cpus", "num_gpus", "client_cpus", "client_gpus", "ray_address"])
def test_what_only_ray_can_follow_is_refused_without_it(name: str) -> None:
    value: Any = "local" if name == "ray_address" else 2
    starts: list[Any] = [partial(simulate, SMOKE, engine="vectorized")]
    if name != "ray_address":  # a comparison may be on a cluster, or on this machine
        starts.append(partial(compare, SMOKE, ["bsfl"]))
    for start in starts:
        with pytest.raises(ParameterError, match=f"^{name} is for Ray. Choose the engine"):
            start(**{name: value})


@pytest.mark.parametrize(
    ("given", "there", "device"), [([], True, "cpu"), (["0"], True, "cuda"), (["0"], False, "cpu")]
)
def test_clients_train_on_the_gpu_that_ray_gave_them(
    given: list[str], there: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": given})
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    assert assigned_device() == device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_model_on_a_gpu_trains_as_on_the_cpu() -> None:
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    labels = np.arange(40) % 3
    trained = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3).to(device)
        settings = TrainingSettings(learning_rate=0.1, batch_size=8, local_epochs=3, momentum=0.9)
        loss = train(model, inputs, labels, settings, np.random.default_rng(1))
        trained[device] = (loss, *get_arrays(model), *evaluate(model, inputs, labels))
    for ours, theirs in zip(*trained.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
