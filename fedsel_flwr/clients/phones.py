"""A fleet of phones as the system model of a run: log-normal speeds that vary from round to round.

References:
    [1] C. Yang et al., "Characterizing impacts of heterogeneity in federated learning upon large-scale smartphone
        data", WWW 2021 (FLASH): throughput of 19 Wi-Fi networks.
    [2] J. Zhang et al., "FLHetBench: benchmarking device and state heterogeneity in federated learning", CVPR 2024:
        training latency of 932 phone models.

| measured | here |
| --- | --- |
| [2]: median 172 ms, standard deviation of the logarithm .78 | `seconds_per_example`, `compute_log_sd` |
| [2]: repeated runs on one phone within a few per cent | `compute_round_cv` = .03 |
| [1]: downlink median 4,300, log sd .47 | `download_bytes_per_s`, `download_log_sd` |
| [1]: uplink median 3,300, log sd .68 | `upload_bytes_per_s`, `upload_log_sd` |
| [1]: coefficient of variation within one network .26-.47 | `network_round_cv` = .4 |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.device import RoundDelays, System
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class PhoneModel(System):
    """A fleet of phones that differ in processor and Wi-Fi, and slightly from round to round.

    Each client has its own median of the seconds per example and of its two throughputs, drawn once. In each round,
    each of these is multiplied by a factor with the median 1. The three medians and the three factors are log-normal
    and independent. Time to train: seconds per example x `examples` of the client. Transfers: the payload divided by
    the throughput.

    Deviations:
        * The measurements do not define the examples in a latency of [2]. One example is assumed.
        * The unit of [1] is unclear. kB/s is assumed, because FLASH's code divides that way. Its comment says kb/s.
        * The measurements do not relate fast phones to fast networks. Independence is assumed.
        * The distribution within a client is open. It is log-normal with the measured coefficient of variation.
        * Probe and energy are ours.

    Args:
        num_clients: Number of clients, with partition ids 0 … num_clients - 1.
        seed: Seed of the run, at least 0.
        examples: Number of examples that each client processes in a round, shape (num_clients,), see
            :func:`~fedsel_flwr.clients.training_settings.examples_per_round`.
        payload_bits: Size of the model, as sent and as returned, bit.
        seconds_per_example: Median over the phones of the time to train on an example, s.
        compute_log_sd: Standard deviation between phones of the logarithm of the seconds per example.
        compute_round_cv: Coefficient of variation of a phone's seconds per example from round to round.
        download_bytes_per_s: Median over the phones of the downlink's throughput, bytes/s.
        download_log_sd: Standard deviation between phones of the logarithm of the downlink's throughput.
        upload_bytes_per_s: Median over the phones of the uplink's throughput, bytes/s.
        upload_log_sd: Standard deviation between phones of the logarithm of the uplink's throughput.
        network_round_cv: Coefficient of variation of each throughput of a phone from round to round.
        compute_power_w: Power while computing, W.
        radio_power_w: Power while receiving or sending, W.
        max_latency_s: Client deadline, s.
        devices: Your own devices instead of drawn ones, shape (num_clients, 3): seconds per example, downlink and
            uplink in bytes/s of each client. None draws them from the medians above.

    Raises:
        ParameterError: If a value is outside its range; the message names the field.

    Example:
        >>> phones = PhoneModel(num_clients=2, seed=1, examples=(10, 20), payload_bits=8e6)
        >>> round(phones.draw(0, 1).compute_s, 3), round(phones.draw(0, 1).upload_s, 3)
        (2.163, 0.314)
    """

    examples: Sequence[float] | npt.NDArray[np.integer | np.floating]
    payload_bits: float
    seconds_per_example: float = 0.172
    compute_log_sd: float = 0.78
    compute_round_cv: float = 0.03
    download_bytes_per_s: float = 4.3e6
    download_log_sd: float = 0.47
    upload_bytes_per_s: float = 3.3e6
    upload_log_sd: float = 0.68
    network_round_cv: float = 0.4
    compute_power_w: float = 3.0
    radio_power_w: float = 1.0
    max_latency_s: float = 60.0
    devices: Sequence[Sequence[float]] | FloatArray | None = None
    may_be_zero: ClassVar[frozenset[str]] = frozenset({
        "compute_log_sd", "compute_round_cv", "download_log_sd", "upload_log_sd", "network_round_cv", "compute_power_w",
        "radio_power_w",
    })  # fmt: skip

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        examples = self._by_client("examples", self.examples, (), "a number of examples")
        object.__setattr__(self, "examples", tuple(examples.tolist()))
        if self.devices is not None:
            devices = self._by_client("devices", self.devices, (3,), "seconds per example, downlink and uplink")
            object.__setattr__(self, "devices", tuple(map(tuple, devices.tolist())))

    def _by_client(self, name: str, given: Any, shape: tuple[int, ...], what: str) -> FloatArray:
        """Return numbers of each client; refuse other shapes, and numbers that are not above 0."""
        values = np.asarray(given)
        fits = values.shape == (self.num_clients, *shape) and values.dtype.kind in "iuf"
        if not fits or not (np.isfinite(values) & (values > 0)).all():
            raise ParameterError(
                f"{name} must hold {what} above 0 for each of {self.num_clients} clients, got shape {values.shape} of "
                f"{values.dtype}. Give finite numbers for each client."
            )
        return values.astype(np.float64)

    @property
    def payload_up_bits(self) -> float:
        """Size of the update that a client sends, bit."""
        return self.payload_bits

    def _draws(self, partition_ids: Sequence[int], round: int) -> list[RoundDelays]:
        """Return :meth:`draws` of existing partitions."""
        factors = streams(self.seed, "phone-round", partition_ids, round)
        return [
            self._delays(k, own, now.standard_normal(3).tolist())
            for k, own, now in zip(partition_ids, self._own_draws(partition_ids), factors, strict=True)
        ]

    def _latencies(self, points: FloatArray) -> Iterator[FloatArray]:
        """Yield each phone's latencies; points have the shape (n, 3) for all phones, or (n, num_clients, 3)."""
        # Imported here, because a run needs no SciPy.
        from scipy.special import ndtri

        network_sd = _log_sd(self.network_round_cv)
        # Minus, because a throughput is a divisor.
        spread = [_log_sd(self.compute_round_cv), -network_sd, -network_sd]
        shared = np.exp(ndtri(points) * spread) if points.ndim == 2 else None
        for k, own in enumerate(self._own_draws(range(self.num_clients))):
            now = np.exp(ndtri(points[:, k]) * spread) if shared is None else shared
            usual = self._delays(k, own, [0.0, 0.0, 0.0])
            yield now @ [usual.compute_s, usual.download_s, usual.upload_s]

    def _own_draws(self, partition_ids: Sequence[int]) -> list[list[float]]:
        """Return the standard normal draws of the clients' own medians; zeros if ``devices`` sets the medians."""
        if self.devices is not None:
            return [[0.0, 0.0, 0.0]] * len(partition_ids)
        return [own.standard_normal(3).tolist() for own in streams(self.seed, "phone", partition_ids)]

    def _delays(self, k: int, own: list[float], now: list[float]) -> RoundDelays:
        """Return the delays of client k for standard normal draws of the client (``own``) and the round (``now``)."""
        medians = (self.seconds_per_example, self.download_bytes_per_s, self.upload_bytes_per_s)
        example_s, down, up = medians if self.devices is None else self.devices[k]
        network_sd = _log_sd(self.network_round_cv)
        seconds = example_s * math.exp(self.compute_log_sd * own[0] + _log_sd(self.compute_round_cv) * now[0])
        down *= math.exp(self.download_log_sd * own[1] + network_sd * now[1])
        up *= math.exp(self.upload_log_sd * own[2] + network_sd * now[2])
        return RoundDelays(
            download_s=self.payload_bits / 8 / down,
            compute_s=seconds * self.examples[k],
            upload_s=self.payload_bits / 8 / up,
            computing_rate=1 / seconds,
        )

    def _energy_j(self, delays: RoundDelays, busy: float) -> float:
        """Return power x seconds of the radio and of the processor: a phone receives, trains and sends."""
        received = min(delays.download_s, self.max_latency_s)
        trained = min(busy, self.max_latency_s - received)
        sent = min(delays.upload_s, self.max_latency_s - received - trained)
        return self.compute_power_w * trained + self.radio_power_w * (received + sent)


def _log_sd(variation: float) -> float:
    """Return the standard deviation of the logarithm of a log-normal variable with this coefficient of variation."""
    return math.sqrt(math.log1p(variation**2))
