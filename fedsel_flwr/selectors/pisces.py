"""Pisces: select clients whose data are useful, and whose updates arrive before they are stale (Jiang et al.)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray, fraction, real
from fedsel_flwr.selectors._draws import top
from fedsel_flwr.selectors.base import SizedSelector
from fedsel_flwr.selectors.round_report import RoundReport, put_last

WINDOW = 5
"""Number of a client's latest updates whose mean staleness is its expected staleness."""


class Pisces(SizedSelector):
    """Exploits the explored clients with the highest utilities, and explores clients that never reported.

    The utility is large if the client has many examples with large losses, and if its updates were not stale. The
    *staleness* of an update is the number of steps of the global model between sending the model and using the update.

    ============  ===============================  ==========================================================
    paper         here                             meaning
    ============  ===============================  ==========================================================
    U_i           ``_utility``                     utility of client i
    B_i           ``_size``                        examples of client i
    Loss          ``_rms_loss``                    losses of the examples; here their root mean square over B_i
    tau_i         from ``_staleness``              expected staleness: mean over the last updates of client i
    k             ``WINDOW``                       number of these updates; 0 is expected before the first
    beta          ``staleness_penalty``            exponent of the discount of stale clients
    epsilon       ``_exploration_share``           chance of each place in a round to be for a client never explored
    ============  ===============================  ==========================================================

    The defaults of epsilon, beta and k are those of the authors' code, commit 4ba4db8, and of the experiments in its
    folder ``experiments/exp_config_examples``. We could not compare them with the text of the paper.

    When not to use:
        * Rounds are synchronous. Every staleness is then 0, and speed has no influence on a selection.
        * Every client must train regularly. After the exploration, clients with low utilities are rarely selected.
        * Some clients have wrong labels. Wrong labels cause large losses, so such clients are selected often.

    Deviations:
        * The exclusion of outliers by DBSCAN is left out. It is off by default in the authors' code.
        * The adaptive pace of aggregation is left out, because it is not part of the selection. The strategy decides
          when the server uses the updates.
        * Each client computes its losses with the received model, on all its training examples. The authors' code
          uses a moving average over the batches of the first epoch. It averages the mean losses of the batches, and
          takes the square root. The result is the root of a mean loss, not of a mean square.
        * The authors' code can also discount slow clients by their latency. All its configurations of Pisces turn this
          off (``statistical_only``), except those without a selection by utility.
        * Epsilon decays once in each round. The authors' code plans a selection every few seconds, and epsilon decays
          with each plan.
        * A client is explored as soon as it has reported a loss. A client that completes a round without a loss counts
          as failed.
        * The authors' code has no failures: a client that does not reply stays in training. Here, a first failure
          changes nothing. After n >= 2 failures in a row, the client comes last for 2^n rounds, or until it completes
          one. Without this, a client that never replies would be explored forever.
        * A spare's update is not used, so it has no staleness. Its loss counts if it reports one.
        * ``inform(clients, num_examples=...)`` sets the sizes of clients. A client of unknown size counts as one of
          average size.
        * In a common warm-up of all selectors clients are explored too. The decay of epsilon starts after it.

    Args:
        clients_per_round: m.
        exploration: epsilon of round 1, the chance that a place in the round is for an unexplored client, in [0, 1].
        exploration_decay: Factor of epsilon from round to round, in [0, 1].
        exploration_min: Lowest epsilon, in [0, 1].
        staleness_penalty: beta, the exponent of the discount of stale clients, at least 0.
        seed: Seed of the random draws.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        Z. Jiang, W. Wang, B. Li, B. Li, Pisces: efficient federated learning via guided asynchronous training, SoCC
        2022 (arXiv:2206.09264). Code: github.com/SamuelGong/Pisces, commit 4ba4db8, ``plato/client_managers/sirius.py``
        and ``base.py``.

    >>> import numpy as np
    >>> selector = Pisces(clients_per_round=2, exploration_min=0.0, exploration_decay=0.0, seed=0)
    >>> chosen = selector.select(np.arange(2))  # both are unexplored
    >>> told = {"completed": [True] * 2, "latency": [1.0] * 2, "rms_loss": [3.0, 2.0], "staleness": [3, 0]}
    >>> selector.observe(RoundReport(clients=chosen, **told))
    >>> selector.clients_per_round = 1
    >>> selector.select(np.arange(2))  # 3 / (1 + 3)^0.5 = 1.5 is less than 2
    array([1])
    """

    name: ClassVar[str] = "pisces"
    citations: ClassVar[tuple[str, ...]] = ("jiang2022pisces",)
    needs: ClassVar[frozenset[str]] = frozenset({"rms_loss", "staleness", "spare"})
    requires: ClassVar[frozenset[str]] = frozenset({"rms_loss"})
    client_state: ClassVar[dict[str, npt.ArrayLike]] = {
        "_rms_loss": -1.0, "_staleness": np.full(WINDOW, -1.0), "_failures": 0, "_last_until": 0,
    }  # fmt: skip

    # Latest loss; -1 for clients that are not explored.
    _rms_loss: FloatArray
    # Staleness of the latest updates, the latest first; -1 if there were fewer.
    _staleness: FloatArray
    # Failures in a row.
    _failures: IntArray
    _last_until: IntArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        exploration: float = 0.9,
        exploration_decay: float = 0.98,
        exploration_min: float = 0.3,
        staleness_penalty: float = 0.5,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.exploration = fraction("exploration", exploration)
        self.exploration_decay = fraction("exploration_decay", exploration_decay)
        self.exploration_min = fraction("exploration_min", exploration_min)
        self.staleness_penalty = real("staleness_penalty", staleness_penalty, at_least=0.0)

    def _select(self, available: IntArray) -> IntArray:
        count = min(self.asked_per_round, available.size)
        # Permuted, so that ties between utilities are broken at random.
        shuffled = self._generator.permutation(available)
        last, explored = self._last_until[shuffled] >= self.round, self._rms_loss[shuffled] >= 0
        tried, unexplored = shuffled[explored & ~last], shuffled[~explored & ~last]
        planned = int(self._generator.binomial(count, self._exploration_share()))  # planned_explore_len
        exploit = min(tried.size, count - min(planned, unexplored.size))  # actual_exploit_len
        best = tried[top(self._utility(tried), exploit)] if exploit else tried[:0]  # take_top_clients
        return np.concatenate([best, unexplored[: count - exploit], shuffled[last]])[:count]  # take_random_clients

    def _observe(self, report: RoundReport) -> None:
        k, loss = report.clients, np.asarray(report.rms_loss)
        reported = report.completed & np.isfinite(loss)
        self._rms_loss[k[reported]] = loss[reported]
        used = k[report.used]
        self._staleness[used, 1:] = self._staleness[used, :-1]
        self._staleness[used, 0] = np.asarray(report.staleness)[report.used]
        put_last(self._last_until, self._failures, report, self.round)

    def _exploration_share(self) -> float:
        """Return epsilon of the current round."""
        return max(self.exploration_min, self.exploration * self.exploration_decay ** (self.own_round - 1))

    def _utility(self, clients: IntArray) -> FloatArray:
        """Return the utility of explored ``clients``, shape (n,)."""
        past = self._staleness[clients]
        expected = np.maximum(past, 0.0).sum(axis=1) / np.maximum((past >= 0).sum(axis=1), 1)  # tau_i
        utility = self._sizes()[clients] * self._rms_loss[clients]
        return np.asarray(utility * (1.0 + expected) ** -self.staleness_penalty)  # U_i
