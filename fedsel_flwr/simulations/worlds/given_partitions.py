"""Partitions by given numbers of examples or classes, by writers, or by a random sample for each client."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds.image_files import DATA_DIR_VARIABLE


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


def by_writers(writers: IntArray, num_clients: int, rng: np.random.Generator) -> list[IntArray]:
    """Give each client all examples of some writers; each writer belongs to one client.

    The writers are drawn at random. The clients' numbers of writers differ by at most one. The clients' numbers of
    examples differ more, because the writers have different numbers of examples.

    Args:
        writers: The writer id of each example, shape (n,).
        num_clients: The number of clients, at most the number of writers.
        rng: Generator that draws the writers.

    Returns:
        The rows of each client.

    Raises:
        ParameterError: There are more clients than writers.

    Example:
        >>> parts = by_writers(np.array([7, 7, 2, 5, 2, 7]), 2, np.random.default_rng(0))
        >>> [rows.tolist() for rows in parts]
        [[0, 1, 2, 4, 5], [3]]
    """
    ids, writer = np.unique(writers, return_inverse=True)
    if num_clients > len(ids):
        raise ParameterError(
            f"{num_clients} clients cannot share {len(ids)} writers, because each client gets all examples of a "
            f"writer. Use at most {len(ids)} clients."
        )
    client_of = np.empty(len(ids), dtype=np.int64)
    for client, own in enumerate(np.array_split(rng.permutation(len(ids)), num_clients)):
        client_of[own] = client
    clients = client_of[writer]
    return np.split(np.argsort(clients, kind="stable"), np.cumsum(np.bincount(clients))[:-1])


def read_writers(folder: Path) -> tuple[IntArray, IntArray]:
    """Read the digit and the writer of each training image of MNIST from the extended labels of QMNIST.

    Args:
        folder: The folder of the image sets, which contains ``QMNIST/raw``.

    Returns:
        Digits and writer ids, int64 of shape (60000,), in the order of MNIST's files.

    Raises:
        ParameterError: The file with the extended labels is missing or damaged.

    References:
        C. Yadav and L. Bottou, "Cold Case: The Lost MNIST Digits", NeurIPS 2019.
    """
    from torchvision.datasets import QMNIST

    url = QMNIST.resources["train"][1][0]
    packed = folder / "QMNIST" / "raw" / url.rpartition("/")[2]
    paths = [path for path in (packed, packed.with_suffix("")) if path.is_file()]
    if not paths:
        raise ParameterError(
            f"the writers of MNIST's images are in the file {packed}, which does not exist. Copy {url} to this path, "
            f"or name the folder that contains QMNIST/raw with --data-dir or {DATA_DIR_VARIABLE}."
        )
    try:
        content = gzip.decompress(paths[0].read_bytes()) if paths[0] == packed else paths[0].read_bytes()
        table = np.frombuffer(content, ">i4", offset=12).reshape(-1, 8)
        # The header: 32-bit integers in two dimensions, and the two sizes.
        if np.frombuffer(content, ">i4", count=3).tolist() != [0xC02, *table.shape]:
            raise ValueError("the header does not fit the content")
    except Exception as problem:
        raise ParameterError(
            f"{paths[0]} is damaged ({type(problem).__name__}: {problem}). Copy {url} again."
        ) from problem
    return table[:, 0].astype(np.int64), table[:, 2].astype(np.int64)


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
