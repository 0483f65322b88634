"""Xia's cell: golden draws, their distributions, computing rates, and energies worked by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fedsel_flwr.clients.device import RoundDelays, probe_delays
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.clients.system import SystemModel, computing_rate_bounds, cpu_energy
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.wireless import OFDMAChannel
from tests.clients.helpers import SYSTEM, WATT


@pytest.mark.parametrize(
    ("partition_id", "round_number", "distance", "energy", "delays"),
    [
        (0, 1, 0.39865900227484175, 0.012601383647817642,
         RoundDelays(0.05291234750465004, 0.06254102367583597, 0.06213144077900625, 31.979009655589337)),
        (19, 2, 0.4592308490472732, 0.022713820267969406,
         RoundDelays(0.07310778721072463, 0.008812217976184644, 0.06220669890508341, 226.9576178670428)),
    ],
)  # fmt: skip
def test_golden(partition_id: int, round_number: int, distance: float, energy: float, delays: RoundDelays) -> None:
    """Recorded draws of Xia's defaults; a change here changes every recorded run."""
    drawn = SYSTEM.draw(partition_id, round_number)
    assert SYSTEM.distance_km(partition_id) == pytest.approx(distance, rel=1e-12)
    assert dataclasses.astuple(drawn) == pytest.approx(dataclasses.astuple(delays), rel=1e-12)
    assert SYSTEM.energy_j(drawn) == pytest.approx(energy, rel=1e-12)


def test_delays_follow_from_the_streams() -> None:
    """(32), (34), (36) spelled out: fading down, then up, from "latency"; the rate from "computing"."""
    system = SystemModel(
        num_clients=3, seed=11, downlink=OFDMAChannel(bandwidth_hz=1e6), payload_down_bits=8e4, samples_per_round=5,
        radius_km=2.0,
    )  # fmt: skip
    d = 2.0 * math.sqrt(stream(11, "placement", 1).random())
    down, up = stream(11, "latency", 1, 4).standard_exponential(2)
    phi = stream(11, "computing", 1, 4).uniform(30, 50)  # k = 2
    gain = 10 ** (-(128.1 + 37.6 * math.log10(d)) / 10)
    noise = 10**-10.7 / 1000  # -107 dBm
    drawn = system.draw(1, 4)
    assert drawn.download_s == pytest.approx(8e4 / (1e6 * math.log2(1 + WATT * gain * down / noise)), rel=1e-10)
    assert drawn.upload_s == pytest.approx(5000 / (15e3 * math.log2(1 + WATT * gain * up / noise)), rel=1e-10)
    assert drawn.computing_rate == pytest.approx(phi, rel=1e-15)
    assert drawn.compute_s == 5 / drawn.computing_rate


def test_a_probe_by_hand() -> None:
    """Round 1 of client 0, whose delays test_golden records: .0529123 s down, .0625410 s training, .0621314 s up.

    Probe: .0529123 s; .0625410 / 3 = .0208470 s; 64 of 5,000 bit, .0621314 x .0128 = .000795282 s.
    Energy: .1995262 W x .000795282 s + 1e-28 x 2e7/3 x (31.979 x 1e7)^2 = 1.58680e-4 + 6.81771e-5 J.
    """
    probe = probe_delays(SYSTEM, SYSTEM.draw(0, 1))
    expected = (0.05291234750, 0.02084700789, 0.000795282442, 31.97900966)
    assert dataclasses.astuple(probe) == pytest.approx(expected, rel=1e-9)
    assert SYSTEM.energy_j(probe) == pytest.approx(2.26857e-4, rel=1e-5)


@pytest.mark.parametrize(
    ("download", "upload", "airtime"),
    [
        (0.1, 0.2, 0.2),
        (1.0, 10.0, 3.95),  # 5 - 1 - 0.05 are left for an upload of 10 s
        (1.0, 3.0, 3.0),
        (4.95, 3.0, 0.0),
        (6.0, 1.0, 0.0),  # the model came after the deadline: nothing was sent
        (1.0, math.inf, 3.95),  # a dead channel: sends until the deadline
        (math.inf, 1.0, 0.0),
        (math.inf, math.inf, 0.0),
    ],
)
def test_energy_until_the_deadline(download: float, upload: float, airtime: float) -> None:
    """tau_max = 5 s; radio .1995262 W x airtime; CPU .05 s at 40 x 1e7 = 4e8 Hz, 1e-28 x 2e7 x 1.6e17 = 3.2e-4 J."""
    delays = RoundDelays(download_s=download, compute_s=0.05, upload_s=upload, computing_rate=40.0)
    assert SYSTEM.energy_j(delays) == pytest.approx(WATT * airtime + 3.2e-4, rel=1e-9)


