"""System model of clients: the delays of a round, the methods of every system model, and the device of a client.

:class:`System` is the base class of a system model, and :class:`RoundDelays` what it draws for engines and clients.
:func:`mean_latencies` returns the true means, which no selector knows. Regret and genies are computed from these means.
The device of Xia's clients, with its computing rate and energy, follows.

References:
    [1] W. Xia et al., "Multi-armed bandit-based client scheduling for federated learning", IEEE Transactions on
        Wireless Communications, 2020, section V-A.
    [2] N. H. Tran, W. Bao, A. Zomaya, M. N. H. Nguyen and C. S. Hong, "Federated learning over wireless networks:
        optimization model design and analysis", IEEE INFOCOM, 2019.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedsel_flwr.checks import FloatArray, real, whole
from fedsel_flwr.errors import ParameterError

PROBE_BITS = 64
"""Size of a scalar answer, bit."""


@dataclass(frozen=True)
class RoundDelays:
    """Delays of one client in one round, before the deadline limits them.

    Args:
        download_s: Time to receive the model, s; infinite if the channel carries nothing.
        compute_s: Time to train, s, by the model of the device.
        upload_s: Time to send the update, s; infinite if the channel carries nothing.
        computing_rate: Training speed in this round, samples/s.
    """

    download_s: float
    compute_s: float
    upload_s: float
    computing_rate: float


@dataclass(frozen=True, kw_only=True)
class System(ABC):
    """System model: the delays and the energy of each client in each round.

    :class:`~fedsel_flwr.clients.system.SystemModel` is Xia's cell, :class:`~fedsel_flwr.clients.phones.PhoneModel` a
    fleet of phones.

    Args:
        num_clients: Number of clients, with partition ids 0 … num_clients - 1.
        seed: Seed of the run, at least 0.
        max_latency_s: Client deadline, s.
    """

    num_clients: int
    seed: int
    max_latency_s: float

    @property
    @abstractmethod
    def payload_up_bits(self) -> float:
        """Size of the update that a client sends, bit."""

    def _check_numbers(self, above_zero: Sequence[str], not_negative: Sequence[str]) -> None:
        """Check the fields that hold a number.

        Raises:
            ParameterError: If a value is outside its range; the message names the field.
        """
        for name, lowest in (("num_clients", 1), ("seed", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), lowest))
        for name in above_zero:
            real(name, getattr(self, name), above=0.0)
        for name in not_negative:
            real(name, getattr(self, name), at_least=0.0)

    def draw(self, partition_id: int, round: int) -> RoundDelays:
        """Draw the delays of a client in a round; the same arguments give the same delays.

        Args:
            partition_id: The client's partition, in [0, num_clients).
            round: Absolute round.

        Returns:
            The parts of the client's latency. The caller limits their sum to `max_latency_s`.

        Raises:
            ParameterError: If there is no such partition, or the round is negative.
        """
        return self.draws([partition_id], round)[0]

    @abstractmethod
    def draws(self, partition_ids: Sequence[int], round: int) -> list[RoundDelays]:
        """Return :meth:`draw` of several clients, identical to the last bit, in a fraction of the time."""

    def mean_latencies(self, points: FloatArray) -> FloatArray:
        """Return each client's mean latency over the rounds, capped at the deadline, s.

        Args:
            points: Points spread evenly over the unit cube, shape (n, 3), see :func:`quasirandom_points`.

        Returns:
            Mean latencies, shape (num_clients,).
        """
        return np.array([np.minimum(own, self.max_latency_s).mean() for own in self._latencies(points)])

    def latencies(self, points: FloatArray) -> FloatArray:
        """Return the latencies of every client in several rounds, not capped, s.

        Args:
            points: Points of the unit cube, shape (rounds, num_clients, 3). Uniform points give the distribution of
                :meth:`draws`.

        Returns:
            Latencies, shape (rounds, num_clients).
        """
        return np.stack(list(self._latencies(points)), axis=1)

    @abstractmethod
    def _latencies(self, points: FloatArray) -> Iterator[FloatArray]:
        """Yield each client's latencies; points have the shape (n, 3) for all clients, or (n, num_clients, 3)."""

    @abstractmethod
    def energy_j(self, delays: RoundDelays, compute_s: float | None = None) -> float:
        """Return the energy of a client in a round, J; ``compute_s`` replaces the time to train."""


def check_partition(partition_id: int, num_clients: int) -> int:
    """Return the partition of a client, and refuse a partition that the system model does not have."""
    if not 0 <= partition_id < num_clients:
        raise ParameterError(
            f"partition_id must be at least 0 and below num_clients = {num_clients}, got {partition_id!r}. "
            "Start no more clients than the system model has."
        )
    return partition_id


def computing_seconds(delays: RoundDelays, measured: float | None) -> float:
    """Return the seconds of training: the measured ones, else those of the system model.

    Raises:
        ParameterError: If the seconds are negative or not finite.
    """
    seconds = delays.compute_s if measured is None else measured
    if not 0 <= seconds < float("inf"):
        raise ParameterError(f"compute_s must be finite and at least 0, got {seconds!r}. Give the seconds of training.")
    return seconds


