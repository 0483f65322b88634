"""The channel worked by hand from Xia et al., section V, the random draws of the cell, and the time of a round."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.wireless import OFDMAChannel, rayleigh_power, round_time, uniform_disc

CHANNEL = OFDMAChannel()
DRAWS = 200_000


def test_path_loss() -> None:
    """PL = 128.1 + 37.6 log10(d): 37.6 dB less for each decade; below the minimum, 1 m, as at the minimum."""
    losses = {1.0: 128.1, 0.1: 90.5, 0.001: 15.3, 0.0005: 15.3, 0.0: 15.3}
    for distance, loss in losses.items():
        assert CHANNEL.path_loss_db(distance) == pytest.approx(loss, abs=1e-12)
    assert OFDMAChannel(min_distance_km=0.1).path_loss_db(0.0) == pytest.approx(90.5, abs=1e-12)


def test_transmit_power_and_energy() -> None:
    """23 dBm = 10^2.3 mW = 199.526231... mW, not 200 mW; times 5 s = .99763116 J."""
    assert CHANNEL.transmit_power_w == pytest.approx(0.19952623149688797, rel=1e-15)
    assert OFDMAChannel(transmit_power_dbm=30).transmit_power_w == 1.0
    assert CHANNEL.transmit_energy(5.0) == pytest.approx(0.9976311574844398, rel=1e-15)
    np.testing.assert_array_equal(CHANNEL.transmit_energy([0.0, math.inf]), [0.0, math.inf])


def test_snr_rate_and_time_at_250_m() -> None:
    """The chain at d = 0.25 km, fading 1.

    log10(0.25) = -0.60205999, so PL = 128.1 - 22.63745567 = 105.46254433 dB;
    SNR = 23 - 105.46254433 + 107 = 24.53745567 dB = 284.279 ;  R = log2(285.279) = 8.15623 bit/s/Hz;
    5000 bit / (15000 Hz x 8.15623) = 40.8686 ms. The noise is that of the whole channel: twice the bandwidth halves it.
    """
    assert 10 * math.log10(CHANNEL.snr(0.25, 1.0)) == pytest.approx(24.53745567, abs=1e-8)
    assert CHANNEL.rate(0.25, 1.0) == pytest.approx(math.log2(1 + 10**2.453745567), rel=1e-9)
    assert CHANNEL.transfer_time(5000, 0.25, 1.0) == pytest.approx(5000 / 15e3 / 8.156226, rel=1e-6)
    assert OFDMAChannel(bandwidth_hz=30e3).transfer_time(5000, 0.25, 1.0) == CHANNEL.transfer_time(5000, 0.25, 1.0) / 2


def test_no_signal_never_arrives_and_warns_nothing() -> None:
    """Fading 0: rate 0, time infinite; an empty payload still takes no time.

    At SNR 1e-18, 1 + SNR is 1 in doubles; ln(1 + x) = x gives R = 1e-18 / ln 2.
    """
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        assert CHANNEL.rate(0.5, 0.0) == 0.0
        assert CHANNEL.transfer_time(5000, 0.5, 0.0) == math.inf
        assert CHANNEL.transfer_time(0, 0.5, 0.0) == 0.0
        assert CHANNEL.transfer_time(5000, 0.5, 1e-312) == math.inf  # 1e310 s, past the largest double
    fading = 1e-18 / float(CHANNEL.snr(0.5, 1.0))
    assert CHANNEL.rate(0.5, fading) == pytest.approx(1e-18 / math.log(2), rel=1e-12)


def test_arrays_broadcast_and_stay_untouched() -> None:
    """Distances (3, 1) against fadings (2,) give (3, 2), each equal to its scalar; scalars give floats."""
    distance = np.array([[0.0], [0.1], [0.5]])
    fading = np.array([0.0, 2.0])
    time = CHANNEL.transfer_time(5000, distance, fading)
    assert time.shape == (3, 2)
    for i in range(3):
        for j in range(2):
            assert time[i, j] == CHANNEL.transfer_time(5000, distance[i, 0], fading[j])
    assert CHANNEL.rate(distance, 1.0).shape == (3, 1)
    assert distance[0, 0] == 0.0
    for value in (CHANNEL.path_loss_db(0.2), CHANNEL.snr(0.2, 1), CHANNEL.rate(0.2, 1), CHANNEL.transmit_energy(1)):
        assert isinstance(value, float)
    assert isinstance(CHANNEL.transfer_time(5000, 0.2, 1), float)


# ---- the cell's random draws -----------------------------------------------------------------------------------------


def test_uniform_over_the_area() -> None:
    """P(d < r) = (r/R)^2: half the radius holds a quarter; within 5 standard errors."""
    distance = uniform_disc(np.random.default_rng(3), size=DRAWS)
    assert 0.001 <= distance.min() < distance.max() < 0.5
    for share in (0.1, 0.5, 0.9):
        inside = share**2
        within = 5 * math.sqrt(inside * (1 - inside) / DRAWS)
        assert (distance < share * 0.5).mean() == pytest.approx(inside, abs=within)
    # With a minimum of half the radius, the inner quarter of the points stands on the minimum.
    far = uniform_disc(np.random.default_rng(3), radius_km=2.0, min_distance_km=1.0, size=10_000)
    assert far.min() == 1.0
    assert (far == 1.0).mean() == pytest.approx(0.25, abs=0.022)
    assert uniform_disc(np.random.default_rng(3), radius_km=1.0, min_distance_km=1.0) == 1.0


def test_one_draw_is_a_float() -> None:
    """R sqrt(u) with the generator's next u."""
    u = np.random.default_rng(9).random()
    drawn = uniform_disc(np.random.default_rng(9), radius_km=0.7)
    assert isinstance(drawn, float)
    assert drawn == pytest.approx(0.7 * math.sqrt(u), rel=1e-15)
    assert isinstance(rayleigh_power(np.random.default_rng(1)), float)
    assert rayleigh_power(np.random.default_rng(1), (2, 3)).shape == (2, 3)


