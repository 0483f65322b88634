"""Genies: the choice of each paper's benchmark policy, which knows every client's mean.

References:
    [1] W. Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE Transactions on
        Wireless Communications 19(11), 2020, equation (13).
    [2] D. Ben Ami, K. Cohen, Q. Zhao, Client selection for generalization in accelerated federated learning: a
        multi-armed bandit approach, IEEE Access 13, 2025, equation (6).

A set's mean reward is the minimum of its members' *means*. The mean of the minimum, which a realized round shows, is
smaller: against it even a genie would lose something every round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray, column, real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.bsfl import maximize


def xia_genie(mean_reward: npt.ArrayLike, clients_per_round: int) -> tuple[IntArray, float]:
    """Return the set with the largest mean reward: the m clients with the largest means.

    Args:
        mean_reward: mu_k, each client's mean reward, shape (K,).
        clients_per_round: m, the paper's N; all K clients are returned when m >= K.

    Returns:
        Indices of the set, ascending (the lower index if means are equal), and its mean reward, the smallest of
        its members' means.

    Raises:
        ParameterError: ``mean_reward`` is empty or not finite, or ``clients_per_round`` < 1.

    References:
        [1], equation (13).

    >>> xia_genie([0.2, 0.9, 0.5, 0.9], 3)
    (array([1, 2, 3]), 0.5)
    """
    mean = finite_means("mean_reward", mean_reward)
    m = whole("clients_per_round", clients_per_round, 1)
    chosen = np.sort(np.argsort(-mean, kind="stable")[:m])  # (13)
    return chosen, float(mean[chosen].min())  # mu(S*), below (14)


def sorted_groups(mean_latency: npt.ArrayLike, clients_per_round: int) -> list[IntArray]:
    """Return the groups with the shortest rounds if every client is chosen equally often.

    Clients are sorted by mean latency and taken m at a time. A round lasts as long as its slowest client, so clients of
    similar latency belong together: no other partition into groups of m has a smaller sum of largest means.

    Args:
        mean_latency: Each client's mean latency, s, shape (K,).
        clients_per_round: m; if it does not divide K, the fastest group is the small one.

    Returns:
        The groups in turn, each of indices ascending.

    Raises:
        ParameterError: ``mean_latency`` is empty or not finite, or ``clients_per_round`` < 1.

    >>> [group.tolist() for group in sorted_groups([0.2, 0.9, 0.5, 0.8], 2)]
    [[0, 2], [1, 3]]
    """
    mean = finite_means("mean_latency", mean_latency)
    m = whole("clients_per_round", clients_per_round, 1)
    order = np.argsort(mean, kind="stable")
    # The remainder goes to the fastest clients: a small group costs least there.
    first = mean.size % m
    cuts = range(first, mean.size, m) if first else range(m, mean.size, m)
    return [np.sort(group) for group in np.split(order, list(cuts))]


def bsfl_genie(
    mean_speed: npt.ArrayLike, generalization: npt.ArrayLike, clients_per_round: int, alpha: float
) -> tuple[IntArray, float]:
    """Return the set with the largest mean reward of one round, given the history that is in ``generalization``.

    Args:
        mean_speed: mu_k, each client's mean of tau_min / tau_k, shape (K,).
        generalization: g_k at the beginning of the round, shape (K,).
        clients_per_round: m; all K clients are returned when m >= K.
        alpha: Weight of the generalization term, at least 0.

    Returns:
        Indices of the set, ascending, and its mean reward: min mu + (alpha / m) sum of g over the set.

    Raises:
        ParameterError: An array is empty, not finite or of another length, ``clients_per_round`` < 1, or ``alpha`` < 0.

    References:
        [2], equation (6), solved exactly by :func:`fedsel_flwr.selectors.bsfl.maximize`.

    >>> chosen, value = bsfl_genie([0.9, 0.8, 0.1], [0.0, -0.1, 0.9], 2, 1.0)
    >>> chosen, round(value, 6)
    (array([0, 1]), 0.75)
    """
    mean = finite_means("mean_speed", mean_speed)
    g = finite_means("generalization", generalization)
    m, alpha = whole("clients_per_round", clients_per_round, 1), real("alpha", alpha, at_least=0.0)
    chosen = maximize(mean, g, m, alpha)  # (6)
    return chosen, float(mean[chosen].min() + alpha / m * g[chosen].sum())  # r*(t), (6)


def finite_means(name: str, values: Any) -> FloatArray:
    """Return ``values`` as a copied array of shape (K,), K >= 1, of finite numbers."""
    array = column(name, values, np.shape(values)[0] if np.ndim(values) else 0)
    if array.size == 0 or not np.isfinite(array).all():
        raise ParameterError(
            f"{name} must hold one finite number per client, got {values!r}. Give every client's number"
        )
    return array
