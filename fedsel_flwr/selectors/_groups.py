"""A bandit over groups of clients with like data (LSH, NCCB): what its two ways of grouping share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, fraction, real
from fedsel_flwr.selectors._vectors import VectorSelector
from fedsel_flwr.selectors.base import Probe
from fedsel_flwr.selectors.report import RoundReport


class GroupBandit(VectorSelector):
    """Chooses the clients of the groups with the largest bound; a group's numbers are the sums over its members."""

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
        """The group of each client whose hash is known, counted from 0; shape (number of known clients,)."""

    def _probe(self, available: IntArray) -> Probe | None:
        asked = self._to_ask(available)
        return Probe(clients=asked, columns=("sketch",)) if asked.size else None

    def _select(self, available: IntArray) -> IntArray:
        return self._largest(self._bounds(), available)

    def _bounds(self) -> FloatArray:
        """Each client's bound, which is its group's, shape (K,); a client without a hash is a group of its own."""
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
            self._keep(clients, columns["sketch"])
