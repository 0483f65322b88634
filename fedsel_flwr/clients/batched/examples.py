"""Examples of all clients, held once, and the tables of which client sees which of them in which step.

A client is a list of rows of the data set. Its generator draws what :func:`fedsel_flwr.clients.training.train` draws,
in the same order: first the seed of the dropout, then for each pass the order of the data and the views of the images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.training import check_examples, draw_views, read_only_tensor
from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

ArrayOrTensor = npt.NDArray[Any] | torch.Tensor


@dataclass(frozen=True)
class Examples:
    """A data set, and the rows of each client: nothing is copied for a client, and rows may be shared.

    Args:
        inputs: The examples, shape (n, …); a tensor on a device is used there.
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
        """Check that the rows are there."""
        count = len(self.inputs)
        if len(self.labels) != count:
            raise ParameterError(
                f"expected one label for each example; got {count} examples, {len(self.labels)} labels. "
                "Give labels of the same length as the inputs."
            )
        # all rows at once, which is fast; the loop below only finds the client to name
        if all(map(len, self.rows)) and len(self.rows):
            together = np.concatenate(self.rows)
            if together.min() >= 0 and together.max() < count:
                return
        for client, own in enumerate(self.rows):
            if not len(own):
                raise ParameterError(
                    f"expected at least one example for each client; client {client} has none. Leave the client out."
                )
            if np.min(own) < 0 or np.max(own) >= count:
                raise ParameterError(
                    f"expected rows in [0, {count}); client {client} has {np.min(own)}…{np.max(own)}. "
                    "Give rows of the data set."
                )

    @property
    def sizes(self) -> list[int]:
        """Number of examples of each client."""
        return [len(own) for own in self.rows]

    def subset(self, clients: Sequence[int] | IntArray) -> Examples:
        """Return some of the clients, in the order given."""
        return Examples(self.inputs, self.labels, [self.rows[client] for client in clients])

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels as tensors on a device; nothing is copied that is there already."""
        return read_only_tensor(self.inputs, device), read_only_tensor(self.labels, device)

    def of_client(self, client: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return one client's inputs and labels as new arrays."""
        rows = np.asarray(self.rows[client])
        return tuple(  # type: ignore[return-value]  # of length two, which mypy does not see
            held[torch.as_tensor(rows, device=held.device)].cpu().numpy()
            if isinstance(held, torch.Tensor)
            else held[rows]
            for held in (self.inputs, self.labels)
        )


def check_generators(
    clients: Examples | Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]], generators: Sequence[np.random.Generator]
) -> Examples:
    """Return clients as :class:`Examples`, and refuse a number of generators that is not theirs.

    Args:
        clients: The clients; pairs (inputs, labels) become rows of one data set, which is a copy of theirs.
        generators: One generator for each client.

    Raises:
        ParameterError: If there is not one generator for each client, or not one label for each example.
    """
    examples = clients if isinstance(clients, Examples) else _joined(clients)
    if len(generators) != len(examples.rows):
        raise ParameterError(
            f"expected one generator for each client; got {len(generators)} for {len(examples.rows)} clients. Give as "
            "many generators as clients."
        )
    return examples


