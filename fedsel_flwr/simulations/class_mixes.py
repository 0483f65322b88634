"""Partitions in which each client has a mixture of classes of its own, drawn from a Dirichlet distribution."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import ParameterError

WEIGHT = 1e4
"""Of the equations against the norm, in the least-squares problem of :func:`least_norm_sizes`."""


def by_mixtures(labels: IntArray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[IntArray]:
    """Give all clients equally many examples, whose classes follow q_k ~ Dir(alpha 1) as long as there are any.

    Each example goes to one client. A class that is used up falls out of the mixtures of the clients still to come.

    Args:
        labels: The class of each example, 0 … C - 1, shape (n,).
        num_clients: The number of clients, at most n.
        alpha: The concentration, above 0: the smaller, the fewer classes a client has.
        rng: Draws the mixtures and the examples.

    Returns:
        Per client, its rows.

    References:
        Hsu et al., "Measuring the effects of non-identical data distribution for federated visual classification",
        2019; "class heterogeneity" of Kim et al.

    Example:
        >>> digits = np.arange(1000) % 10
        >>> parts = by_mixtures(digits, 4, 0.1, np.random.default_rng(0))
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
            if not weight.sum() > 0:  # nothing is left of any class of the mixture
                weight = np.where(open_, (left - taken).astype(np.float64), 0.0)
            taken = np.minimum(left, taken + rng.multinomial(missing, weight / weight.sum()))
        parts.append(np.concatenate([deck[c][left[c] - taken[c] : left[c]] for c in range(len(deck))]))
        left -= taken
    return parts


def by_least_norm(labels: IntArray, num_clients: int, alpha: float, rng: np.random.Generator) -> list[IntArray]:
    """Draw each client's mixture q_k ~ Dir(alpha p), p the classes' shares, and find sizes that hand out everything.

    Args:
        labels: The class of each example, 0 … C - 1, shape (n,).
        num_clients: The number of clients, at most n.
        alpha: The concentration (GPFL's zeta), above 0.
        rng: Draws the mixtures and the examples.

    Returns:
        Per client, its rows; a small client may have none.

    Raises:
        ParameterError: No sizes hand out every class, for example because a class is in nobody's mixture.

    References:
        GPFL, section IV ("Dir"), after FedCor.

    Example:
        >>> digits = np.arange(1000) % 10
        >>> parts = by_least_norm(digits, 30, 0.5, np.random.default_rng(0))
        >>> sum(len(rows) for rows in parts), max(len(rows) for rows in parts)
        (1000, 133)
    """
    counts = np.bincount(labels)
    mixtures = rng.dirichlet(alpha * counts / counts.sum(), size=num_clients).T  # Q, shape (C, K)
    sizes = least_norm_sizes(mixtures, counts)
    parts: list[list[IntArray]] = [[] for _ in range(num_clients)]
    for label, count in enumerate(counts):
        share = np.cumsum(mixtures[label] * sizes)
        cuts = np.rint(share * (count / share[-1])).astype(np.int64)[:-1]
        rows = rng.permutation(np.flatnonzero(labels == label))
        for client, own in enumerate(np.split(rows, cuts)):
            parts[client].append(own)
    return [np.concatenate(shares) for shares in parts]


def least_norm_sizes(mixtures: FloatArray, counts: IntArray) -> FloatArray:
    """Return the sizes x >= 0 of least norm with Q x = d: no client is larger than it must be.

    Args:
        mixtures: Q, the share of each class in each client's data, shape (C, K).
        counts: d, the examples of each class, shape (C,).

    Returns:
        Shape (K,).

    Raises:
        ParameterError: There are no such sizes.

    Example:
        >>> least_norm_sizes(np.array([[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]]), np.array([30, 30])).round(4).tolist()
        [20.0, 20.0, 20.0]
    """
    total = counts.sum()
    rows = np.vstack([WEIGHT * mixtures, np.eye(mixtures.shape[1])])
    sizes = total * nnls(rows, np.concatenate([WEIGHT * counts / total, np.zeros(mixtures.shape[1])]))[0]
    missed = np.abs(mixtures @ sizes - counts)
    if (missed > 1e-3 * total).any():
        label = int(missed.argmax())
        raise ParameterError(
            f"the clients' mixtures cannot hand out the examples of class {label}: {missed[label]:.0f} of "
            f"{counts[label]} are left; use more clients, a larger alpha or another seed"
        )
    return np.asarray(sizes)
