"""Simulated devices: the delays of a round, the methods of every system model, and the clients that drop out.

:class:`System` is the base class of a system model, and :class:`RoundDelays` what it draws for engines and clients.
:func:`mean_latencies` returns the true means, which no selector knows. Regret and genies are computed from these means.
:class:`ClientDropout` draws the clients that crash before training, and those whose updates never arrive.

References:
    W. Xia et al., "Multi-armed bandit-based client scheduling for federated learning", IEEE Transactions on Wireless
    Communications, 2020, equation (4): the three parts of a latency.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, fraction, real, whole
from fedsel_flwr.clients.streams import first_uniforms
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.replies import CRASHED, FAILED

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
    may_be_zero: ClassVar[frozenset[str]] = frozenset()
    """Real numbers among the fields that need not be above 0."""

    @property
    @abstractmethod
    def payload_up_bits(self) -> float:
        """Size of the update that a client sends, bit."""

    def __post_init__(self) -> None:
        """Check the fields that hold a number: real numbers are above 0, or at least 0 if they may be zero.

        Raises:
            ParameterError: If a value is outside its range; the message names the field.
        """
        for name, lowest in (("num_clients", 1), ("seed", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), lowest))
        for name in (one.name for one in fields(self) if one.type in (float, "float")):
            real(name, getattr(self, name), **({"at_least": 0.0} if name in self.may_be_zero else {"above": 0.0}))

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

    def draws(self, partition_ids: Sequence[int], round: int) -> list[RoundDelays]:
        """Return :meth:`draw` of several clients, identical to the last bit, in a fraction of the time.

        Args:
            partition_ids: The clients' partitions, each in [0, num_clients).
            round: Absolute round.

        Returns:
            The parts of each client's latency.

        Raises:
            ParameterError: If there is no such partition, or the round is negative.
        """
        return self._draws([check_partition(k, self.num_clients) for k in partition_ids], round)

    @abstractmethod
    def _draws(self, partition_ids: Sequence[int], round: int) -> list[RoundDelays]:
        """Return :meth:`draws` of existing partitions."""

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

    def energy_j(self, delays: RoundDelays, compute_s: float | None = None) -> float:
        """Return the energy that a client spends in a round, J. It is modelled, not measured, and ends at the deadline.

        Args:
            delays: The client's delays in this round.
            compute_s: Measured time to train, s; None takes the time of `delays`.

        Raises:
            ParameterError: If `compute_s` is negative or not finite.
        """
        busy = delays.compute_s if compute_s is None else compute_s
        if not 0 <= busy < float("inf"):
            raise ParameterError(f"compute_s must be finite and at least 0, got {busy!r}. Give seconds of training")
        return self._energy_j(delays, busy)

    @abstractmethod
    def _energy_j(self, delays: RoundDelays, busy: float) -> float:
        """Return :meth:`energy_j` of a client that trains for ``busy`` seconds."""


def check_partition(partition_id: int, num_clients: int) -> int:
    """Return the partition of a client, and refuse a partition that the system model does not have."""
    if not 0 <= partition_id < num_clients:
        raise ParameterError(
            f"partition_id must be at least 0 and below num_clients = {num_clients}, got {partition_id!r}. "
            "Start no more clients than the system model has."
        )
    return partition_id


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
    points = quasirandom_points()
    return np.array([np.minimum(own, system.max_latency_s).mean() for own in system._latencies(points)])


REPLIED = 0
"""Outcome of a client whose reply arrives."""


@dataclass(frozen=True, kw_only=True)
class ClientDropout:
    """Draws the clients that drop out of a round, each client from its own random streams.

    A client whose reply is lost has trained, so its seconds and joules are in the history. A client that crashes has
    spent nothing. The server cannot distinguish the two. It waits for both until ``max_latency_s``, and the selector
    sees a failure.

    Args:
        seed: Seed of the run.
        failure_probability: Probability that the reply of a client that trained is lost, in [0, 1].
        crash_probability: Probability that a client crashes before it trains, in [0, 1].

    Raises:
        ParameterError: A probability is outside [0, 1].

    Example:
        >>> ClientDropout(seed=1, failure_probability=0.3, crash_probability=0.2).outcomes(range(8), 2)
        [1, 0, 0, 1, 2, 1, 2, 0]
    """

    seed: int
    failure_probability: float = 0.0
    crash_probability: float = 0.0

    def __post_init__(self) -> None:
        """Check both probabilities."""
        for name in ("failure_probability", "crash_probability"):
            fraction(name, getattr(self, name))

    @property
    def probability(self) -> float:
        """Probability that a chosen client drops out, for either reason."""
        return 1 - (1 - self.crash_probability) * (1 - self.failure_probability)

    def outcomes(self, partition_ids: Sequence[int], round: int) -> list[int]:
        """Draw the outcome of a round for each client.

        Args:
            partition_ids: The clients' partitions.
            round: Absolute round.

        Returns:
            One outcome for each client: :data:`REPLIED`, or the :data:`~fedsel_flwr.rounds.replies.FAILED` or
            :data:`~fedsel_flwr.rounds.replies.CRASHED` in its reply.
        """
        # Both are drawn for all clients, each from its own stream, so that a change of one probability does not change
        # the other draws.
        crashed = self._drawn("crash", self.crash_probability, partition_ids, round)
        failed = self._drawn("failure", self.failure_probability, partition_ids, round)
        return [CRASHED if c else FAILED if f else REPLIED for c, f in zip(crashed, failed, strict=True)]

    def _drawn(self, purpose: str, probability: float, partition_ids: Sequence[int], round: int) -> list[bool]:
        # Most runs have no dropout, and seeding the streams takes longer than the rest of this function.
        if not probability:
            return [False] * len(partition_ids)
        drawn: list[bool] = (first_uniforms(self.seed, purpose, partition_ids, round) < probability).tolist()
        return drawn
