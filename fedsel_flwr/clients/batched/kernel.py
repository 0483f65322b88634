"""What the ways of batched training have in common: one step of many clients at once, and the loop over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.augmenting import crop_flip
from fedsel_flwr.clients.batched.descent import Descent
from fedsel_flwr.clients.batched.masks import Draw, MaskStreams
from fedsel_flwr.clients.batched.schedule import Schedule


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
