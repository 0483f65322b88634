"""A bandit whose arms are groups of clients with similar data (LSH, NCCB), and k-means over hashes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, fraction, real
from fedsel_flwr.selectors._vectors import VectorSelector
from fedsel_flwr.selectors.base import Probe
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
