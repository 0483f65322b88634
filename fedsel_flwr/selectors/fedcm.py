"""FedCM: selects clients whose models FedCA's filter keeps, by UCB or Thompson sampling (Kim et al.)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.round_report import RoundReport


class KeptRewards(Selector):
    """Base of the two selectors: the reward of a client is whether FedCA's filter keeps its model."""

    citations: ClassVar[tuple[str, ...]] = ("kim2020accurate",)
    needs: ClassVar[frozenset[str]] = frozenset({"kept"})
    paper_options: ClassVar[dict[str, str]] = {"filter": "loss", "averaging": "fedpdp"}  # (5)


class FedCMUCB(KeptRewards):
    """Selects the clients whose models FedCA most probably keeps, by upper confidence bounds.

    FedCA keeps the subset of a round's models whose average is best on the server's validation set.

    ============  ======================  ================================================
    paper         here                    meaning
    ============  ======================  ================================================
    r_k           ``report.kept``         whether client k is in S_opt
    mu-hat_k      ``_mean``               estimated probability, starts at a fair coin's draw
    a_k           ``_plays``              1 + rounds in which client k was selected and observed
    ============  ======================  ================================================

    When not to use:
        * The validation set is small, or differs from the clients' data. The filter then keeps models that fit only the
          validation set.
        * Rounds must be short. The selector ignores the latency.
        * The clients' data are nearly i.i.d. For such data the paper reports almost equal results: in Table 2 with
          alpha = 5, all accuracies are between 82.26 and 83.08.

    Deviations:
        * Algorithm 2 computes new bounds only for the clients of the last round. Here, all bounds are computed in every
          round.
        * Rounds count from t = 1, so the first bound contains ln 1, and the second bound contains ln 2. In Algorithm 1,
          t starts at 0, so the first bound contains ln 0, and the second bound contains ln 1 = 0.
        * Line 4 excludes all clients whose value equals the m-th largest value. In round 1, this may exclude all
          clients. Here, exactly m available clients are selected, and ties are broken at random.
        * The first value of mu-hat_k is 0 or 1, each with probability 1/2. Appendix C only says "the random binomial
          distribution".
        * If a selected client fails, its reward is 0, because its model is not in S_opt.
        * The rounds of a common warm-up are plays, because the filter scores every model of these rounds.
        * In buffered rounds (``concurrency``), the filter compares models that were trained on different global models.
          The paper's reward assumes the same one.
        * The paper samples a ratio of the clients; here ``clients_per_round`` sets their number.

    Args:
        clients_per_round: m, the paper's SamplingRatio times ``|S|``.
        seed: Seed of the generator of first means and ties.

    References:
        T. Kim et al., Accurate and fast federated learning via combinatorial multi-armed bandits, 2020, Algorithm 2.

    >>> import numpy as np
    >>> selector = FedCMUCB(clients_per_round=1, seed=0)
    >>> for _ in range(200):
    ...     chosen = selector.select(np.arange(2))
    ...     selector.observe(RoundReport(clients=chosen, completed=[True], latency=[1.0], kept=chosen == 1))
    >>> selector.state_dict()["plays"].tolist()  # only client 1's models are kept
    [8, 194]
    """

    name: ClassVar[str] = "fedcm-ucb"
    client_state: ClassVar[dict[str, float | int]] = {"_plays": 1, "_mean": 0.0}  # Appendix C

    _plays: IntArray
    _mean: FloatArray

    def _select(self, available: IntArray) -> IntArray:
        # Plays start at 1, so that no client has an infinite bound.
        bound = self._mean + np.sqrt(3.0 * np.log(self.round) / (2.0 * self._plays))  # Algorithm 2, line 3
        return self._largest(bound, available)  # Algorithm 2, line 4

    def _observe(self, report: RoundReport) -> None:
        k = report.clients
        reward = np.asarray(report.kept, dtype=np.float64)  # r_k
        self._mean[k] = (self._plays[k] * self._mean[k] + reward) / (self._plays[k] + 1)  # Algorithm 2, line 2
        self._plays[k] += 1  # Algorithm 2, line 2

    def _admit(self, clients: IntArray) -> None:
        # Drawn at the registration of a client, so that the draws do not depend on later selections.
        self._mean[clients] = self._generator.integers(0, 2, clients.size)  # Bernoulli(1/2), Appendix C


class FedCMTS(KeptRewards):
    """Selects the clients whose models FedCA most probably keeps, by draws from Beta posteriors.

    FedCA keeps the subset of a round's models whose average is best on the server's validation set.

    ============  ======================  ================================================
    paper         here                    meaning
    ============  ======================  ================================================
    r_k           ``report.kept``         whether client k's model was kept
    alpha_k       ``_successes``          1 + rounds in which client k's model was kept
    beta_k        ``_failures``           1 + rounds in which it was not kept
    theta-hat_k   ``draw``                one draw per client and round
    ============  ======================  ================================================

    When not to use: as for :class:`FedCMUCB`.

    Deviations: as for :class:`FedCMUCB`. Algorithm 3 draws only for the clients of the last round; here all
    available clients draw. Line 4 of Algorithm 3 lacks the division by ``|S|``.

    Args:
        clients_per_round: m.
        seed: Seed of the generator of the draws.

    References:
        T. Kim et al., Accurate and fast federated learning via combinatorial multi-armed bandits, 2020, Algorithm 3.

    >>> import numpy as np
    >>> selector = FedCMTS(clients_per_round=1, seed=0)
    >>> for _ in range(200):
    ...     chosen = selector.select(np.arange(2))
    ...     selector.observe(RoundReport(clients=chosen, completed=[True], latency=[1.0], kept=chosen == 1))
    >>> int(selector.state_dict()["successes"][1])  # only client 1's models are kept
    200
    """

    name: ClassVar[str] = "fedcm-ts"
    client_state: ClassVar[dict[str, float | int]] = {"_successes": 1, "_failures": 1}  # Beta(1, 1), Appendix C

    _successes: IntArray
    _failures: IntArray

    def _select(self, available: IntArray) -> IntArray:
        draw = np.zeros(self._successes.shape)
        alpha, beta = self._successes[available], self._failures[available]
        # Only available clients draw, so the draws do not depend on the number of other registered clients.
        draw[available] = self._generator.beta(alpha, beta)  # Algorithm 3, line 3
        return self._largest(draw, available)  # Algorithm 3, line 4

    def _observe(self, report: RoundReport) -> None:
        k, kept = report.clients, np.asarray(report.kept)
        self._successes[k] += kept  # Algorithm 3, line 2
        self._failures[k] += ~kept  # Algorithm 3, line 2
