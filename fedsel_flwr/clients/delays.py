"""What a system model says of clients: the parts of a latency, and the methods that every system model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedsel_flwr.checks import FloatArray

PROBE_BITS = 64
"""A scalar answer, bit."""


@dataclass(frozen=True)
class RoundDelays:
    """What one client takes in one round, before the deadline cuts it.

    Args:
        download_s: Time to receive the model, s; infinite in a channel that carries nothing.
        compute_s: Time to train, s, by the model of the device.
        upload_s: Time to send the update, s; infinite in a channel that carries nothing.
        computing_rate: Training speed in this round, samples/s.
    """

    download_s: float
    compute_s: float
    upload_s: float
    computing_rate: float


class System(Protocol):
    """How long each client takes in each round, and the energy it spends.

    :class:`~fedsel_flwr.clients.system.SystemModel` is Xia's cell, :class:`~fedsel_flwr.clients.phones.PhoneModel` a
    fleet of phones.
    """

    @property
    def num_clients(self) -> int:
        """Number of clients, with partition ids 0 … num_clients - 1."""

    @property
    def seed(self) -> int:
        """Seed of the run."""

    @property
    def max_latency_s(self) -> float:
        """Deadline of a round, s."""

    @property
    def payload_up_bits(self) -> float:
        """Size of the update that a client sends, bit."""

    def draw(self, partition_id: int, round: int) -> RoundDelays:
        """What a client takes in a round, not capped; the same arguments give the same delays."""

    def draws(self, partition_ids: Sequence[int], round: int) -> list[RoundDelays]:
        """What several clients take in a round: :meth:`draw` of each, to the last bit."""

    def mean_latencies(self, points: FloatArray) -> FloatArray:
        """Each client's mean latency over the rounds, capped at the deadline, s; points of the unit cube, (n, 3)."""

    def draw_probe(
        self, partition_id: int, round: int, *, forward_passes: float = 1, bits: float = PROBE_BITS
    ) -> RoundDelays:
        """What a client takes to answer a question about the model: some forward passes, and an answer of some bits."""

    def probe_delays(self, delays: RoundDelays, *, forward_passes: float = 1, bits: float = PROBE_BITS) -> RoundDelays:
        """What that takes a client with these delays in the round."""

    def energy_j(self, delays: RoundDelays, compute_s: float | None = None) -> float:
        """The energy of a client in a round, J; ``compute_s`` replaces the time to train."""
