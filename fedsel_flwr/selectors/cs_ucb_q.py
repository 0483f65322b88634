"""CS-UCB-Q: selects fast clients under a fairness constraint, with virtual queues (Xia et al.)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, Seconds, by_client, fraction, lookup, real
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.base import SizedSelector
from fedsel_flwr.selectors.cs_ucb import LatencyRewards
from fedsel_flwr.selectors.round_report import RoundReport

BELOW_ONE = float(np.nextafter(1.0, 0.0))
"""Upper limit of the fairness from data sizes, whose range is [0, 1)."""


class CSUCBQ(LatencyRewards, SizedSelector):
    """Selects fast clients under a fairness constraint: by optimistic reward plus deficit against the fair share.

    The deficit of a client grows in each round in which it was not selected.

    At the beginning of a round, (27) updates the deficits of all clients, the virtual queues. (26) is the optimistic
    reward. The m available clients with the largest (28) are selected.

    ===========  ======================  ==============================================================
    paper        here                    meaning
    ===========  ======================  ==============================================================
    m            ``clients_per_round``   clients per round, the paper's N
    tau_max      ``max_latency``         longest wait for a client, seconds
    tau_k, r_k   ``latency_reward``      latency of client k in a round, reward
    c_k          ``fairness``            smallest fraction of the rounds for client k
    beta         ``queue_weight``        weight of the queues against the rewards
    y_k          ``_rewards``            mean observed reward of client k
    n_k          ``_plays``              rounds with client k that were observed, the paper's z_k
    D_k          ``_queue``              virtual queue: the deficit of client k against c_k
    b_k          ``_served``             whether client k was selected in the round before
    ===========  ======================  ==============================================================

    When not to use:
        * The run is short and has many clients. The optimistic rewards (26) are then all 1 for a long time, so the
          selection depends only on the queues.
        * Slow clients have data that no other client has, and ``queue_weight`` is very small. Slow clients are then
          rarely selected.

    Deviations:
        * In the paper, (16) contains r_k(t - 1). Here the mean after round t contains the reward of round t.
        * A failure counts as a play with reward 0, and the failed client counts as selected (b_k = 1). With
          ``max_latency="auto"``, the reward of a failure is -1.
        * ``max_latency="auto"``: as in :class:`~fedsel_flwr.selectors.CSUCB`.
        * ``exploration`` is a factor of the radius in (26); 1 gives the paper's radius.
        * In the first round of a new client, its queue is 0. If the selector receives no report on a round, no client
          counts as selected in this round (b_k = 0).
        * The fairness from data sizes is phi m s_k / sum(s), capped below 1 (section II-C with c_min at its lower
          limit, and V-C).
        * If new data sizes change c_k, (27) uses the value at the beginning of the round.
        * c_k = 1 and phi = 1 are allowed; the paper has [0, 1).
        * In buffered rounds (``concurrency``), b_k is 1 in the round in which client k arrives, so the queues of the
          clients at work grow meanwhile. The paper's bounds assume that a selection is observed in its own round.
        * In a common warm-up, every round is a play of all selected clients, and they count as selected (b_k = 1).

    Args:
        clients_per_round: m, the paper's N.
        max_latency: tau_max, seconds; "auto" uses the slowest completed play, :attr:`max_latency_now`.
        fairness: c, the smallest share of the rounds by client index, each in [0, 1]. An array or a mapping, which may
            grow with the fleet. None computes c from the data sizes of ``inform(clients, num_examples=...)``. A client
            of unknown size then counts as a client of average size.
        fairness_scale: phi, the scale of the fairness from data sizes, in [0, 1], used only if ``fairness`` is None.
        queue_weight: beta, the weight of the queues against the rewards, in [0, 1]. The regret is sub-linear for beta
            of at most 1 / sqrt(T).
        exploration: Factor of the confidence radius, at least 0; 1 is the paper's, 0 uses the mean rewards alone.
        seed: Seed of the generator that breaks ties.

    Raises:
        ParameterError: A parameter is out of range, or the fairness adds up to more than m.

    References:
        W. Xia, T. Q. S. Quek, K. Guo, W. Wen, H. H. Yang, H. Zhu, Multi-armed bandit-based client scheduling for
        federated learning, IEEE Transactions on Wireless Communications 19(11), 2020, Algorithm 2.

    >>> import numpy as np
    >>> selector = CSUCBQ(clients_per_round=1, max_latency=5.0, fairness=[0.4, 0.4], queue_weight=0.5, seed=0)
    >>> for _ in range(100):
    ...     chosen = selector.select(np.arange(2))
    ...     selector.observe(RoundReport(clients=chosen, completed=[True], latency=0.5 + 4.0 * chosen))
    >>> selector.state_dict()["plays"].tolist()  # client 1 is slow, but gets more than its 40 %
    [54, 46]
    """

    name: ClassVar[str] = "cs-ucb-q"
    by_client: ClassVar[frozenset[str]] = frozenset({"fairness"})
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_queue": 0.0, "_served": False, "_new": True, "_share": 0.0}

    _queue: FloatArray
    _served: BoolArray
    _new: BoolArray
    _share: FloatArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        max_latency: Seconds,
        fairness: FloatArray | Mapping[int, float] | None = None,
        fairness_scale: float = 0.5,
        queue_weight: float = 0.01,
        exploration: float = 1.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            clients_per_round=clients_per_round, max_latency=max_latency, exploration=exploration, seed=seed
        )
        self.fairness_scale = real("fairness_scale", fairness_scale, at_least=0.0)
        self.queue_weight = fraction("queue_weight", queue_weight)
        self.fairness = None if fairness is None else by_client("fairness", fairness)
        if self.fairness is None and self.fairness_scale > 1.0:
            raise ParameterError(
                f"fairness_scale must be at most 1, got {fairness_scale!r}. The fairness from data sizes would have "
                f"a sum of {self.fairness_scale * clients_per_round:.6g}, but only m = {clients_per_round} are chosen"
            )
        if self.fairness is not None:
            self._check_shares(list(self.fairness.values()))

    def _advance(self) -> None:
        share = self._fairness()
        behind = np.maximum(self._queue + share - self._served, 0.0)  # (27)
        self._queue = np.where(self._registered & ~self._new, behind, 0.0)
        self._new[self._registered] = False
        # A selection serves its clients only when the round is observed.
        self._served[:] = False

    def _select(self, available: IntArray) -> IntArray:
        beta, played = self.queue_weight, self._plays > 0
        optimistic = np.ones(played.shape)  # 1 where z_k = 0, below (26)
        radius = self.exploration * np.sqrt(2.0 * np.log(self.round) / self._plays[played])  # (26)
        optimistic[played] = np.minimum(self._rewards()[played] + radius, 1.0)  # (26)
        return self._largest((1.0 - beta) * optimistic + beta * self._queue, available)  # (28)

    def _observe(self, report: RoundReport) -> None:
        super()._observe(report)
        self._served[report.clients] = True

    def _admit(self, clients: IntArray) -> None:
        if self.fairness is not None:
            shares = lookup("fairness", self.fairness, clients)
            self._check_shares([*self._share[self._registered], *shares])
            self._share[clients] = shares

    def _check_shares(self, shares: list[float]) -> None:
        """Refuse a fairness that no sequence of selections can meet."""
        if max(shares, default=0.0) > 1.0:
            raise ParameterError(f"each value of fairness must be at most 1, got {max(shares)}. Lower it")
        # Rounding makes the sum of shares such as 1/3 slightly too large.
        if sum(shares) > self.clients_per_round * (1 + 1e-9):
            raise ParameterError(
                f"fairness cannot be met: its sum is {sum(shares):.6g}, but only m = {self.clients_per_round} clients "
                "are chosen a round. Lower the sum to at most m"
            )

    def _fairness(self) -> FloatArray:
        """Return c by index."""
        if self.fairness is not None:
            return self._share
        size = np.where(self._registered, self._sizes(), 0.0)
        total = max(float(size.sum()), 1e-300)
        share = self.fairness_scale * self.clients_per_round * size / total  # c_k of (6), sections II-C, V-C
        return np.asarray(np.minimum(share, BELOW_ONE))
