"""Clients trained together get the weights and losses that they get one by one.

In single precision a rounding difference can turn a unit that stands at its kink, or the maximum of a window, and the
weights then differ by the step length times that unit's gradient: hence small steps here, and the same comparison in
double precision, where nothing but rounding of 1e-12 may differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.backends import Backend
from fedsel_flwr.clients.objectives import CLASSIFICATION, REGRESSION, Objective, get_arrays, set_arrays
from fedsel_flwr.clients.training import TrainingSettings, train
from fedsel_flwr.simulations.worlds.architectures import build_model

Arrays = list[npt.NDArray[Any]]
SIZES = (7, 30, 1, 24, 12, 10, 5)  # with batches of 8: one to four steps a pass, last batches of 1 to 8
PLAIN = {"learning_rate": 0.003, "batch_size": 8}
SETTINGS = {
    "plain": PLAIN,
    "epochs": PLAIN | {"local_epochs": 3},
    "steps": PLAIN | {"local_steps": 5},
    "momentum": PLAIN | {"local_epochs": 2, "momentum": 0.9},
    "decay": PLAIN | {"weight_decay": 0.05, "local_epochs": 2},
    "proximal": PLAIN | {"proximal_mu": 0.5, "local_epochs": 2},
    "everything": PLAIN | {"local_epochs": 2, "momentum": 0.7, "weight_decay": 0.02, "proximal_mu": 0.3},
    "full batch": {"learning_rate": 0.003, "batch_size": 1000, "local_epochs": 2},
    "augmented": PLAIN | {"augmentation": "crop-flip", "local_epochs": 2},
}
SETTINGS["everything, augmented"] = SETTINGS["everything"] | {"augmentation": "crop-flip", "local_steps": 5}


def vgg() -> nn.Module:
    """VGG-11 with an eighth of its channels, for images of 32x32."""
    layers: list[nn.Module] = []
    channels = 1
    for size in (8, "pool", 16, "pool", 32, 32, "pool", 64, 64, "pool", 64, 64, "pool"):
        if size == "pool":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, int(size), 3, padding=1), nn.ReLU(inplace=True)]
            channels = int(size)
    head = (nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Sequential(*head))


def odd() -> nn.Module:
    """Strides, dilation, overlapping and padded windows, no biases, dropout between convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, dilation=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        nn.Identity(),
        nn.Flatten(),
        nn.Dropout(0.0),
        nn.Linear(6 * 7 * 7, 10, bias=False),
    )


def dropping() -> nn.Module:
    """A perceptron with dropout of inputs and units."""
    return nn.Sequential(
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(784, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 10)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Objective]] = {
    "logistic": (lambda: build_model("logistic", (1, 28, 28), 10, 0), (1, 28, 28), CLASSIFICATION),
    "mlp": (lambda: build_model("mlp", (1, 28, 28), 10, 0), (1, 28, 28), CLASSIFICATION),
    "dropping": (dropping, (1, 28, 28), CLASSIFICATION),
    "cnn": (lambda: build_model("cnn", (1, 28, 28), 10, 0), (1, 28, 28), CLASSIFICATION),
    "vgg": (vgg, (1, 32, 32), CLASSIFICATION),
    "odd": (odd, (1, 28, 28), CLASSIFICATION),
    "squared": (lambda: nn.Sequential(nn.Linear(5, 1)), (5,), REGRESSION),
}


def world(model: str, dtype: type[np.floating[Any]] = np.float32) -> tuple[nn.Module, Examples, Objective]:
    """A model, clients of ragged sizes whose rows overlap, and an objective."""
    build, shape, objective = MODELS[model]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        built = build()
    rng = np.random.default_rng(2)
    classes = rng.integers(10, size=60)
    inputs = (rng.normal(size=(10, *shape))[classes] + 0.3 * rng.normal(size=(60, *shape))).astype(dtype)
    labels = classes if objective is CLASSIFICATION else inputs.sum(1)
    built = built.double() if dtype is np.float64 else built
    return built, Examples(inputs, labels, [rng.choice(60, size=size, replace=False) for size in SIZES]), objective


def generators(round_: int) -> list[np.random.Generator]:
    return [np.random.default_rng([round_, client]) for client in range(len(SIZES))]


def one_by_one(
    model: nn.Module, start: Arrays, examples: Examples, settings: TrainingSettings, objective: Objective, round_: int
) -> tuple[Arrays, npt.NDArray[np.float64]]:
    models, losses = [], []
    for rows, generator in zip(examples.rows, generators(round_), strict=True):
        set_arrays(model, start)
        losses.append(train(model, examples.inputs[rows], examples.labels[rows], settings, generator, objective))
        models.append(get_arrays(model))
    return [np.stack(layer) for layer in zip(*models, strict=True)], np.array(losses)


