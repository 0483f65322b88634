"""Wireless cell of Xia et al.: an OFDMA channel, distances and fading, and the time of a round. NumPy only.

A channel has path loss, rate, transfer time and radio energy. The cell draws the clients' distances to the access point
and the fading of their channels. More clients than channels share them in waves.

References:
    W. Xia, T. Q. S. Quek, K. Guo, W. Wen, H. H. Yang and H. Zhu, "Multi-armed bandit-based client scheduling for
    federated learning", IEEE Transactions on Wireless Communications, 2020, section V.

============  ========================================================================================
paper         here
============  ========================================================================================
B             ``bandwidth_hz``
p, p^D, p^U   ``transmit_power_dbm``
sigma^2       ``noise_power_dbm``, the total over one channel: it does not grow with the bandwidth
abs(h)^2      path gain x ``fading_power``
PL(d)         ``path_loss_db``
m_0, m_k      ``bits``
R             ``rate``
tau^D, tau^U  ``transfer_time``
============  ========================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedsel_flwr.checks import FloatArray, real, whole
from fedsel_flwr.errors import ParameterError

__all__ = ["OFDMAChannel", "finish_times", "rayleigh_power", "round_time", "uniform_disc"]

_ABOVE_ZERO = frozenset({"bandwidth_hz", "min_distance_km"})
_NOT_NEGATIVE = frozenset({"path_loss_slope_db"})


@dataclass(frozen=True, kw_only=True)
class OFDMAChannel:
    """Channel between a client and its access point; the defaults are Xia's, except `min_distance_km`.

    Every method takes scalars or arrays that broadcast against each other. It returns an array of the common shape, or
    a NumPy float if all inputs are scalars. Array calls return exactly the numbers of single calls.

    Deviations: a distance below `min_distance_km` counts as `min_distance_km`; the paper's path loss has no limit at 0.

    Args:
        bandwidth_hz: Bandwidth of the channel, Hz.
        transmit_power_dbm: Power of the sender, dBm.
        noise_power_dbm: Total noise power in the channel, dBm.
        path_loss_at_1km_db: Path loss at a distance of 1 km, dB.
        path_loss_slope_db: Increase of the path loss with every tenfold distance, dB.
        min_distance_km: Smallest distance, km; shorter distances count as this distance.

    Raises:
        ParameterError: If a value is not a finite number or outside its range; the message names the field.

    References:
        Xia et al., section V.

    Example:
        >>> channel = OFDMAChannel()
        >>> round(10 * float(np.log10(channel.snr(0.25, 1.0))), 3)
        24.537
        >>> round(float(channel.rate(0.25, 1.0)), 3)
        8.156
        >>> round(1000 * float(channel.transfer_time(5000, 0.25, 1.0)), 2)
        40.87
    """

    bandwidth_hz: float = 15e3
    transmit_power_dbm: float = 23.0
    noise_power_dbm: float = -107.0
    path_loss_at_1km_db: float = 128.1
    path_loss_slope_db: float = 37.6
    min_distance_km: float = 0.001

    def __post_init__(self) -> None:
        """Check every field."""
        for name, value in vars(self).items():
            above, at_least = (0.0 if name in names else None for names in (_ABOVE_ZERO, _NOT_NEGATIVE))
            real(name, value, above=above, at_least=at_least)

    @property
    def transmit_power_w(self) -> float:
        """Power of the sender, W."""
        return float(10.0 ** ((self.transmit_power_dbm - 30.0) / 10.0))

    def path_loss_db(self, distance_km: ArrayLike) -> FloatArray:
        """Return the path loss.

        Args:
            distance_km: Distance between sender and receiver, km, at least 0.

        Returns:
            Path loss in dB.

        Raises:
            ParameterError: If a distance is negative or not a number.
        """
        distance = np.maximum(_not_negative("distance_km", distance_km), self.min_distance_km)
        return self.path_loss_at_1km_db + self.path_loss_slope_db * np.log10(distance)  # section V-A

    def snr(self, distance_km: ArrayLike, fading_power: ArrayLike) -> FloatArray:
        """Return the signal-to-noise ratio at the receiver.

        Args:
            distance_km: Distance between sender and receiver, km, at least 0.
            fading_power: Power of the small-scale fading, at least 0, with mean 1 (see `rayleigh_power`).

        Returns:
            Signal-to-noise ratio, linear (not in dB).

        Raises:
            ParameterError: If an input is negative or not a number.
        """
        fading = _not_negative("fading_power", fading_power)
        mean_db = self.transmit_power_dbm - self.path_loss_db(distance_km) - self.noise_power_dbm
        return _ratio(mean_db) * fading  # p |h|^2 / sigma^2 in (33), (35)

    def rate(self, distance_km: ArrayLike, fading_power: ArrayLike) -> FloatArray:
        """Return the rate per bandwidth.

        Args:
            distance_km: Distance between sender and receiver, km, at least 0.
            fading_power: Power of the small-scale fading, at least 0.

        Returns:
            Spectral efficiency in bit/s/Hz; 0 if the fading is 0.

        Raises:
            ParameterError: If an input is negative or not a number.
        """
        # log1p keeps the rate of a deep fade above 0, at which log2(1 + snr) rounds to 0.
        nats = np.log1p(self.snr(distance_km, fading_power))
        return nats / math.log(2.0)  # (33), (35)

    def transfer_time(self, bits: ArrayLike, distance_km: ArrayLike, fading_power: ArrayLike) -> FloatArray:
        """Return the transfer time of a payload.

        Args:
            bits: Size of the payload, bit, at least 0.
            distance_km: Distance between sender and receiver, km, at least 0.
            fading_power: Power of the small-scale fading, at least 0.

        Returns:
            Seconds; infinite if the rate is 0, and 0 for an empty payload.

        Raises:
            ParameterError: If an input is negative or not a number.
        """
        size = _not_negative("bits", bits)
        speed = self.bandwidth_hz * self.rate(distance_km, fading_power)  # bit/s
        # A rate of 0 makes the time infinite, and an empty payload over it NaN, which the last line replaces.
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            seconds = size / speed  # (32), (34)
        return np.where(size > 0, seconds, 0.0)[()]

    def transmit_energy(self, airtime_s: ArrayLike) -> FloatArray:
        """Return the energy of the sender's radio. The formula is ours, because no paper defines joules.

        Args:
            airtime_s: Time spent sending, s, at least 0.

        Returns:
            Energy in J: transmit power x airtime.

        Raises:
            ParameterError: If an airtime is negative or not a number.
        """
        return self.transmit_power_w * _not_negative("airtime_s", airtime_s)


def _ratio(decibels: FloatArray) -> FloatArray:
    """Return decibels as a ratio."""
    # Number by number, because NumPy's power of an array may round differently from that of a single number.
    exponents = np.asarray(decibels / 10.0)
    powers = [10.0**exponent for exponent in exponents.ravel()]
    return np.array(powers, dtype=np.float64).reshape(exponents.shape)[()]


def _not_negative(name: str, value: ArrayLike) -> FloatArray:
    """Return numbers of at least 0 as a float array."""
    # Common case without the cost of an array: a client computes its own times.
    if type(value) is float and value >= 0.0:
        return np.float64(value)
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{name} must hold numbers, got {value!r}. Give a number or an array of them") from error
    if not np.all(array >= 0):
        raise ParameterError(f"{name} must be at least 0 and not NaN, got {value!r}. Remove the values that are not")
    return array


def uniform_disc(
    generator: np.random.Generator,
    *,
    radius_km: float = 0.5,
    min_distance_km: float = 0.001,
    size: int | tuple[int, ...] | None = None,
) -> FloatArray:
    """Draw the distances from the centre for points that are uniform over a disc.

    A point is within d of the centre with probability (d / radius)^2, so the distance is radius x sqrt(U[0, 1)).

    Args:
        generator: Source of randomness; it advances.
        radius_km: Radius of the disc, km.
        min_distance_km: Smallest distance, km, at most `radius_km`; nearer points move out to it.
        size: Shape of the draws; None draws one number.

    Returns:
        Distances in km.

    Raises:
        ParameterError: Unless 0 <= min_distance_km <= radius_km, both finite, and radius_km > 0.

    References:
        Xia et al., section V-A; the smallest distance is ours.

    Example:
        >>> distance = uniform_disc(np.random.default_rng(1), size=100_000)
        >>> round(float((distance < 0.25).mean()), 2)
        0.25
    """
    if not (math.isfinite(radius_km) and radius_km > 0):
        raise ParameterError(f"radius_km must be a finite number above 0, got {radius_km!r}. Give the disc's radius")
    if not 0 <= min_distance_km <= radius_km:
        raise ParameterError(
            f"min_distance_km must lie between 0 and radius_km = {radius_km!r}, got {min_distance_km!r}. "
            "Lower it or enlarge the disc"
        )
    return np.maximum(radius_km * np.sqrt(generator.random(size)), min_distance_km)


def rayleigh_power(generator: np.random.Generator, size: int | tuple[int, ...] | None = None) -> FloatArray:
    """Draw the power of Rayleigh fading: exponential with mean 1.

    Args:
        generator: Source of randomness; it advances.
        size: Shape of the draws; None draws one number.

    Returns:
        Fading power, dimensionless.

    References:
        Xia et al., section V-A: "Rayleigh distribution with uniform variance". The square of a Rayleigh amplitude is
        exponential. With a mean of 1, the path loss alone sets the average gain.

    Example:
        >>> draws = rayleigh_power(np.random.default_rng(1), 100_000)
        >>> round(float(draws.mean()), 2)
        1.0
    """
    return np.asarray(generator.standard_exponential(size))[()]


def round_time(latency_s: ArrayLike, channels: int) -> float:
    """Return the time of one round.

    A round waits for its slowest client. Xia selects as many clients as there are channels. A larger cohort (ours) runs
    in waves of `channels` clients, in the order of the array. A wave starts when the previous wave has ended.

    Args:
        latency_s: Seconds of each client of the cohort, shape (n,), already capped at the deadline.
        channels: Number of clients that can transmit at the same time, at least 1.

    Returns:
        Seconds: the sum of the waves' maxima; 0 for an empty cohort.

    Raises:
        ParameterError: If a latency is negative or not finite, the shape is wrong, or `channels` is below 1.

    References:
        Xia et al., "Multi-armed bandit-based client scheduling for federated learning", equation (7).

    Example:
        >>> round_time([1.0, 3.0, 2.0], 2)
        5.0
    """
    latency, width = _checked(latency_s, channels)
    if latency.size == 0:
        return 0.0
    return float(_slowest_per_wave(latency, width).sum())


def finish_times(latency_s: ArrayLike, channels: int) -> FloatArray:
    """Return the time at which each client of a cohort finishes.

    Args:
        latency_s: Seconds of each client of the cohort, shape (n,), already capped at the deadline.
        channels: Number of clients that can transmit at the same time, at least 1.

    Returns:
        Seconds from the start of the round, shape (n,): the time of the earlier waves plus the client's latency. The
        latest of these times is the result of :func:`round_time`.

    Raises:
        ParameterError: As for :func:`round_time`.

    Example:
        >>> finish_times([1.0, 3.0, 2.0], 2).tolist()
        [1.0, 3.0, 5.0]
    """
    latency, width = _checked(latency_s, channels)
    if latency.size == 0:
        return latency
    ends = np.cumsum(_slowest_per_wave(latency, width))
    starts = np.concatenate([[0.0], ends[:-1]])
    return np.asarray(starts[np.arange(latency.size) // width] + latency)


def _slowest_per_wave(latency: FloatArray, width: int) -> FloatArray:
    """Return each wave's largest latency."""
    return np.asarray(np.maximum.reduceat(latency, np.arange(0, latency.size, width)))  # (7), once per wave


def _checked(latency_s: ArrayLike, channels: int) -> tuple[FloatArray, int]:
    """Check both arguments and convert them."""
    latency = np.asarray(latency_s, dtype=np.float64)
    if latency.ndim != 1:
        raise ParameterError(f"latency_s must have shape (n,), got {latency.shape}. Give one number per client")
    if not np.all(np.isfinite(latency) & (latency >= 0)):
        raise ParameterError(f"latency_s must be finite and at least 0, got {latency_s!r}. Cap it at the deadline")
    return latency, whole("channels", channels, 1)
