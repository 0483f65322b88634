"""NCCB without its neural network, and LSH: bandits over groups of clients with similar data (Pan et al.)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, fraction, real, whole
from fedsel_flwr.selectors._vectors import VectorSelector
from fedsel_flwr.selectors.round_report import RoundReport

MOST_STEPS = 100
"""Largest number of steps of k-means. Usually a few suffice."""


class GroupBandit(VectorSelector):
    """Selects clients of the groups with the largest upper confidence bounds.

    The plays and utilities of a group are the sums over its clients.
    """

    citations: ClassVar[tuple[str, ...]] = ("pan2024contextual",)
    needs: ClassVar[frozenset[str]] = frozenset({"accuracy", "energy_score"})
    asks: ClassVar[frozenset[str]] = frozenset({"sketch"})
    requires: ClassVar[frozenset[str]] = frozenset({"energy_score"})
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_plays": 0, "_reward_sum": 0.0}

    _plays: IntArray
    _reward_sum: FloatArray

    def __init__(self, *, clients_per_round: int, accuracy_weight: float, exploration: float, seed: int | None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.accuracy_weight = fraction("accuracy_weight", accuracy_weight)
        self.exploration = real("exploration", exploration, at_least=0.0)

    @property
    def hashes(self) -> BoolArray:
        """The clients' hashes, shape (K, length of a hash)."""
        return np.asarray(self.vectors > 0.5)

    @abstractmethod
    def _groups(self) -> IntArray:
        """Return the group of each client with a known hash, counted from 0, shape (number of known hashes,)."""

    def _select(self, available: IntArray) -> IntArray:
        return self._largest(self._bounds(), available)

    def _bounds(self) -> FloatArray:
        """Return the bound of each client's group, shape (K,)."""
        # Numbers below K are groups of a single client without a hash. The groups of hashes follow.
        known, count = np.flatnonzero(self._known), len(self._known)
        group = np.arange(count)
        group[known] = count + self._groups()
        plays = np.bincount(group, weights=self._plays)
        rewards = np.bincount(group, weights=self._reward_sum)
        seen = plays > 0
        bound = np.full(plays.shape, np.inf)
        spread = np.sqrt(self.exploration * np.log(max(1.0, float(self._plays.sum()))) / plays[seen])  # UCB
        bound[seen] = rewards[seen] / plays[seen] + spread  # UCB
        return np.asarray(bound[group])

    def _observe(self, report: RoundReport) -> None:
        done, weight = report.completed, self.accuracy_weight
        accuracy, energy = np.asarray(report.accuracy)[done], np.asarray(report.energy_score)[done]
        self._plays[report.clients] += 1
        self._reward_sum[report.clients[done]] += weight * accuracy + (1.0 - weight) * energy  # utility

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        if "sketch" in columns:
            self._store_vectors(clients, columns["sketch"])


