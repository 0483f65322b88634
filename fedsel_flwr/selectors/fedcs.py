"""FedCS: select as many clients as finish before a deadline (Nishio and Yonetani)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, real, whole
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.round_report import RoundReport, repeated_failures

ROUNDING = 1e-9
"""Tolerance of the deadline in seconds, because sums of latencies are rounded."""


class FedCS(Selector):
    """Adds the client that lengthens the round least, until the next client would exceed the deadline.

    As many clients as possible thus reply before the deadline.

    ==============  ====================  ===========================================================
    paper           here                  meaning
    ==============  ====================  ===========================================================
    T_round         ``deadline``          seconds that a round may take
    t_k             ``_latency``          estimated seconds of client k, the paper's t_UD + t_UL
    w, C            ``waves``             waves of a round; channels, ``channels``
    Theta           ``time``              seconds of a round with the clients selected so far
    S               the selection         as many clients as fit
    ==============  ====================  ===========================================================

    The time of a round is computed as in the strategies. Clients go in waves of ``channels``, one wave after the other.
    A wave takes as long as its slowest client. The selector does not decide which clients share a wave. Therefore the
    time of a set is the largest over all partitions into waves: w waves take at most the sum of the set's w largest
    latencies. With a channel for each client, this is the largest latency, and all clients within the deadline are
    selected.

    When not to use:
        * Slow clients have other labels than fast clients. Slow clients are not selected.
        * A round may ask only a few clients. The fastest clients are then selected again and again.

    Deviations:
        * In the paper uploads follow one another while other clients train. Here each client has a channel, as in the
          strategies' round time, and transfers and training are one number.
        * An estimate is the mean of the client's measured latencies. The paper asks a random part of the clients for
          their resources in each round.
        * The paper has no failures. Here, the first failure does not change the estimate. From the second failure in a
          row on, a failure counts as a measurement of the latency in the report.
        * A spare that has replied is measured. If a spare has not replied, its estimate is at least the time that the
          server waited.
        * A client that was never measured, or not for ``refresh_rounds`` rounds, gets the estimate 0 s, and its mean
          restarts. Therefore the first rounds measure all clients in turn, one wave per round (``channels`` or
          ``clients_per_round``, else all). Such a round may exceed the deadline.
        * A common warm-up of all selectors measures all clients. Its rounds may exceed the deadline.
        * If no client fits, the fastest client is selected.

    Args:
        deadline: T_round, the seconds in which the selected clients should reply, above 0.
        clients_per_round: Optional largest number of clients, at least 1. None sets no limit.
        channels: Clients served at the same time, as in the strategy. None serves all selected clients at once.
        refresh_rounds: Number of rounds after a measurement for which the estimate is valid, at least 1.
        seed: Seed of the generator of ties and of the order in which clients are measured.

    Raises:
        ParameterError: A parameter is out of range.

    References:
        T. Nishio, R. Yonetani, Client selection for federated learning with heterogeneous resources in mobile edge,
        ICC 2019 (arXiv:1804.08333), section IV, Algorithm 3.

    >>> import numpy as np
    >>> selector = FedCS(deadline=2.5, seed=0)
    >>> selector.select(np.arange(3))  # no client was measured yet
    array([0, 1, 2])
    >>> selector.observe(RoundReport(clients=[0, 1, 2], completed=[True] * 3, latency=[1.0, 3.0, 2.0]))
    >>> selector.select(np.arange(3))
    array([0, 2])
    """

    name: ClassVar[str] = "fedcs"
    citations: ClassVar[tuple[str, ...]] = ("nishio2019client",)
    needs: ClassVar[frozenset[str]] = frozenset({"latency", "spare"})
    # The deadline alone decides the number of clients.
    may_exceed_clients_per_round: ClassVar[bool] = True
    buffers: ClassVar[bool] = False
    client_state: ClassVar[dict[str, float | int]] = {
        "_latency": 0.0, "_measurements": 0, "_measured_in": 0, "_failures": 0,
    }  # fmt: skip

    _latency: FloatArray
    _measurements: IntArray
    _measured_in: IntArray
    # Failures in a row.
    _failures: IntArray

    def __init__(
        self,
        *,
        deadline: float,
        clients_per_round: int | None = None,
        channels: int | None = None,
        refresh_rounds: int = 100,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.deadline = real("deadline", deadline, above=0.0)
        self.channels = None if channels is None else whole("channels", channels, 1)
        self.refresh_rounds = whole("refresh_rounds", refresh_rounds, 1)

    def expected_count(self, num_available: int) -> int | None:
        """Return None, because the latencies decide how many clients fit; in a warm-up, return all."""
        return None if num_available and self.round >= self.common_warmup else num_available

    def _select(self, available: IntArray) -> IntArray:
        shuffled = self._generator.permutation(available)
        estimated = self._has_estimate(shuffled)
        known = shuffled[estimated]
        known = known[np.argsort(self._latency[known], kind="stable")]
        # Each unmeasured client counts as 0 s. Without a limit, all of them would be selected at once.
        limits = [limit for limit in (self.channels, self.asked_per_round) if limit is not None]
        unmeasured = shuffled[~estimated][: min(limits, default=available.size)]
        order = np.concatenate([unmeasured, known])  # Algorithm 3: the least additional time first
        seconds = np.concatenate([np.zeros(unmeasured.size), self._latency[known]])
        times, limit = self._round_time(seconds), self.deadline + ROUNDING
        fitting = np.searchsorted(times, limit, side="right")  # Algorithm 3, T_round
        most = available.size if self.clients_per_round is None else self.asked_per_round
        return order[: max(1, min(int(fitting), most))]

    def _observe(self, report: RoundReport) -> None:
        k = report.clients
        outdated = k[~self._has_estimate(k)]
        self._latency[outdated], self._measurements[outdated], self._measured_in[outdated] = 0.0, 0, 0
        measured = report.completed | repeated_failures(self._failures, report)
        clients, waiting = k[measured], np.asarray(report.spare) & ~report.completed
        self._measurements[clients] += 1
        change = report.latency[measured] - self._latency[clients]
        self._latency[clients] += change / self._measurements[clients]  # estimate, ours
        self._latency[k[waiting]] = np.maximum(self._latency[k[waiting]], report.latency[waiting])
        self._measured_in[k[measured | waiting]] = self.round

    def _has_estimate(self, clients: IntArray) -> BoolArray:
        """Return whether each client's estimate is recent enough, shape (n,)."""
        measured_in = self._measured_in[clients]
        return (measured_in > 0) & (self.round - measured_in <= self.refresh_rounds)

    def _round_time(self, seconds: FloatArray) -> FloatArray:
        """Return Theta of the first s clients, for s = 1 ... n. ``seconds`` ascends, and so does Theta."""
        count = np.arange(1, seconds.size + 1)
        waves = -(-count // (self.channels or seconds.size))
        total = np.concatenate([[0.0], np.cumsum(seconds)])
        return np.where(waves == 1, seconds, total[count] - total[count - waves])  # Theta, the largest of each wave
