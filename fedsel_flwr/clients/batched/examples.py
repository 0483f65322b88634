"""The examples of all clients, held once; a client is a list of their rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.training import check_examples
from fedsel_flwr.errors import ParameterError

Held = npt.NDArray[Any] | torch.Tensor


@dataclass(frozen=True)
class Examples:
    """A data set, and which of its rows belong to whom: nothing is copied for a client, and rows may be shared.

    Args:
        inputs: The examples, shape (n, …); as tensor on a device, they are used where they are.
        labels: What the loss compares the outputs with, shape (n, …).
        rows: For each client the rows of its examples, shape (its count,), at least one.

    Raises:
        ParameterError: If there is not one label for each example, a client has none, or a row is out of range.

    Example:
        >>> Examples(np.zeros((4, 2)), np.zeros(4), [np.array([0, 1, 2]), np.array([2])]).sizes
        [3, 1]
    """

    inputs: Held
    labels: Held
    rows: Sequence[IntArray]

    def __post_init__(self) -> None:
        """Check that the rows are there."""
        count = len(self.inputs)
        if len(self.labels) != count:
            raise ParameterError(
                f"expected one label for each example; got {count} examples, {len(self.labels)} labels"
            )
        if all(map(len, self.rows)) and len(self.rows):
            together = np.concatenate(self.rows)
            if together.min() >= 0 and together.max() < count:
                return
        for client, own in enumerate(self.rows):
            if not len(own):
                raise ParameterError(f"expected at least one example for each client; client {client} has none")
            if np.min(own) < 0 or np.max(own) >= count:
                raise ParameterError(f"expected rows in [0, {count}); client {client} has {np.min(own)}…{np.max(own)}")

    @property
    def sizes(self) -> list[int]:
        """How many examples each client has."""
        return [len(own) for own in self.rows]

    def of(self, clients: Sequence[int] | IntArray) -> Examples:
        """Some of the clients, in the order given."""
        return Examples(self.inputs, self.labels, [self.rows[client] for client in clients])

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels as tensors on a device; nothing is copied that is there already."""
        return _tensor(self.inputs, device), _tensor(self.labels, device)

    def own(self, client: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """One client's inputs and labels as new arrays."""
        rows = np.asarray(self.rows[client])
        return tuple(  # type: ignore[return-value]  # of length two, which mypy does not see
            held[torch.as_tensor(rows, device=held.device)].cpu().numpy()
            if isinstance(held, torch.Tensor)
            else held[rows]
            for held in (self.inputs, self.labels)
        )


def as_examples(clients: Examples | Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> Examples:
    """Return clients given as pairs (inputs, labels) as rows of one data set, which is a copy of theirs."""
    if isinstance(clients, Examples):
        return clients
    for inputs, labels in clients:
        check_examples(inputs, labels)
    if not clients:
        return Examples(np.empty((0, 1), dtype=np.float32), np.empty(0, dtype=np.int64), [])
    ends = np.cumsum([len(labels) for _, labels in clients])
    inputs, labels = (np.concatenate(parts) for parts in zip(*clients, strict=True))
    return Examples(inputs, labels, np.split(np.arange(len(labels)), ends[:-1]))


def with_generators(
    clients: Examples | Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]], generators: Sequence[np.random.Generator]
) -> Examples:
    """:func:`as_examples`, of which each client must have its generator; raises a :class:`ParameterError`."""
    examples = as_examples(clients)
    if len(generators) != len(examples.rows):
        raise ParameterError(
            f"expected one generator for each client; got {len(generators)} for {len(examples.rows)} clients"
        )
    return examples


def _tensor(held: Held, device: torch.device) -> torch.Tensor:
    with warnings.catch_warnings():  # of arrays that may not be written to: nothing here writes to them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(held, device=device)
