"""The channel against numbers worked by hand from Xia et al., section V."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.wireless import OFDMAChannel

CHANNEL = OFDMAChannel()


def test_path_loss() -> None:
    """PL = 128.1 + 37.6 log10(d): 128.1 dB at 1 km, 37.6 dB less at 100 m, and at 1 m three decades less."""
    assert CHANNEL.path_loss_db(1.0) == pytest.approx(128.1, abs=1e-12)
    assert CHANNEL.path_loss_db(0.1) == pytest.approx(90.5, abs=1e-12)
    assert CHANNEL.path_loss_db(0.001) == pytest.approx(128.1 - 112.8, abs=1e-12)


def test_nearer_than_the_minimum_counts_as_the_minimum() -> None:
    """At the mast log10(0) would be minus infinity; the distance is 1 m there."""
    assert CHANNEL.path_loss_db(0.0) == CHANNEL.path_loss_db(0.0005) == CHANNEL.path_loss_db(0.001)
    assert OFDMAChannel(min_distance_km=0.1).path_loss_db(0.0) == pytest.approx(90.5, abs=1e-12)


def test_transmit_power_is_computed_never_rounded() -> None:
    """23 dBm = 10^2.3 mW = 199.526231… mW, not 200 mW."""
    assert CHANNEL.transmit_power_w == pytest.approx(0.19952623149688797, rel=1e-15)
    assert OFDMAChannel(transmit_power_dbm=30).transmit_power_w == 1.0


def test_snr_rate_and_time_at_250_m() -> None:
    """The chain at d = 0.25 km, fading 1.

    log10(0.25) = -0.60205999, so PL = 128.1 - 22.63745567 = 105.46254433 dB;
    SNR = 23 - 105.46254433 + 107 = 24.53745567 dB = 284.279 ;  R = log2(285.279) = 8.15623 bit/s/Hz;
    5000 bit / (15000 Hz x 8.15623) = 40.8686 ms.
    """
    assert 10 * math.log10(CHANNEL.snr(0.25, 1.0)) == pytest.approx(24.53745567, abs=1e-8)
    assert CHANNEL.rate(0.25, 1.0) == pytest.approx(math.log2(1 + 10**2.453745567), rel=1e-9)
    assert CHANNEL.rate(0.25, 1.0) == pytest.approx(8.156, abs=5e-4)
    assert CHANNEL.transfer_time(5000, 0.25, 1.0) == pytest.approx(0.04087, abs=5e-6)
    assert CHANNEL.transfer_time(5000, 0.25, 1.0) == pytest.approx(5000 / 15e3 / 8.156226, rel=1e-6)


def test_round_numbers() -> None:
    """Path loss 0 dB and equal powers: SNR = fading; 3 gives 2 bit/s/Hz, and 12 bit over 6 Hz take 1 s."""
    channel = OFDMAChannel(
        bandwidth_hz=6, transmit_power_dbm=0, noise_power_dbm=0, path_loss_at_1km_db=0, path_loss_slope_db=0
    )
    assert channel.snr(0.3, 3.0) == 3.0
    assert channel.rate(0.3, 3.0) == pytest.approx(2.0, rel=1e-15)
    assert channel.transfer_time(12, 0.3, 3.0) == pytest.approx(1.0, rel=1e-15)


def test_noise_is_the_total_of_the_channel() -> None:
    """Twice the bandwidth halves the time exactly: the noise is not rescaled with B."""
    wide = OFDMAChannel(bandwidth_hz=30e3)
    assert wide.rate(0.4, 0.7) == CHANNEL.rate(0.4, 0.7)
    assert wide.transfer_time(5000, 0.4, 0.7) == CHANNEL.transfer_time(5000, 0.4, 0.7) / 2


def test_no_signal_never_arrives_and_warns_nothing() -> None:
    """Fading 0: rate 0, time infinite; an empty payload still takes no time."""
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        assert CHANNEL.rate(0.5, 0.0) == 0.0
        assert CHANNEL.transfer_time(5000, 0.5, 0.0) == math.inf
        assert CHANNEL.transfer_time(0, 0.5, 0.0) == 0.0
        assert CHANNEL.transfer_time(5000, 0.5, 1e-312) == math.inf  # 1e310 s, past the largest double


def test_a_deep_fade_is_slow_but_finite() -> None:
    """At SNR 1e-18, 1 + SNR is 1 in doubles; ln(1 + x) = x gives R = 1e-18 / ln 2."""
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


def test_transmit_energy() -> None:
    """0.19952623 W for 5 s = 0.99763116 J."""
    assert CHANNEL.transmit_energy(5.0) == pytest.approx(0.9976311574844398, rel=1e-15)
    np.testing.assert_array_equal(CHANNEL.transmit_energy([0.0, math.inf]), [0.0, math.inf])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bandwidth_hz", 0),
        ("bandwidth_hz", -15e3),
        ("bandwidth_hz", True),
        ("transmit_power_dbm", math.inf),
        ("noise_power_dbm", "-107"),
        ("path_loss_at_1km_db", math.nan),
        ("path_loss_slope_db", -1),
        ("min_distance_km", 0.0),
    ],
)
def test_wrong_settings_name_the_field(name: str, value: Any) -> None:
    """One field at a time is wrong; the message starts with its name and shows the value."""
    with pytest.raises(ParameterError, match=rf"^{name} must be a finite number.*got {value!r}"):
        OFDMAChannel(**{name: value})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bits", (-1, 0.1, 1.0)),
        ("distance_km", (5000, [0.1, -0.1], 1.0)),
        ("fading_power", (5000, 0.1, math.nan)),
        ("fading_power", (5000, 0.1, "fast")),
    ],
)
def test_wrong_inputs_name_the_argument(name: str, arguments: tuple[Any, Any, Any]) -> None:
    """Negative, NaN and text are refused by name."""
    with pytest.raises(ParameterError, match=f"^{name} must"):
        CHANNEL.transfer_time(*arguments)
    with pytest.raises(ParameterError, match=r"^airtime_s must"):
        CHANNEL.transmit_energy(-1.0)


def test_frozen_and_keyword_only() -> None:
    """Settings cannot change behind a run's back, nor be swapped by position."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        CHANNEL.bandwidth_hz = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        OFDMAChannel(15e3)  # type: ignore[call-arg]
