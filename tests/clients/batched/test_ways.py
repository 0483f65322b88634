"""Which way a model is trained, why not the faster one, and that it is right all the same."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.predicting import logits_batched
from fedsel_flwr.clients.losses import Loss, cross_entropy
from fedsel_flwr.clients.parameters import get_arrays, set_arrays
from fedsel_flwr.clients.predicting import torch_predict
from fedsel_flwr.clients.training import TrainingSettings, train
from fedsel_flwr.errors import ParameterError

SETTINGS = TrainingSettings(
    learning_rate=0.05, batch_size=4, local_epochs=2, momentum=0.5, weight_decay=0.1, proximal_mu=0.2
)
SIZES = (6, 9, 4)


class Residual(nn.Module):
    """Not sequential; normalization within an example; whole channels dropped, one layer of dropout called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.channels = nn.Dropout2d(0.4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.channels(torch.relu(self.first(x)))
        x = self.drop(x + torch.relu(self.norm(self.second(x))))
        return self.head(self.drop(x.flatten(1)))


class ChannelsLast(nn.Module):
    """Its dropout's input is laid out channels last, and torch draws in the order of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.drop, self.head = nn.Conv2d(1, 4, 3), nn.Dropout(0.5), nn.Linear(4 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.head(self.drop(x).flatten(1))


class Tied(nn.Module):
    """Two layers with one weight, a frozen one, one that is never called, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.frozen, self.idle, self.head = nn.Linear(64, 64), nn.Linear(3, 3), nn.Linear(64, 10)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.7))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.flatten(1)))
        return self.head(self.frozen(torch.tanh(self.second(x))) * self.scale)


class Chance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.head(x.flatten(1)), 0.5, self.training)


class Centred(Chance):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(x.flatten(1))
        return outputs - outputs.mean(0)


class Counting(Chance):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(x.flatten(1))


class Branching(Chance):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(x.flatten(1))
        return outputs if outputs.sum().item() > 0 else 2 * outputs


def normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 10))


def shared() -> nn.Module:
    """One rectifier and one dropout layer in several places."""
    relu, drop = nn.ReLU(), nn.Dropout(0.4)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), relu, drop, nn.Linear(20, 20), relu, drop, nn.Linear(20, 10))


def world(dtype: type[np.floating[Any]] = np.float32) -> Examples:
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(20, 1, 8, 8)).astype(dtype)
    return Examples(inputs, rng.integers(10, size=20), [rng.choice(20, size=size, replace=False) for size in SIZES])


