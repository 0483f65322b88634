"""Steps of many clients at once, which the backends "manual" and "vmap" share.

A backend is a :class:`Kernel`: it takes one step with the first models of the stacks. The loop over the steps, SGD on
stacked parameters, the dropout masks and the layout of the stacks are the same for each.

The engine on Ray trains clients one by one. Every random number is drawn in the same order here, so that both engines
choose the same clients. The models differ by rounding, as padded batches and batched products sum in another order.
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
from fedsel_flwr.clients.training import crop_flip
from fedsel_flwr.clients.training_settings import TrainingSettings

Stack = list[npt.NDArray[Any]]


class Unsupported(Exception):
    """A model that a backend cannot train; the message says why, and the next backend is tried."""


class Kernel(Protocol):
    """What a backend does in one step of many models."""

    @property
    def dropout_calls(self) -> Sequence[DropoutCall]:
        """The calls of dropout layers in a forward pass, in order."""

    def step(self, sgd: StackedSGD, batch: Batch) -> torch.Tensor:
        """Take one step with the first models of the stack; return their losses before it, shape (n_active,)."""


def take_steps(
    kernel: Kernel,
    sgd: StackedSGD,
    schedule: Schedule,
    data: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Take all steps of a schedule.

    Args:
        kernel: The backend's kernel.
        sgd: The models, in the order of the schedule; changed in place.
        schedule: Which examples each client sees in which step.
        data: The data set: inputs and labels.

    Returns:
        The loss of each client's batch before each step, shape (n_steps, n_clients), zero where it takes none.
    """
    inputs, labels = data
    dtype = next(w.dtype for w in sgd.stack if w.is_floating_point())
    device = inputs.device
    dropout = DropoutMasks(schedule.seeds, kernel.dropout_calls, dtype, device)
    losses = torch.zeros(schedule.lengths.shape, dtype=dtype, device=device)
    # Tables of all steps at once: in a small step each of these calls would take as long as a layer.
    rows, weights = (torch.as_tensor(table, device=device) for table in (schedule.rows, schedule.weights))
    # without augmentation the rows stand in the place of the views, and nobody reads them
    views = rows if schedule.views is None else torch.as_tensor(schedule.views, device=device)
    tables = (rows, labels[rows], weights.to(dtype), views)
    for number, (own, targets, shares, seen) in enumerate(zip(*(table.unbind() for table in tables), strict=True)):
        active, width = schedule.extents[number]
        # most steps have the full extent, and a slice of each table costs as much as a small operation
        if (active, width) != own.shape:
            own, targets, shares, seen = (table[:active, :width] for table in (own, targets, shares, seen))
        masks = dropout.next(schedule.lengths[number, :active].tolist(), width) if kernel.dropout_calls else ()
        batch = Batch(inputs, own, targets, shares, masks, None if schedule.views is None else seen)
        losses[number, :active] = kernel.step(sgd, batch)
    return losses


def mean_loss(steps: FloatArray) -> float:
    """Return the mean of a client's losses before its steps, shape (n_steps,); NaN if its training diverged."""
    # fsum, as in the training of one client: the result does not depend on the order of the summands
    losses = steps.tolist()
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


@dataclass(frozen=True)
class Batch:
    """The batches of the clients that take a step, padded to one width.

    Args:
        inputs: The whole data set, shape (n, …).
        rows: Rows of the data set, shape (n_active, width).
        labels: Labels of these rows, shape (n_active, width, …).
        weights: One over the batch's length, zero in the padding, shape (n_active, width).
        masks: Dropout masks, one for each call of a layer, each of shape (n_active, width, …).
        views: View of each image, shape (n_active, width); None without augmentation.
    """

    inputs: torch.Tensor
    rows: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    masks: Sequence[torch.Tensor]
    views: torch.Tensor | None = None

    def seen(self) -> torch.Tensor:
        """Return the inputs as the clients see them, shape (n_active, width, …)."""
        inputs = self.inputs[self.rows]
        if self.views is None:
            return inputs
        return crop_flip(inputs.flatten(0, 1), self.views.flatten()).view_as(inputs)


