"""Power-of-Choice: select the candidates with the largest losses, by pow-d, cpow-d or rpow-d (Cho et al.)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors._draws import draw
from fedsel_flwr.selectors.base import Probe, SizedSelector
from fedsel_flwr.selectors.pczfl import UtilityOption
from fedsel_flwr.selectors.round_report import RoundReport, put_last


class Candidates(SizedSelector):
    """Draws d candidates by data size, for all three variants.

    Args:
        clients_per_round: m.
        candidates: d, the number of candidates in a round, at least ``clients_per_round``.
        seed: Seed of the generator of candidates and ties.

    Raises:
        ParameterError: A parameter is out of range, or ``candidates`` below ``clients_per_round``.
    """

    citations: ClassVar[tuple[str, ...]] = ("cho2022towards",)
    paper_options: ClassVar[dict[str, str]] = {"averaging": "mean"}  # step 3: the mean over the set

    def __init__(self, *, clients_per_round: int, candidates: int = 30, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.candidates = whole("candidates", candidates, 1)
        if self.candidates < self.clients_per_round:
            raise ParameterError(
                f"candidates must be at least clients_per_round, got {self.candidates} for {self.clients_per_round} "
                "clients. Raise candidates, best to at least twice clients_per_round"
            )

    def _num_candidates(self) -> int:
        """Return d, or the number of clients that the strategy asks if that is larger."""
        return max(self.candidates, int(self.asked_per_round))

    def _draw_candidates(self, clients: IntArray, count: int) -> IntArray:
        """Draw ``count`` of ``clients`` without replacement, in proportion to p_k."""
        with np.errstate(divide="ignore"):
            weight = np.log(self._sizes()[clients])  # p_k, step 1
        return draw(self._generator, clients, weight, count)


class PowerOfChoice(Candidates, UtilityOption):
    """Draws d candidates by data size, asks each for its loss, and selects the m clients with the largest losses.

    These are the candidates on whose data the current model is worst.

    ============  ======================  ==========================================================
    paper         here                    meaning
    ============  ======================  ==========================================================
    d             ``candidates``          candidates in a round, m <= d <= K
    A             ``_asked_in``           the candidates: clients asked before the upcoming selection
    n_k           ``_size``               number of examples of client k
    p_k           from ``_size``          client k's share of all examples
    w             (the model)             the current global model
    F_k(w)        ``_loss``               loss of the current global model on client k's data
    S             the selection           the clients of the round
    ============  ======================  ==========================================================

    When not to use:
        * Some clients have wrong labels. Wrong labels cause large losses, so such clients are selected often.
        * Clients reply slowly. Every round begins with a probe of d clients, which often takes longer than the
          training.

    Deviations:
        * A probe before each round asks the candidates for their losses. Its time and energy are charged. The paper's
          variants are :class:`CPowD`, with a mini-batch, and :class:`RPowD`, with former losses.
        * Models are averaged without weights, as in the paper. With the strategy's ``averaging="fedpdp"``, the numbers
          of examples are the weights.
        * In a common warm-up of all selectors no client is asked for a loss.
        * ``inform(clients, num_examples=...)`` sets the sizes of clients. A client of unknown size counts as one of
          average size.
        * A candidate that replies NaN comes last. For a candidate that does not reply, its former loss counts.
        * If fewer than d clients are available, all are candidates.
        * If fewer than m candidates are left at the selection, further candidates are drawn in the same way. This
          happens if candidates leave after the probe, or if no probe was sent.
        * ``accuracy_weight`` makes this class a baseline of PCZFL (section 5.3 of PCZFL's paper). The candidates with
          the largest utilities are selected, instead of those with the largest losses. The utility is a weighted mean
          of a client's energy score and the accuracy of its last model. The server measures this accuracy on its
          validation set. PCZFL's paper states neither the weights nor d.
        * With ``accuracy_weight`` there is no probe, because the server knows both numbers. An unknown number counts as
          0. In another reading, all candidates train and the server evaluates their new models before the selection. We
          use the last models, because the contexts of PCZFL are also those of the last models.
        * With ``accuracy_weight`` the utility of a failed client does not change. The selector alone could then select
          a dead client forever. Strategies exclude failing clients for some rounds (``cooldown="auto"``).

    Args:
        clients_per_round: m.
        candidates: d, the number of candidates in a round, at least ``clients_per_round``.
        accuracy_weight: Weight of the accuracy in PCZFL's utility, in [0, 1]; None follows the selector's own paper.
            The energy score has the weight 1 minus this number. Equal weights are 0.5.
        seed: Seed of the generator of candidates and ties.

    Raises:
        ParameterError: A parameter is out of range, or ``candidates`` below ``clients_per_round``.

    References:
        Y. J. Cho, J. Wang, G. Joshi, Towards understanding biased client selection in federated learning, AISTATS 2022.
        Earlier: Client selection in federated learning: convergence analysis and power-of-choice selection strategies,
        arXiv:2010.01243. The three steps of strategy pow-d.

    >>> import numpy as np
    >>> selector = PowerOfChoice(clients_per_round=1, candidates=3, seed=0)
    >>> question = selector.probe(np.arange(3))
    >>> question.columns, question.clients.tolist()
    (('loss',), [0, 1, 2])
    >>> selector.inform(question.clients, loss=np.array([0.3, 2.1, 0.9]))
    >>> selector.select(np.arange(3))
    array([1])
    """

    name: ClassVar[str] = "power-of-choice"
    asks: ClassVar[frozenset[str]] = frozenset({"loss"})
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_loss": -np.inf, "_asked_in": 0}

    _loss: FloatArray
    _asked_in: IntArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        candidates: int = 30,
        accuracy_weight: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, candidates=candidates, seed=seed)
        self._set_utility(accuracy_weight, replaced=frozenset({"loss"}))
        if accuracy_weight is not None:
            vars(self)["asks_failed_for_ever"] = True

    def _probe(self, available: IntArray) -> Probe | None:
        if not self.asks:
            return None
        # A second probe before the selection replaces the first one's candidates.
        self._asked_in[self._asked_in == self.round + 1] = 0
        candidates = self._draw_candidates(available, self._num_candidates())  # A, step 1
        self._asked_in[candidates] = self.round + 1
        return Probe(clients=np.sort(candidates), columns=tuple(self.asks))  # step 2

    def _select(self, available: IntArray) -> IntArray:
        asked = self._asked_in[available] == self.round
        candidates, others = available[asked], available[~asked]
        if candidates.size < min(self.asked_per_round, available.size):
            more = self._draw_candidates(others, self._num_candidates() - candidates.size)
            candidates = np.sort(np.concatenate([candidates, more]))
        score = self._loss if self.accuracy_weight is None else self._utilities()
        return self._largest(score, candidates)  # step 3

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        super()._inform(clients, columns)
        for name in self.asks & columns.keys():
            answers = columns[name]
            self._loss[clients] = np.where(np.isfinite(answers), answers, -np.inf)  # F_k(w), step 2


class CPowD(PowerOfChoice):
    """Chooses as Power-of-Choice, with candidates that estimate their loss on one mini-batch.

    The estimate needs less computing than the loss on all examples.

    ===============  ======================  =======================================================
    paper            here                    meaning
    ===============  ======================  =======================================================
    d, A             ``candidates``          number of candidates; the candidates, asked before the selection
    n_k, p_k         ``_size``               number of examples of client k; its share of all examples
    xi-hat_k         column ``batch_loss``   mini-batch of b examples, drawn again for each probe
    b                (the client's)          examples in the mini-batch: the batch size of the client's training
    f                (the client's)          loss of an example xi of the mini-batch
    w                (the model)             the current global model
    F_k(w)           ``_loss``               mean loss of the current global model on the mini-batch
    S                the selection           the clients of the round
    ===============  ======================  =======================================================

    When not to use:
        * The network is slow. The server still sends the model to all d candidates.
        * Some clients have wrong labels. Wrong labels cause large losses, so such clients are selected often.

    Deviations:
        * The client knows b. It is the batch size of its training, as in the authors' code (``args.bs``). A client with
          fewer examples uses all of them. A probe is charged for this share of a pass over the data, and for the whole
          download of the model.
        * Everything else is as in :class:`PowerOfChoice`.

    Args:
        clients_per_round: m.
        candidates: d, the number of candidates in a round, at least ``clients_per_round``.
        seed: Seed of the generator of candidates and ties.

    Raises:
        ParameterError: A parameter is out of range, or ``candidates`` below ``clients_per_round``.

    References:
        Cho et al., as :class:`PowerOfChoice`: the computation-efficient variant cpow-d. Code: the paper's supplement,
        in github.com/peng-ju/Power-of-Choice, commit d9393c1, ``1776-supp/code/dnn/train_dnn.py``.

    >>> import numpy as np
    >>> selector = CPowD(clients_per_round=1, candidates=3, seed=0)
    >>> question = selector.probe(np.arange(3))
    >>> selector.inform(question.clients, batch_loss=np.array([0.3, 2.1, 0.9]))
    >>> question.columns, selector.select(np.arange(3)).tolist()
    (('batch_loss',), [1])
    """

    name: ClassVar[str] = "cpow-d"
    asks: ClassVar[frozenset[str]] = frozenset({"batch_loss"})

    def __init__(self, *, clients_per_round: int, candidates: int = 30, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, candidates=candidates, seed=seed)


class RPowD(Candidates):
    """Chooses as Power-of-Choice without a probe, by the loss of each candidate's last training.

    Candidates that have not trained yet come first.

    =====================  ==================  =====================================================================
    paper                  here                meaning
    =====================  ==================  =====================================================================
    d, A                   ``candidates``      candidates, drawn in proportion to p_k when the round is chosen
    n_k, p_k               ``_size``           number of examples of client k; its share of all examples
    proxy for F_k(w)       ``_loss``           mean loss over the local steps when client k last took part, infinite
                                               before it has
    =====================  ==================  =====================================================================

    When not to use:
        * Each client trains rarely. The losses of clients that are not selected become outdated.
        * Some clients have wrong labels. Wrong labels cause large losses, so such clients are selected often.

    Deviations:
        * The loss is the column ``train_loss``, which costs no pass over the data. It is the mean over the local steps
          of the mini-batch's loss before the step. The column ``loss``, of the received model, would cost a forward
          pass.
        * The paper has no failures. Here, the first failure does not change the loss, which is infinite for a client
          never selected. After n >= 2 failures in a row, the client comes last among the candidates for 2^n rounds, or
          until it completes a round. A dead client is therefore asked less and less often. Two failures do not exclude
          a client permanently.
        * A client that completes a round without a loss counts as failed.
        * The loss of a spare changes only if the spare reports a new loss.
        * Models are averaged without weights, as in the paper. With the strategy's ``averaging="fedpdp"``, the numbers
          of examples are the weights.
        * In a common warm-up of all selectors clients report losses too.
        * ``inform(clients, num_examples=...)`` sets the sizes of clients. A client of unknown size counts as one of
          average size.
        * Ties, as among clients never selected, are broken at random. If fewer than d clients are available, all are
          candidates.

    Args:
        clients_per_round: m.
        candidates: d, the number of candidates in a round, at least ``clients_per_round``.
        seed: Seed of the generator of candidates and ties.

    Raises:
        ParameterError: A parameter is out of range, or ``candidates`` below ``clients_per_round``.

    References:
        Cho et al., as :class:`PowerOfChoice`: the communication- and computation-efficient variant rpow-d. Code as in
        :class:`CPowD`.

    >>> import numpy as np
    >>> selector = RPowD(clients_per_round=1, candidates=3, seed=0)
    >>> for loss in (0.3, 2.1, 0.9):
    ...     chosen = selector.select(np.arange(3))  # each time a client not seen yet
    ...     selector.observe(RoundReport(clients=chosen, completed=[True], latency=[1.0], train_loss=[loss]))
    >>> losses = selector.state_dict()["loss"]
    >>> losses[selector.select(np.arange(3))]
    array([2.1])
    """

    name: ClassVar[str] = "rpow-d"
    needs: ClassVar[frozenset[str]] = frozenset({"train_loss", "spare"})
    requires: ClassVar[frozenset[str]] = frozenset({"train_loss"})
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_loss": np.inf, "_failures": 0, "_last_until": 0}

    _loss: FloatArray
    _failures: IntArray
    _last_until: IntArray

    def _select(self, available: IntArray) -> IntArray:
        candidates = np.sort(self._draw_candidates(available, self._num_candidates()))  # A, step 1
        # Repeatedly failed clients rank below every loss.
        return self._largest(np.where(self._last_until < self.round, self._loss, -np.inf), candidates)  # step 3

    def _observe(self, report: RoundReport) -> None:
        k, loss = report.clients, np.asarray(report.train_loss)
        reported = report.completed & np.isfinite(loss)
        self._loss[k[reported]] = loss[reported]  # proxy for F_k(w), step 2
        put_last(self._last_until, self._failures, report, self.round)