def seeded(build: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        built: nn.Module = build()
    return built


def check_against_loop(model: nn.Module, examples: Examples, trainer: BatchedTrainer, loss: Loss, atol: float) -> None:
    start = get_arrays(model)
    drawers = [[np.random.default_rng(i) for i in range(len(SIZES))] for _ in range(2)]
    layers, losses = trainer.train(start, examples, drawers[0])
    alone = copy.deepcopy(model)
    for i, (rows, generator) in enumerate(zip(examples.rows, drawers[1], strict=True)):
        set_arrays(alone, start)
        expected = train(alone, examples.inputs[rows], examples.labels[rows], SETTINGS, generator, loss)
        assert losses[i] == pytest.approx(expected, rel=1e-4)
        for layer, array in zip(layers, get_arrays(alone), strict=True):
            assert layer.dtype == array.dtype
            np.testing.assert_allclose(layer[i], array, atol=atol, rtol=0)
    # the generators stand where the loop leaves them
    assert [g.integers(2**40) for g in drawers[0]] == [g.integers(2**40) for g in drawers[1]]


@pytest.mark.parametrize(
    ("build", "way"),
    [
        (shared, "written"),
        (shared, "general"),
        (Residual, "general"),
        (ChannelsLast, "general"),
        (Tied, "general"),
        (Chance, "loop"),
        (Centred, "loop"),
        (Counting, "loop"),
        (Branching, "loop"),
        (normalized, "loop"),
    ],
)
def test_models_of_all_kinds(build: Any, way: str) -> None:
    model = seeded(build).double()
    trainer = BatchedTrainer(model, SETTINGS, way="general" if way == "general" else "auto", chunk=2)
    check_against_loop(model, world(np.float64), trainer, cross_entropy, atol=1e-12)
    assert trainer.way == way


@pytest.mark.parametrize(
    ("build", "way", "reason"),
    [
        (Residual, "written", "Residual at 'the top' is not among the layers that are written out"),
        (normalized, "written", "BatchNorm2d at '1' is not among"),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(64, 4), nn.Flatten()), "written", "Flatten at '0' keeps axes"),
        (lambda: nn.Sequential(nn.Linear(8, 2), nn.Flatten()), "written", "Linear at '0' reads more than one axis"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten()),
            "written",
            "Conv2d at '0' has groups",
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2).requires_grad_(False)), "written", "frozen"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), "written", "expected outputs of shape (n, k)"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), "written", "Linear at '1' cannot read its input"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2).double()), "written", "must share one type"),
        (Chance, "general", "on chance beside nn.Dropout"),
        (Centred, "general", "depend on the rest of the batch"),
        (Counting, "general", "changes its buffers"),
        (Branching, "general", "torch.func cannot batch it: RuntimeError: vmap"),
        (normalized, "general", "BatchNorm2d at '1' reads and keeps statistics"),
        (lambda: nn.Sequential(nn.AlphaDropout(), nn.Flatten(), nn.Linear(64, 2)), "general", "masks of AlphaDropout"),
    ],
)
def test_why_not(build: Any, way: Any, reason: str) -> None:
    model, examples = build(), world()
    with pytest.raises(ParameterError) as error:
        BatchedTrainer(model, SETTINGS, way=way).train(
            get_arrays(model), examples, [np.random.default_rng(i) for i in range(3)]
        )
    assert reason in str(error.value)


def test_the_reasons_can_be_read() -> None:
    model = seeded(normalized)
    trainer = BatchedTrainer(model, SETTINGS)
    trainer.train(get_arrays(model), world(), [np.random.default_rng(i) for i in range(3)])
    assert trainer.way == "loop"
    assert [*trainer.reasons] == ["written", "general"]
    assert "BatchNorm2d" in trainer.reasons["general"]


def test_a_layer_with_a_hook_is_not_written_out() -> None:
    model = seeded(shared).double()
    model[1].register_forward_hook(lambda module, args, output: 2 * output)  # type: ignore[operator]
    trainer = BatchedTrainer(model, SETTINGS)
    check_against_loop(model, world(np.float64), trainer, cross_entropy, atol=1e-12)
    assert trainer.way == "general"
    assert "has hooks" in trainer.reasons["written"]


def absolute_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.mean(1) - labels).abs()


@pytest.mark.parametrize("way", ["written", "general"])
def test_a_loss_of_ones_own(way: Any) -> None:
    model = seeded(shared).double()
    trainer = BatchedTrainer(model, SETTINGS, way=way, loss=absolute_error)
    check_against_loop(model, world(np.float64), trainer, absolute_error, atol=1e-12)


def test_probabilities_instead_of_classes() -> None:
    model, examples = seeded(shared).double(), world(np.float64)
    soft = np.random.default_rng(0).dirichlet(np.ones(10), size=20)
    trainer = BatchedTrainer(model, SETTINGS, way="written")
    check_against_loop(model, Examples(examples.inputs, soft, examples.rows), trainer, cross_entropy, atol=1e-12)


@pytest.mark.parametrize("build", [shared, Residual, normalized, Branching])
def test_logits_of_a_stack(build: Any) -> None:
    model, inputs = seeded(build), world().inputs
    rng = np.random.default_rng(0)
    models = [[(a + rng.normal(size=a.shape) / 9).astype(a.dtype) for a in get_arrays(model)] for _ in range(3)]
    found = logits_batched(model, [np.stack(layer) for layer in zip(*models, strict=True)], inputs, batch_size=7)
    predict = torch_predict(copy.deepcopy(model))
    if build is not Branching:  # which decides by the batch
        expected: list[npt.NDArray[np.float64]] = [predict(arrays, np.asarray(inputs)) for arrays in models]
        np.testing.assert_allclose(found, np.stack(expected), atol=1e-5)
    assert found.shape == (3, 20, 10)