class StackedSGD:
    """torch.optim.SGD on many models at once, in place.

    With the gradient g, the received model w0, mu, weight decay d, momentum m and step length r, each step sets
    v = m v + g + mu (w - w0) + d w, from v = 0, and w = w - r v. (FedProx: gradient of mu/2 |w - w0|².)

    Args:
        stack: The models, a tensor for each parameter, each of shape (n_models, …); changed in place.
        start: The received model, in the same order, without the first axis.
        settings: How to train.
    """

    def __init__(
        self, stack: Sequence[torch.Tensor], start: Sequence[torch.Tensor], settings: TrainingSettings
    ) -> None:
        self.stack, self._start = stack, start
        self._rate, self._momentum = settings.learning_rate, settings.momentum
        self._decay, self._mu = settings.weight_decay, settings.proximal_mu
        # without momentum, weight decay and the proximal term are one factor of w: one operation less on the stack
        self._shrink = 1 - self._rate * (self._decay + self._mu)
        self._velocity = [torch.zeros_like(w) for w in stack] if self._momentum else []
        self._first: list[torch.Tensor] = []

    def first(self, active: int) -> list[torch.Tensor]:
        """Return the first ``active`` models, a tensor for each parameter."""
        # a slice costs as much as a small operation, and the number of active clients seldom changes
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
        """Move along the gradient left @ right, shapes (n_active, p, q) and (n_active, q, r).

        The gradient is never formed: it would be written to memory and read again, as large as the stack.
        """
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
        """Add the last term of (1 - r (d + mu)) w - r g + r mu w0, which is w - r (g + d w + mu (w - w0))."""
        if self._mu:
            w.add_(self._start[i], alpha=self._rate * self._mu)


@dataclass(frozen=True)
class DropoutCall:
    """One call of a dropout layer.

    Args:
        probability: Probability that a value is dropped.
        shape: Shape of the mask, without the examples.
        memory_format: Layout of the layer's input, which the order of the draws follows.
    """

    probability: float
    shape: tuple[int, ...]
    memory_format: torch.memory_format = torch.contiguous_format


class DropoutMasks:
    """Dropout masks for each client, from the stream that torch's own dropout would draw them from.

    torch's dropout on the CPU is ``input * noise`` with ``noise = empty_like(input).bernoulli_(1 - p).div_(1 - p)``,
    drawn from the global generator; with p = 0 or 1 nothing is drawn. A separate generator with the same seed draws the
    same.

    Args:
        seeds: Seeds of the clients.
        calls: The calls of a forward pass, in order.
        dtype: Type of the masks.
        device: Device to which the masks go; they are always drawn on the CPU.
    """

    def __init__(
        self, seeds: Sequence[int], calls: Sequence[DropoutCall], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds] if calls else []
        self._calls, self._dtype, self._device = calls, dtype, device

    def next(self, lengths: Sequence[int], width: int) -> list[torch.Tensor]:
        """Return the masks of the next step, one for each call of a layer.

        Args:
            lengths: Examples in the batches of the clients that take the step, the first ones of all.
            width: Width of the padded batches.

        Returns:
            Tensors of shape (n_active, width, …), zero in the padding.
        """
        if not self._calls:
            return []
        masks = [torch.zeros(len(lengths), width, *call.shape, dtype=self._dtype) for call in self._calls]
        # clients outside, calls inside: each client's generator draws in the order of its own forward pass
        for i, length in enumerate(lengths):
            for mask, call in zip(masks, self._calls, strict=True):
                mask[i, :length] = self._noise(call, int(length), i)
        return [mask.to(self._device) for mask in masks]

    def _noise(self, call: DropoutCall, length: int, client: int) -> torch.Tensor | float:
        keep = 1.0 - call.probability
        # as torch does: nothing is drawn, so that the generator stays in step
        if keep in (0.0, 1.0):
            return keep
        noise = torch.empty(length, *call.shape, dtype=self._dtype, memory_format=call.memory_format)
        return noise.bernoulli_(keep, generator=self._generators[client]).div_(keep)


class StackLayout:
    """Layout of a model's stacks: an array for each entry of its state, with the clients as the first axis.

    Args:
        model: The model, on the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        state = list(model.state_dict(keep_vars=True).values())
        self._state = [(tuple(tensor.shape), tensor.dtype) for tensor in state]
        # Entries that are one tensor (tied weights) are trained in the place of the first.
        self._owners = [next(i for i, other in enumerate(state) if other is tensor) for tensor in state]

    def allocate(self, count: int, device: str | torch.device) -> list[torch.Tensor]:
        """Return stacks of ``count`` models, not filled."""
        return [torch.empty((count, *shape), dtype=dtype, device=device) for shape, dtype in self._state]

    def in_client_order(
        self, stacks: Sequence[npt.NDArray[Any]], losses: FloatArray, order: IntArray
    ) -> tuple[Stack, FloatArray]:
        """Return stacks and losses in the order of the clients, from the order in which they were trained."""
        layers = [stacks[i] for i in self._owners]
        # indexing would copy the stacks, the largest memory of a round
        if (order == np.arange(len(order))).all():
            return layers, losses
        back = np.argsort(order)
        return [layer[back] for layer in layers], losses[back]
