"""FedCM: clients whose models FedCA's filter keeps, by UCB or Thompson sampling (Kim et al.)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.citations import KIM
from fedsel_flwr.selectors.round_report import RoundReport


class FedCMUCB(Selector):
    """Chooses the largest upper confidence bound of the probability that FedCA keeps a client's model.

    ============  ======================  ================================================
    paper         here                    meaning
    ============  ======================  ================================================
    r_k           ``report.kept``         whether client k is in S_opt
    mu-hat_k      ``_mean``               estimated probability, starts at a fair coin's draw
    a_k           ``_plays``              1 + rounds in which client k was selected and observed
    ============  ======================  ================================================

    Deviations:
        * Algorithm 2 prints the refresh of the bound only for last round's clients; all are refreshed.
        * Rounds are counted from 1. The print's t counts from 0 (Algorithm 1), so that its second sampling has
          ln 1 = 0 in the bound, and its first ln 0; here they have ln 2 and ln 1.
        * Line 4 as printed leaves out all clients that tie at the limit (in round 1 perhaps all); here
          exactly m of the available clients are chosen, ties at random.
        * "The random binomial distribution" of the first means (Appendix C) is taken as a fair coin.
        * A failed client is not in S_opt, so its reward is 0.
        * The rounds of a common warm-up are plays, as every model goes through the filter.
        * The paper samples a ratio of the clients; here ``clients_per_round`` says how many.

    Args:
        clients_per_round: m, the paper's SamplingRatio times |S|.
        seed: Seed of the generator of initial means and ties.

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
    citations: ClassVar[tuple[str, ...]] = (KIM,)
    needs: ClassVar[frozenset[str]] = frozenset({"kept"})
    paper_options: ClassVar[dict[str, str]] = {"filter": "loss", "averaging": "fedpdp"}  # (5)
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
        # Drawn when a client is registered, so that the draws do not depend on later choices.
        self._mean[clients] = self._generator.integers(0, 2, clients.size)  # Bernoulli(1/2), Appendix C


class FedCMTS(Selector):
    """Chooses the largest draws from Beta posteriors of the probability that FedCA keeps a client's model.

    ============  ======================  ================================================
    paper         here                    meaning
    ============  ======================  ================================================
    alpha_k       ``_successes``          1 + rounds in which client k's model was kept
    beta_k        ``_failures``           1 + rounds in which it was not
    theta-hat_k   ``draw``                one draw per client and round
    ============  ======================  ================================================

    Deviations: as :class:`FedCMUCB`; Algorithm 3 prints the draw only for last round's clients, all draw.
    Its line 4 lacks the division by |S|.

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
    citations: ClassVar[tuple[str, ...]] = (KIM,)
    needs: ClassVar[frozenset[str]] = frozenset({"kept"})
    paper_options: ClassVar[dict[str, str]] = {"filter": "loss", "averaging": "fedpdp"}  # (5)
    client_state: ClassVar[dict[str, float | int]] = {"_successes": 1, "_failures": 1}  # Beta(1, 1), Appendix C

    _successes: IntArray
    _failures: IntArray

    def _select(self, available: IntArray) -> IntArray:
        draw = np.zeros(self._successes.shape)
        alpha, beta = self._successes[available], self._failures[available]
        # Only available clients draw: the draws do not depend on how many others are registered.
        draw[available] = self._generator.beta(alpha, beta)  # Algorithm 3, line 3
        return self._largest(draw, available)  # Algorithm 3, line 4

    def _observe(self, report: RoundReport) -> None:
        k, kept = report.clients, np.asarray(report.kept)
        self._successes[k] += kept  # Algorithm 3, line 2
        self._failures[k] += ~kept  # Algorithm 3, line 2
