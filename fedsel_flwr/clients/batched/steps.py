"""Steps of many clients at once, shared by the backends "manual" and "vmap".

A backend is a :class:`Kernel`, which takes one step with the first models of the stacks. The loop over the steps, SGD
on stacked parameters and the dropout masks are the same for all backends.

The engine on Ray trains clients one by one. All random numbers are drawn in the same order here, so both engines choose
the same clients. The models differ by rounding, because padded batches and batched products sum in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fedsel_flwr.clients.batched.examples import Schedule
from fedsel_flwr.clients.training import crop_flip
from fedsel_flwr.clients.training_settings import TrainingSettings


class Unsupported(Exception):
    """A model that a backend cannot train. The message has the reason, and the next backend is tried."""


class Kernel(Protocol):
    """The part of a backend that takes one step of many models."""

    @property
    def dropout_calls(self) -> Sequence[DropoutCall]:
        """The calls of dropout layers in a forward pass, in order."""

    def step(self, sgd: StackedSGD, batch: Batch) -> torch.Tensor:
        """Take one step with the first models of the stack; return their losses before it, shape (n_active,)."""


def take_steps(
    kernel: Kernel, sgd: StackedSGD, schedule: Schedule, data: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Take all steps of a schedule.

    Args:
        kernel: The backend's kernel.
        sgd: The models, in the order of the schedule; changed in place.
        schedule: The examples that each client uses in each step.
        data: The data set: inputs and labels.

    Returns:
        The loss of each client's batch before each step, shape (n_steps, n_clients); zero if the client takes no such
        step.
    """
    inputs, labels = data
    dtype = next(w.dtype for w in sgd.stack if w.is_floating_point())
    device = inputs.device
    calls = kernel.dropout_calls
    generators = [torch.Generator().manual_seed(seed) for seed in schedule.seeds] if calls else []
    losses = torch.zeros(schedule.lengths.shape, dtype=dtype, device=device)
    # Tables of all steps at once, because in a small step each of these calls would take as long as a layer.
    rows, weights = (torch.as_tensor(table, device=device) for table in (schedule.rows, schedule.weights))
    # Without augmentation the rows stand in for the views, which are not read.
    views = rows if schedule.views is None else torch.as_tensor(schedule.views, device=device)
    tables = (rows, labels[rows], weights.to(dtype), views)
    for number, (own, targets, shares, seen) in enumerate(zip(*(table.unbind() for table in tables), strict=True)):
        active, width = schedule.extents[number]
        # Most steps have the full extent, and a slice of each table costs as much as a small operation.
        if (active, width) != own.shape:
            own, targets, shares, seen = (table[:active, :width] for table in (own, targets, shares, seen))
        lengths = schedule.lengths[number, :active].tolist() if calls else []
        masks = [mask.to(device) for mask in dropout_masks(calls, generators, lengths, width, dtype)]
        batch = Batch(inputs, own, targets, shares, masks, None if schedule.views is None else seen)
        losses[number, :active] = kernel.step(sgd, batch)
    return losses


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
        """Return the inputs with the clients' views, shape (n_active, width, …)."""
        inputs = self.inputs[self.rows]
        if self.views is None:
            return inputs
        return crop_flip(inputs.flatten(0, 1), self.views.flatten()).view_as(inputs)


class StackedSGD:
    """torch.optim.SGD on many models at once, in place.

    Each step sets, from v = 0::

        v = m v + g + mu (w - w0) + d w
        w = w - r v

    Symbols: gradient g, received model w0, FedProx's mu, weight decay d, momentum m, step length r. The term with mu is
    the gradient of mu/2 |w - w0|².

    Args:
        stack: The models, a tensor for each parameter, each of shape (n_models, …); changed in place.
        start: The received model, in the same order, without the first axis.
        settings: The settings of training.
    """

    def __init__(
        self, stack: Sequence[torch.Tensor], start: Sequence[torch.Tensor], settings: TrainingSettings
    ) -> None:
        self.stack, self._start = stack, start
        self._rate, self._momentum = settings.learning_rate, settings.momentum
        self._decay, self._mu = settings.weight_decay, settings.proximal_mu
        # Without momentum, weight decay and the proximal term are one factor of w, which saves an operation on the
        # stack.
        self._shrink = 1 - self._rate * (self._decay + self._mu)
        self._velocity = [torch.zeros_like(w) for w in stack] if self._momentum else []
        self._first: list[torch.Tensor] = []

    def first(self, active: int) -> list[torch.Tensor]:
        """Return the first ``active`` models, a tensor for each parameter."""
        # A slice costs as much as a small operation, and the number of active clients rarely changes.
        if not self._first or len(self._first[0]) != active:
            self._first = [w[:active] for w in self.stack]
        return self._first

    def step(self, i: int, gradient: torch.Tensor) -> None:
        """Move the first models along the gradient of parameter ``i``, shape (n_active, …), and may overwrite it."""
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

        The gradient is never formed, because it would be as large as the stack, and be written to memory and read
        again.
        """
        w = self.first(left.shape[0])[i]
        if self._momentum:
            self._move(i, w, self._velocity[i][: left.shape[0]].baddbmm_(left, right, beta=self._momentum))
        else:
            self._pull_back(i, w.baddbmm_(left, right, beta=self._shrink, alpha=-self._rate))

    def _move(self, i: int, w: torch.Tensor, v: torch.Tensor) -> None:
        """Add the other terms to the velocity m v + g, and move by the result."""
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


def dropout_masks(
    calls: Sequence[DropoutCall],
    generators: Sequence[torch.Generator],
    lengths: Sequence[int],
    width: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Draw dropout masks for each client, from the same random stream as torch's own dropout.

    torch's dropout on the CPU is ``input * noise`` with ``noise = empty_like(input).bernoulli_(1 - p).div_(1 - p)``,
    drawn from the global generator. With p = 0 or 1 nothing is drawn. A separate generator with the same seed makes the
    same draws.

    Args:
        calls: The calls of a forward pass, in order.
        generators: The generator of each client, with the seed of its dropout.
        lengths: Number of examples in the batches of the clients that take the step, which are the first ones.
        width: Width of the padded batches.
        dtype: Type of the masks.

    Returns:
        A tensor for each call, shape (n_active, width, …), zero in the padding, on the CPU.
    """
    masks = [torch.zeros(len(lengths), width, *call.shape, dtype=dtype) for call in calls]
    # Clients outside, calls inside, because each client's generator draws in the order of its own forward pass.
    for i, length in enumerate(lengths):
        for mask, call in zip(masks, calls, strict=True):
            keep = 1.0 - call.probability
            noise = torch.empty(length, *call.shape, dtype=dtype, memory_format=call.memory_format).fill_(keep)
            # As in torch, nothing is drawn for 0 and 1, so that the generators draw the same numbers.
            if keep not in (0.0, 1.0):
                noise.bernoulli_(keep, generator=generators[i]).div_(keep)
            mask[i, :length] = noise
    return masks
