"""BSFL: selects fast clients, and clients whose share of the rounds is below that of the data (Ben Ami et al.)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import (
    AUTO,
    BoolArray,
    FloatArray,
    IntArray,
    Seconds,
    by_client,
    lookup,
    one_of,
    real,
    seconds,
    whole,
)
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.bsfl_solvers import anneal, maximize
from fedsel_flwr.selectors.round_report import RoundReport

__all__ = ["BSFL", "maximize"]

TINY = 1e-300
"""Replaces a sum of weights of 0, so that every target is 0."""
SHORTEST = 1e-6
"""Smallest latency under "auto", seconds, so that 1 / tau_k is finite."""
FAST = 0.1
"""Share of the clients whose mean latency may be below tau_min, under "auto"."""


class BSFL(Selector):
    """Prefers fast clients, and clients whose share of the rounds is below their share of the data.

    The selected set maximizes the optimistic speed of its slowest member plus alpha times its mean generalization value
    (13). The generalization value of a client is positive while its share is below its target, and otherwise negative.

    ===============  ======================  ==========================================================
    paper            here                    meaning
    ===============  ======================  ==========================================================
    m                ``clients_per_round``   clients per round
    tau_min          ``min_latency``         seconds to send and receive with zero training
    mu-bar_k         ``_mean``, ``_speeds``  mean observed speed tau_min / tau_k
    c_k              ``_plays``              rounds in which client k was selected and observed
    d_k              ``data_weights``        quality times number of examples
    g_k              ``_generalization``     distance of client k's share below its target
    alpha, beta      ``alpha``, ``beta``     weight of the generalization values; exponent in g_k
    S                the selection           a set of m available clients
    ===============  ======================  ==========================================================

    ``docs/papers/ben-ami.md`` explains every equation. :class:`fedsel_flwr.strategies.BSFL` is the strategy.

    When not to use:
        * The clients' shares must reach their targets, and ``alpha`` is small. The distance between share and target is
          roughly proportional to 1 / alpha. CS-UCB-Q guarantees a minimum share by a constraint.
        * Each client trains in only a few rounds. The radius of (12) is then large, so all clients are selected about
          equally often.

    Deviations:
        * The paper states that solving (13) takes exponential time, and uses annealing. The default solver,
          :func:`~fedsel_flwr.selectors.bsfl_solvers.maximize`, solves (13) exactly in O(K log K). The same file has the
          paper's two solvers.
        * A failure counts as a play at the speed tau_min / tau_max. A failed client has no latency, and the report then
          contains tau_max.
        * In buffered rounds (``concurrency``), the slowest member of a set does not set the length of a round, as (13)
          assumes. The shares count arrivals.
        * Speeds above 1 are replaced by 1, because measured latencies may be below ``min_latency``.
        * ``min_latency="auto"`` sets tau_min to the tenth percentile of the clients' mean latencies, over the
          completed plays. This tau_min includes the training of fast clients and the server's polling. The selector
          stores the mean of 1 / tau_k, and multiplies this mean by the current tau_min at each selection.
        * With "auto", a latency below the tau_min of its round counts as this tau_min. Each client's shortest latency
          counts as at least the current tau_min. One implausibly short latency therefore has no permanent effect.
        * With over-selection, m in (13) is the number of clients asked, because its second term is a mean over the
          selected set. In (3), (4) and (12), m is ``clients_per_round``.
        * ``exploration`` is a factor of the radius in (12); 1 gives the paper's radius. With m = 25 of 500 clients, the
          radius is 4.6 after six plays of every client, although no speed exceeds 1. A smaller factor ends exploration
          earlier.
        * Delta_max (14), the largest difference between the values of two sets, needs the true means. In the annealing
          solvers, the range of the finite bounds plus alpha times the range of g replaces it. One finite bound above
          all others replaces the infinite bounds.
        * The targets (3) and (4) depend only on the clients that have joined so far.
        * With ``data_weights``, the first selections are not random. Clients without a play all have infinite bounds,
          so the clients with the largest weights come first. The generator breaks ties only between clients with equal
          bounds and equal g.
        * The rounds of a common warm-up count as plays, in the bounds and in g. Clients that missed the warm-up come
          first.
        * In (17) the paper has the sum inside the minimum, and we have the sum outside. The results are equal.

    Args:
        clients_per_round: m.
        min_latency: tau_min, the seconds to receive and send without training, above 0; "auto" computes it from the
            latencies of fast clients. :attr:`min_latency_now` is the current value.
        alpha: Weight of the generalization term, at least 0; 0 uses the speed alone.
        beta: Exponent of g_k, the distance of a client's share below its target, at least 1.
        data_weights: d_k of (4), quality times number of examples by client index, above 0 and of any scale. An array
            or a mapping, which may grow with the fleet. None uses the target m/K of (3), for balanced i.i.d. data.
        solver: Solver of (13): "exact", or the paper's "alsa" or "annealing".
        solver_steps: Steps of the annealing solvers in each round, at least 1.
        exploration: Factor of the confidence radius, at least 0; 1 is the paper's, 0 uses the mean speeds alone.
        seed: Seed of the generator that breaks ties and anneals.

    Raises:
        ParameterError: A parameter is out of range, or ``data_weights`` does not cover a client.

    References:
        D. Ben Ami, K. Cohen, Q. Zhao, Client selection for generalization in accelerated federated learning: a
        multi-armed bandit approach, IEEE Access 13, 2025, Algorithm 1.

    >>> import numpy as np
    >>> selector = BSFL(clients_per_round=1, min_latency=0.1, alpha=20.0, seed=0)
    >>> for _ in range(100):
    ...     chosen = selector.select(np.arange(2))
    ...     selector.observe(RoundReport(clients=chosen, completed=[True], latency=0.2 + chosen))
    >>> selector.state_dict()["plays"].tolist()  # client 0 is six times as fast; alpha asks for equal shares
    [51, 49]
    """

    name: ClassVar[str] = "bsfl"
    citations: ClassVar[tuple[str, ...]] = ("benami2025client",)
    needs: ClassVar[frozenset[str]] = frozenset({"latency"})
    by_client: ClassVar[frozenset[str]] = frozenset({"data_weights"})
    client_state: ClassVar[dict[str, float | int]] = {
        "_plays": 0, "_mean": 0.0, "_fastest": 0.0, "_completed": 0, "_latency": 0.0, "_weight": 1.0,
    }  # fmt: skip

    _plays: IntArray
    _mean: FloatArray
    # Latency of the fastest completed play, at least the tau_min of its round; 0 without a completed play.
    _fastest: FloatArray
    _completed: IntArray
    # Mean latency over the completed plays.
    _latency: FloatArray
    _weight: FloatArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        min_latency: Seconds,
        alpha: float = 1.0,
        beta: int = 1,
        data_weights: FloatArray | Mapping[int, float] | None = None,
        solver: str = "exact",
        solver_steps: int = 1000,
        exploration: float = 1.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.min_latency = seconds("min_latency", min_latency)
        self.alpha = real("alpha", alpha, at_least=0.0)
        self.beta = whole("beta", beta, 1)
        self.solver = one_of("solver", solver, ("exact", "alsa", "annealing"))
        self.solver_steps = whole("solver_steps", solver_steps, 1)
        self.exploration = real("exploration", exploration, at_least=0.0)
        self.data_weights = None if data_weights is None else by_client("data_weights", data_weights)
        if self.data_weights and not sum(self.data_weights.values()) > 0.0:
            raise ParameterError("data_weights must have a positive sum. Leave it out for i.i.d. data")

    @property
    def min_latency_now(self) -> float:
        """tau_min, seconds: ``min_latency``, or under "auto" the lower tenth percentile of the clients' mean latencies.

        Only completed plays of clients that were not forgotten count. The value is infinite before the first play.
        """
        if not isinstance(self.min_latency, str):
            return self.min_latency
        latency = self._latency[self._completed > 0]
        return max(SHORTEST, float(np.quantile(latency, FAST, method="lower"))) if latency.size else np.inf

    def _select(self, available: IntArray) -> IntArray:
        # The exact solver is deterministic, so the permutation breaks ties between clients with equal bound and g.
        shuffled = self._generator.permutation(available)
        ucb, g, m = self._bounds()[shuffled], self._generalization()[shuffled], self.asked_per_round
        if self.solver == "exact":
            best = maximize(ucb, g, m, self.alpha)  # (13)
        else:
            best, _ = anneal(
                ucb, g, m, self.alpha, kind=self.solver, steps=self.solver_steps, generator=self._generator
            )
        return np.asarray(shuffled[best])

    def _observe(self, report: RoundReport) -> None:
        k, done = report.clients, report.completed
        self._completed[k] += done
        change = (report.latency[done] - self._latency[k[done]]) / self._completed[k[done]]
        self._latency[k[done]] += change
        # Computed after this round's latencies, so that the first completed play already sets tau_min.
        shortest = self.min_latency_now
        latency = np.maximum(report.latency, shortest if np.isfinite(shortest) else SHORTEST)
        unit = 1.0 if isinstance(self.min_latency, str) else self.min_latency
        speed = unit / latency  # tau_min / tau_k of (8), (11), at most 1; under "auto" without tau_min
        self._plays[k] += 1  # (10)
        self._mean[k] += (speed - self._mean[k]) / self._plays[k]  # (11), which is (8)
        faster = done & ((self._fastest[k] == 0.0) | (latency < self._fastest[k]))
        self._fastest[k[faster]] = latency[faster]

    def _speeds(self, played: BoolArray) -> FloatArray:
        """Return mu-bar of the clients with a play."""
        if self.min_latency != AUTO:
            return self._mean[played]
        shortest, fastest = self.min_latency_now, self._fastest[played]
        # Corrects the mean as if the fastest play had taken tau_min: an implausible play must not count permanently.
        with np.errstate(divide="ignore"):
            excess = np.where(fastest > 0.0, np.maximum(1.0 / fastest - 1.0 / shortest, 0.0), 0.0)
        mean = self._mean[played] - excess / self._plays[played]
        return np.asarray(np.minimum(shortest * mean, 1.0))  # (11), at the present tau_min

    def _bounds(self) -> FloatArray:
        """Return ucb(k, t - 1), infinite for clients without a play."""
        t = max(self.round - 1, 1)
        played = self._plays > 0
        bound = np.full(played.shape, np.inf)
        radius = self.exploration * np.sqrt((self.clients_per_round + 1) * np.log(t) / self._plays[played])  # (12)
        bound[played] = self._speeds(played) + radius  # (12), which is (9)
        return bound

    def _generalization(self) -> FloatArray:
        """Return g_k at the beginning of this round."""
        if self.data_weights is None:
            target = np.full(self._plays.shape, self.clients_per_round / self.num_clients)  # (3)
        else:
            total = max(float(self._weight[self._registered].sum()), TINY)
            target = self.clients_per_round * self._weight / total  # (4)
        x = target - self._plays / self.round  # (3), (4)
        return np.asarray(np.abs(x) ** self.beta * np.sign(x))  # (3), (4)

    def _admit(self, clients: IntArray) -> None:
        if self.data_weights is not None:
            self._weight[clients] = lookup("data_weights", self.data_weights, clients)
