"""The backend that trains a model: a case for each backend, and for each reason against one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedsel_flwr.clients.batched import BatchedTrainer, numba_kernels
from fedsel_flwr.clients.batched.backends import Backend, Choice, RunSize, choose_backend
from fedsel_flwr.clients.batched.numba_mlp import perceptron
from fedsel_flwr.clients.batched.steps import Unsupported
from fedsel_flwr.clients.objectives import CLASSIFICATION, Reduction, cross_entropy, get_arrays
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from tests.clients.batched.checking import SETTINGS, check_against_loop, seeded, world
from tests.clients.batched.kinds import Branching, Centred, Chance, Counting, Residual, normalized, shared


class Transposed(nn.Module):
    """A dropout layer whose input is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.layer = nn.Dropout(0.5), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes (n, 1, 8, 8) to (n, 10)."""
        return self.layer(self.dropout(x[:, 0].transpose(1, 2)).sum(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("build", "backend", "reason"),
    [
        (Residual, "manual", "Residual at 'the top' is not among the layers"),
        (normalized, "manual", "BatchNorm2d at '1' is not among"),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(64, 4), nn.Flatten()), "manual", "Flatten at '0' keeps axes"),
        (lambda: nn.Sequential(nn.Linear(8, 2), nn.Flatten()), "manual", "Linear at '0' reads more than one axis"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten()),
            "manual",
            "Conv2d at '0' has groups",
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2).requires_grad_(False)), "manual", "frozen"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), "manual", "expected outputs of shape (n, k)"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), "manual", "Linear at '1' cannot read its input"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2).double()), "manual", "must share one type"),
        (lambda: nn.Sequential(nn.Flatten(), *[nn.Linear(64, 64)] * 2), "manual", "shared"),
        (lambda: nn.Sequential(nn.MaxPool2d(2, return_indices=True), nn.Flatten()), "manual", "MaxPool2d at '0'"),
        (Transposed, "vmap", "neither contiguous nor channels last"),
        (Chance, "vmap", "on chance outside nn.Dropout"),
        (Centred, "vmap", "depend on the rest of the batch"),
        (Counting, "vmap", "changes its buffers"),
        (Branching, "vmap", "torch.func cannot batch it: RuntimeError: vmap"),
        (normalized, "vmap", "BatchNorm2d at '1' reads and keeps statistics"),
        (lambda: nn.Sequential(nn.AlphaDropout(), nn.Flatten(), nn.Linear(64, 2)), "vmap", "masks of AlphaDropout"),
    ],
)
def test_why_not(build: Any, backend: Any, reason: str) -> None:
    model, examples = seeded(build), world()
    with pytest.raises(ParameterError) as error:
        BatchedTrainer(model, SETTINGS, backend=backend).train(
            get_arrays(model), examples, [np.random.default_rng(i) for i in range(3)]
        )
    assert reason in str(error.value)


def test_the_reasons_can_be_read() -> None:
    model = seeded(normalized)
    trainer = BatchedTrainer(model, SETTINGS)
    trainer.train(get_arrays(model), world(), [np.random.default_rng(i) for i in range(3)])
    assert trainer.backend == "sequential"
    assert [*trainer.reasons] == ["numba", "manual", "vmap"]
    assert "'auto' leaves it out" in trainer.reasons["numba"]
    assert "BatchNorm2d" in trainer.reasons["vmap"]


def test_a_layer_with_a_hook_is_not_written_out() -> None:
    model = seeded(shared).double()
    model[1].register_forward_hook(lambda module, args, output: 2 * output)  # type: ignore[operator]
    trainer = BatchedTrainer(model, SETTINGS)
    check_against_loop(model, world(np.float64), trainer, CLASSIFICATION, atol=1e-12)
    assert trainer.backend == "vmap"
    assert "has hooks" in trainer.reasons["manual"]


LONG = RunSize(rounds=2000, clients_per_round=25, steps=1.0, largest=10)
PROBE = TrainingSettings(learning_rate=0.1, batch_size=10)
BEFORE = {"numba": [], "manual": ["numba"], "vmap": ["numba", "manual"], "sequential": ["numba", "manual", "vmap"]}
compiles = pytest.mark.skipif(bool(numba_kernels.MISSING), reason="Numba is not installed (no wheel for this platform)")


def chosen(build: Any, loss: Any = cross_entropy, **options: Any) -> Choice:
    inputs, labels = world().to(torch.device("cpu"))
    return choose_backend(seeded(build), loss, inputs, labels, options.pop("settings", PROBE), **options)


@pytest.mark.parametrize(
    ("build", "backend"),
    [
        pytest.param(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "numba", marks=compiles),
        (shared, "manual"),
        (Residual, "vmap"),
        (normalized, "sequential"),
    ],
)
def test_the_first_backend_that_can(build: Any, backend: str) -> None:
    """Each backend before it in the list has its reason."""
    choice = chosen(build, size=LONG)
    assert choice.backend == backend
    assert [*choice.reasons] == BEFORE[backend]
    assert (choice.kernel is None) == (backend == "sequential")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": None}, "size of the run is not given"),
        ({"size": RunSize(24_999, 1, 1.0, 10)}, "fewer than 25,000 local steps"),
        ({"size": LONG, "backend": "auto"}, "'auto' leaves it out"),
        ({"size": LONG, "loss": functional.multi_margin_loss}, "cross-entropy of classes"),
        ({"size": LONG, "settings": TrainingSettings(learning_rate=0.1, batch_size=33)}, "33 examples"),
        (
            {"size": LONG, "settings": TrainingSettings(learning_rate=0.1, batch_size=5, augmentation="crop-flip")},
            "augmentation",
        ),
    ],
)
def test_reasons_against_numba(options: dict[str, Any], reason: str) -> None:
    choice = chosen(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), **options)
    assert choice.backend == "manual"
    assert reason in choice.reasons["numba"]


@pytest.mark.parametrize(
    "inputs",
    [torch.zeros(2, 64, device="meta"), torch.zeros(64, 2).T, torch.zeros(2, 64, dtype=torch.float16)],
    ids=["device", "layout", "type"],
)
def test_numba_reads_float32_or_float64_in_one_piece_on_the_cpu(inputs: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match="float32 or float64 in one piece on the CPU"):
        perceptron(nn.Sequential(nn.Linear(64, 10)), cross_entropy, inputs, torch.zeros(2, dtype=torch.int64), PROBE)


def test_without_numba_the_next_backend_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_kernels, "MISSING", "No module named 'numba'")
    choice = chosen(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), size=LONG)
    assert choice.backend == "manual"
    assert "fedsel-flwr[sim]" in choice.reasons["numba"]


def test_a_loss_that_is_no_number_for_each_example_is_trained_one_by_one() -> None:
    def mean(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
        return functional.cross_entropy(outputs, targets)

    choice = chosen(Residual, loss=mean)
    assert choice.backend == "sequential"
    assert "one loss for each" in choice.reasons["vmap"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": RunSize(2000, 7, 1.0, 10)}, "a round has 7 clients"),
        ({"size": LONG, "chunk": lambda: 7}, "no more than 7 clients fit into the caches"),
        ({"chunk": lambda: 7}, "no more than 7 clients fit into the caches"),
    ],
)
def test_vmap_is_refused_if_few_clients_train_together(options: dict[str, Any], reason: str) -> None:
    choice = chosen(Residual, **options)
    assert choice.backend == "sequential"
    assert reason in choice.reasons["vmap"]
    assert chosen(Residual, backend="vmap", **options).backend == "vmap"
    assert chosen(Residual, size=RunSize(2000, 8, 1.0, 10), chunk=lambda: 8).backend == "vmap"


def test_the_largest_client_of_the_run_counts_not_that_of_its_first_round() -> None:
    """A resumed run begins with other clients, and must choose as before."""
    model = seeded(Residual)
    wide = TrainingSettings(learning_rate=0.1, batch_size=4_000)
    trainer = BatchedTrainer(model, wide, backend=None, size=RunSize(2000, 25, 1.0, 4_000))
    trainer.train(get_arrays(model), world(), [np.random.default_rng(i) for i in range(3)])
    assert trainer.backend == "sequential"
    assert "fit into the caches" in trainer.reasons["vmap"]


@pytest.mark.parametrize("backend", ["numba", "manual", "vmap"])
def test_a_backend_that_cannot_is_refused_by_name(backend: Backend) -> None:
    with pytest.raises(ParameterError, match=f"backend = '{backend}'"):
        chosen(normalized, backend=backend)
