"""Models of all kinds, clients of ragged sizes, and the comparison of a trainer with the loop over them.

The models are for images of one channel and 8x8 pixels and ten classes.
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
from torch.nn import functional

from fedsel_flwr.clients.batched import BatchedTrainer, Examples, numba_kernels
from fedsel_flwr.clients.batched.backends import Backend
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective, get_arrays, set_arrays
from fedsel_flwr.clients.training import TrainingSettings, train
from fedsel_flwr.simulations.worlds.architectures import build_model

COMPILES = pytest.mark.skipif(bool(numba_kernels.MISSING), reason="Numba is not installed (no wheel for this platform)")
SIZES = (7, 20, 1, 12, 5)  # with batches of 8: one to three steps a pass, last batches of 1 to 7
PLAIN = {"learning_rate": 0.003, "batch_size": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "steps": PLAIN | {"local_steps": 5},
    "momentum": PLAIN | {"local_epochs": 2, "momentum": 0.9},
    "decay": PLAIN | {"weight_decay": 0.05, "local_epochs": 2},
    "proximal": PLAIN | {"proximal_mu": 0.5, "local_epochs": 2},
    "everything": PLAIN | {"local_epochs": 2, "momentum": 0.7, "weight_decay": 0.02, "proximal_mu": 0.3},
    "full batch": PLAIN | {"batch_size": 1000, "local_epochs": 2},
    "augmented": PLAIN | {"augmentation": "crop-flip", "local_epochs": 2},
}
SETTINGS["everything, augmented"] = SETTINGS["everything"] | {"augmentation": "crop-flip", "local_steps": 5}


def settings_of(name: str = "everything") -> TrainingSettings:
    return TrainingSettings(**SETTINGS[name])


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return build()


def world(dtype: type[np.floating[Any]] = np.float64, shape: tuple[int, ...] = (1, 8, 8)) -> Examples:
    """Clients of ragged sizes whose rows overlap; the classes can be told apart."""
    rng = np.random.default_rng(2)
    labels = rng.integers(10, size=60)
    inputs = (rng.normal(size=(10, *shape))[labels] + 0.3 * rng.normal(size=(60, *shape))).astype(dtype)
    return Examples(inputs, labels, [rng.choice(60, size=size, replace=False) for size in SIZES])


def generators(round: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng([round, client]) for client in range(len(SIZES))]


def one_by_one(
    model: nn.Module,
    start: list[npt.NDArray[Any]],
    examples: Examples,
    settings: TrainingSettings,
    objective: Objective = CLASSIFICATION,
    drawers: list[np.random.Generator] | None = None,
) -> tuple[list[npt.NDArray[Any]], npt.NDArray[np.float64]]:
    """Train each client after the other; returns what a trainer returns."""
    alone, models, losses = copy.deepcopy(model), [], []
    for rows, generator in zip(examples.rows, drawers or generators(), strict=True):
        set_arrays(alone, start)
        losses.append(train(alone, examples.inputs[rows], examples.labels[rows], settings, generator, objective))
        models.append(get_arrays(alone))
    return [np.stack(layer) for layer in zip(*models, strict=True)], np.array(losses)


def check_against_loop(
    model: nn.Module,
    examples: Examples,
    backend: Backend = "auto",
    settings: str = "everything",
    *,
    objective: Objective = CLASSIFICATION,
    chunk: int | None = 3,
    atol: float = 1e-12,
) -> BatchedTrainer:
    """Train and average twice, together and one by one; after each round the clients' models must agree."""
    chosen = settings_of(settings)
    trainer = BatchedTrainer(model, chosen, objective=objective, backend=backend, chunk=chunk)
    start = get_arrays(model)
    for round in range(2):
        drawers = [generators(round), generators(round)]
        layers, losses = trainer.train(start, examples, drawers[0])
        expected, expected_losses = one_by_one(model, start, examples, chosen, objective, drawers[1])
        assert [(x.dtype, x.shape) for x in layers] == [(x.dtype, x.shape) for x in expected]
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
        assert max(np.abs(one - old).max() for one, old in zip(expected, start, strict=True)) > 3e-4
        for found, layer in zip(layers, expected, strict=True):
            np.testing.assert_allclose(found, layer, atol=atol, rtol=0)
        # the generators stand where the loop leaves them
        assert [one.integers(2**40) for one in drawers[0]] == [one.integers(2**40) for one in drawers[1]]
        weights = np.array(SIZES) / sum(SIZES)
        start = [np.tensordot(weights, layer, 1).astype(layer.dtype) for layer in expected]
    return trainer