class NCCB(GroupBandit):
    """Selects the clients whose cluster has the largest upper confidence bound of accuracy and energy score.

    A cluster contains clients with similar hashes, which the clients compute from their data.

    ==============  ======================  ==================================================================
    paper           here                    meaning
    ==============  ======================  ==================================================================
    context         ``hashes``              SimHash of client k's data, computed on the client
    cluster         ``_cluster``            k-means over the contexts with the Hamming distance
    u_k             ``_reward_sum``         utility: weight * accuracy + (1 - weight) * energy score
    w               ``accuracy_weight``     weight of the accuracy a_k; the energy score is e_k
    n_j, n          ``_plays``              plays of cluster j, of all clusters; summed over the clients
    c               ``exploration``         factor in the bound
    ==============  ======================  ==================================================================

    The bound of a cluster is its mean utility + sqrt(exploration * ln(all plays) / its plays). This bound is infinite
    before the first play. Utilities and plays are sums over all clients of the cluster. The m clients with the largest
    bounds are selected.

    When not to use:
        * You need the method of Pan et al. This class has no neural network, so its results say nothing about their
          method.
        * Each round needs clients with different data. All clients of a cluster have the same bound, so the selected
          clients are often similar.
        * The clients do not know their energy scores.

    Deviations:
        * The paper's NCCB is a neural contextual combinatorial bandit: a network predicts the reward of a context. This
          class has the same name, but no network. It is a UCB bandit over clusters of SimHash contexts.
        * The comparison in the PCZFL paper has this baseline. The comparison states neither the weights of the utility,
          nor the number of clusters, nor the bound. Equal weights, five clusters and UCB1's bound are ours.
        * A probe asks each client for its hash when the client is first seen. The cost of the probe is charged. Then
          all hashes are clustered again, and each client's sums count in its new cluster. A client that sends no hash
          is asked three times and is a separate cluster.
        * Each bit of a centre is the majority of this bit in the cluster's hashes. No other centre has a smaller sum of
          distances. The first centres are hashes that are far apart.
        * The rounds of a common warm-up of all selectors are plays. Probes ask for hashes after the warm-up.
        * A failed client counts as a play with utility 0. Ties, as within a cluster, are broken at random.
        * The accuracy is that of the client's new model on the server's validation set.

    Args:
        clients_per_round: m.
        clusters: Largest number of clusters, at least 1.
        accuracy_weight: Weight of the accuracy in the utility, in [0, 1]. The energy score has the weight 1 minus this.
        exploration: Factor in the bound, at least 0.
        seed: Seed of the generator of ties and of the first centre.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        Q. Pan, H. Cao, Y. Zhu, J. Liu, B. Li, Contextual client selection for efficient federated learning over edge
        devices, IEEE TMC 2024, as a baseline of PCZFL. SimHash: M. Charikar, Similarity estimation techniques from
        rounding algorithms, STOC 2002.

    >>> selector = NCCB(clients_per_round=1, clusters=2, seed=0)
    >>> selector.inform(np.arange(3), sketch=np.array([[1.0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 1, 1]]))
    >>> chosen = selector.select(np.array([1]))
    >>> selector.observe(RoundReport(clients=chosen, completed=[True], latency=[1.0], accuracy=[0.9],
    ...                              energy_score=[0.9]))
    >>> selector.select(np.arange(3))  # 2 is in the cluster that was played
    array([0])
    """

    name: ClassVar[str] = "nccb"
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_cluster": -1}
    scalar_state: ClassVar[tuple[str, ...]] = (*GroupBandit.scalar_state, "_regroup")

    _cluster: IntArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        clusters: int = 5,
        accuracy_weight: float = 0.5,
        exploration: float = 2.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            clients_per_round=clients_per_round, accuracy_weight=accuracy_weight, exploration=exploration, seed=seed
        )
        self.clusters = whole("clusters", clusters, 1)
        # Whether hashes arrived since the last clustering.
        self._regroup = False

    def _groups(self) -> IntArray:
        known = np.flatnonzero(self._known)
        if self._regroup and known.size:
            self._cluster[known] = cluster(self.hashes[known], self.clusters, self._generator)
        self._regroup = False
        return self._cluster[known]

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        if "sketch" in columns and self._store_vectors(clients, columns["sketch"]).size:
            self._regroup = True


