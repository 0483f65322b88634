"""BSFL: fast clients, each as often as its data deserve (Ben Ami et al.)."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heapreplace
from typing import ClassVar

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors._check import FloatArray, IntArray, column, real, whole
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.report import RoundReport


class BSFL(Selector):
    """Maximizes the slowest member's optimistic speed plus the set's mean generalization value.

    ===============  =====================  ==========================================================
    paper            here                   meaning
    ===============  =====================  ==========================================================
    m                ``clients_per_round``  clients per round
    tau_min          ``min_latency``        seconds to send and receive with zero training
    mu-bar_k         ``_mean``              mean observed speed tau_min / tau_k
    c_k              ``_plays``             rounds in which client k was selected and observed
    d_k              ``data_weights``       quality times number of examples
    g_k              ``generalization``     how far client k's share lies below its target
    ===============  =====================  ==========================================================

    Deviations:
        * (13) is called exponential and annealed in the paper; :func:`maximize` solves it exactly in O(K log K).
        * Selected clients that fail count as a play at the speed of their reported latency, tau_max.
        * Speeds are cut at 1, as measured latencies may undercut ``min_latency``.

    Args:
        clients_per_round: m.
        min_latency: tau_min, seconds.
        alpha: Weight of the generalization term; 0 looks at speed alone.
        beta: Exponent of g_k, a natural number.
        data_weights: d_k of (4) by client index, an array or a mapping of any positive scale; None for the i.i.d.
            balanced target m/K of (3).
        seed: Seed of the generator that breaks ties.

    Raises:
        ParameterError: A parameter out of range, or a client that ``data_weights`` does not cover.

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
    needs: ClassVar[frozenset[str]] = frozenset({"latency"})
    by_client: ClassVar[frozenset[str]] = frozenset({"data_weights"})
    client_state: ClassVar[dict[str, float | int]] = {"_plays": 0, "_mean": 0.0, "_weight": 1.0}

    _plays: IntArray
    _mean: FloatArray
    _weight: FloatArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        min_latency: float,
        alpha: float = 1.0,
        beta: int = 1,
        data_weights: FloatArray | Mapping[int, float] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.min_latency = real("min_latency", min_latency, above=0.0)
        self.alpha = real("alpha", alpha, at_least=0.0)
        self.beta = whole("beta", beta, 1)
        self.data_weights = _checked_weights(data_weights)

    def _select(self, available: IntArray) -> IntArray:
        shuffled = self._generator.permutation(available)  # ties at random
        best = maximize(self._bounds()[shuffled], self._generalization()[shuffled], self.clients_per_round, self.alpha)
        return np.asarray(shuffled[best])

    def _observe(self, report: RoundReport) -> None:
        k = report.clients
        speed = self.min_latency / np.maximum(report.latency, self.min_latency)  # min(1, tau_min / tau_k)
        self._plays[k] += 1  # (10)
        self._mean[k] += (speed - self._mean[k]) / self._plays[k]  # (11)

    def _bounds(self) -> FloatArray:
        """ucb(k, t - 1), infinite for clients never observed."""
        played = self._plays > 0
        bound = np.full(played.shape, np.inf)
        if played.any():  # so that t - 1 is at least 1
            radius = np.sqrt((self.clients_per_round + 1) * np.log(self.round - 1) / self._plays[played])
            bound[played] = self._mean[played] + radius  # (12)
        return bound

    def _generalization(self) -> FloatArray:
        """g_k at the beginning of this round."""
        if self.data_weights is None:
            target = np.full(self._plays.shape, self.clients_per_round / self.num_clients)  # (3)
        else:
            total = sum(self.data_weights.values())
            target = self.clients_per_round * self._weight / total  # (4)
        x = target - self._plays / self.round
        return np.asarray(np.abs(x) ** self.beta * np.sign(x))  # (3), (4)

    def _admit(self, clients: IntArray) -> None:
        if self.data_weights is None:
            return
        missing = [int(k) for k in clients if int(k) not in self.data_weights]
        if missing:
            raise ParameterError(
                f"data_weights covers {len(self.data_weights)} clients, but not {missing}: give one weight per client"
            )
        self._weight[clients] = [self.data_weights[int(k)] for k in clients]


