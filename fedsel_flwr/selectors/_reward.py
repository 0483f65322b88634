"""The rewards of CS-UCB and CS-UCB-Q.

References:
    W. Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE Transactions on Wireless
    Communications 19(11), 2020, section III-B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray, real
from fedsel_flwr.selectors._auto import Seconds, seconds
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.report import RoundReport


def latency_reward(report: RoundReport, max_latency: float) -> FloatArray:
    """Return r_k, shape (n,): it falls from 1 to 0 as the latency rises from 0 to ``max_latency``; 0 where failed."""
    reward = 1.0 - np.minimum(report.latency, max_latency) / max_latency  # r_k, below (12)
    return np.where(report.completed, reward, 0.0)


class LatencyRewards(Selector):
    """Keeps the mean reward of each client.

    The reward is affine in the latency. Under "auto" the means of the latencies are kept, a failed play as 0 s, and how
    many plays failed: from these the mean rewards follow at whatever tau_max. A failed play is then worth -1, as the
    slowest play that completed is worth 0.

    Args:
        clients_per_round: How many clients to choose each round.
        max_latency: tau_max, seconds; "auto" takes :attr:`max_latency_now`.
        exploration: Factor of the confidence radius, at least 0; the print has 1.
        seed: Seed of the selector's own generator.

    Raises:
        ParameterError: ``clients_per_round`` < 1, ``exploration`` < 0, or ``max_latency`` neither above 0 nor "auto".
    """

    needs: ClassVar[frozenset[str]] = frozenset({"latency"})
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_plays": 0, "_mean": 0.0, "_failed": 0, "_slowest": 0.0}

    _plays: IntArray
    _mean: FloatArray
    _failed: IntArray
    _slowest: FloatArray

    def __init__(
        self, *, clients_per_round: int, max_latency: Seconds, exploration: float = 1.0, seed: int | None = None
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.max_latency = seconds("max_latency", max_latency)
        self.exploration = real("exploration", exploration, at_least=0.0)

    @property
    def max_latency_now(self) -> float:
        """tau_max, seconds: ``max_latency``, or under "auto" just above the slowest play that completed so far.

        Plays of clients that were forgotten do not count; nearly 0 before anybody has completed.
        """
        if isinstance(self.max_latency, str):
            return float(np.nextafter(self._slowest.max(initial=0.0), np.inf))
        return self.max_latency

    def _observe(self, report: RoundReport) -> None:
        k, latency = report.clients, np.where(report.completed, report.latency, 0.0)
        observed = latency if isinstance(self.max_latency, str) else latency_reward(report, self.max_latency)
        self._plays[k] += 1  # (17)
        self._mean[k] += (observed - self._mean[k]) / self._plays[k]  # (16)
        self._failed[k] += ~report.completed
        self._slowest[k] = np.maximum(self._slowest[k], latency)

    def _rewards(self) -> FloatArray:
        """y_k by index; 0 for clients never observed."""
        if not isinstance(self.max_latency, str):
            return self._mean
        failed = self._failed / np.maximum(self._plays, 1)
        completed = np.where(self._plays > 0, 1.0 - failed, 0.0)
        return np.asarray(completed - self._mean / self.max_latency_now - failed)  # (16): 1 - tau_k / tau_max, or -1