def test_the_power_of_rayleigh_fading_is_unit_exponential() -> None:
    """|h|^2 of a complex normal h: mean 1, variance 1 and P(X > x) = e^-x, each within 5 standard errors."""
    power = rayleigh_power(np.random.default_rng(20), DRAWS)
    assert power.mean() == pytest.approx(1.0, abs=5 / math.sqrt(DRAWS))
    assert power.var() == pytest.approx(1.0, abs=5 * math.sqrt(8 / DRAWS))  # (mu4 - 1) / n = 8/n
    for x in (0.01, 0.5, 1.0, 3.0):
        tail = math.exp(-x)
        assert (power > x).mean() == pytest.approx(tail, abs=5 * math.sqrt(tail * (1 - tail) / DRAWS))


@pytest.mark.parametrize(
    ("latency", "channels", "seconds"),
    [
        ([], 3, 0.0),
        ([2.5], 1, 2.5),
        ([1.0, 4.0, 2.0], 3, 4.0),  # (7): the slowest
        ([1.0, 4.0, 2.0], 10, 4.0),
        ([1.0, 4.0, 2.0], 1, 7.0),  # one after another
        ([1.0, 4.0, 2.0, 3.0, 5.0], 2, 12.0),  # max(1,4) + max(2,3) + 5
        ([5.0, 4.0, 3.0, 2.0, 1.0], 2, 9.0),  # the order counts: 5 + 3 + 1
        ([0.0, 0.0], 1, 0.0),
    ],
)
def test_the_time_of_a_round_by_hand(latency: list[float], channels: int, seconds: float) -> None:
    assert round_time(latency, channels) == seconds
    assert isinstance(round_time(latency, channels), float)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def disc(**how: Any) -> Any:
    return uniform_disc(np.random.default_rng(1), **how)


@pytest.mark.parametrize(
    ("call", "name", "values"),
    [
        (OFDMAChannel, "bandwidth_hz", [0, -15e3, True]),
        (OFDMAChannel, "transmit_power_dbm", [math.inf]),
        (OFDMAChannel, "noise_power_dbm", ["-107"]),
        (OFDMAChannel, "path_loss_at_1km_db", [math.nan]),
        (OFDMAChannel, "path_loss_slope_db", [-1]),
        (OFDMAChannel, "min_distance_km", [0.0]),
        (partial(CHANNEL.transfer_time, distance_km=0.1, fading_power=1.0), "bits", [-1]),
        (partial(CHANNEL.transfer_time, 5000, fading_power=1.0), "distance_km", [[0.1, -0.1]]),
        (partial(CHANNEL.transfer_time, 5000, 0.1), "fading_power", [math.nan, "fast"]),
        (CHANNEL.transmit_energy, "airtime_s", [-1.0]),
        (disc, "radius_km", [0.0, math.nan, math.inf]),
        (partial(disc, radius_km=0.5), "min_distance_km", [0.6, -0.1, math.nan]),
        (partial(round_time, [1.0]), "channels", [0, -1, 2.5, "3", None]),
        (partial(round_time, []), "channels", [0, -1, 2.5, "3", None]),
        # It would poison the clock of the whole run.
        (partial(round_time, channels=2), "latency_s", [[-1.0], [math.nan, 1.0], [math.inf], [[1.0]], 1.0]),
    ],
)
def test_what_is_wrong_is_named(call: Any, name: str, values: list[Any]) -> None:
    for value in values:
        said = rf" .*got {value!r}" if call is OFDMAChannel else ""
        with pytest.raises(ParameterError, match=f"^{name} must{said}"):
            call(**{name: value})
