"""CS-UCB: selects the fastest clients, learned by upper confidence bounds (Xia et al.).

:class:`LatencyRewards` has the rewards of CS-UCB and CS-UCB-Q.

References:
    W. Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE Transactions on Wireless
    Communications 19(11), 2020, section III-B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray, Seconds, real, seconds
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.round_report import RoundReport


def latency_reward(report: RoundReport, max_latency: float) -> FloatArray:
    """Return r_k, shape (n,): 1 at latency 0, falling to 0 at ``max_latency``; 0 if the client failed."""
    reward = 1.0 - np.minimum(report.latency, max_latency) / max_latency  # r_k, below (12)
    return np.where(report.completed, reward, 0.0)


class LatencyRewards(Selector):
    """Keeps the mean reward of each client.

    The reward is affine in the latency. Under "auto" the state holds each client's mean latency, with 0 s for a failed
    play, and its number of failed plays. These two give the mean reward at any tau_max. A failed play then has reward
    -1, because the slowest completed play has reward 0.

    Args:
        clients_per_round: Number of clients to select each round.
        max_latency: tau_max, seconds; "auto" uses :attr:`max_latency_now`.
        exploration: Factor of the confidence radius, at least 0; the paper's is 1.
        seed: Seed of the selector's generator.

    Raises:
        ParameterError: ``clients_per_round`` < 1, ``exploration`` < 0, or ``max_latency`` neither above 0 nor "auto".
    """

    citations: ClassVar[tuple[str, ...]] = ("xia2020multi",)
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
        """tau_max, seconds: ``max_latency``, or under "auto" the next float above the slowest completed play.

        Plays of forgotten clients do not count. The value is nearly 0 before the first completed play.
        """
        if isinstance(self.max_latency, str):
            # The next float, so that the slowest play has a reward above 0 and no division is by 0.
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
        """Return y_k by index; 0 for clients without a play."""
        if not isinstance(self.max_latency, str):
            return self._mean
        failed = self._failed / np.maximum(self._plays, 1)
        completed = np.where(self._plays > 0, 1.0 - failed, 0.0)
        return np.asarray(completed - self._mean / self.max_latency_now - failed)  # (16): 1 - tau_k / tau_max, or -1


class CSUCB(LatencyRewards):
    """Selects the fastest clients: those with the largest mean reward plus confidence radius.

    The reward of a client falls from 1 to 0 as its latency rises from 0 to ``max_latency``. The objective (18) is a
    sum over the set, so the m clients with the largest bounds are its exact maximizer.

    ===========  ======================  ====================================================
    paper        here                    meaning
    ===========  ======================  ====================================================
    m            ``clients_per_round``   clients per round, the paper's N
    tau_max      ``max_latency``         longest wait for a client, seconds
    tau_k, r_k   ``latency_reward``      latency of client k in a round, reward
    y_k          ``_rewards``            mean observed reward of client k
    n_k          ``_plays``              observed rounds with client k, the paper's z_k
    kappa        ``ceil(K/m)``           opening rounds that play every client at least once
    ===========  ======================  ====================================================

    When not to use:
        * The run is short and has many clients. If the mean rewards are similar, the selection depends mainly on the
          radius of (18) for a long time. All clients are then selected almost equally often.
        * Slow clients have data that no other client has. Slow clients are rarely selected.

    Deviations:
        * In the paper, (16) contains r_k(t - 1). Here the mean after round t contains the reward of round t.
        * A failure counts as a play with reward 0, because a failed client of section V-B has latency tau_max. If
          failures were not plays, a client that never replies would be selected in every round.
        * ``max_latency="auto"`` sets tau_max to the next float above the slowest completed play so far. All rewards,
          old ones included, use the current tau_max. A play that exceeds the strategy's longest wait counts as that
          wait. A failure has reward -1. With reward 0, a failed client would look like the slowest client, which is
          more useful because it replies.
        * ``exploration`` is a factor of the radius in (18); 1 gives the paper's radius. With m = 25 of 500 clients, the
          radius is 4.6 after six plays of every client, although no reward exceeds 1. A smaller factor ends exploration
          earlier.
        * If clients are absent or new ("modified CS-UCB" of section V-C), available clients without a play come first,
          then (18). The last opening round is filled up at random only if every registered client has been available
          in every round.
        * In buffered rounds (``concurrency``), a round does not wait for its slowest client, and the rewards of other
          selections arrive in it. The paper's regret assumes neither.
        * A common warm-up replaces the opening rounds. Its observations are plays, and clients that were offline come
          first.

    Args:
        clients_per_round: m, the paper's N.
        max_latency: tau_max, seconds; "auto" uses the slowest completed play, :attr:`max_latency_now`.
        exploration: Factor of the confidence radius, at least 0; 1 is the paper's, 0 compares the mean rewards alone.
        seed: Seed of the generator that breaks ties and orders the opening rounds.

    Raises:
        ParameterError: ``clients_per_round`` < 1, ``exploration`` < 0, or ``max_latency`` neither above 0 nor "auto".

    References:
        W. Xia, T. Q. S. Quek, K. Guo, W. Wen, H. H. Yang, H. Zhu, Multi-armed bandit-based client scheduling for
        federated learning, IEEE Transactions on Wireless Communications 19(11), 2020, Algorithm 1.

    >>> import numpy as np
    >>> from fedsel_flwr.selectors import RoundReport
    >>> selector = CSUCB(clients_per_round=1, max_latency=5.0, seed=0)
    >>> for _ in range(50):
    ...     chosen = selector.select(np.arange(2))
    ...     selector.observe(RoundReport(clients=chosen, completed=[True], latency=0.5 + 4.0 * chosen))
    >>> selector.state_dict()["plays"].tolist()  # client 0 answers in 0.5 s, client 1 in 4.5 s
    [44, 6]
    """

    name: ClassVar[str] = "cs-ucb"
    scalar_state: ClassVar[tuple[str, ...]] = ("_ideal_fleet",)

    # K while all K clients were available in every round, 0 after the first absence, -1 before the first round.
    _ideal_fleet: int = -1

    def _join(self, available: IntArray) -> None:
        # The warm-up replaces the opening rounds.
        self._ideal_fleet = 0

    def _select(self, available: IntArray) -> IntArray:
        m, played = self.clients_per_round, self._plays > 0
        bound = np.full(played.shape, np.inf)
        if self._is_opening(available):
            bound[played] = 0.0  # Algorithm 1, line 4: topped up at random
        else:
            radius = self.exploration * np.sqrt((m + 1) * np.log(self.round) / self._plays[played])  # (18)
            bound[played] = self._rewards()[played] + radius  # (18)
        return self._largest(bound, available)

    def _is_opening(self, available: IntArray) -> bool:
        """Return whether this is one of the first ceil(K/m) rounds, with all clients available so far."""
        if self._ideal_fleet == -1:
            self._ideal_fleet = self.num_clients
        if not available.size == self.num_clients == self._ideal_fleet:
            self._ideal_fleet = 0
        return bool(self.round <= -(-self._ideal_fleet // self.clients_per_round))  # kappa
