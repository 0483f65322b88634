"""The backend that trains a model: a case for each backend, and for each reason against one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedsel_flwr.clients.batched import BatchedTrainer, numba_kernels
from fedsel_flwr.clients.batched.backends import Choice, RunSize, choose_backend
from fedsel_flwr.clients.batched.numba_mlp import perceptron
from fedsel_flwr.clients.batched.steps import Unsupported
from fedsel_flwr.clients.objectives import Reduction, cross_entropy, get_arrays
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from tests.clients.batched import helpers as models
from tests.clients.batched.helpers import COMPILES, built, generators, seeded, world

LONG = RunSize(rounds=2000, clients_per_round=25, steps=1.0, largest=10)
BEFORE = {"numba": [], "manual": ["numba"], "vmap": ["numba", "manual"], "sequential": ["numba", "manual", "vmap"]}


def layers(*given: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(nn.Sequential(*given))


def settings_of(**options: Any) -> TrainingSettings:
    return TrainingSettings(**{"learning_rate": 0.1, "batch_size": 10} | options)


def chosen(build: Any, loss: Any = cross_entropy, settings: dict[str, Any] | None = None, **options: Any) -> Choice:
    inputs, labels = world(np.float32).to(torch.device("cpu"))
    return choose_backend(seeded(build), loss, inputs, labels, settings_of(**settings or {}), **options)


LINEAR = layers(nn.Flatten(), nn.Linear(64, 10))
FIRST = "supports only dense layers"


@pytest.mark.parametrize(
    ("build", "backend", "reason"),
    [
        (models.Residual, "manual", "Residual at 'the top' is not a layer that manual backprop supports"),
        (models.normalized, "manual", "BatchNorm2d at '1' is not a layer"),
        (layers(nn.Flatten(2), nn.Linear(64, 4), nn.Flatten()), "manual", "Flatten at '0' does not flatten all axes"),
        (layers(nn.Linear(8, 2), nn.Flatten()), "manual", "Linear at '0' gets inputs that are not flat"),
        (layers(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten()), "manual", "Conv2d at '0' has groups"),
        (layers(nn.Flatten(), nn.Linear(64, 2).requires_grad_(False)), "manual", "frozen"),
        (layers(nn.Conv2d(1, 2, 3), nn.ReLU()), "manual", "expected outputs of shape (n, k)"),
        (layers(nn.Flatten(), nn.Linear(9, 2)), "manual", "Linear at '1' cannot read its input"),
        (layers(nn.Flatten(), nn.Linear(64, 2).double()), "manual", "must share one type"),
        (lambda: nn.Sequential(nn.Flatten(), *[nn.Linear(64, 64)] * 2), "manual", "shared"),
        (layers(nn.MaxPool2d(2, return_indices=True), nn.Flatten()), "manual", "MaxPool2d at '0'"),
        (models.hooked, "manual", "has hooks"),
        (models.Transposed, "vmap", "neither contiguous nor channels last"),
        (models.Chance, "vmap", "on random numbers outside nn.Dropout"),
        (models.Centred, "vmap", "depend on the rest of the batch"),
        (models.Counting, "vmap", "changes its buffers"),
        (lambda: models.Gated(lambda z: z.mean(0)), "vmap", "depend on the rest of the batch"),
        (lambda: models.Gated(lambda z: z[:1]), "vmap", "depend on the rest of the batch"),
        (models.normalized_by_hand, "vmap", "a forward pass with one example fails: ValueError"),
        (models.Renormed, "vmap", "changes its parameters"),
        (lambda: models.Remembering("mean"), "vmap", "on earlier forward passes"),
        (lambda: models.Remembering("calls"), "vmap", "changes its attributes"),
        (models.Branching, "vmap", "torch.func cannot batch it: RuntimeError: vmap"),
        (models.normalized, "vmap", "BatchNorm2d at '1' uses statistics of the whole batch"),
        (layers(nn.AlphaDropout(), nn.Flatten(), nn.Linear(64, 2)), "vmap", "AlphaDropout is not supported"),
        (models.dropping, "numba", FIRST),
        (built("cnn"), "numba", FIRST),
        (layers(nn.Flatten(), nn.ReLU(), nn.Linear(64, 10)), "numba", FIRST),
        (layers(nn.Flatten(), nn.Linear(64, 10), nn.ReLU()), "numba", "its last layer must"),
        (lambda: LINEAR().double(), "numba", "must share one type"),
        (layers(nn.Flatten(), nn.Linear(64, 10), nn.Tanh()), "numba", "Tanh at '2' is not"),
    ],
)
def test_why_not(build: Any, backend: Any, reason: str) -> None:
    model = seeded(build)
    with pytest.raises(ParameterError, match=f"backend = '{backend}'") as error:
        BatchedTrainer(model, settings_of(), backend=backend).train(get_arrays(model), world(np.float32), generators())
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": None}, "length of the run is unknown"),
        ({"size": RunSize(24_999, 1, 1.0, 10)}, "fewer than 25,000 local steps"),
        ({"backend": "auto"}, "'auto' skips it"),
        ({"loss": functional.multi_margin_loss}, "cross-entropy of classes"),
        ({"settings": {"batch_size": 33}}, "more than 32 examples"),
        ({"settings": {"batch_size": 5, "augmentation": "crop-flip"}}, "augmentation"),
    ],
)
def test_reasons_against_numba(options: dict[str, Any], reason: str) -> None:
    choice = chosen(LINEAR, **{"size": LONG} | options)
    assert choice.backend == "manual"
    assert reason in choice.reasons["numba"]


@pytest.mark.parametrize(
    "inputs",
    [torch.zeros(2, 64, device="meta"), torch.zeros(64, 2).T, torch.zeros(2, 64, dtype=torch.float16)],
    ids=["device", "layout", "type"],
)
def test_numba_reads_float32_or_float64_in_one_piece_on_the_cpu(inputs: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match="contiguous inputs of float32 or float64 on the CPU"):
        perceptron(
            nn.Sequential(nn.Linear(64, 10)), cross_entropy, inputs, torch.zeros(2, dtype=torch.int64), settings_of()
        )


@pytest.mark.parametrize(
    ("build", "backend"),
    [
        pytest.param(LINEAR, "numba", marks=COMPILES),
        (models.shared, "manual"),
        (models.Residual, "vmap"),
        (models.normalized, "sequential"),
    ],
)
def test_the_first_backend_that_can(build: Any, backend: str) -> None:
    """Each backend before it in the list has its reason."""
    choice = chosen(build, size=LONG)
    assert choice.backend == backend
    assert [*choice.reasons] == BEFORE[backend]
    assert (choice.kernel is None) == (backend == "sequential")


def test_without_numba_the_next_backend_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_kernels, "MISSING", "No module named 'numba'")
    choice = chosen(LINEAR, size=LONG)
    assert choice.backend == "manual"
    assert "fedsel-flwr[sim]" in choice.reasons["numba"]
    assert "No module named 'numba'" in choice.reasons["numba"]


def test_a_loss_that_is_no_number_for_each_example_is_trained_one_by_one() -> None:
    def mean(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
        return functional.cross_entropy(outputs, targets)

    choice = chosen(models.Residual, loss=mean)
    assert choice.backend == "sequential"
    assert "one loss for each" in choice.reasons["vmap"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": RunSize(2000, 7, 1.0, 10)}, "a round has 7 clients"),
        ({"size": LONG, "chunk": lambda: 7}, "only 7 clients fit into the caches"),
        ({"chunk": lambda: 7}, "only 7 clients fit into the caches"),
    ],
)
def test_vmap_is_refused_if_few_clients_train_together(options: dict[str, Any], reason: str) -> None:
    choice = chosen(models.Residual, **options)
    assert choice.backend == "sequential"
    assert reason in choice.reasons["vmap"]
    assert chosen(models.Residual, backend="vmap", **options).backend == "vmap"
    assert chosen(models.Residual, size=RunSize(2000, 8, 1.0, 10), chunk=lambda: 8).backend == "vmap"


def test_the_largest_client_of_the_run_counts_not_that_of_its_first_round() -> None:
    """A resumed run begins with other clients, and must choose as before."""
    model, size = seeded(models.Residual), RunSize(2000, 25, 1.0, 4_000)
    trainer = BatchedTrainer(model, settings_of(batch_size=4_000), backend=None, size=size)
    trainer.train(get_arrays(model), world(np.float32), generators())
    assert trainer.backend == "sequential"
    assert [*trainer.reasons] == BEFORE["sequential"]
    assert "fit into the caches" in trainer.reasons["vmap"]
