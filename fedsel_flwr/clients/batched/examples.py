"""Examples of all clients, held once, and the schedule of the examples that each client uses in each step.

A client is a list of rows of the data set. Its generator makes the same draws as in
:func:`fedsel_flwr.clients.training.train`, in the same order. The seed of the dropout comes first, then for each pass
the order of the data and the views of the images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.training import draw_views, read_only_tensor
from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

ArrayOrTensor = npt.NDArray[Any] | torch.Tensor


@dataclass(frozen=True)
class Examples:
    """A data set, and the rows of each client; no example is copied for a client, and clients may share rows.

    Args:
        inputs: The examples, shape (n, …). A tensor on a device stays there.
        labels: The labels with which the loss compares the outputs, shape (n, …).
        rows: For each client the rows of its examples, shape (its count,), at least one.

    Raises:
        ParameterError: If there is not one label for each example, a client has none, or a row is out of range.

    Example:
        >>> Examples(np.zeros((4, 2)), np.zeros(4), [np.array([0, 1, 2]), np.array([2])]).sizes
        [3, 1]
    """

    inputs: ArrayOrTensor
    labels: ArrayOrTensor
    rows: Sequence[IntArray]

    def __post_init__(self) -> None:
        """Check that the rows exist."""
        count = len(self.inputs)
        if len(self.labels) != count:
            raise ParameterError(
                f"expected one label for each example; got {count} examples, {len(self.labels)} labels. "
                "Give labels of the same length as the inputs."
            )
        if 0 in self.sizes:
            raise ParameterError(
                f"expected at least one example for each client; client {self.sizes.index(0)} has none. Leave the "
                "client out."
            )
        together = np.concatenate([np.zeros(0, dtype=np.int64), *self.rows])
        if len(together) and not 0 <= together.min() <= together.max() < count:
            raise ParameterError(
                f"expected rows in [0, {count}), got {together.min()}…{together.max()}. Give rows of the data set."
            )

    @property
    def sizes(self) -> list[int]:
        """Number of examples of each client."""
        return [len(own) for own in self.rows]

    def subset(self, clients: Sequence[int] | IntArray) -> Examples:
        """Return some of the clients, in the given order."""
        return Examples(self.inputs, self.labels, [self.rows[client] for client in clients])

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels as tensors on a device; nothing is copied that is already there."""
        return read_only_tensor(self.inputs, device), read_only_tensor(self.labels, device)

    def of_client(self, client: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return one client's inputs and labels as new arrays."""
        rows = read_only_tensor(np.asarray(self.rows[client]))
        inputs, labels = (read_only_tensor(held)[rows].cpu().numpy() for held in (self.inputs, self.labels))
        return inputs, labels


def longest_first(sizes: Sequence[int], settings: TrainingSettings) -> IntArray:
    """Sort the clients by steps and then by size, largest first; equal ones keep their order.

    In this order, the clients that still train are the first ones at every step, and neighbours need little padding.
    """
    return np.array(sorted(range(len(sizes)), key=lambda i: (-settings.steps(sizes[i]), -sizes[i])), dtype=np.int64)


def order_of_examples(rows: IntArray, settings: TrainingSettings, generator: np.random.Generator) -> IntArray:
    """Draw the order in which one client uses its examples, pass after pass; the last pass may exceed its steps.

    Args:
        rows: The client's rows of the data set, shape (its count,).
        settings: The settings of training, without augmentation.
        generator: Draws as for a `Schedule`.
    """
    # The seed of the dropout is not used here, but it is drawn, so that the permutations equal those of other backends.
    generator.integers(2**63)
    per_pass = math.ceil(len(rows) / settings.batch_size)
    passes = math.ceil(settings.steps(len(rows)) / per_pass)
    own = np.asarray(rows, dtype=np.int64)
    return np.concatenate([own[generator.permutation(len(own))] for _ in range(passes)])


class Schedule:
    """The batches of some clients, in the order of :func:`longest_first`.

    At each step the first clients train, padded to the longest batch of the step. The tables hold all steps, padded to
    the steps of the first client and to the longest batch of all.

    Args:
        rows: For each client its rows of the data set, shape (its count,).
        settings: The settings of training.
        generators: One generator for each client.

    Attributes:
        seeds: Seed of each client's dropout.
        steps: Number of steps of each client, never increasing.
        extents: For each step the number of clients that take it, and the length of their longest batch.
        rows: Rows of the data set, shape (n_steps, n_clients, width). After a batch's end its first row is repeated.
        lengths: Number of examples in each batch, shape (n_steps, n_clients), 0 for clients that do not take the step.
        weights: One over the batch's length, zero in the padding, shape (n_steps, n_clients, width).
        views: View of each image, shape (n_steps, n_clients, width); None without augmentation.
    """

    def __init__(
        self, rows: Sequence[IntArray], settings: TrainingSettings, generators: Sequence[np.random.Generator]
    ) -> None:
        sizes = [len(own) for own in rows]
        width = min(settings.batch_size, max(sizes))
        self.seeds: list[int] = []
        self.steps = np.array([settings.steps(size) for size in sizes], dtype=np.int64)
        self.rows = np.zeros((int(self.steps.max()), len(rows), width), dtype=np.int64)
        self.lengths = np.zeros(self.rows.shape[:2], dtype=np.int64)
        self.views = None if settings.augmentation == "none" else np.zeros_like(self.rows)
        for i, (own, generator) in enumerate(zip(rows, generators, strict=True)):
            self.seeds.append(int(generator.integers(2**63)))
            per_pass = math.ceil(sizes[i] / width)
            # Start of the last batch of a pass.
            last = (per_pass - 1) * width
            batches = np.empty((math.ceil(int(self.steps[i]) / per_pass), per_pass * width), dtype=np.int64)
            views = np.zeros_like(batches)
            for order, seen in zip(batches, views, strict=True):
                order[: sizes[i]] = np.asarray(own)[generator.permutation(sizes[i])]
                # Padding repeats a row of the batch with weight 0, so that its loss is as finite as the batch's.
                order[sizes[i] :] = order[last]
                if self.views is not None:
                    seen[: sizes[i]] = draw_views(generator, sizes[i])
            self.rows[: self.steps[i], i] = batches.reshape(-1, width)[: self.steps[i]]
            if self.views is not None:
                self.views[: self.steps[i], i] = views.reshape(-1, width)[: self.steps[i]]
            lengths = np.full(per_pass, width)
            lengths[-1] = sizes[i] - last
            self.lengths[: self.steps[i], i] = np.tile(lengths, len(batches))[: self.steps[i]]
        self.extents = list(zip((self.lengths > 0).sum(1).tolist(), self.lengths.max(1).tolist(), strict=True))
        inside = np.arange(width) < self.lengths[..., None]
        self.weights = np.where(inside, 1 / np.maximum(self.lengths, 1)[..., None], 0)
