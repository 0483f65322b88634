"""A client's local work: stochastic gradient descent and evaluation with torch, where the model is."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.checks import whole
from fedsel_flwr.clients.augmenting import check_images, crop_flip, draw_views
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective
from fedsel_flwr.clients.settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

__all__ = ["TrainingSettings", "check_examples", "device_of", "evaluate", "held", "train"]

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Targets = npt.NDArray[np.int64] | npt.NDArray[np.float32]
"""Classes, or numbers to predict."""


def train(
    model: nn.Module,
    inputs: FloatArray,
    labels: Targets,
    settings: TrainingSettings,
    generator: np.random.Generator,
    objective: Objective = CLASSIFICATION,
) -> float:
    """Train a model on a client's data by stochastic gradient descent.

    Args:
        model: The received model, changed in place.
        inputs: The client's examples, shape (n, …), n at least 1.
        labels: Their classes, or numbers to predict, shape (n,).
        settings: How to train.
        generator: Draws first the seed of the dropout, then for each pass a new order of the data and, where images
            are augmented, how each of them is seen, in that order. torch's global random state stays as it is.
        objective: What the steps minimise; cross-entropy if not given.

    Returns:
        The mean over the steps taken of the batch's mean loss before the step (cross-entropy: in nats), without the
        proximal term. Not finite when the training diverged.

    Raises:
        ParameterError: If there are no examples, or not one label for each, or no images to augment.

    Examples:
        >>> model = nn.Linear(2, 2)
        >>> _ = [nn.init.zeros_(parameter) for parameter in model.parameters()]
        >>> inputs, labels = np.ones((1, 2), dtype=np.float32), np.zeros(1, dtype=np.int64)
        >>> settings = TrainingSettings(learning_rate=0.1, batch_size=1)
        >>> round(train(model, inputs, labels, settings, np.random.default_rng(0)), 4)
        0.6931
    """
    check_examples(inputs, labels)
    check_images(settings, inputs.ndim)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    received = [parameter.detach().clone() for parameter in parameters] if settings.proximal_mu > 0 else []
    descent = _Descent(parameters, settings)
    steps = settings.local_steps or settings.local_epochs * math.ceil(len(labels) / settings.batch_size)
    losses: list[float] = []
    was_training = model.training
    model.train()
    device = device_of(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        _seed_dropout(int(generator.integers(2**63)), device)
        for rows, views in itertools.islice(_batches(len(labels), settings, generator), steps):
            seen = torch.tensor(inputs[rows], device=device)
            if views is not None:
                seen = crop_flip(seen, torch.tensor(views, device=device))
            loss = objective.loss(model(seen), torch.tensor(labels[rows], device=device))
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter, start in zip(parameters, received, strict=False):  # none received: no proximal term
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - start, alpha=settings.proximal_mu)  # FedProx's mu (w - w0)
            descent.step()  # Kim (2); GPFL (1), (2)
            losses.append(loss.item())
    model.train(was_training)
    return math.fsum(losses) / steps if all(map(math.isfinite, losses)) else math.nan


class _Descent:
    """What ``torch.optim.SGD`` does to parameters on the CPU, operation by operation.

    torch's own optimizers import its compiler when the first one is made, which takes a client's process longer than
    its first rounds.

    Args:
        parameters: The model's, without gradients from now on.
        settings: Rate, momentum and weight decay.
    """

    def __init__(self, parameters: list[nn.Parameter], settings: TrainingSettings) -> None:
        self._parameters, self._settings = parameters, settings
        self._momenta: list[torch.Tensor | None] = [None] * len(parameters)
        self._clear()

    @torch.no_grad()
    def step(self) -> None:
        """Take a step along the gradients, and clear them."""
        rate, momentum, decay = (
            self._settings.learning_rate, self._settings.momentum, self._settings.weight_decay
        )  # fmt: skip
        for k, parameter in enumerate(self._parameters):
            if (gradient := parameter.grad) is None:
                continue
            if decay:
                gradient = gradient.add(parameter, alpha=decay)
            if momentum:
                held = self._momenta[k]
                held = gradient.clone() if held is None else held.mul_(momentum).add_(gradient)
                self._momenta[k] = gradient = held
            parameter.add_(gradient, alpha=-rate)
        self._clear()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def evaluate(
    model: nn.Module,
    inputs: FloatArray,
    labels: Targets,
    batch_size: int = 256,
    objective: Objective = CLASSIFICATION,
) -> tuple[float, float]:
    """Measure a model on examples, with dropout off; the model stays as it is.

    Args:
        model: The model.
        inputs: The examples, shape (n, …), n at least 1.
        labels: Their classes, or numbers to predict, shape (n,).
        batch_size: Examples at a time, at least 1; the result does not depend on it but for rounding.
        objective: What is measured; cross-entropy and the fraction classified correctly if not given.

    Returns:
        The mean loss (cross-entropy: in nats), and the quality.

    Raises:
        ParameterError: If there are no examples, or not one label for each, or `batch_size` is below 1.
    """
    check_examples(inputs, labels)
    batch_size = whole("batch_size", batch_size, 1)
    loss, parts = 0.0, []
    was_training = model.training
    model.eval()
    examples, targets = held(inputs).to(device_of(model)), held(labels).to(device_of(model))
    with torch.no_grad():
        for start in range(0, len(labels), batch_size):
            outputs = model(examples[start : start + batch_size])
            loss += objective.loss(outputs, targets[start : start + batch_size], reduction="sum").item()
            parts.append(outputs)
        quality = objective.quality(torch.cat(parts), targets)
    model.train(was_training)
    return loss / len(labels), quality


def _batches(
    count: int, settings: TrainingSettings, generator: np.random.Generator
) -> Iterator[tuple[IntArray, IntArray | None]]:
    """Yield rows and views of one batch after the other, pass after pass without end, each pass in a new order."""
    while True:
        order = generator.permutation(count)
        views = None if settings.augmentation == "none" else draw_views(generator, count)
        for start in range(0, count, settings.batch_size):
            part = slice(start, start + settings.batch_size)
            yield order[part], None if views is None else views[part]


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _seed_dropout(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def held(array: npt.NDArray[Any]) -> torch.Tensor:
    """An array as a tensor that nobody writes to; nothing is copied."""
    with warnings.catch_warnings():  # of arrays that may not be written to
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(array)


def check_examples(inputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> None:
    """Refuse no examples, and examples without one label for each."""
    if len(labels) < 1 or len(inputs) != len(labels):
        raise ParameterError(
            f"expected at least one example and one label for each; got {len(inputs)} examples, {len(labels)} labels"
        )