def average(layers: Arrays) -> Arrays:
    weights = np.array(SIZES) / sum(SIZES)
    return [np.tensordot(weights, layer, 1).astype(layer.dtype) for layer in layers]


def three_rounds(
    name: str,
    settings: TrainingSettings,
    backend: Backend,
    chunk: int | None = 3,
    dtype: type[np.floating[Any]] = np.float32,
    tolerance: float = 1e-5,
) -> BatchedTrainer:
    """Train and average three times, one by one and together; compare after each."""
    model, examples, objective = world(name, dtype)
    trainer = BatchedTrainer(model, settings, objective=objective, backend=backend, chunk=chunk)
    alone = together = get_arrays(model)
    for round_ in range(3):
        layers, losses = trainer.train(together, examples, generators(round_))
        expected_layers, expected_losses = one_by_one(
            copy.deepcopy(model), alone, examples, settings, objective, round_
        )
        assert [(x.dtype, x.shape) for x in layers] == [(x.dtype, x.shape) for x in expected_layers]
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
        moved = max(np.abs(a - b).max() for a, b in zip(expected_layers, alone, strict=True))
        assert moved > 3e-4
        alone, together = average(expected_layers), average(layers)
        difference = max(np.abs(a - b).max() for a, b in zip(alone, together, strict=True))
        assert difference <= tolerance, (round_, difference)
    return trainer


def cases(names: list[str], settings: list[str]) -> list[tuple[str, str]]:
    """Every model with every setting; numbers to predict come with vectors, which are no images."""
    return [(name, which) for name in names for which in settings if name != "squared" or "augmented" not in which]


@pytest.mark.parametrize(("name", "settings"), cases(["logistic", "mlp", "dropping", "cnn", "squared"], [*SETTINGS]))
def test_same_averages_after_three_rounds(name: str, settings: str) -> None:
    trainer = three_rounds(name, TrainingSettings(**SETTINGS[settings]), "auto")  # type: ignore[arg-type]
    assert trainer.backend == "manual"


@pytest.mark.parametrize(("name", "settings"), cases(["vgg", "odd"], ["plain", "everything", "everything, augmented"]))
def test_same_averages_of_deeper_networks(name: str, settings: str) -> None:
    assert three_rounds(name, TrainingSettings(**SETTINGS[settings]), "auto").backend == "manual"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*cases([*MODELS], ["everything"]), *cases(["dropping", "odd"], ["everything, augmented"]), ("cnn", "steps")],
)
@pytest.mark.parametrize("backend", ["manual", "vmap"])
def test_what_differs_is_rounding(backend: Backend, name: str, settings: str) -> None:
    chosen = TrainingSettings(**SETTINGS[settings])  # type: ignore[arg-type]
    three_rounds(name, chosen, backend, dtype=np.float64, tolerance=1e-12)


@pytest.mark.parametrize(("name", "settings"), [*cases([*MODELS], ["everything"]), ("cnn", "everything, augmented")])
def test_same_averages_the_general_way(name: str, settings: str) -> None:
    three_rounds(name, TrainingSettings(**SETTINGS[settings]), "vmap")  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [1, 2, 100, None])
@pytest.mark.parametrize("backend", ["manual", "vmap"])
def test_the_size_of_a_chunk_changes_nothing(backend: Backend, chunk: int | None) -> None:
    three_rounds("cnn", TrainingSettings(**SETTINGS["everything"]), backend, chunk)  # type: ignore[arg-type]


def test_the_loop_is_the_loop() -> None:
    model, examples, objective = world("mlp")
    settings = TrainingSettings(**PLAIN)  # type: ignore[arg-type]
    layers, losses = BatchedTrainer(model, settings, backend="sequential").train(
        get_arrays(model), examples, generators(0)
    )
    expected, expected_losses = one_by_one(model, get_arrays(model), examples, settings, objective, 0)
    assert all(np.array_equal(a, b) for a, b in zip(layers, expected, strict=True))
    assert np.array_equal(losses, expected_losses)


def test_repeated_runs_are_equal_to_the_last_bit() -> None:
    model, examples, _ = world("cnn")
    settings = TrainingSettings(**SETTINGS["everything"])  # type: ignore[arg-type]
    runs = [BatchedTrainer(model, settings).train(get_arrays(model), examples, generators(0)) for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert np.array_equal(runs[0][1], runs[1][1])
