"""What the ways of batched training have in common: one step of many clients at once, and the loop over the steps.

The step of stochastic gradient descent on stacked parameters, in place.

Where the models of a round stand: a stack for each entry of the model's state.

Dropout masks, drawn for each client from the stream that torch's own dropout would draw them from.

torch's dropout on the CPU is ``input * noise`` with ``noise = empty_like(input).bernoulli_(1 - p).div_(1 - p)``, drawn
from the global generator; with p = 0 or 1 nothing is drawn. A generator of one's own with the same seed draws the same.

Why a model cannot be trained in one way or another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.batched.examples import Schedule
from fedsel_flwr.clients.batched.shared_memory import Form
from fedsel_flwr.clients.training import crop_flip
from fedsel_flwr.clients.training_settings import TrainingSettings


class Descent:
    """What torch.optim.SGD does to one model, done to many at once.

    With the gradient g, the received model w0, mu, weight decay d, momentum m and step length r, each step sets
    v = m v + g + mu (w - w0) + d w, from v = 0, and w = w - r v. (FedProx: gradient of mu/2 |w - w0|².)

    Args:
        stack: The models, a tensor a parameter, each of shape (n_models, …); changed in place.
        start: The received model, in the same order, without the first axis.
        settings: How to train.
    """

    def __init__(
        self, stack: Sequence[torch.Tensor], start: Sequence[torch.Tensor], settings: TrainingSettings
    ) -> None:
        self.stack, self._start = stack, start
        self._rate, self._momentum = settings.learning_rate, settings.momentum
        self._decay, self._mu = settings.weight_decay, settings.proximal_mu
        self._shrink = 1 - self._rate * (self._decay + self._mu)
        self._velocity = [torch.zeros_like(w) for w in stack] if self._momentum else []
        self._first: list[torch.Tensor] = []

    def first(self, active: int) -> list[torch.Tensor]:
        """The first so many models, a tensor a parameter."""
        if not self._first or len(self._first[0]) != active:
            self._first = [w[:active] for w in self.stack]
        return self._first

    def step(self, i: int, gradient: torch.Tensor) -> None:
        """Move the first models along the gradient of parameter ``i``, shape (n_active, …), which may be changed."""
        w = self.first(gradient.shape[0])[i]
        if self._momentum:
            v = self._velocity[i][: gradient.shape[0]]
            self._move(i, w, v.mul_(self._momentum).add_(gradient))
        else:
            if self._shrink != 1:
                w.mul_(self._shrink)
            self._pull_back(i, w.sub_(gradient, alpha=self._rate))

    def step_along_product(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Move along the gradient left @ right, shapes (n_active, p, q) and (n_active, q, r), which is never formed."""
        w = self.first(left.shape[0])[i]
        if self._momentum:
            self._move(i, w, self._velocity[i][: left.shape[0]].baddbmm_(left, right, beta=self._momentum))
        else:
            self._pull_back(i, w.baddbmm_(left, right, beta=self._shrink, alpha=-self._rate))

    def _move(self, i: int, w: torch.Tensor, v: torch.Tensor) -> None:
        """Complete the velocity m v + g by its other terms, and move by it."""
        if self._decay or self._mu:
            v.add_(w, alpha=self._decay + self._mu)
        if self._mu:
            v.sub_(self._start[i], alpha=self._mu)
        w.sub_(v, alpha=self._rate)

    def _pull_back(self, i: int, w: torch.Tensor) -> None:
        """Without momentum w - r (g + d w + mu (w - w0)) = (1 - r (d + mu)) w - r g + r mu w0: add the last term."""
        if self._mu:
            w.add_(self._start[i], alpha=self._rate * self._mu)


Stack = list[npt.NDArray[Any]]


class Stacks:
    """What stacks of a model look like.

    Args:
        model: The model, on the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        state = list(model.state_dict(keep_vars=True).values())
        self._state = [(tuple(tensor.shape), tensor.dtype) for tensor in state]
        self._forms: list[Form] = [(tuple(tensor.shape), tensor.detach().numpy().dtype) for tensor in state]
        # of entries that are one tensor, the first
        self._owners = [next(i for i, other in enumerate(state) if other is tensor) for tensor in state]

    def new(self, count: int, device: str | torch.device) -> list[torch.Tensor]:
        """Stacks of so many models, not filled."""
        return [torch.empty((count, *shape), dtype=dtype, device=device) for shape, dtype in self._state]

    def forms(self, count: int) -> list[Form]:
        """All that a round of so many clients shares: the received model, the losses, the stacks."""
        stacks: list[Form] = [((count, *shape), dtype) for shape, dtype in self._forms]
        return [*self._forms, ((count,), np.float64), *stacks]

    def apart(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[Stack, FloatArray, Stack]:
        """Arrays of these forms: the received model, the losses, the stacks."""
        n = len(self._forms)
        return list(arrays[:n]), arrays[n], list(arrays[n + 1 :])

    def unsorted(
        self, stacks: Sequence[npt.NDArray[Any]], losses: FloatArray, order: IntArray
    ) -> tuple[Stack, FloatArray]:
        """Put what was trained in an order back into the clients' own; nothing is copied where that is the same."""
        layers = [stacks[i] for i in self._owners]
        if (order == np.arange(len(order))).all():
            return layers, losses
        back = np.argsort(order)
        return [layer[back] for layer in layers], losses[back]


