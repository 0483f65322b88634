"""DivFL: select clients whose gradients represent those of all clients, by facility location (Balakrishnan et al.)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray, real, whole
from fedsel_flwr.selectors._vectors import VectorSelector, projected
from fedsel_flwr.selectors.pczfl import UtilityOption
from fedsel_flwr.selectors.round_report import RoundReport

CHUNK = 256
"""Numbers of each gradient that are compared at a time. They stay in the processor's cache."""
BLOCK = 256
"""Clients whose distances to all others are computed at a time, which bounds the memory."""
TIE = 1e-6
"""Relative difference of sums that count as equal, because mutually nearest clients often leave the same sum."""
BATCH = 32
"""Candidates whose sums are computed at a time."""
SLACK = 1e-9
"""Relative widening of a bound, so that no rounded sum passes it."""


class DivFL(VectorSelector, UtilityOption):
    """Selects clients one after the other, so that every client's gradient is close to that of a selected client.

    The next client is the one that lowers the sum of all distances most.

    ===================  ===================  ===================================================================
    paper                here                 meaning
    ===================  ===================  ===================================================================
    g_i                  ``vectors``          client i's full-batch gradient at the model it received last
    S, K                 the selection, m     the clients of a round, and their number
    ||g_i - g_j||        ``_distances``       how badly j represents i
    G(S)                 ``uncovered``        sum over all i of min over j in S of ||g_i - g_j||, (4)
    ===================  ===================  ===================================================================

    Before the first selection, a probe asks every client for its gradient. Later, the stored gradient of a client is
    from its last round, as in the paper's experiments. The greedy set has at least 1 - 1/e of the largest reduction of
    G. The search is lazy: a candidate whose bound is too high is not summed again. The selections are those of the
    plain greedy search.

    With ``sketch_size`` s the server stores s numbers of each gradient. With probability 0.95, the squares of all
    distances among n clients are within (1 - e, 1 + e) of the true ones. Here e solves
    ``n (n - 1) exp(-s (e**2 / 4 - e**3 / 6)) = 0.05``. It is 0.24 for 100 clients and s = 1,024.

    When not to use:
        * Only the model may leave the clients, or updates must be hidden (secure aggregation). A gradient reveals as
          much about a client's data as the client's update.
        * Uploads are slow. Each selected client also sends a gradient of the model's size.
        * There are many clients. The server stores the distances of all pairs.

    Deviations:
        * Gradients are those of the whole local data at the received model, instead of the updates' differences.
        * The first gradients come from a probe, which is charged as one upload of the model's size. In the paper they
          come from a round in which all clients train. New clients are asked when they are first available. A client
          that sends no gradient is asked three times, and is selected only if there are too few other clients.
        * In a common warm-up of all selectors clients send the gradient with the update, and no probe asks for it.
        * The sum G(S) is over all registered clients with a known gradient, available or not.
        * In buffered rounds (``concurrency``), G(S) is over the clients of one selection, without those at work.
        * Ties among sums, to one in a million, are broken at random.
        * The gradient of a failed client does not change. The selector alone would then repeat the same selection, and
          select a dead client forever. Strategies exclude failing clients for some rounds (``cooldown="auto"``). The
          paper does not exclude clients.
        * ``sketch_size`` and ``max_clients`` are ours: the distances of K clients take 8 K^2 bytes.
        * ``accuracy_weight`` makes this class a baseline of PCZFL (section 5.3 of PCZFL's paper). The utility u_i is a
          weighted mean of client i's energy score and the accuracy of its last model. The server measures this accuracy
          on its validation set. G(S) is then the sum over all i of u_i times the minimum over j in S of ||g_i - g_j||.
        * PCZFL's paper replaces the "original utility scores" by the utility. It states neither a formula for DivFL nor
          the weights of the mean. We weight G(S), because this form needs no further constant and has the same
          guarantee. With equal utilities, the selections are those of DivFL. With equal distances between all
          gradients, the m clients with the largest utilities are selected.
        * There are two other readings. If the utility replaces the reduction of G, gradients do not matter. The
          selections are then those of ``power-of-choice`` with all clients as candidates. If the utility is added to
          the reduction of G, the sum needs a factor between the two units, and the paper has none.
        * An unknown accuracy or energy score counts as 0. A client with the utility 0 adds nothing to G, but can be
          selected.

    Args:
        clients_per_round: m.
        epsilon: Share of the guarantee that a stochastic greedy search gives up in expectation, in (0, 1). Each step
            compares K/m ln(1/epsilon) random candidates. None compares all candidates.
        sketch_size: Length of the stored projections, at least 1. None stores whole gradients.
        max_clients: Largest number of clients, at least 1.
        accuracy_weight: Weight of the accuracy in PCZFL's utility, in [0, 1]; None follows the selector's own paper.
            The energy score has the weight 1 minus this number. Equal weights are 0.5.
        seed: Seed of the generator of ties, candidates and signs.

    Raises:
        ParameterError: A parameter is out of range. Later: there are more than ``max_clients`` clients.

    References:
        R. Balakrishnan, T. Li, T. Zhou, N. Himayat, V. Smith, J. Bilmes, Diverse client selection for federated
        learning via submodular maximization, ICLR 2022, (3) to (5), Algorithm 1. Lazy greedy: M. Minoux, Accelerated
        greedy algorithms for maximizing submodular set functions, Optimization Techniques, 1978. Stochastic greedy:
        B. Mirzasoleiman et al., Lazier than lazy greedy, AAAI 2015. Random signs: D. Achlioptas, Database-friendly
        random projections, JCSS 2003.

    >>> selector = DivFL(clients_per_round=2, seed=0)
    >>> selector.probe(np.arange(7)).columns
    ('gradient',)
    >>> selector.inform(np.arange(7), gradient=np.array([[0.0], [1.0], [3.0], [50.0], [51.0], [53.0], [54.5]]))
    >>> selector.select(np.arange(7))  # 3 represents the four from 50 on, 1 the others
    array([1, 3])
    """

    name: ClassVar[str] = "divfl"
    citations: ClassVar[tuple[str, ...]] = ("balakrishnan2022diverse",)
    needs: ClassVar[frozenset[str]] = frozenset({"gradient"})
    asks: ClassVar[frozenset[str]] = frozenset({"gradient"})
    asks_failed_for_ever: ClassVar[bool] = True
    scalar_state: ClassVar[tuple[str, ...]] = (*VectorSelector.scalar_state, "_signs")

    def __init__(
        self,
        *,
        clients_per_round: int,
        epsilon: float | None = None,
        sketch_size: int | None = None,
        max_clients: int = 1000,
        accuracy_weight: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.epsilon = None if epsilon is None else real("epsilon", epsilon, above=0.0, below=1.0)
        self.sketch_size = None if sketch_size is None else whole("sketch_size", sketch_size, 1)
        self.max_clients = whole("max_clients", max_clients, 1)
        self._set_utility(accuracy_weight)
        # Seed of the random signs.
        self._signs = int(self._generator.integers(1 << 62))
        # A cache of distances at the last selection. It is not saved, because it follows from the vectors.
        self._between: FloatArray = np.zeros((0, 0))
        # Clients whose gradient is newer than the cache.
        self._changed: set[int] = set()

    def _select(self, available: IntArray) -> IntArray:
        # Permuted, so that the first of equal sums is a random one.
        order = self._generator.permutation(available)
        candidates = order[self._known[order]]
        chosen = self._greedy(candidates)
        without_gradient = order[~self._known[order]]
        return np.concatenate([chosen, without_gradient])[: self.asked_per_round]

    def _greedy(self, candidates: IntArray) -> IntArray:
        """Return the greedy set, up to m of the candidates."""
        covered = np.flatnonzero(self._known & self._registered)
        weight = None if self.accuracy_weight is None else self._utilities()[covered]
        coverage = _Coverage(self._distances(), candidates, covered, weight)
        left = np.ones(candidates.size, dtype=np.bool_)
        chosen = np.zeros(min(self.asked_per_round, candidates.size), dtype=np.int64)
        for step in range(chosen.size):
            best = coverage.best(self._step_candidates(np.flatnonzero(left), candidates.size))
            coverage.add(best)
            left[best], chosen[step] = False, candidates[best]
        return chosen

    def _step_candidates(self, left: IntArray, num_candidates: int) -> IntArray:
        """Return the positions of the candidates to compare in one step."""
        if self.epsilon is None:
            return left
        size = math.ceil(num_candidates / self.clients_per_round * math.log(1 / self.epsilon))
        return np.sort(self._generator.permutation(left)[: max(1, size)])

    def _distances(self) -> FloatArray:
        """Return ||g_i - g_j|| of all pairs, shape (K, K), not squared. Only those of new gradients are computed."""
        if missing := len(self._known) - len(self._between):
            self._between = np.pad(self._between, (0, missing))
        known, changed = np.flatnonzero(self._known), np.array(sorted(self._changed), dtype=np.int64)
        for start in range(0, changed.size, BLOCK):
            some = changed[start : start + BLOCK]
            apart = self._distances_between(some, known)  # (4)
            self._between[np.ix_(some, known)], self._between[np.ix_(known, some)] = apart, apart.T
        self._changed.clear()
        return self._between

    def _distances_between(self, some: IntArray, others: IntArray) -> FloatArray:
        """Return ||g_i - g_j|| from ``some`` clients to ``others``, shape (some, others)."""
        squares = np.zeros((some.size, others.size))
        for start in range(0, self._length, CHUNK):
            part = self.vectors[others, start : start + CHUNK]
            for row, k in zip(squares, some, strict=True):
                difference = part - self.vectors[k, start : start + CHUNK]
                row += np.einsum("ij,ij->i", difference, difference)
        return np.sqrt(squares)

    def _observe(self, report: RoundReport) -> None:
        rows = report.completed
        self._store_gradients(report.clients[rows], np.asarray(report.gradient)[rows])
        super()._observe(report)

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        super()._inform(clients, columns)
        if "gradient" in columns:
            self._store_gradients(clients, columns["gradient"])

    def _store_gradients(self, clients: IntArray, gradients: FloatArray) -> None:
        """Store gradients, or their projections."""
        if self.sketch_size is not None:
            usable = np.isfinite(gradients).all(axis=1)
            clients = clients[usable]
            gradients = projected(gradients[usable], self.sketch_size, self._signs)
        self._changed.update(self._store_vectors(clients, gradients).tolist())

    def _cost_of(self, count: int) -> str:
        return f" (distances of {count:,} clients take {8.0 * count**2 / 2**30:,.2f} GiB)"

    def _reset_rows(self, clients: IntArray) -> None:
        super()._reset_rows(clients)
        self._changed.difference_update(clients.tolist())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Nothing changes if the state does not fit."""
        super().load_state_dict(state)
        # The cache may hold distances of other vectors.
        self._between, self._changed = np.zeros((0, 0)), set(np.flatnonzero(self._known).tolist())


class _Coverage:
    """The uncovered distance of a growing set of clients, and the candidate that reduces it most.

    The reduction by a candidate falls as the set grows (submodularity). So its last computed reduction bounds the
    present one. Candidates whose bound is too small are not summed again (lazy greedy).

    Args:
        distances: Distances of all pairs, shape (K, K).
        candidates: Clients that may be selected, shape (n,). Earlier ones win ties.
        covered: Clients that the sum covers.
        weight: Weight of each covered client in the sum, at least 0, shape (covered,); None weights all equally.
    """

    def __init__(
        self, distances: FloatArray, candidates: IntArray, covered: IntArray, weight: FloatArray | None = None
    ) -> None:
        self._distances, self._candidates, self._covered, self._weight = distances, candidates, covered, weight
        self._nearest = np.full(covered.size, np.inf)
        self._uncovered = math.inf
        # Largest possible reduction by each candidate.
        self._most = np.full(candidates.size, np.inf)

    def best(self, places: IntArray) -> int:
        """Return the first of ``places`` whose candidate leaves the smallest sum, within the tie tolerance."""
        least = self._least(places)
        order = np.argsort(least)
        sums, smallest = np.full(places.size, np.inf), math.inf
        for start in range(0, places.size, BATCH):
            batch = order[start : start + BATCH]
            if least[batch[0]] > smallest * (1.0 + TIE):
                break
            sums[batch] = self._sums_with(places[batch])
            smallest = min(smallest, float(sums[batch].min()))
        return int(places[np.argmax(sums <= smallest * (1.0 + TIE))])  # (5)

    def add(self, place: int) -> None:
        """Select the candidate at ``place``."""
        nearer = self._weighted(self._distances[self._candidates[place], self._covered])
        self._nearest = np.minimum(self._nearest, nearer)
        self._uncovered = float(self._nearest.sum())  # G(S)

    def _least(self, places: IntArray) -> FloatArray:
        """Return a lower bound on the sum that each candidate at ``places`` leaves."""
        most = self._most[places]
        looked_at = np.isfinite(most)
        return np.where(looked_at, self._uncovered - np.where(looked_at, most, 0.0), -np.inf)

    def _sums_with(self, places: IntArray) -> FloatArray:
        """Return the sum that each candidate at ``places`` leaves together with the clients already selected."""
        rows = self._weighted(self._distances[np.ix_(self._candidates[places], self._covered)])
        sums: FloatArray = np.minimum(self._nearest, rows, out=rows).sum(axis=1)  # (4)
        if math.isfinite(self._uncovered):
            self._most[places] = self._uncovered * (1.0 + SLACK) - sums
        return sums

    def _weighted(self, distances: FloatArray) -> FloatArray:
        """Return distances to the covered clients times their weights: u_i min d_ij = min u_i d_ij."""
        return distances if self._weight is None else distances * self._weight  # (4)