def probe_delays(
    system: System, delays: RoundDelays, *, forward_passes: float = 1, bits: float = PROBE_BITS
) -> RoundDelays:
    """Return the delays of an answer about the model: receive the model, evaluate it, send the answer.

    Channels and computing rate are those of the round (block fading). A forward pass over the examples of a round takes
    a third of the time of training. The backward pass costs about two forward passes (ours). An answer about more or
    fewer examples takes as many more or fewer passes, see :func:`~fedsel_flwr.clients.answering.forward_passes`.

    Args:
        system: The system model.
        delays: The client's delays in the round that follows the question.
        forward_passes: Number of passes of the answer, over the examples that the client trains on in a round.
        bits: Size of the answer, bit.

    Returns:
        The parts of the client's latency, not capped.
    """
    return replace(
        delays,
        compute_s=delays.compute_s * forward_passes / 3,
        upload_s=delays.upload_s * bits / system.payload_up_bits,
    )


POINTS = 4096
"""Number of points for the means, whose error is about a thousandth of the spread."""
PLASTIC = 1.2207440846057596
"""The root of x^4 = x + 1, which generalizes the golden ratio to three dimensions."""


def quasirandom_points() -> FloatArray:
    """Spread points evenly over the unit cube, shape (n, 3), none of them on a face.

    References:
        M. Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018 (the sequence R_3).
    """
    steps = PLASTIC ** -np.arange(1.0, 4.0)
    return np.asarray((0.5 + np.arange(1, POINTS + 1)[:, np.newaxis] * steps) % 1.0)


def mean_latencies(system: System) -> FloatArray:
    """Return each client's mean latency over the rounds, capped at the deadline, s, shape (num_clients,).

    Args:
        system: The system model of a run.

    Example:
        >>> from fedsel_flwr.clients.system import SystemModel
        >>> mean_latencies(SystemModel(num_clients=3, seed=1)).round(2).tolist()
        [0.2, 0.15, 0.31]
    """
    return system.mean_latencies(quasirandom_points())


PRINTED_CLIENTS = 20
"""The largest number of clients in Xia's experiments."""

COMPUTING_STEP = 20.0
"""Width of Xia's ranges of computing rates, samples/s."""


def computing_rate_bounds(index: int, num_clients: int, *, step: float = COMPUTING_STEP) -> tuple[float, float]:
    """Return the range from which a client's computing rate is drawn in every round.

    Xia gives client k = 1, 2, …, K the range [(0.5 k + 0.5) x 20, (0.5 k + 1.5) x 20], with K up to 20.

    Deviations:
        For more than 20 clients, the span of the printed 20 is divided evenly: k' = 1 + 19 (k - 1) / (K - 1). Otherwise
        client 500 would be 170 times as fast as client 1.

    Args:
        index: Partition id of the client, 0-based, below `num_clients`.
        num_clients: Number of clients of the run.
        step: Width of the range, samples/s.

    Returns:
        Lower and upper bound of the uniform distribution, samples/s.

    Raises:
        ParameterError: Unless 0 <= index < num_clients and step > 0.

    References:
        [1], section V-A. The paper prints the lower bound twice. The second one is the upper bound.

    Example:
        >>> computing_rate_bounds(0, 20), computing_rate_bounds(19, 20), computing_rate_bounds(499, 500)
        ((20.0, 40.0), (210.0, 230.0), (210.0, 230.0))
        >>> computing_rate_bounds(2, 3)
        (40.0, 60.0)
    """
    check_partition(index, num_clients)
    if not 0 < step < float("inf"):
        raise ParameterError(f"step must be a finite number above 0, got {step!r}. Give a width in samples/s.")
    rank = 1.0 + int(index)  # k
    # int(), because K - 1 of a NumPy integer of few bits would overflow.
    if num_clients > PRINTED_CLIENTS:
        rank = 1.0 + (PRINTED_CLIENTS - 1.0) * int(index) / (int(num_clients) - 1)  # k' = 1 + 19 (k-1) / (K-1)
    return (0.5 * rank + 0.5) * step, (0.5 * rank + 1.5) * step  # phi^LB, phi^UB in section V-A


def cpu_energy(cycles: float, frequency_hz: float, effective_capacitance: float) -> float:
    """Return the energy of a computation, from the usual model of dynamic power.

    Args:
        cycles: Processor cycles of the computation.
        frequency_hz: Clock frequency, Hz.
        effective_capacitance: Effective switched capacitance, F (J per cycle and Hz^2); alpha / 2 in [2].

    Returns:
        Energy in J.

    Raises:
        ParameterError: If an argument is negative or not a number.

    References:
        [2], computation energy alpha/2 x cycles x f^2.

    Example:
        >>> round(cpu_energy(2e7, 1e9, 1e-28), 6)
        0.002
    """
    given = {"cycles": cycles, "frequency_hz": frequency_hz, "effective_capacitance": effective_capacitance}
    for name, value in given.items():
        if not value >= 0:
            raise ParameterError(f"{name} must be at least 0, got {value!r}. Change {name}.")
    return effective_capacitance * cycles * frequency_hz**2
