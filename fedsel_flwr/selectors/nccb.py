"""NCCB, without its neural network, and LSH: bandits over groups of clients with similar data (Pan et al.)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, fraction, real, whole
from fedsel_flwr.selectors._vectors import VectorSelector
from fedsel_flwr.selectors.base import Probe
from fedsel_flwr.selectors.citations import PAN
from fedsel_flwr.selectors.round_report import RoundReport

MOST_STEPS = 100
"""Largest number of steps of k-means, which settles in a few."""


class GroupBandit(VectorSelector):
    """Chooses the clients of the groups with the largest upper confidence bound; a group sums its members' plays."""

    needs: ClassVar[frozenset[str]] = frozenset({"accuracy", "energy_score"})
    asks: ClassVar[frozenset[str]] = frozenset({"sketch"})
    requires: ClassVar[frozenset[str]] = frozenset({"energy_score"})
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {
        **VectorSelector.client_state, "_plays": 0, "_reward_sum": 0.0,
    }  # fmt: skip

    _plays: IntArray
    _reward_sum: FloatArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        accuracy_weight: float,
        exploration: float,
        seed: int | None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.accuracy_weight = fraction("accuracy_weight", accuracy_weight)
        self.exploration = real("exploration", exploration, at_least=0.0)

    @property
    def hashes(self) -> BoolArray:
        """The clients' hashes, shape (K, length of a hash)."""
        return np.asarray(self.vectors > 0.5)

    @abstractmethod
    def _groups(self) -> IntArray:
        """Return the group of each client with a known hash, counted from 0; shape (number of known hashes,)."""

    def _probe(self, available: IntArray) -> Probe | None:
        asked = self._ask_unknown(available)
        return Probe(clients=asked, columns=("sketch",)) if asked.size else None

    def _select(self, available: IntArray) -> IntArray:
        return self._largest(self._bounds(), available)

    def _bounds(self) -> FloatArray:
        """Return each client's bound, which is its group's, shape (K,)."""
        # Numbers below K are groups of a single client without a hash; the groups of hashes follow.
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
    """Chooses the clients whose cluster has the largest upper confidence bound of accuracy and energy score.

    ==============  ======================  ==================================================================
    paper           here                    meaning
    ==============  ======================  ==================================================================
    context         ``hashes``              SimHash of client k's data, computed on the client
    cluster         ``_cluster``            k-means over the contexts with the Hamming distance
    utility         ``_reward_sum``         weight * accuracy + (1 - weight) * energy score, by client
    n               ``_plays``              how often the client was chosen and observed
    ==============  ======================  ==================================================================

    The bound of a cluster is its mean utility + sqrt(exploration * ln(all plays) / its plays), infinite before its
    first play; sums and plays are those of its clients together. The m clients of the largest bounds are chosen.

    Deviations:
        * The paper's NCCB is a neural contextual combinatorial bandit: a network predicts the reward of a context. No
          network is here. This is a UCB bandit over clusters of SimHash contexts, which keeps the paper's name.
        * The comparison that has this baseline gives neither its utility's weights, nor the number of clusters, nor its
          bound: equal weights, five clusters and UCB1's bound are ours.
        * Hashes come by a probe when a client is first seen, whose cost is charged; all are then clustered
          again, and the clients' own sums move with them. A client that sends none is asked three times and is a
          separate cluster.
        * A centre is the majority of its hashes, bit by bit, which is nearest to them in the sum; centres start at
          hashes that are far apart.
        * The rounds of a common warm-up of all selectors are plays; hashes are asked for after it.
        * A failed client counts as a play of utility 0. Ties, as within a cluster, are broken at random.
        * The accuracy is that of the client's new model on the server's validation set.

    Args:
        clients_per_round: m.
        clusters: Largest number of clusters.
        accuracy_weight: Weight of the accuracy in the utility, in [0, 1]; the energy score has the rest.
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
    >>> selector.select(np.arange(3))  # 2 is of the cluster that was played
    array([0])
    """

    name: ClassVar[str] = "nccb"
    citations: ClassVar[tuple[str, ...]] = (PAN,)
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {**GroupBandit.client_state, "_cluster": -1}
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
    """Chooses the clients whose hash has the largest upper confidence bound of accuracy and energy score.

    ==============  ======================  ==================================================================
    paper           here                    meaning
    ==============  ======================  ==================================================================
    context         ``hashes``              SimHash of client k's data, computed on the client
    hash length     ``bits``                how many bits of a context count
    arm             ``_groups``             clients whose contexts are equal in these bits
    utility         ``_reward_sum``         weight * accuracy + (1 - weight) * energy score, by client
    n               ``_plays``              how often the client was chosen and observed
    ==============  ======================  ==================================================================

    The bound of an arm is its mean utility + sqrt(exploration * ln(all plays) / its plays), infinite before its first
    play; sums and plays are those of its clients together. The m clients of the largest bounds are chosen.

    Deviations:
        * The comparison that has this baseline gives neither its utility's weights nor its bound: equal weights and
          UCB1's bound are ours.
        * The number of bits is ours: the comparison gives none. Simulated clients send 64 bits, with which nearly every
          client is a separate arm. The first ``bits`` of a hash count, as its planes are drawn alike. The default of
          8 makes about sqrt(K) arms of 100 clients that share scikit-learn's digits: 10.1 with two shards each, 9.2
          with a Dirichlet partition (``docs/papers/diversity.md`` has the table).
        * Hashes come by a probe when a client is first seen, whose cost is charged. A client that sends none is asked
          three times and is a separate arm.
        * The rounds of a common warm-up of all selectors are plays; hashes are asked for after it.
        * A failed client counts as a play of utility 0. Ties, as among the clients of an arm, are broken at random.
        * The accuracy is that of the client's new model on the server's validation set.

    Args:
        clients_per_round: m.
        accuracy_weight: Weight of the accuracy in the utility, in [0, 1]; the energy score has the rest.
        exploration: Factor in the bound, at least 0.
        bits: How many bits of a hash count, at least 1; all of them if the hash has fewer.
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
    citations: ClassVar[tuple[str, ...]] = (PAN,)

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
    # |a - b| = a + b - 2ab for bits: one matrix product, in floats, since NumPy has BLAS for floats only.
    apart = one.sum(axis=1)[:, None] + other.sum(axis=1) - 2.0 * one @ other.T
    return np.asarray(np.rint(apart), dtype=np.int64)


def majority(bits: BoolArray) -> BoolArray:
    """Return the centre of hashes, the majority of each bit, ties as 0: no other has a smaller sum of distances.

    >>> majority(np.array([[True, True], [True, False], [False, True], [False, True]])).tolist()
    [False, True]
    """
    return np.asarray(2 * bits.sum(axis=0) > len(bits))


def cluster(bits: BoolArray, count: int, generator: np.random.Generator) -> IntArray:
    """Cluster hashes into at most ``count`` groups, by k-means with the Hamming distance.

    The first centre is a hash drawn at random, each further one a hash that is farthest from all centres so far; then
    each hash goes to its nearest centre (the first of equals) and each centre to the majority of its hashes, until
    nothing changes.

    Args:
        bits: Hashes, shape (n, bits), n at least 1.
        count: Largest number of clusters, at least 1.
        generator: Generator of the first centre.

    Returns:
        The cluster of each hash, shape (n,); with fewer different hashes there are fewer clusters.

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
