"""Partitions of the examples among the clients: i.i.d., by Dirichlet distributions, by shards, by numbers, by writers.

flwr-datasets draws Flower's kinds "iid", "dirichlet" and "shards". It has partitioners for some of the other kinds too,
but they draw otherwise. With them, every seed would have another partition, and stored results would not be repeatable.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.streams import stream, streams
from fedsel_flwr.errors import ParameterError

WEIGHT = 1e4
"""Weight of the equations, relative to the norm, in the least-squares problem of :func:`least_norm_sizes`."""


def partition_indices(
    labels: npt.NDArray[np.integer],
    num_clients: int,
    *,
    kind: str = "iid",
    alpha: float = 0.5,
    shards_per_client: int = 2,
    sizes: Sequence[int] = (),
    classes_per_client: Sequence[int] = (),
    examples_per_client: int = 120,
    writers: IntArray | None = None,
    seed: int = 0,
) -> Sequence[IntArray]:
    """Partition the examples among the clients; each client gets at least one example.

    The kinds:

    * "iid": a random share of the examples.
    * "dirichlet": the clients' shares of each class are Dirichlet distributed.
    * "shards": the examples are sorted by class and cut into equal shards. Each client gets some shards at random.
    * "dirichlet-classes": the mixtures of classes are Dirichlet distributed, and all clients have equal sizes.
    * "dirichlet-sizes": the mixtures of classes are Dirichlet distributed, and sizes of least norm assign all examples.
    * "sizes": a given number of i.i.d. examples per client.
    * "classes": a given number of classes per client.
    * "sampled": a sample of all examples per client.
    * "writers": all examples of some writers per client.

    The first five kinds and "writers" assign every example to exactly one client. The kinds "sizes" and "classes"
    assign an example at most once, and "sampled" any number of times.

    "iid", "dirichlet" and "shards" shuffle the examples, and then use `IidPartitioner`, `DirichletPartitioner` and
    `ShardPartitioner` of flwr-datasets. If the examples do not fill the last shard, flwr-datasets leaves the rest out.
    Here the rest goes, one by one, to the smallest client that already holds the example's class.

    With the first five kinds, a client without examples gets a random example from the largest client at that moment.
    If several clients are equally large, the one with the lowest index gives it.

    Args:
        labels: The class of each example, shape (n,).
        num_clients: The number of clients, at most n unless ``kind`` is "sampled".
        kind: Kind of the partition, see above.
        alpha: The Dirichlet concentration, above 0. A smaller value makes clients more heterogeneous. In
            "dirichlet-sizes" it is multiplied by the classes' shares.
        shards_per_client: The number of shards that each client gets.
        sizes: For "sizes" only: the number of examples of each client.
        classes_per_client: For "classes" only: the number of classes of each client.
        examples_per_client: For "sampled" only: the number of examples of each client.
        writers: For "writers" only: the writer id of each example, shape (n,).
        seed: Seed that draws the partition. The same seed gives the same partition in every process.

    Returns:
        Per client, the rows of its examples in ascending order, int64 of shape (n_k,). For "sampled", each access draws
        them.

    Raises:
        ParameterError: There are more clients or shards than examples, or more clients than writers. Also raised if a
            list is set that ``kind`` does not read, or that does not have one number per client.

    References:
        Dirichlet: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019.
        Shards: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        AISTATS 2017. Classes: Hsu et al., 2019. Sizes: GPFL, section IV.

    Examples:
        >>> parts = partition_indices(np.arange(100) % 10, 10, kind="shards", shards_per_client=1)
        >>> len(parts[0]), len({int(row) % 10 for row in parts[0]})
        (10, 1)
    """
    _check_list("sizes", sizes, kind, "sizes", num_clients)
    _check_list("classes_per_client", classes_per_client, kind, "classes", num_clients)
    if kind == "sampled":
        return SampledPartition(len(labels), num_clients, examples_per_client, seed)
    if kind == "writers":
        if writers is None or len(writers) != len(labels):
            raise ParameterError(
                f"partition.kind = 'writers' needs the writer of each of {len(labels)} examples, got "
                f"{'none' if writers is None else len(writers)}. Give them, or choose another kind."
            )
        return tuple(by_writers(writers, num_clients, stream(seed, "partition", 0)))
    classes = _class_indices(labels, num_clients, shards_per_client if kind == "shards" else 1)
    # The draws below use this generator in this order. Any change would give every scenario another partition.
    rng = np.random.default_rng(seed)
    parts: Sequence[Sequence[int] | IntArray]
    if kind == "sizes":
        parts = by_sizes(len(classes), sizes, rng)
    elif kind == "classes":
        parts = by_classes(classes, classes_per_client, rng)
    else:
        parts = _fill_empty(_assign_all(classes, num_clients, kind, alpha, shards_per_client, rng), rng)
    return tuple(np.sort(np.asarray(part, dtype=np.int64)) for part in parts)


def _assign_all(
    classes: IntArray, num_clients: int, kind: str, alpha: float, shards_per_client: int, rng: np.random.Generator
) -> list[list[int]]:
    """Assign every example to one client, by mixtures of classes or with flwr-datasets; some clients may get none."""
    if kind in ("dirichlet-classes", "dirichlet-sizes"):
        by_mixtures = by_dirichlet_classes if kind == "dirichlet-classes" else by_dirichlet_sizes
        return [rows.tolist() for rows in by_mixtures(classes, num_clients, alpha, rng)]
    rows, seed = rng.permutation(len(classes)), int(rng.integers(2**32))
    # The same as IidPartitioner, without the import of flwr-datasets, which takes a second.
    if kind == "iid":
        return [part.tolist() for part in np.array_split(rows, num_clients)]

    # Only downloads by flwr-datasets send telemetry, partitioners do not.
    import datasets
    from flwr_datasets.partitioner import DirichletPartitioner, ShardPartitioner

    make = {
        "dirichlet": partial(DirichletPartitioner, alpha=alpha, min_partition_size=0),
        "shards": partial(ShardPartitioner, num_shards_per_partition=shards_per_client),
    }[kind]
    partitioner = make(num_clients, "label", shuffle=False, seed=seed)
    partitioner.dataset = datasets.Dataset.from_dict({"row": rows, "label": classes[rows]}).with_format("arrow")
    # `datasets` calls pyarrow's sort in a deprecated way.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Specifying null_placement", category=FutureWarning)
        columns = (partitioner.load_partition(client)["row"] for client in range(num_clients))
        parts = [column[:].to_pylist() for column in columns]
    _give_leftovers(parts, rows, classes)
    return parts


def partition_sizes(partitions: Sequence[IntArray]) -> IntArray:
    """Return the number of examples of each client, shape (num_clients,), without drawing a sampled partition."""
    if isinstance(partitions, SampledPartition):
        return np.full(len(partitions), partitions.examples_per_client, dtype=np.int64)
    return np.array([len(rows) for rows in partitions], dtype=np.int64)


def rows_of(partitions: Sequence[IntArray], clients: Sequence[int]) -> list[IntArray]:
    """Return the rows of several clients; the rows of a sampled partition are drawn together."""
    return partitions.of(clients) if isinstance(partitions, SampledPartition) else [partitions[k] for k in clients]


def by_dirichlet_classes(labels: IntArray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[IntArray]:
    """Give all clients equally many examples, with classes from mixtures q_k ~ Dir(alpha 1).

    Each example goes to one client. A class with no examples left is dropped from the mixtures of the next clients.

    Args:
        labels: The class of each example, 0 … C - 1, shape (n,).
        num_clients: The number of clients, at most n.
        alpha: The concentration, above 0. A smaller value gives a client fewer classes.
        rng: Generator that draws the mixtures and the examples.

    Returns:
        The rows of each client.

    References:
        Hsu et al., "Measuring the effects of non-identical data distribution for federated visual classification",
        2019; "class heterogeneity" of Kim et al.

    Example:
        >>> digits = np.arange(1000) % 10
        >>> parts = by_dirichlet_classes(digits, 4, 0.1, np.random.default_rng(0))
        >>> [len(rows) for rows in parts], np.bincount(digits[parts[0]], minlength=10).tolist()
        ([250, 250, 250, 250], [0, 7, 0, 3, 45, 100, 0, 12, 0, 83])
    """
    deck = [rng.permutation(np.flatnonzero(labels == label)) for label in range(int(labels.max()) + 1)]
    left = np.array([len(rows) for rows in deck])
    parts = []
    for client in range(num_clients):
        q = rng.dirichlet(np.full(len(deck), alpha))
        wanted = len(labels) // num_clients + (client < len(labels) % num_clients)
        taken = np.zeros(len(deck), dtype=np.int64)
        while missing := wanted - int(taken.sum()):
            open_ = left > taken
            weight = np.where(open_, q, 0.0)
            # No class of the mixture has examples left, so the rest comes from all classes, by their remaining numbers.
            # The comparison is negated, so that weights of NaN end here too.
            if not weight.sum() > 0:
                weight = np.where(open_, (left - taken).astype(np.float64), 0.0)
            taken = np.minimum(left, taken + rng.multinomial(missing, weight / weight.sum()))
        parts.append(np.concatenate([deck[c][left[c] - taken[c] : left[c]] for c in range(len(deck))]))
        left -= taken
    return parts


def by_dirichlet_sizes(labels: IntArray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[IntArray]:
    """Draw mixtures of classes q_k ~ Dir(alpha p), with the classes' shares p, and find sizes that assign all examples.

    Args:
        labels: The class of each example, 0 … C - 1, shape (n,).
        num_clients: The number of clients, at most n.
        alpha: The concentration (GPFL's zeta), above 0.
        rng: Generator that draws the mixtures and the examples.

    Returns:
        The rows of each client. A small client may have no rows.

    Raises:
        ParameterError: No sizes assign every class, for example because a class is in no client's mixture.

    References:
        GPFL, section IV ("Dir"), after FedCor.

    Example:
        >>> digits = np.arange(1000) % 10
        >>> parts = by_dirichlet_sizes(digits, 30, 0.5, np.random.default_rng(0))
        >>> sum(len(rows) for rows in parts), max(len(rows) for rows in parts)
        (1000, 133)
    """
    counts = np.bincount(labels)
    mixtures = rng.dirichlet(alpha * counts / counts.sum(), size=num_clients).T  # Q, shape (C, K)
    sizes = least_norm_sizes(mixtures, counts)
    parts: list[list[IntArray]] = [[] for _ in range(num_clients)]
    for label, count in enumerate(counts):
        # Cut points are rounded cumulative shares, so that every example is assigned.
        share = np.cumsum(mixtures[label] * sizes)
        cuts = np.rint(share * (count / share[-1])).astype(np.int64)[:-1]
        rows = rng.permutation(np.flatnonzero(labels == label))
        for client, own in enumerate(np.split(rows, cuts)):
            parts[client].append(own)
    return [np.concatenate(shares) for shares in parts]


def least_norm_sizes(mixtures: FloatArray, counts: IntArray) -> FloatArray:
    """Return the sizes x >= 0 of least norm with Q x = d, which keeps the clients as equal as possible.

    Args:
        mixtures: Q, the share of each class in each client's data, shape (C, K).
        counts: d, the number of examples of each class, shape (C,).

    Returns:
        The sizes x, shape (K,).

    Raises:
        ParameterError: There are no such sizes.

    Example:
        >>> least_norm_sizes(np.array([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]]), np.array([30, 30])).round(4).tolist()
        [20.0, 20.0, 20.0]
    """
    total = counts.sum()
    # One non-negative least-squares problem: first the equations with a large weight, then the norm of x.
    rows = np.vstack([WEIGHT * mixtures, np.eye(mixtures.shape[1])])
    sizes = total * nnls(rows, np.concatenate([WEIGHT * counts / total, np.zeros(mixtures.shape[1])]))[0]
    missed = np.abs(mixtures @ sizes - counts)
    if (missed > 1e-3 * total).any():
        label = int(missed.argmax())
        raise ParameterError(
            f"the clients' mixtures cannot assign all examples of class {label}: {missed[label]:.0f} of "
            f"{counts[label]} are left. Use more clients, a larger alpha or another seed."
        )
    return np.asarray(sizes)


def _check_list(name: str, given: Sequence[int], kind: str, own: str, num_clients: int) -> None:
    """Refuse a list that belongs to another kind (``own``), or that does not have one number per client."""
    if len(given) and kind != own:
        raise ParameterError(
            f"partition.{name} is set, but partition.kind is {kind!r}. Set the kind to {own!r}, or remove the list."
        )
    if kind == own and len(given) != num_clients:
        raise ParameterError(
            f"partition.{name} must hold a number for each of {num_clients} clients, got {len(given)}. Change it or "
            "num_clients."
        )


def _give_leftovers(parts: list[list[int]], rows: IntArray, labels: IntArray) -> None:
    """Give each unassigned row to the smallest client that holds its class, or else to the smallest client."""
    left = np.ones(len(rows), dtype=bool)
    left[[row for part in parts for row in part]] = False
    if not left.any():
        return
    sizes = np.array([len(part) for part in parts])
    holds = np.zeros((len(parts), labels.max() + 1), dtype=bool)
    for client, part in enumerate(parts):
        holds[client, labels[part]] = True
    for row in rows[left[rows]]:
        candidates = np.flatnonzero(holds[:, labels[row]])
        if not len(candidates):
            candidates = np.arange(len(parts))
        client = candidates[np.argmin(sizes[candidates])]
        parts[client].append(int(row))
        sizes[client] += 1
        holds[client, labels[row]] = True


def _fill_empty(parts: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
    """Move a random example from the largest client to each client without examples; return the clients."""
    sizes = np.array([len(part) for part in parts])
    for client in np.flatnonzero(sizes == 0):
        largest = int(np.argmax(sizes))
        parts[client].append(parts[largest].pop(int(rng.integers(sizes[largest]))))
        sizes[client] += 1
        sizes[largest] -= 1
    return parts


def _class_indices(labels: npt.NDArray[np.integer], num_clients: int, shards_per_client: int) -> IntArray:
    """Return the classes as 0 … C - 1; refuse fewer examples than clients or shards."""
    if num_clients > len(labels):
        raise ParameterError(
            f"{num_clients} clients cannot share {len(labels)} examples. Use at most {len(labels)} clients."
        )
    if num_clients * shards_per_client > len(labels):
        raise ParameterError(
            f"{num_clients} clients with {shards_per_client} shards each need {num_clients * shards_per_client} "
            f"examples, got {len(labels)}. Use fewer clients or a smaller shards_per_client."
        )
    classes: IntArray = np.unique(labels, return_inverse=True)[1].astype(np.int64)
    return classes


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

    def __getitem__(self, client: Any) -> Any:
        """Draw the rows of a client or of a slice of clients; each in ascending order, shape (examples_per_client,)."""
        # The range accepts negative indices, and raises IndexError past the end, as lists do.
        chosen = range(len(self))[client]
        return self.of(chosen) if isinstance(client, slice) else self.of([chosen])[0]

    def of(self, clients: Sequence[int]) -> list[IntArray]:
        """Draw the rows of several clients together, which is faster than one by one."""
        drawn = streams(self._seed, "partition", clients)
        size = self.examples_per_client
        return [np.sort(own.choice(self._num_examples, size, replace=False)) for own in drawn]