def vgg() -> nn.Module:
    """VGG-11 with a sixteenth of its channels, for images of 32x32."""
    layers: list[nn.Module] = []
    channels = 1
    for size in (4, 0, 8, 0, 16, 16, 0, 32, 32, 0, 32, 32, 0):
        if size == 0:
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, size, 3, padding=1), nn.ReLU(inplace=True)]
            channels = size
    head = (nn.Dropout(0.5), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
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
    return nn.Sequential(
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 10)
    )


def unbiased() -> nn.Module:
    """Widths that are no multiples of anything, a layer without biases, two in a row."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 19), nn.ReLU())
    return nn.Sequential(first, nn.Linear(19, 3, bias=False), nn.Flatten(), nn.Linear(3, 10))


def built(name: str) -> Callable[[], nn.Module]:
    return lambda: build_model(name, (1, 8, 8), 10, 0)


def hooked() -> nn.Module:
    """A layer with a hook is not written out."""
    model = shared()
    model[1].register_forward_hook(lambda module, args, output: 2 * output)  # type: ignore[operator]
    return model


class Residual(nn.Module):
    """Not sequential; normalization within an example; dropout of whole channels, of everything, and called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.channels = nn.Dropout2d(0.4)
        self.drop, self.everything = nn.Dropout(0.3), nn.Dropout(1.0)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.channels(torch.relu(self.first(x)))
        x = self.drop(x + torch.relu(self.norm(self.second(x))) + self.everything(x))
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


class Gated(Chance):
    """Reads the whole batch behind a gate that begins at zero, by a mean, the first example or batch statistics."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate, self.read = nn.Parameter(torch.zeros(10)), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(x.flatten(1))
        return outputs + self.gate * self.read(outputs)


def normalized_by_hand() -> nn.Module:
    return Gated(lambda z: functional.batch_norm(z, None, None, training=True))


class Renormed(nn.Module):
    """An embedding that shortens the vectors of the words in its input, in place."""

    def __init__(self, max_norm: float = 0.5) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 5, max_norm=max_norm), nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words((x.flatten(1).abs() * 5).long().clamp(max=19)).mean(1))


class Remembering(Chance):
    """Keeps a running mean outside of its state dictionary: as a buffer, a plain attribute, or in a list."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls, self.held = where, 0, [torch.zeros(64)]
        self.register_buffer("mean", torch.zeros(64), persistent=False)
        self.plain = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        if self.where == "calls":
            self.calls += 1
            return self.head(flat)
        held = self.held[0] if self.where == "list" else getattr(self, self.where)
        if self.training:
            held = (0.9 * held + 0.1 * flat.detach().mean(0)).to(flat.dtype)
            if self.where == "list":
                self.held[0] = held
            else:
                setattr(self, self.where, held)
        return self.head(flat - held)


class Branching(Chance):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(x.flatten(1))
        # The sum is positive in training, but torch.func does not know that.
        return outputs if (outputs**2).sum().item() > 0 else 2 * outputs


class Transposed(nn.Module):
    """A dropout layer whose input is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.layer = nn.Dropout(0.5), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.dropout(x[:, 0].transpose(1, 2)).sum(1))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 10))


def shared() -> nn.Module:
    """One rectifier and one dropout layer in several places."""
    relu, drop = nn.ReLU(), nn.Dropout(0.4)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), relu, drop, nn.Linear(20, 20), relu, drop, nn.Linear(20, 10))


class Words(nn.Module):
    """Reads whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop, self.head = nn.Embedding(7, 5), nn.Dropout(0.2), nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.embedding(x.flatten(1)).mean(1)))


def pooled() -> nn.Module:
    """Rectified before the first layer that has parameters, and pooled."""
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(27, 10)
    )
