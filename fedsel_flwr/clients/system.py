"""Xia's cell as the system model of a run: the delays and the energy of each client in each round.

References:
    [1] W. Xia et al., "Multi-armed bandit-based client scheduling for federated learning", IEEE Transactions on
        Wireless Communications, 2020, section V.
    [2] N. H. Tran, W. Bao, A. Zomaya, M. N. H. Nguyen and C. S. Hong, "Federated learning over wireless networks:
        optimization model design and analysis", IEEE INFOCOM, 2019.

| paper | here |
| --- | --- |
| tau^D, tau^LU, tau^U | `download_s`, `compute_s`, `upload_s` |
| tau_max | `max_latency_s` |
| m_0, m_k | `payload_down_bits`, `payload_up_bits` |
| rho | `samples_per_round` |
| phi | `computing_rate` |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.device import RoundDelays, System, check_partition
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.wireless import OFDMAChannel, rayleigh_power, uniform_disc

PRINTED_CLIENTS = 20
"""The largest number of clients in Xia's experiments."""

COMPUTING_STEP = 20.0
"""Width of Xia's ranges of computing rates, samples/s."""


@dataclass(frozen=True, kw_only=True)
class SystemModel(System):
    """A cell of clients with fading channels, and devices whose speed changes from round to round.

    Payloads and samples are constants of the scenario, and are never derived from the trained model. A VGG-11 over 15
    kHz would take 40 minutes.

    Deviations:
        * One fading draw per client, round and direction stands for the paper's average over a round's coherence times
          (text above (33)).
        * For K above 20, see :func:`computing_rate_bounds`.
        * The probe and the energy are ours.

    Args:
        num_clients: Number of clients, with partition ids 0 … num_clients - 1.
        seed: Seed of the run, at least 0.
        downlink: Channel from the access point to a client.
        uplink: Channel from a client to the access point.
        radius_km: Radius of the disc that holds the clients, km.
        payload_down_bits: Size of the model that is sent to a client, bit.
        payload_up_bits: Size of the update that a client sends, bit.
        samples_per_round: Samples that a client trains on in a round (rho), whatever the examples of the trained model.
        computing_step: Width of a client's range of computing rates, samples/s.
        cycles_per_sample: Processor cycles per sample.
        effective_capacitance: Effective switched capacitance of the processor, F.
        max_latency_s: Client deadline, s.

    Raises:
        ParameterError: If a value is outside its range; the message names the field.

    References:
        Xia et al., section V; the energy is ours.

    Example:
        >>> delays = SystemModel(num_clients=20, seed=1).draw(partition_id=0, round=1)
        >>> 0.05 <= delays.compute_s <= 0.1
        True
    """

    downlink: OFDMAChannel = field(default_factory=OFDMAChannel)
    uplink: OFDMAChannel = field(default_factory=OFDMAChannel)
    radius_km: float = 0.5
    payload_down_bits: float = 5_000.0
    payload_up_bits: float = 5_000.0
    samples_per_round: float = 2.0
    computing_step: float = COMPUTING_STEP
    cycles_per_sample: float = 1e7
    effective_capacitance: float = 1e-28
    max_latency_s: float = 5.0
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"cycles_per_sample", "effective_capacitance"})

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        for name in ("downlink", "uplink"):
            if not isinstance(getattr(self, name), OFDMAChannel):
                raise ParameterError(f"{name} must be an OFDMAChannel, got {getattr(self, name)!r}. Pass one")
        if self.radius_km < self._min_distance_km:
            raise ParameterError(
                f"radius_km must be at least the channels' min_distance_km = {self._min_distance_km!r}, "
                f"got {self.radius_km!r}. Enlarge the disc or lower min_distance_km."
            )

    def distance_km(self, partition_id: int) -> float:
        """Return a client's distance from the access point, the same in every round.

        Args:
            partition_id: The client's partition, in [0, num_clients).

        Returns:
            Distance in km.

        Raises:
            ParameterError: If there is no such partition.
        """
        return self._distances_km([check_partition(partition_id, self.num_clients)])[0]

    def _distances_km(self, partition_ids: Sequence[int]) -> list[float]:
        radius, least = self.radius_km, self._min_distance_km
        placements = streams(self.seed, "placement", partition_ids)
        return [float(uniform_disc(own, radius_km=radius, min_distance_km=least)) for own in placements]

    def _draws(self, partition_ids: Sequence[int], round: int) -> list[RoundDelays]:
        """Return :meth:`draws` of existing partitions."""
        distance = np.array(self._distances_km(partition_ids))
        fading = np.array(
            [rayleigh_power(own, 2) for own in streams(self.seed, "latency", partition_ids, round)]
        ).reshape(-1, 2)
        bounds = [computing_rate_bounds(k, self.num_clients, step=self.computing_step) for k in partition_ids]
        computing = streams(self.seed, "computing", partition_ids, round)
        rates = [float(own.uniform(*ends)) for own, ends in zip(computing, bounds, strict=True)]
        down = self.downlink.transfer_time(self.payload_down_bits, distance, fading[:, 0])  # (32)
        up = self.uplink.transfer_time(self.payload_up_bits, distance, fading[:, 1])  # (34)
        return [
            RoundDelays(
                download_s=download_s,
                compute_s=self.samples_per_round / rate,  # (36)
                upload_s=upload_s,
                computing_rate=rate,
            )
            for download_s, upload_s, rate in zip(down.tolist(), up.tolist(), rates, strict=True)
        ]

    def _latencies(self, points: FloatArray) -> Iterator[FloatArray]:
        """Yield each client's latencies; points have the shape (n, 3) for all clients, or (n, num_clients, 3)."""
        for k, distance in enumerate(self._distances_km(range(self.num_clients))):
            own = points if points.ndim == 2 else points[:, k]
            # Rayleigh fading: the power is Exp(1), here drawn with its inverse distribution function.
            gain_down, gain_up = -np.log1p(-own[:, 0]), -np.log1p(-own[:, 1])
            low, high = computing_rate_bounds(k, self.num_clients, step=self.computing_step)
            down = self.downlink.transfer_time(self.payload_down_bits, distance, gain_down)  # (32)
            up = self.uplink.transfer_time(self.payload_up_bits, distance, gain_up)  # (34)
            computing = self.samples_per_round / (low + (high - low) * own[:, 2])  # (36)
            yield down + computing + up

    def _energy_j(self, delays: RoundDelays, busy: float) -> float:
        """Return the joules of processor and sending radio; the access point pays for the downlink."""
        airtime = min(max(self.max_latency_s - delays.download_s - busy, 0.0), delays.upload_s)
        frequency_hz = delays.computing_rate * self.cycles_per_sample
        # cycles_per_sample x samples_per_round, if the time is the model's.
        cycles = frequency_hz * busy
        radio = float(self.uplink.transmit_energy(airtime))
        return radio + cpu_energy(cycles, frequency_hz, self.effective_capacitance)

    @property
    def _min_distance_km(self) -> float:
        return min(self.downlink.min_distance_km, self.uplink.min_distance_km)


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