@dataclass(frozen=True)
class Draw:
    """One call of a dropout layer.

    Args:
        probability: Of dropping.
        shape: Of the mask, without the examples.
        memory_format: Of the layer's input, which the order of the draws follows.
    """

    probability: float
    shape: tuple[int, ...]
    memory_format: torch.memory_format = torch.contiguous_format


class MaskStreams:
    """A stream of masks for each client.

    Args:
        seeds: Of the clients.
        draws: The calls of a forward pass, in order.
        dtype: Of the masks.
        device: Where the masks go; they are always drawn on the CPU.
    """

    def __init__(self, seeds: Sequence[int], draws: Sequence[Draw], dtype: torch.dtype, device: torch.device) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds] if draws else []
        self._draws, self._dtype, self._device = draws, dtype, device

    def next(self, lengths: Sequence[int], width: int) -> list[torch.Tensor]:
        """Return the masks of the next step, one a call of a layer.

        Args:
            lengths: Examples in the batches of the clients that take the step, the first ones of all.
            width: Of the padded batches.

        Returns:
            Tensors of shape (n_active, width, …), zero in the padding.
        """
        if not self._draws:
            return []
        masks = [torch.zeros(len(lengths), width, *draw.shape, dtype=self._dtype) for draw in self._draws]
        for i, length in enumerate(lengths):
            for mask, draw in zip(masks, self._draws, strict=True):
                mask[i, :length] = self._noise(draw, int(length), i)
        return [mask.to(self._device) for mask in masks]

    def _noise(self, draw: Draw, length: int, client: int) -> torch.Tensor | float:
        keep = 1.0 - draw.probability
        if keep in (0.0, 1.0):
            return keep
        noise = torch.empty(length, *draw.shape, dtype=self._dtype, memory_format=draw.memory_format)
        return noise.bernoulli_(keep, generator=self._generators[client]).div_(keep)


@dataclass(frozen=True)
class Batch:
    """The batches of the clients that take a step, padded to one width.

    Args:
        inputs: The whole data set, shape (n, …).
        rows: Which of it, shape (n_active, width).
        labels: Of these rows, shape (n_active, width, …).
        weights: One over the batch's length, zero in the padding, shape (n_active, width).
        masks: Of the dropout, one a call of a layer, each of shape (n_active, width, …).
        views: How each image is seen, shape (n_active, width); None where images are seen as they are.
    """

    inputs: torch.Tensor
    rows: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    masks: Sequence[torch.Tensor]
    views: torch.Tensor | None = None

    def seen(self) -> torch.Tensor:
        """The inputs as the clients see them, shape (n_active, width, …)."""
        inputs = self.inputs[self.rows]
        if self.views is None:
            return inputs
        return crop_flip(inputs.flatten(0, 1), self.views.flatten()).view_as(inputs)


class Kernel(Protocol):
    """One way of training many models at once."""

    @property
    def draws(self) -> Sequence[Draw]:
        """The calls of dropout layers in a forward pass, in order."""

    def step(self, descent: Descent, batch: Batch) -> torch.Tensor:
        """Take one step with the first models of the stack; return their losses before it, shape (n_active,)."""


def descend(
    kernel: Kernel,
    descent: Descent,
    schedule: Schedule,
    data: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Take all steps of a schedule.

    Args:
        kernel: How.
        descent: The models, in the order of the schedule; changed in place.
        schedule: Who sees what when.
        data: The data set: inputs and labels.

    Returns:
        The loss of each client's batch before each step, shape (n_steps, n_clients), zero where it takes none.
    """
    inputs, labels = data
    dtype = next(w.dtype for w in descent.stack if w.is_floating_point())
    device = inputs.device
    streams = MaskStreams(schedule.seeds, kernel.draws, dtype, device)
    losses = torch.zeros(len(schedule), len(schedule.seeds), dtype=dtype, device=device)
    # tables of all steps at once: in a small step each of these calls would take as long as a layer
    rows, weights, views = (torch.as_tensor(table, device=device) for table in schedule.tables())
    tables = (rows, labels[rows], weights.to(dtype), views)
    for number, (own, targets, shares, seen) in enumerate(zip(*(table.unbind() for table in tables), strict=True)):
        active, width = schedule.extent(number)
        if (active, width) != own.shape:
            own, targets, shares, seen = (table[:active, :width] for table in (own, targets, shares, seen))
        masks = streams.next(schedule[number].lengths.tolist(), width) if kernel.draws else ()
        batch = Batch(inputs, own, targets, shares, masks, seen if schedule.augments else None)
        losses[number, :active] = kernel.step(descent, batch)
    return losses


def mean_loss(steps: FloatArray) -> float:
    """The mean of a client's losses before its steps, shape (n_steps,); NaN when its training diverged."""
    losses = steps.tolist()
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


class Refused(Exception):
    """A model does not fit a way of training; the message says why, and the next way is tried."""
