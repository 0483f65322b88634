"""PCZFL: select clients on the Pareto front of accuracy and energy, by contextual zooming.

:class:`UtilityOption` is the utility by which the baselines in PCZFL's paper rank clients.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, fraction, real, whole
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.round_report import RoundReport

INSIDE = 1e-12
"""Tolerance at the surface of a ball. Balls are closed."""
TIE = 1e-9
"""Largest difference of distances to the mean context that counts as equal."""
CHUNK = 1 << 17
"""Number of client-ball distances in memory at a time, about 4 MB with temporaries."""


class PCZFL(Selector):
    """Covers the clients' contexts with balls, and selects every client in a ball of the Pareto front.

    A context is the accuracy of the client's last model on the server's data, and the client's energy score.

    ===============  ====================================  =====================================================
    paper            here                                  meaning
    ===============  ====================================  =====================================================
    x_k              ``_accuracy``, ``_energy_score``      context of client k, in [0, 1]^2
    r(B), centre     ``_radius``, ``_centre``              the balls, in order of creation
    N_B              ``_ball_plays``                       rounds in which ball B was selected
    mu-hat_B         ``_ball_mean``                        mean reward vector of ball B
    j                (columns)                             objective: accuracy or energy score
    D                ``distance``                          distance between the centres of two balls
    A                ``uncertainty``                       confidence hyper-parameter
    u_B              ``_spread``                           sqrt(2 A / N_B), infinite if N_B = 0
    g_B              ``_significance``                     significance score (5)
    ===============  ====================================  =====================================================

    The interview set is the server's validation set. The context of a client is the accuracy of its last model on this
    set, and its energy score. Before the client's first model, the context contains the accuracy of the initial model.
    The context of a client that is not selected does not change.

    When not to use:
        * The cohort must have a fixed size. A limit leaves out clients at random.
        * All clients have similar energy and accuracy. The balls of the front then contain all clients.
        * The run is short and has no warm-up. Until the first smaller ball is added, one ball covers all clients, so
          all clients train.

    Deviations:
        * The second coordinate of (3) is the energy score of section 5.5.1. In the paper, (3) has the energy
          consumption. There are two objectives, each in [0, 1], as in the experiments.
        * The first ball has centre (0.5, 0.5) and radius 1. Balls are closed, with a tolerance of 1e-12.
        * During ``warmup_rounds`` all available clients train, and every relevant ball is selected and updated as
          usual. The paper does not describe these updates. A common warm-up of all selectors, as in section 5, has the
          same effect. If both warm-ups are set, they start with round 1, and the longer one counts.
        * A ball's reward is the mean over its selected clients that completed the round. Line 17 has one reward.
        * If all clients of a selected ball failed, the ball does not change. If a dead client is alone in its ball, the
          selector alone would then select it in every round. Strategies exclude failing clients for some rounds
          (``cooldown="auto"``). The paper does not exclude clients.
        * The centre of a new ball is the context, at selection, of one of these clients: the client nearest to the mean
          of their contexts. If distances differ by less than 1e-9, the lowest client index wins. Line 13 has one
          context per ball.
        * The zoom test uses the counts from before the round.
        * A round adds at most one new ball per selected ball, as in Algorithm 1. Section 4.3 adds one ball per round.
        * You can set any ``uncertainty``, as in the experiments. The limit ``clients_per_round`` is ours.

    Args:
        uncertainty: A, the confidence hyper-parameter, above 0. With the theory's value, about 25, zooming never helps.
        warmup_rounds: Rounds in which all available clients train, at least 0.
        clients_per_round: Optional limit of the selected clients, at least 1. If more clients are selected, random ones
            are left out. None sets no limit.
        seed: Seed of the generator that leaves out clients.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        Optimizing federated learning client selection via multi-objective contextual bandits (OpenReview, 2025): (2)
        to (5), Definitions 1 and 2, Algorithm 1.

    >>> import numpy as np
    >>> selector = PCZFL(seed=0)
    >>> selector.inform(np.arange(3), accuracy=np.array([0.1, 0.1, 0.1]), energy_score=np.array([0.5, 0.7, 0.9]))
    >>> selector.select(np.arange(3))  # one ball covers all clients
    array([0, 1, 2])
    """

    name: ClassVar[str] = "pczfl"
    citations: ClassVar[tuple[str, ...]] = ("pczfl2025optimizing",)
    needs: ClassVar[frozenset[str]] = frozenset({"accuracy", "energy_score"})
    requires: ClassVar[frozenset[str]] = frozenset({"energy_score"})
    remembers: ClassVar[dict[str, str]] = {"accuracy": "_accuracy", "energy_score": "_energy_score"}
    asks_failed_for_ever: ClassVar[bool] = True
    # All clients in the warm-up, then as many as the front holds.
    may_exceed_clients_per_round: ClassVar[bool] = True
    buffers: ClassVar[bool] = False
    client_state: ClassVar[dict[str, float]] = {"_accuracy": 0.0, "_energy_score": 0.0}
    free_state: ClassVar[dict[str, tuple[type, tuple[int, ...]]]] = {
        "_centre": (float, (2,)), "_radius": (float, ()), "_ball_plays": (int, ()), "_ball_mean": (float, (2,)),
        "_chosen_balls": (int, ()),
    }  # fmt: skip

    _accuracy: FloatArray
    _energy_score: FloatArray
    _chosen_balls: IntArray

    def __init__(
        self,
        *,
        uncertainty: float = 0.02,
        warmup_rounds: int = 0,
        clients_per_round: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.uncertainty = real("uncertainty", uncertainty, above=0.0)
        self.warmup_rounds = whole("warmup_rounds", warmup_rounds, 0)
        self._centre: FloatArray = np.full((1, 2), 0.5)  # Algorithm 1, line 3
        self._radius: FloatArray = np.ones(1)  # Algorithm 1, line 3
        self._ball_plays: IntArray = np.zeros(1, dtype=np.int64)  # Algorithm 1, line 3
        self._ball_mean: FloatArray = np.zeros((1, 2))  # Algorithm 1, line 3

    def expected_count(self, num_available: int) -> int | None:
        """Return the size of the next cohort: all clients in the warm-up, then None, because the front decides."""
        return num_available if self.round < self._warmup else None

    @property
    def _warmup(self) -> int:
        """Rounds in which all clients train. The selector's own warm-up and the common one both begin with round 1."""
        return max(self.warmup_rounds, self.common_warmup)

    def _join(self, available: IntArray) -> None:
        # The balls are also selected and updated in a common warm-up.
        self._select(available)

    def _select(self, available: IntArray) -> IntArray:
        member = self._domains(available)
        relevant = np.flatnonzero(member.any(axis=0))  # Algorithm 1, line 6
        warmup = self.round <= self._warmup
        front = relevant if warmup else relevant[self._undominated(relevant)]  # Algorithm 1, line 7
        chosen = available[member[:, front].any(axis=1)]  # Algorithm 1, line 8
        if self.clients_per_round is not None and not warmup:
            chosen = np.sort(self._generator.permutation(chosen)[: self.asked_per_round])
        kept = np.isin(available, chosen)
        self._chosen_balls = front[member[np.ix_(kept, front)].any(axis=0)]
        return chosen

    def _observe(self, report: RoundReport) -> None:
        rewards = np.column_stack([np.asarray(report.accuracy), np.asarray(report.energy_score)])
        # In the order of the clients, so that sums do not depend on the order of the replies.
        rows = np.argsort(report.clients)
        rows = rows[report.completed[rows]]
        self._update_balls(report.clients[rows], rewards[rows])
        # A second report of the same selection must not update the balls again.
        self._chosen_balls = self._chosen_balls[:0]

    def _update_balls(self, done: IntArray, rewards: FloatArray) -> None:
        """Zoom into each selected ball, update its mean, then move the clients' contexts."""
        member, contexts, spread = self._domains(done), self._contexts(done), self._spread()
        centres, radii = [], []
        for ball in self._chosen_balls:
            mine = member[:, ball]
            if not mine.any():
                continue
            if spread[ball] <= self._radius[ball]:  # Algorithm 1, line 12
                distance = np.linalg.norm(contexts[mine] - contexts[mine].mean(axis=0), axis=1)
                # argmax takes the lowest index among equals, because clients ascend.
                nearest = np.argmax(distance <= distance.min() + TIE)
                centres.append(contexts[mine][nearest])  # Algorithm 1, line 13
                radii.append(self._radius[ball] / 2.0)  # Algorithm 1, line 13
            self._ball_plays[ball] += 1  # Algorithm 1, line 18
            step = rewards[mine].mean(axis=0) - self._ball_mean[ball]  # Algorithm 1, line 17
            self._ball_mean[ball] += step / self._ball_plays[ball]  # Algorithm 1, line 17
        if centres:
            self._centre = np.vstack([self._centre, centres])
            self._radius = np.append(self._radius, radii)
            self._ball_plays = np.append(self._ball_plays, np.zeros(len(radii), np.int64))  # Algorithm 1, line 14
            self._ball_mean = np.vstack([self._ball_mean, centres])  # Algorithm 1, line 14
        self._accuracy[done], self._energy_score[done] = rewards.T  # (3)

    def _contexts(self, clients: IntArray) -> FloatArray:
        """Return x_k of ``clients``, shape (n, 2)."""
        return np.column_stack([self._accuracy[clients], self._energy_score[clients]])  # (3)

    def _domains(self, clients: IntArray) -> BoolArray:
        """Return whether each client lies in the domain of each ball (Definition 2), shape (n, balls)."""
        x, y = self._contexts(clients).T.copy()
        member = np.zeros((self._radius.size, clients.size), dtype=np.bool_)
        # A domain excludes all smaller balls. So start at the smallest radius, and continue with the clients outside.
        outside = np.arange(clients.size)
        for radius in np.unique(self._radius):
            balls = np.flatnonzero(self._radius == radius)
            taken = np.zeros(outside.size, dtype=np.bool_)
            for part in np.array_split(balls, max(1, min(balls.size, -(-balls.size * outside.size // CHUNK)))):
                across = x[outside] - self._centre[part, :1]
                along = y[outside] - self._centre[part, 1:]
                inside = np.sqrt(across * across + along * along) <= radius + INSIDE  # (2), Definition 2
                member[part[:, None], outside] = inside
                taken |= inside.any(axis=0)
            outside = outside[~taken]
        return member.T

    def _spread(self) -> FloatArray:
        """Return u_B, infinite for a ball never selected."""
        with np.errstate(divide="ignore"):
            return np.sqrt(2.0 * self.uncertainty / self._ball_plays)  # u_B, below (4)

    def _significance(self, balls: IntArray) -> FloatArray:
        """Return g_B of ``balls``, shape (n, 2)."""
        ucb = self._ball_mean + (self._spread() + self._radius)[:, None]  # (4)
        distance = np.linalg.norm(self._centre[balls][:, None, :] - self._centre[None, :, :], axis=2)
        nearest = (ucb[None, :, :] + distance[:, :, None]).min(axis=1)  # (5)
        return np.asarray(self._radius[balls][:, None] + nearest)  # (5)

    def _undominated(self, balls: IntArray) -> BoolArray:
        """Return which of ``balls`` no other one dominates, by being at least as good in both and better in one."""
        g = self._significance(balls)
        at_least = np.all(g[None, :, :] >= g[:, None, :], axis=2)  # Definition 1
        better = np.any(g[None, :, :] > g[:, None, :], axis=2)  # Definition 1
        return np.asarray(~np.any(at_least & better, axis=1))  # Algorithm 1, line 7


class UtilityOption(Selector):
    """The option ``accuracy_weight`` of PCZFL's baselines: rank clients by accuracy and energy (section 5.3).

    The utility of a client is accuracy_weight * accuracy + (1 - accuracy_weight) * energy score. The accuracy is that
    of the client's last model on the server's validation set. Before its first model, it is the accuracy of the initial
    model. Accuracy and energy score change only when the client completes another round. An unknown number counts as 0,
    as in :class:`PCZFL`.

    A subclass calls :meth:`_set_utility` in ``__init__``. With ``accuracy_weight=None``, it must do what its own paper
    says.
    """

    accuracy_weight: float | None

    _accuracy: FloatArray
    _energy_score: FloatArray

    def _set_utility(self, accuracy_weight: float | None, replaced: frozenset[str] = frozenset()) -> None:
        """Set the weight and declare what the utility reads; call it after the base class's ``__init__``.

        Args:
            accuracy_weight: Weight of the accuracy, in [0, 1]; None for no utility.
            replaced: Columns that the selector no longer reads if it ranks by utility.

        Raises:
            ParameterError: The weight is out of range.
        """
        self.accuracy_weight = None if accuracy_weight is None else fraction("accuracy_weight", accuracy_weight)
        if self.accuracy_weight is None:
            return
        # Declared on the object, because the class declares what its own paper reads.
        vars(self).update(
            needs=(self.needs - replaced) | {"accuracy", "energy_score"},
            requires=self.requires | {"energy_score"},
            asks=self.asks - replaced,
            remembers={**self.remembers, "accuracy": "_accuracy", "energy_score": "_energy_score"},
            client_state={**self.client_state, "_accuracy": 0.0, "_energy_score": 0.0},
        )
        self._accuracy, self._energy_score = np.zeros(0), np.zeros(0)

    def _observe(self, report: RoundReport) -> None:
        """Store accuracy and energy score of the clients that completed; without the option, do nothing."""
        if self.accuracy_weight is None:
            return
        accuracy, energy_score = np.asarray(report.accuracy), np.asarray(report.energy_score)
        # The server measures nothing on a spare.
        done = report.completed & np.isfinite(accuracy) & np.isfinite(energy_score)
        self._accuracy[report.clients[done]] = accuracy[done]
        self._energy_score[report.clients[done]] = energy_score[done]

    def _utilities(self) -> FloatArray:
        """Return the utility of each client, in [0, 1], shape (K,)."""
        weight = self.accuracy_weight or 0.0
        return weight * self._accuracy + (1.0 - weight) * self._energy_score  # section 5.3, utility
