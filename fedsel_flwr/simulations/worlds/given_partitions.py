"""Partitions of a given form: so many examples each, so many classes each, or a sample each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from fedsel_flwr.checks import IntArray, whole
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.errors import ParameterError


def by_sizes(num_examples: int, sizes: Sequence[int], rng: np.random.Generator) -> list[IntArray]:
    """Draw so many examples for each client, i.i.d.; what the sizes leave over belongs to nobody.

    Args:
        num_examples: How many examples there are.
        sizes: How many each client gets, each at least 1.
        rng: Draws the order of the examples.

    Returns:
        Per client, its rows.

    Raises:
        ParameterError: A size is below 1, or the sizes add up to more than there are examples.

    References:
        Xia et al., Fig. 4: 1,500, 1,000 and 500 examples.

    Example:
        >>> [len(rows) for rows in by_sizes(10, [5, 3, 1], np.random.default_rng(0))]
        [5, 3, 1]
    """
    wanted = [whole("every one of partition.sizes", size, 1) for size in sizes]
    if sum(wanted) > num_examples:
        raise ParameterError(
            f"partition.sizes add up to {sum(wanted)}, but there are {num_examples} training examples: lower them"
        )
    return np.split(rng.permutation(num_examples), np.cumsum(wanted))[:-1]


def by_classes(labels: IntArray, classes_per_client: Sequence[int], rng: np.random.Generator) -> list[IntArray]:
    """Give each client so many classes, and the examples of a class in equal parts to the clients that have it.

    The classes are dealt like cards: shuffled, client after client, and shuffled anew when all are dealt; a client that
    would get a class twice gets the next one. So every class goes to somebody before any goes to a second client. How
    many examples a client holds follows from that. The examples of a class that nobody got belong to nobody.

    Args:
        labels: The class of each example, 0 … C - 1, shape (n,).
        classes_per_client: How many classes each client gets, each from 1 to C.
        rng: Deals the classes and shuffles the examples.

    Returns:
        Per client, its rows.

    Raises:
        ParameterError: A number of classes is below 1 or above C, or a class has fewer examples than holders.

    References:
        Xia et al., Fig. 6: two clients with 5 digits, eight with 1. The paper gives neither digits nor sizes.

    Example:
        >>> digits = np.arange(100) % 10
        >>> parts = by_classes(digits, [5, 5, 1], np.random.default_rng(0))
        >>> [len(set(digits[rows])) for rows in parts], [len(rows) for rows in parts]
        ([5, 5, 1], [45, 50, 5])
    """
    num_classes = int(labels.max()) + 1
    holders: list[list[int]] = [[] for _ in range(num_classes)]
    deck: list[int] = []
    for client, given in enumerate(classes_per_client):
        wanted = whole("every one of partition.classes_per_client", given, 1)
        if wanted > num_classes:
            raise ParameterError(
                f"partition.classes_per_client gives client {client} {wanted} classes, but there are {num_classes}"
            )
        for _ in range(wanted):
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
                f"{len(clients)} clients cannot share the {len(rows)} examples of class {label}: lower the numbers of "
                "partition.classes_per_client, or use fewer clients"
            )
        for client, share in zip(clients, np.array_split(rows, max(len(clients), 1)), strict=False):
            parts[client].append(share)
    return [np.concatenate(shares) for shares in parts]


class SampledPartition(Sequence[IntArray]):
    """Each client holds a random sample of all examples; two clients may hold the same example.

    Nothing is kept: a client's rows are drawn when they are asked for, from its own stream, the same every time. So
    there may be more clients than examples, and a client stays itself in a larger fleet.

    Args:
        num_examples: How many examples there are.
        num_clients: How many clients there are.
        examples_per_client: How many examples each client holds, each once.
        seed: Seed of the run.

    Raises:
        ParameterError: A client cannot hold so many examples, or a number is out of range.

    Example:
        >>> fleet = SampledPartition(1000, 100_000, 3, seed=1)
        >>> len(fleet), fleet[99_999].tolist()
        (100000, [45, 681, 724])
    """

    def __init__(self, num_examples: int, num_clients: int, examples_per_client: int, seed: int) -> None:
        self._num_examples, self._num_clients = whole("num_examples", num_examples, 1), num_clients
        self.examples_per_client, self._seed = whole("partition.examples_per_client", examples_per_client, 1), seed
        if self.examples_per_client > num_examples:
            raise ParameterError(
                f"partition.examples_per_client = {examples_per_client} is more than the {num_examples} training "
                "examples there are: lower it"
            )

    def __len__(self) -> int:
        """How many clients there are."""
        return self._num_clients

    @overload
    def __getitem__(self, client: int) -> IntArray: ...

    @overload
    def __getitem__(self, client: slice) -> list[IntArray]: ...

    def __getitem__(self, client: int | slice) -> IntArray | list[IntArray]:
        """The rows of a client in ascending order, shape (examples_per_client,); drawn anew at each call."""
        if isinstance(client, slice):
            return self.of(range(len(self))[client])
        return self.of([range(len(self))[client]])[0]  # IndexError past the end, as lists do

    def of(self, clients: Sequence[int]) -> list[IntArray]:
        """The rows of several clients, each as :meth:`__getitem__` draws them, in less time."""
        drawn = streams(self._seed, "partition", clients)
        size = self.examples_per_client
        return [np.sort(own.choice(self._num_examples, size, replace=False)) for own in drawn]
