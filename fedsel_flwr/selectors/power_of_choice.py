"""Power-of-Choice: of some candidates those on whose data the model does worst (Cho et al.)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors._drawing import draw
from fedsel_flwr.selectors._sizes import filled_sizes, take_sizes
from fedsel_flwr.selectors.base import Probe, Selector


class PowerOfChoice(Selector):
    """Draws d candidates by data size, asks each for its loss, and takes the m of the largest loss.

    ============  ======================  ==========================================================
    paper         here                    meaning
    ============  ======================  ==========================================================
    d             ``candidates``          candidates in a round, m <= d <= K
    A             ``_asked_in``           the candidates: those asked in the round about to be chosen
    p_k           ``_size``               client k's share of all examples
    F_k(w)        ``_loss``               loss of the current global model on client k's data
    ============  ======================  ==========================================================

    Deviations:
        * The candidates' losses are a probe before each round, whose time and energy are charged; the paper's variants
          with a mini-batch (cpow-d) or former losses (rpow-d) are not built.
        * In a common warm-up of all selectors nobody is asked for a loss.
        * Sizes come by ``inform(clients, num_examples=...)``; a client of unknown size counts as one of average size.
        * A candidate whose answer is NaN comes last; one that is not informed about keeps its former answer. With
          fewer than d clients available all are candidates.
        * Candidates that leave between probe and choice, or were never asked, are replaced by draws of the same kind,
          where fewer than m are left.

    Args:
        clients_per_round: m.
        candidates: d, at least m.
        seed: Seed of the generator of candidates and ties.

    Raises:
        ParameterError: A parameter is out of range, or ``candidates`` below ``clients_per_round``.

    References:
        Y. J. Cho, J. Wang, G. Joshi, Towards understanding biased client selection in federated learning, AISTATS 2022
        (arXiv:2010.01243, Client selection in federated learning: convergence analysis and power-of-choice selection
        strategies), the three steps of strategy pow-d.

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
    client_state: ClassVar[dict[str, float | int]] = {"_size": -1.0, "_loss": -np.inf, "_asked_in": 0}

    _size: FloatArray
    _loss: FloatArray
    _asked_in: IntArray

    def __init__(self, *, clients_per_round: int, candidates: int = 30, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.candidates = whole("candidates", candidates, 1)
        if self.candidates < self.clients_per_round:
            raise ParameterError(
                f"candidates must be at least clients_per_round, got {self.candidates} for {self.clients_per_round} "
                "clients; raise candidates (twice clients_per_round and more make a difference)"
            )

    def _probe(self, available: IntArray) -> Probe:
        self._asked_in[self._asked_in == self.round + 1] = 0  # asked again before the choice
        candidates = self._drawn(available, self._wanted())  # A, step 1
        self._asked_in[candidates] = self.round + 1
        return Probe(clients=np.sort(candidates), columns=("loss",))  # step 2

    def _select(self, available: IntArray) -> IntArray:
        asked = self._asked_in[available] == self.round
        candidates, others = available[asked], available[~asked]
        if candidates.size < min(self.asked_per_round, available.size):
            more = self._drawn(others, self._wanted() - candidates.size)
            candidates = np.sort(np.concatenate([candidates, more]))
        return self._largest(self._loss, candidates)  # step 3

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        take_sizes(self._size, clients, columns)
        if "loss" in columns:
            answers = columns["loss"]
            self._loss[clients] = np.where(np.isfinite(answers), answers, -np.inf)  # F_k(w), step 2

    def _wanted(self) -> int:
        """d, or as many as the strategy asks."""
        return max(self.candidates, int(self.asked_per_round))

    def _drawn(self, clients: IntArray, count: int) -> IntArray:
        """So many of ``clients``, without replacement, in proportion to p_k."""
        with np.errstate(divide="ignore"):
            weight = np.log(filled_sizes(self._size, self._registered)[clients])  # p_k, step 1
        return draw(self._generator, clients, weight, count)