def _joined(clients: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> Examples:
    """Copy the clients' examples into one data set."""
    for inputs, labels in clients:
        check_examples(inputs, labels)
    if not clients:
        return Examples(np.empty((0, 1), dtype=np.float32), np.empty(0, dtype=np.int64), [])
    ends = np.cumsum([len(labels) for _, labels in clients])
    inputs, labels = (np.concatenate(parts) for parts in zip(*clients, strict=True))
    return Examples(inputs, labels, np.split(np.arange(len(labels)), ends[:-1]))


def num_steps(size: int, settings: TrainingSettings) -> int:
    """Count the steps that a client with ``size`` examples takes in a round."""
    return settings.local_steps or settings.local_epochs * math.ceil(size / settings.batch_size)


def longest_first(sizes: Sequence[int], settings: TrainingSettings) -> IntArray:
    """Sort the clients by steps and then by size, largest first; equal ones stay in their order.

    In this order the clients that still train are the first ones at every step, and neighbours need little padding.
    """
    return np.array(
        sorted(range(len(sizes)), key=lambda i: (-num_steps(sizes[i], settings), -sizes[i])), dtype=np.int64
    )


def order_of_examples(rows: IntArray, settings: TrainingSettings, generator: np.random.Generator) -> IntArray:
    """Draw the order in which one client sees its examples, pass after pass; the last pass may exceed its steps.

    Args:
        rows: The client's rows of the data set, shape (its count,).
        settings: How to train, without augmentation.
        generator: Draws as for a `Schedule`.
    """
    # the seed of the dropout: unused, but drawn, so that the permutations are those of the other backends
    generator.integers(2**63)
    per_pass = math.ceil(len(rows) / settings.batch_size)
    passes = math.ceil(num_steps(len(rows), settings) / per_pass)
    own = np.asarray(rows, dtype=np.int64)
    return np.concatenate([own[generator.permutation(len(own))] for _ in range(passes)])


@dataclass(frozen=True)
class Step:
    """Batches of one step, of the clients that take it, padded to the longest.

    Args:
        rows: Rows of the data set, shape (n_active, width); beyond a batch's end its own first row again.
        lengths: Examples in each batch, shape (n_active,).
        weights: One over the batch's length, zero in the padding, shape (n_active, width).
        views: View of each image, shape (n_active, width); None without augmentation.
    """

    rows: IntArray
    lengths: IntArray
    weights: FloatArray
    views: IntArray | None = None


class Schedule:
    """The batches of some clients, in the order of :func:`longest_first`.

    Args:
        rows: For each client its rows of the data set, shape (its count,).
        settings: How to train.
        generators: One generator for each client.

    Attributes:
        seeds: Seed of each client's dropout.
        steps: Number of steps of each client, never increasing.
    """

    def __init__(
        self, rows: Sequence[IntArray], settings: TrainingSettings, generators: Sequence[np.random.Generator]
    ) -> None:
        sizes = [len(own) for own in rows]
        width = min(settings.batch_size, max(sizes))
        self.seeds: list[int] = []
        self.steps = np.array([num_steps(size, settings) for size in sizes], dtype=np.int64)
        self._rows = np.zeros((int(self.steps.max()), len(rows), width), dtype=np.int64)
        self._lengths = np.zeros(self._rows.shape[:2], dtype=np.int64)
        self._views = None if settings.augmentation == "none" else np.zeros_like(self._rows)
        for i, (own, generator) in enumerate(zip(rows, generators, strict=True)):
            self.seeds.append(int(generator.integers(2**63)))
            per_pass = math.ceil(sizes[i] / width)
            # where the last batch of a pass starts
            last = (per_pass - 1) * width
            batches = np.empty((math.ceil(int(self.steps[i]) / per_pass), per_pass * width), dtype=np.int64)
            views = np.zeros_like(batches)
            for order, seen in zip(batches, views, strict=True):
                order[: sizes[i]] = np.asarray(own)[generator.permutation(sizes[i])]
                # padding repeats a row of the batch, whose loss is as finite as the batch's, with weight 0
                order[sizes[i] :] = order[last]
                if self._views is not None:
                    seen[: sizes[i]] = draw_views(generator, sizes[i])
            self._rows[: self.steps[i], i] = batches.reshape(-1, width)[: self.steps[i]]
            if self._views is not None:
                self._views[: self.steps[i], i] = views.reshape(-1, width)[: self.steps[i]]
            lengths = np.full(per_pass, width)
            lengths[-1] = sizes[i] - last
            self._lengths[: self.steps[i], i] = np.tile(lengths, len(batches))[: self.steps[i]]
        self._active = (self._lengths > 0).sum(1).tolist()
        self._widths = self._lengths.max(1).tolist()
        inside = np.arange(width) < self._lengths[..., None]
        self._weights = np.where(inside, 1 / np.maximum(self._lengths, 1)[..., None], 0)

    def __len__(self) -> int:
        """Number of steps of the longest training."""
        return len(self._rows)

    def extent(self, step: int) -> tuple[int, int]:
        """Return the number of clients that take a step, and the length of their longest batch."""
        return self._active[step], self._widths[step]

    def tables(self) -> tuple[IntArray, FloatArray, IntArray]:
        """Return rows, weights and views of all steps, shape (n_steps, n_clients, width), padded beyond their extent.

        Without augmentation the rows stand in the place of the views, and nobody reads them.
        """
        return self._rows, self._weights, self._rows if self._views is None else self._views

    @property
    def augments(self) -> bool:
        """Whether images are augmented."""
        return self._views is not None

    def __getitem__(self, step: int) -> Step:
        """Return the batches of a step."""
        active, width = self._active[step], self._widths[step]
        views = None if self._views is None else self._views[step, :active, :width]
        return Step(
            self._rows[step, :active, :width], self._lengths[step, :active], self._weights[step, :active, :width], views
        )