def maximize(ucb: FloatArray, generalization: FloatArray, clients_per_round: int, alpha: float) -> IntArray:
    """Solve (13) exactly: the set S of m clients with the largest min ucb + (alpha / m) sum of g over S.

    With the clients sorted by falling ucb, the best set whose slowest member is the i-th consists of the m largest g
    among the first i. One sweep with a heap of m visits every i in O(K log K). Deterministic: among equal sets, the
    one with the larger smallest ucb, then the order of the input. Among sets of infinite value the one of larger g.

    Args:
        ucb: Optimistic speeds, shape (K,); +inf for clients never observed.
        generalization: g_k, shape (K,), finite.
        clients_per_round: m; all K clients are returned when m >= K.
        alpha: Weight of the generalization term, at least 0.

    Returns:
        Indices of the chosen clients, ascending, shape (min(m, K),).

    Raises:
        ParameterError: Shapes differ, ``ucb`` holds NaN or -inf, ``generalization`` is not finite, m < 1, alpha < 0.

    References:
        Ben Ami et al., equation (13).

    >>> maximize(np.array([0.9, 0.8, 0.1]), np.array([0.0, -0.1, 0.9]), 2, 1.0)  # 0.75, 0.55 with the slow one
    array([0, 1])
    >>> maximize(np.array([0.9, 0.8, 0.1]), np.array([0.0, -0.1, 0.9]), 2, 3.0)
    array([0, 2])
    """
    m, alpha = whole("clients_per_round", clients_per_round, 1), real("alpha", alpha, at_least=0.0)
    ucb = column("ucb", ucb, len(np.atleast_1d(ucb)))
    g = column("generalization", generalization, len(ucb))
    if np.isnan(ucb).any() or np.isneginf(ucb).any() or not np.isfinite(g).all():
        raise ParameterError("ucb must hold numbers or +inf and generalization finite numbers, got NaN or an infinity")
    if m >= len(ucb):
        return np.arange(len(ucb))
    ucb = _finite_bounds(ucb, g, alpha)
    order = np.argsort(-ucb, kind="stable")
    speeds, values = ucb[order].tolist(), g[order].tolist()
    heap = values[:m]  # the m largest g so far, smallest on top
    total, scale = sum(heap), alpha / m
    heapify(heap)
    best, best_end = speeds[m - 1] + scale * total, m
    for i in range(m, len(speeds)):
        if values[i] > heap[0]:
            total += values[i] - heapreplace(heap, values[i])
            value = speeds[i] + scale * total
            if value > best:
                best, best_end = value, i + 1
    chosen = np.argsort(-g[order[:best_end]], kind="stable")[:m]
    return np.sort(order[chosen])


def _finite_bounds(ucb: FloatArray, g: FloatArray, alpha: float) -> FloatArray:
    """Replace infinite bounds by a finite one so large that the order of any two sets stays the same."""
    finite = ucb[np.isfinite(ucb)]
    if finite.size == ucb.size:
        return ucb
    spread = (np.ptp(finite) if finite.size else 0.0) + alpha * np.ptp(g)  # Delta_max
    return np.where(np.isfinite(ucb), ucb, finite.max(initial=0.0) + spread + 1.0)


def _checked_weights(weights: FloatArray | Mapping[int, float] | None) -> Mapping[int, float] | None:
    if weights is None or isinstance(weights, Mapping):
        items = weights
    else:
        items = dict(enumerate(column("data_weights", weights, len(np.atleast_1d(weights))).tolist()))
    for weight in (items or {}).values():
        real("every one of data_weights", weight, at_least=0.0)
    if items is not None and not sum(items.values()) > 0.0:
        raise ParameterError("data_weights must have a positive sum; leave it out for i.i.d. data")
    return items