def test_energy_of_a_measured_computation() -> None:
    """Measured 2 s at 4e8 Hz: 8e8 cycles, 1e-28 x 8e8 x 1.6e17 = 0.0128 J; of 4 s upload 5 - 1 - 2 = 2 s are sent."""
    delays = RoundDelays(download_s=1.0, compute_s=0.05, upload_s=4.0, computing_rate=40.0)
    assert SYSTEM.energy_j(delays, compute_s=2.0) == pytest.approx(WATT * 2.0 + 0.0128, rel=1e-12)
    assert SYSTEM.energy_j(delays, compute_s=0.0) == pytest.approx(WATT * 4.0, rel=1e-12)


def test_energy_takes_the_power_of_the_uplink() -> None:
    """30 dBm up is 1 W, whatever the access point sends with."""
    system = SystemModel(num_clients=1, seed=0, uplink=OFDMAChannel(transmit_power_dbm=30), cycles_per_sample=0)
    assert system.energy_j(RoundDelays(0.1, 0.1, 0.25, 30.0)) == pytest.approx(0.25, rel=1e-12)


# ---- Xia's devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_clients", [1, 3, 20])
def test_up_to_twenty_clients_as_printed(num_clients: int) -> None:
    """k = 1 ... K: [(0.5k + 0.5) 20, (0.5k + 1.5) 20] = [10k + 10, 10k + 30], exactly."""
    for k in range(1, num_clients + 1):
        assert computing_rate_bounds(k - 1, num_clients) == (10.0 * k + 10, 10.0 * k + 30)


@pytest.mark.parametrize(
    ("index", "num_clients", "bounds"),
    [
        (0, 21, (20.0, 40.0)),  # k' = 1
        (10, 21, (115.0, 135.0)),  # k' = 1 + 19 x 10/20 = 10.5: (5.25 + 0.5) 20, (5.25 + 1.5) 20
        (20, 21, (210.0, 230.0)),  # k' = 20
        (499, 500, (210.0, 230.0)),
        (250, 500, (20 + 190 * 250 / 499, 40 + 190 * 250 / 499)),  # 10 k' + 10 with k' = 1 + 19 x 250/499
    ],
)
def test_more_than_twenty_clients_share_the_span(index: int, num_clients: int, bounds: tuple[float, float]) -> None:
    """The first and the last client are as fast as Xia's first and twentieth."""
    assert computing_rate_bounds(index, num_clients) == pytest.approx(bounds, rel=1e-14)


def test_step_scales_the_bounds() -> None:
    assert computing_rate_bounds(1, 20, step=1.0) == (1.5, 2.5)


@pytest.mark.parametrize(
    ("name", "index", "num_clients", "step"),
    [
        ("partition_id", -1, 20, 20.0),
        ("partition_id", 20, 20, 20.0),
        ("partition_id", 0, 0, 20.0),
        *[("step", 0, 20, step) for step in (0.0, -20.0, math.inf, math.nan)],
    ],
)
def test_wrong_bounds(name: str, index: int, num_clients: int, step: float) -> None:
    with pytest.raises(ParameterError, match=f"^{name} must "):
        computing_rate_bounds(index, num_clients, step=step)


def test_cpu_energy() -> None:
    """1e-28 F x 2e7 cycles x (1e9 Hz)^2 = 2e-3 J; four times as much at twice the frequency."""
    assert cpu_energy(2e7, 1e9, 1e-28) == pytest.approx(2e-3, rel=1e-14)
    assert cpu_energy(2e7, 2e9, 1e-28) == pytest.approx(8e-3, rel=1e-14)
    for name in ("cycles", "frequency_hz", "effective_capacitance"):
        for value in (-1.0, math.nan):
            with pytest.raises(ParameterError, match=f"^{name} must be at least 0"):
                cpu_energy(**{"cycles": 1.0, "frequency_hz": 1.0, "effective_capacitance": 1.0, name: value})
