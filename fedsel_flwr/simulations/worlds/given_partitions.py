"""Partitions by given numbers: examples per client, classes per client, or a random sample for each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.errors import ParameterError


def by_sizes(num_examples: int, sizes: Sequence[int], rng: np.random.Generator) -> list[IntArray]:
    """Draw a given number of i.i.d. examples for each client; the remaining examples are not used.

    Args:
        num_examples: The number of examples.
        sizes: The number of examples of each client, at least 1.
        rng: Generator that draws the order of the examples.

    Returns:
        The rows of each client.

    Raises:
        ParameterError: The sum of the sizes is above the number of examples.

    References:
        Xia et al., Fig. 4: 1,500, 1,000 and 500 examples.

    Example:
        >>> [len(rows) for rows in by_sizes(10, [5, 3, 1], np.random.default_rng(0))]
        [5, 3, 1]
    """
    if sum(sizes) > num_examples:
        raise ParameterError(
            f"partition.sizes add up to {sum(sizes)}, but there are {num_examples} training examples. Lower them."
        )
    return np.split(rng.permutation(num_examples), np.cumsum(sizes))[:-1]


def by_classes(labels: IntArray, classes_per_client: Sequence[int], rng: np.random.Generator) -> list[IntArray]:
    """Give each client the given number of classes, and split each class equally among the clients that have it.

    The classes are dealt like cards, client after client, from a shuffled deck. When all are dealt, a new deck is
    shuffled. A client that would get a class twice gets the next class instead. Therefore each class goes to one client
    before any class goes to a second client. A client's classes determine its number of examples. Examples of a class
    that no client has are not used.

    Args:
        labels: The class of each example, 0 … C - 1, shape (n,).
        classes_per_client: The number of classes of each client, from 1 to C.
        rng: Generator that deals the classes and shuffles the examples.

    Returns:
        The rows of each client.

    Raises:
        ParameterError: A number of classes is above C, or a class has more clients than examples.

    References:
        Xia et al., Fig. 6: two clients with 5 digits, eight with 1. The paper states neither the digits nor the sizes.

    Example:
        >>> digits = np.arange(100) % 10
        >>> parts = by_classes(digits, [5, 5, 1], np.random.default_rng(0))
        >>> [len(set(digits[rows])) for rows in parts], [len(rows) for rows in parts]
        ([5, 5, 1], [45, 50, 5])
    """
    num_classes = int(labels.max()) + 1
    holders: list[list[int]] = [[] for _ in range(num_classes)]
    deck: list[int] = []
    for client, wanted in enumerate(classes_per_client):
        if wanted > num_classes:
            raise ParameterError(
                f"partition.classes_per_client gives client {client} {wanted} classes, but there are {num_classes}. "
                "Lower it."
            )
        for _ in range(wanted):
            # The remaining cards of the old deck stay on top, so that no class is skipped.
            if all(client in holders[label] for label in deck):
                deck += rng.permutation(num_classes).tolist()
            label = next(label for label in deck if client not in holders[label])
            deck.remove(label)
            holders[label].append(client)
    parts: list[list[IntArray]] = [[] for _ in classes_per_client]
    for label, clients in enumerate(holders):
        rows = rng.permutation(np.flatnonzero(labels == label))
        if len(clients) > len(rows):
            raise ParameterError(
                f"{len(clients)} clients cannot share the {len(rows)} examples of class {label}. Lower the numbers of "
                "partition.classes_per_client, or use fewer clients."
            )
        # A class that no client has is split into one part, which `zip` drops, because array_split refuses 0 parts.
        for client, share in zip(clients, np.array_split(rows, max(len(clients), 1)), strict=False):
            parts[client].append(share)
    return [np.concatenate(shares) for shares in parts]


class SampledPartition(Sequence[IntArray]):
    """Partition in which each client holds a random sample of all examples; clients may share examples.

    The rows are not stored. Each access draws the same rows again from the client's random stream. Therefore there may
    be more clients than examples, and a client's sample does not depend on the number of clients.

    Args:
        num_examples: The number of examples.
        num_clients: The number of clients.
        examples_per_client: The number of different examples that each client holds.
        seed: Seed of the run.

    Raises:
        ParameterError: ``examples_per_client`` is above ``num_examples``.

    Example:
        >>> fleet = SampledPartition(1000, 100_000, 3, seed=1)
        >>> len(fleet), fleet[99_999].tolist()
        (100000, [45, 681, 724])
    """

    def __init__(self, num_examples: int, num_clients: int, examples_per_client: int, seed: int) -> None:
        self._num_examples, self._num_clients = num_examples, num_clients
        self.examples_per_client, self._seed = examples_per_client, seed
        if self.examples_per_client > num_examples:
            raise ParameterError(
                f"partition.examples_per_client = {examples_per_client} is more than the {num_examples} training "
                "examples. Lower it."
            )

    def __len__(self) -> int:
        """Return the number of clients."""
        return self._num_clients

    @overload
    def __getitem__(self, client: int) -> IntArray: ...

    @overload
    def __getitem__(self, client: slice) -> list[IntArray]: ...

    def __getitem__(self, client: int | slice) -> IntArray | list[IntArray]:
        """Draw the rows of a client or of a slice of clients; each in ascending order, shape (examples_per_client,)."""
        if isinstance(client, slice):
            return self.of(range(len(self))[client])
        # The range accepts negative indices, and raises IndexError past the end, as lists do.
        return self.of([range(len(self))[client]])[0]

    def of(self, clients: Sequence[int]) -> list[IntArray]:
        """Draw the rows of several clients together, which is faster than one by one."""
        drawn = streams(self._seed, "partition", clients)
        size = self.examples_per_client
        return [np.sort(own.choice(self._num_examples, size, replace=False)) for own in drawn]
