"""GPFL: select clients whose gradients point in the global model's direction (gradient projection and a bandit)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, one_of, real, whole
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.round_report import RoundReport

CLIP = 50.0
"""Largest magnitude of an exponent in (8)."""


class GPFL(Selector):
    """Selects the clients with the largest mean reward from gradient projections, plus an exploration term.

    The projection shows how far a client's update points in the direction in which the global model moves.

    ============  ======================  ==================================================================
    paper         here                    meaning
    ============  ======================  ==================================================================
    c_k           ``report.projection``   ``<d_k, G> / |G|``, client k's gradient on the server's direction (3)
    C             ``_projection``         each client's latest c_k
    mu_k          ``reward``              softmax of C (5), times (8) for the clients just selected
    mu-tilde_k    ``mean``                mean reward of client k over all earlier rounds
    n_k, n        ``_plays``              rounds in which client k was selected and observed, their sum
    A, F          ``_accuracy, _loss``    the global model's accuracy and loss on the validation set
    T             ``total_rounds``        length of the run
    rho           ``rho``                 weight of exploration
    alpha         ``exploration``         rho t / T (7), or fixed
    ============  ======================  ==================================================================

    When not to use:
        * There are very many clients, and the model is large. In round 1 all clients train, and the server needs memory
          for the updates of all clients.
        * The server has an adaptive optimizer, and no test on your data shows that GPFL helps. G is the change of the
          global model divided by ``learning_rate``. An adaptive optimizer scales this change differently for each
          parameter, so G may point in another direction.
        * Rounds must be short. The selector ignores the latency.

    Deviations:
        * If the accuracy has not changed, the factor (8) is exp(F^{t-1} - F^t). The sign printed in the paper would
          reward a rising loss. This contradicts the paper's text: "if the model's accuracy improves ... we amplify the
          reward value". ``loss_sign="paper"`` uses the printed sign.
        * Round 1 is the initialization. Every available client computes a gradient, and the model does not change. A
          and F are those of the initial model, and there is no factor (8).
        * We count the initialization as round 1. The mean in (6) is then over t - 1 rounds, and the weight (7) is rho t
          / T. With the same numbering, the paper has t - 2 rounds and rho (t - 2) / T.
        * A common warm-up of all selectors replaces the initialization. Its first round gives every client a c_k, on
          the mean of the gradients, and changes the model. The rounds of the warm-up count in T. They are plays, and
          (5) and (8) give rewards to all clients.
        * Every observed client gets its reward (5) in every round. Algorithm 1 computes the rewards of the selected
          clients only.
        * Clients are selected by the score (6), as in the text. Algorithm 1 prints ``S_t <- sort(C, K)``, the m largest
          c_k without exploration. ``sort_by="projection"`` does this.
        * In (3) the client gradient is d_k = (w^{t-1} - w_k) / eta: the sum over the local steps, if each step has the
          learning rate eta. The server's direction is G^t = gamma G^{t-1} + (w^{t-1} - w^t) / eta. A projection uses
          the G of the previous round, and c_k = 0 if ``|G| = 0``. Instead of d_k and G, the paper uses the gradients of
          F at w_k^t and at w^{t-1}.
        * After a round without an observation, every client gets its current reward (5) again, without the factor (8).
        * The softmax (5) is computed over the clients with an observed c_k. Exponents of (8) are clipped to -50 to 50.
          A and F are measured on a validation set.
        * A client that joins later has an infinite score at first, and no reward for earlier rounds.
        * A client's momentum (1) starts at 0 in every round, because clients store no state between rounds.
        * A failure counts as a play. The client's c_k does not change, and the factor (8) is not applied. Before the
          client's first c_k, its reward is 0.

    Args:
        clients_per_round: m.
        total_rounds: T, the planned number of rounds, including the initialization.
        rho: Weight of the exploration term, at least 0.
        exploration: A fixed alpha in (6), at least 0. Figure 7a has fixed values. If None, alpha follows (7).
        sort_by: "score" (6), or "projection", c_k as in Algorithm 1.
        loss_sign: Sign in the loss branch of (8): "corrected", or "paper" as printed.
        seed: Seed of the generator that breaks ties.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        S. Na, Y. Liang, S.-M. Yiu, GPFL: a gradient projection-based client selection framework for efficient federated
        learning, equations (3), (5) to (8), Algorithm 1.

    >>> import numpy as np
    >>> selector = GPFL(clients_per_round=1, total_rounds=10, seed=0)
    >>> selector.select(np.arange(3))  # the initialization asks all clients
    array([0, 1, 2])
    >>> selector.observe(RoundReport(clients=np.arange(3), completed=np.ones(3, bool), latency=np.ones(3),
    ...                              projection=[0.0, 2.0, 1.0], global_accuracy=0.1, global_loss=2.3))
    >>> selector.select(np.arange(3))  # softmax(0, 2, 1) = 0.09, 0.67, 0.24; the exploration term is the same for all
    array([1])
    """

    name: ClassVar[str] = "gpfl"
    citations: ClassVar[tuple[str, ...]] = ("na2024gpfl",)
    needs: ClassVar[frozenset[str]] = frozenset({"projection", "global_accuracy", "global_loss"})
    # Round 1 asks all clients.
    may_exceed_clients_per_round: ClassVar[bool] = True
    buffers: ClassVar[bool] = False
    paper_options: ClassVar[dict[str, str]] = {"averaging": "mean"}  # section II: the unweighted mean
    client_state: ClassVar[dict[str, float | int | bool]] = {
        "_plays": 0, "_projection": 0.0, "_observed": False, "_reward_sum": 0.0,
    }  # fmt: skip
    scalar_state: ClassVar[tuple[str, ...]] = ("_rewarded", "_accuracy", "_loss", "_measured")

    _plays: IntArray
    _projection: FloatArray
    _observed: BoolArray
    _reward_sum: FloatArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        total_rounds: int,
        rho: float = 1.0,
        exploration: float | None = None,
        sort_by: str = "score",
        loss_sign: str = "corrected",
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.total_rounds = whole("total_rounds", total_rounds, 1)
        self.rho = real("rho", rho, at_least=0.0)
        self.exploration = None if exploration is None else real("exploration", exploration, at_least=0.0)
        self.sort_by = one_of("sort_by", sort_by, ("score", "projection"))
        self.loss_sign = one_of("loss_sign", loss_sign, ("corrected", "paper"))
        # The last round whose rewards are in the sum.
        self._rewarded = 0
        self._accuracy = self._loss = 0.0
        # Whether A and F are known, as a number.
        self._measured = 0

    @property
    def keeps_model(self) -> bool:
        """Whether the model stays. Round 1 only measures, unless a common warm-up trains the model."""
        return self.round == 1 and not self.warming_up

    def expected_count(self, num_available: int) -> int | None:
        """Return the size of the next cohort: all available clients in round 1."""
        return num_available if self.round == 0 else super().expected_count(num_available)

    def _advance(self) -> None:
        # The previous round was not observed.
        if self._rewarded < self.round - 1:
            self._reward_sum += self._softmax() * (self.round - 1 - self._rewarded)  # (5)
            self._rewarded = self.round - 1

    def _select(self, available: IntArray) -> IntArray:
        if self.round == 1:
            return available
        if self.sort_by == "projection":
            return self._largest(np.where(self._observed, self._projection, np.inf), available)  # Algorithm 1
        seen = self._plays > 0
        score = np.full(seen.shape, np.inf)
        exploration = np.sqrt(2.0 * np.log(max(1, self._plays.sum())) / self._plays[seen])  # (6)
        mean = self._reward_sum[seen] / (self.round - 1)  # mu-tilde, below (6)
        fixed = self.exploration
        alpha = self.rho * (self.round / self.total_rounds) if fixed is None else fixed  # (7), Fig. 7a
        score[seen] = mean + alpha * exploration  # (6)
        return self._largest(score, available)

    def _observe(self, report: RoundReport) -> None:
        done = report.clients[report.completed]
        self._plays[report.clients] += 1
        self._projection[done] = np.asarray(report.projection)[report.completed]  # C, Algorithm 1
        self._observed[done] = True
        reward = self._softmax()  # (5)
        accuracy, loss = float(report.global_accuracy or 0.0), float(report.global_loss or 0.0)
        if self._measured:
            reward[done] *= self._factor(accuracy, loss)  # (8)
        self._reward_sum += reward
        self._rewarded = self.round
        self._accuracy, self._loss, self._measured = accuracy, loss, 1

    def _softmax(self) -> FloatArray:
        """Return the rewards (5), which are 0 for clients without a c_k."""
        reward = np.zeros(self._projection.shape)
        if self._observed.any():
            values = self._projection[self._observed]  # C
            # Subtracting the largest value changes no share and avoids overflow.
            powers = np.exp(values - values.max())  # (5)
            reward[self._observed] = powers / powers.sum()  # (5)
        return reward

    def _factor(self, accuracy: float, loss: float) -> float:
        """Return the amplification (8) of the clients just selected."""
        if accuracy != self._accuracy:
            return float(2.0 * np.exp(np.clip(accuracy - self._accuracy, -CLIP, CLIP)))  # (8)
        fall = self._loss - loss if self.loss_sign == "corrected" else loss - self._loss  # (8)
        return float(np.exp(np.clip(fall, -CLIP, CLIP)))  # (8)
