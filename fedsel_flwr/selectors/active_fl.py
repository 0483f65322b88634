"""Active federated learning: draw clients by the model's loss on their data (Goetz et al.)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, fraction, real
from fedsel_flwr.selectors._draws import draw, tolerant_floor, top
from fedsel_flwr.selectors.base import Probe, SizedSelector
from fedsel_flwr.selectors.pczfl import UtilityOption
from fedsel_flwr.selectors.round_report import FAILURES_THAT_COUNT, RoundReport, repeated_failures


class ActiveFL(UtilityOption, SizedSelector):
    """Draws most clients of a round by a softmax of their valuations, and the others uniformly.

    A valuation is large if the client has many examples, and if the model has a large loss on them.

    ============  ======================  ==================================================================
    paper         here                    meaning
    ============  ======================  ==================================================================
    v_k           ``_valuations``         valuation of client k: sqrt(n_k) times l_k
    l_k           ``_loss``               the model's mean loss on client k's data
    n_k           ``_size``               number of training examples
    alpha_1       ``dropped``             share of clients left out of the softmax, with the lowest valuations
    alpha_2       ``temperature``         factor of the valuation in the softmax
    alpha_3       ``uniform``             share of the round that is drawn uniformly
    K, m          ``available``, m        number of available clients, clients per round
    ============  ======================  ==================================================================

    When not to use:
        * Each client trains rarely. The valuations of clients that are not selected become outdated.
        * Clients have few examples, and you keep the default ``temperature``. The softmax is nearly uniform unless
          valuations are in the hundreds.
        * Some clients have wrong labels. Wrong labels cause large losses, so such clients are selected often.

    Deviations:
        * The first valuations come from a probe. The probe asks each client for its loss once, when the client is first
          available. Its time and energy are charged. Later, the valuation follows from the loss that a selected client
          reports. This is the loss of the received model, before training.
        * In a common warm-up of all selectors every client reports the loss with the update, and no probe asks for it.
        * K is the number of available clients, and the lowest valuations are those of available clients.
        * A client that did not reply to the probe has no valuation and counts among the lowest. The uniform draw can
          still select this client.
        * The paper has no failures. Here, the first failure does not change the valuation. The second failure in a row
          removes the valuation until the client reports a loss again. Otherwise a client that never replies would be
          drawn forever.
        * The valuation of a spare changes only if the spare reports a loss.
        * Models are averaged without weights, as in the only public code found (FedCor's authors', commit d941083).
          With the strategy's ``averaging="fedpdp"``, the numbers of examples are the weights.
        * ``inform(clients, num_examples=...)`` sets the sizes of clients. A client of unknown size counts as one of
          average size.
        * If fewer clients are left than floor((1 - alpha_3) m), all of them are selected, and the uniform part is
          larger.
        * ``accuracy_weight`` makes this class a baseline of PCZFL (section 5.3 of PCZFL's paper). v_k is then the
          utility. This is a weighted mean of client k's energy score and the accuracy of its last model, which the
          server measures on its validation set. An unknown accuracy or energy score counts as 0.
        * PCZFL's paper replaces the "original utility scores" by this mean. We replace the whole v_k. In another
          reading, the mean replaces only the loss, and the factor sqrt(n_k) stays.
        * With ``accuracy_weight`` there is no probe. A valuation that failures removed is back when the client
          completes a round.
        * PCZFL's paper states neither the weights of the mean nor alpha_2. With alpha_2 = 0.01, the draws among the
          clients in the softmax are nearly uniform, because two utilities differ by at most 1.

    Args:
        clients_per_round: m.
        dropped: alpha_1, the share of clients left out of the softmax, in [0, 1].
        temperature: alpha_2, the factor of the valuation in the softmax, at least 0.
        uniform: alpha_3, the share of the round that is drawn uniformly, in [0, 1].
        accuracy_weight: Weight of the accuracy in PCZFL's utility, in [0, 1]; None follows the selector's own paper.
            The energy score has the weight 1 minus this number. Equal weights are 0.5.
        seed: Seed of the generator of the draws.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        J. Goetz et al., Active federated learning, 2019 (arXiv:1909.12641), section 3 and Algorithm 1.

    >>> import numpy as np
    >>> selector = ActiveFL(clients_per_round=1, dropped=0.5, temperature=1.0, uniform=0.0, seed=0)
    >>> selector.probe(np.arange(4)).columns
    ('loss',)
    >>> selector.inform(np.arange(4), loss=np.array([0.1, 2.0, 0.2, 1.0]), num_examples=np.ones(4))
    >>> drawn = [int(selector.select(np.arange(4))[0]) for _ in range(1000)]
    >>> drawn.count(0) + drawn.count(2), round(drawn.count(1) / 1000, 1)  # e^2 / (e^2 + e^1) = 0.73
    (0, 0.7)
    """

    name: ClassVar[str] = "active-fl"
    citations: ClassVar[tuple[str, ...]] = ("goetz2019active",)
    needs: ClassVar[frozenset[str]] = frozenset({"loss", "spare"})
    asks: ClassVar[frozenset[str]] = frozenset({"loss"})
    remembers: ClassVar[dict[str, str]] = {**SizedSelector.remembers, "loss": "_loss"}
    paper_options: ClassVar[dict[str, str]] = {"averaging": "mean"}
    client_state: ClassVar[dict[str, float | bool]] = {"_loss": -np.inf, "_asked": False, "_failures": 0}

    _loss: FloatArray
    _asked: BoolArray
    # Failures in a row.
    _failures: IntArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        dropped: float = 0.75,
        temperature: float = 0.01,
        uniform: float = 0.1,
        accuracy_weight: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.dropped = fraction("dropped", dropped)
        self.temperature = real("temperature", temperature, at_least=0.0)
        self.uniform = fraction("uniform", uniform)
        self._set_utility(accuracy_weight, replaced=frozenset({"loss"}))

    def _probe(self, available: IntArray) -> Probe | None:
        if self.accuracy_weight is not None:
            return None
        newcomers = available[~self._asked[available]]
        self._asked[newcomers] = True
        return Probe(clients=newcomers, columns=("loss",)) if newcomers.size else None

    def _select(self, available: IntArray) -> IntArray:
        count = min(self.asked_per_round, available.size)
        value = self._valuations()
        left = available.size - tolerant_floor(self.dropped * available.size)  # Algorithm 1, alpha_1
        # Permuted, so that ties between valuations are broken at random.
        shuffled = self._generator.permutation(available)
        kept = shuffled[top(value[shuffled], left)] if left else shuffled[:0]
        kept = kept[np.isfinite(value[kept])]
        power = self.temperature * (value[kept] - value[kept].max(initial=-np.inf))  # Algorithm 1, alpha_2
        weighted = tolerant_floor((1.0 - self.uniform) * count)  # Algorithm 1, alpha_3
        by_value = draw(self._generator, kept, power, weighted)
        others = available[~np.isin(available, by_value)]
        rest = self._generator.permutation(others)[: count - by_value.size]  # Algorithm 1, uniformly
        return np.concatenate([by_value, rest])

    def _observe(self, report: RoundReport) -> None:
        if self.accuracy_weight is not None:
            super()._observe(report)
            repeated_failures(self._failures, report)
            return
        k, loss = report.clients, np.asarray(report.loss)
        reported = report.completed & np.isfinite(loss)
        self._loss[k[reported]] = loss[reported]
        self._loss[k[repeated_failures(self._failures, report)]] = -np.inf
        self._asked[k] = True

    def _valuations(self) -> FloatArray:
        """Return v_k of all clients, -inf if unknown."""
        if self.accuracy_weight is not None:
            return np.where(self._failures < FAILURES_THAT_COUNT, self._utilities(), -np.inf)  # v_k
        known = np.isfinite(self._loss)
        size = self._sizes()
        return np.where(known, np.sqrt(size) * np.where(known, self._loss, 0.0), -np.inf)  # v_k