class LSH(GroupBandit):
    """Selects the clients whose hash has the largest upper confidence bound of accuracy and energy score.

    A client computes the hash from its data, so clients with equal hashes have similar data.

    ==============  ======================  ==================================================================
    paper           here                    meaning
    ==============  ======================  ==================================================================
    context         ``hashes``              SimHash of client k's data, computed on the client
    hash length     ``bits``                how many bits of a context count
    arm             ``_groups``             clients whose contexts are equal in these bits
    u_k             ``_reward_sum``         utility: weight * accuracy + (1 - weight) * energy score
    w               ``accuracy_weight``     weight of the accuracy a_k; the energy score is e_k
    n_j, n          ``_plays``              plays of arm j, of all arms; summed over the clients
    c               ``exploration``         factor in the bound
    ==============  ======================  ==================================================================

    The bound of an arm is its mean utility + sqrt(exploration * ln(all plays) / its plays). This bound is infinite
    before the first play. Utilities and plays are sums over all clients of the arm. The m clients with the largest
    bounds are selected.

    When not to use:
        * Each round needs clients with different data. All clients of an arm have the same bound, so the selected
          clients are often similar.
        * The clients do not know their energy scores.

    Deviations:
        * The comparison in the PCZFL paper has this baseline. The comparison states neither the weights of the utility
          nor the bound. Equal weights and UCB1's bound are ours.
        * The number of bits is ours, because the comparison states no number. Simulated clients send 64 bits, with
          which nearly every client is a separate arm. The first ``bits`` bits of a hash count. Any other bits would
          serve as well, because all planes are drawn in the same way.
        * The default of 8 bits gives about sqrt(K) arms of 100 clients that share scikit-learn's digits. These are 10.1
          arms with two shards per client, and 9.2 with a Dirichlet partition (table in ``docs/papers/diversity.md``).
        * A probe asks each client for its hash when the client is first seen. The cost of the probe is charged. A
          client that sends no hash is asked three times and is a separate arm.
        * The rounds of a common warm-up of all selectors are plays. Probes ask for hashes after the warm-up.
        * A failed client counts as a play with utility 0. Ties, as among the clients of an arm, are broken at random.
        * The accuracy is that of the client's new model on the server's validation set.

    Args:
        clients_per_round: m.
        accuracy_weight: Weight of the accuracy in the utility, in [0, 1]. The energy score has the weight 1 minus this.
        exploration: Factor in the bound, at least 0.
        bits: Number of bits of a hash that count, at least 1. If a hash has fewer bits, all its bits count.
        seed: Seed of the generator that breaks ties.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        Q. Pan, H. Cao, Y. Zhu, J. Liu, B. Li, Contextual client selection for efficient federated learning over edge
        devices, IEEE TMC 2024, without its clustering, as a baseline of PCZFL. SimHash: M. Charikar, Similarity
        estimation techniques from rounding algorithms, STOC 2002.

    >>> selector = LSH(clients_per_round=1, seed=0)
    >>> selector.inform(np.arange(3), sketch=np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]))
    >>> chosen = selector.select(np.array([0]))
    >>> selector.observe(RoundReport(clients=chosen, completed=[True], latency=[1.0], accuracy=[0.9],
    ...                              energy_score=[0.9]))
    >>> int(selector.select(np.arange(3))[0]) in (1, 2)  # an arm without a play comes first
    True
    """

    name: ClassVar[str] = "lsh"

    def __init__(
        self,
        *,
        clients_per_round: int,
        accuracy_weight: float = 0.5,
        exploration: float = 2.0,
        bits: int = 8,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            clients_per_round=clients_per_round, accuracy_weight=accuracy_weight, exploration=exploration, seed=seed
        )
        self.bits = whole("bits", bits, 1)

    def _groups(self) -> IntArray:
        if not self._known.any():
            return np.zeros(0, dtype=np.int64)
        packed = np.packbits(self.hashes[self._known, : self.bits], axis=1)
        return np.asarray(np.unique(packed, axis=0, return_inverse=True)[1]).ravel()


def distances(bits: BoolArray, centres: BoolArray) -> IntArray:
    """Return Hamming distances, shape (n, k).

    >>> distances(np.array([[True, False, True]]), np.array([[True, True, True], [False, True, False]])).tolist()
    [[1, 3]]
    """
    one, other = bits.astype(np.float64), centres.astype(np.float64)
    # |a - b| = a + b - 2ab for bits, which is one matrix product. In floats, because NumPy has BLAS for floats only.
    apart = one.sum(axis=1)[:, None] + other.sum(axis=1) - 2.0 * one @ other.T
    return np.asarray(np.rint(apart), dtype=np.int64)


def majority(bits: BoolArray) -> BoolArray:
    """Return the centre of hashes: the majority of each bit, with ties as 0. It has the least sum of distances.

    >>> majority(np.array([[True, True], [True, False], [False, True], [False, True]])).tolist()
    [False, True]
    """
    return np.asarray(2 * bits.sum(axis=0) > len(bits))


def cluster(bits: BoolArray, count: int, generator: np.random.Generator) -> IntArray:
    """Cluster hashes into at most ``count`` groups, by k-means with the Hamming distance.

    The first centre is a hash drawn at random. Each further centre is a hash that is farthest from all centres so far.
    Then two steps repeat until nothing changes: each hash goes to its nearest centre (the first of equals), and each
    centre becomes the majority of its hashes.

    Args:
        bits: Hashes, shape (n, bits), n at least 1.
        count: Largest number of clusters, at least 1.
        generator: Generator of the first centre.

    Returns:
        The cluster of each hash, shape (n,). With fewer different hashes there are fewer clusters.

    >>> cluster(np.eye(3, dtype=bool)[[0, 0, 1]], 2, np.random.default_rng(0)).tolist()
    [1, 1, 0]
    """
    centres = bits[[int(generator.integers(len(bits)))]]
    while len(centres) < count:
        nearest = distances(bits, centres).min(axis=1)
        if not nearest.any():
            break
        centres = np.vstack([centres, bits[[int(np.argmax(nearest))]]])
    group = np.argmin(distances(bits, centres), axis=1)
    for _ in range(MOST_STEPS):
        centres = np.stack(
            [majority(bits[group == c]) if (group == c).any() else centre for c, centre in enumerate(centres)]
        )
        moved = np.argmin(distances(bits, centres), axis=1)
        if np.array_equal(moved, group):
            break
        group = moved
    return np.asarray(group, dtype=np.int64)
