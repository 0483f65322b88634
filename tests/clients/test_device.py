"""What every system model promises, of Xia's cell and of the phones; the phones' draws and joules by hand."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.device import RoundDelays, mean_latencies, probe_delays
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.clients.system import SystemModel
from fedsel_flwr.errors import ParameterError


def cell(num_clients: int = 8, seed: int = 3, **options: Any) -> SystemModel:
    return SystemModel(num_clients=num_clients, seed=seed, **options)


def phones(num_clients: int = 8, seed: int = 3, **options: Any) -> PhoneModel:
    options = {"examples": range(50, 50 + 5 * num_clients, 5), "payload_bits": 2e7} | options
    return PhoneModel(num_clients=num_clients, seed=seed, **options)


of_both = pytest.mark.parametrize("build", [cell, phones])


@of_both
def test_a_draw_is_the_same_alone_and_among_others_backwards_restarted_and_copied(build: Callable[..., Any]) -> None:
    """To the last bit: engines that draw a round's clients together and clients that draw alone report the same."""
    system = build(400)
    ids, rounds = [399, *range(100)], (1, 2, 5)
    forward = {t: system.draws(ids, t) for t in rounds}
    for other in (build(400), pickle.loads(pickle.dumps(system))):
        for t in reversed(rounds):
            assert forward[t][::-1] == [other.draw(k, t) for k in reversed(ids)]
    assert system.draws([], 5) == []
    assert build(400, seed=4).draw(0, 1) != system.draw(0, 1)


@of_both
@pytest.mark.parametrize("partition_id", [-1, 20])
def test_no_such_client(build: Callable[..., Any], partition_id: int) -> None:
    system = build(20)
    calls = [lambda: system.draw(partition_id, 1), lambda: system.draws([0, partition_id], 1)]
    if build is cell:
        calls.append(lambda: system.distance_km(partition_id))
    for call in calls:
        with pytest.raises(ParameterError, match=f"^partition_id must .* num_clients = 20, got {partition_id}"):
            call()


@of_both
def test_a_probe_costs_a_download_a_third_of_the_training_and_64_bit(build: Callable[..., Any]) -> None:
    """The answer is as short whatever the update's size."""
    system = build()
    whole, probe = system.draw(4, 2), probe_delays(system, system.draw(4, 2))
    expected = (whole.download_s, whole.compute_s / 3, whole.upload_s * 64 / system.payload_up_bits)
    assert dataclasses.astuple(probe)[:3] == pytest.approx(expected, rel=1e-12)
    assert probe.computing_rate == whole.computing_rate
    gradient = probe_delays(system, whole, forward_passes=3, bits=system.payload_up_bits)
    assert dataclasses.astuple(gradient) == pytest.approx(dataclasses.astuple(whole), rel=1e-12)


@of_both
@pytest.mark.parametrize("seconds", [-0.1, math.nan, math.inf])
def test_measured_seconds_must_be_seconds(build: Callable[..., Any], seconds: float) -> None:
    with pytest.raises(ParameterError, match=r"^compute_s must"):
        build().energy_j(RoundDelays(0.1, 0.1, 0.1, 30.0), compute_s=seconds)


WRONG: dict[Any, dict[str, list[Any]]] = {
    cell: {
        "num_clients": [0, 20.5],
        "seed": [-1, None],
        "downlink": [None],
        "uplink": [15e3],
        "radius_km": [0, 0.0005],  # below the channels' 1 m
        "payload_down_bits": [-5000],
        "payload_up_bits": [math.inf],
        "samples_per_round": [0],
        "computing_step": ["20"],
        "cycles_per_sample": [-1.0],
        "effective_capacitance": [math.nan],
        "max_latency_s": [0.0],
    },
    phones: {
        "num_clients": [0],
        "seed": [-1],
        "payload_bits": [0.0],
        "seconds_per_example": [math.nan],
        "upload_bytes_per_s": [-1.0],
        "max_latency_s": [0.0],
        "compute_log_sd": [-0.1],
        "radio_power_w": [math.inf],
        "examples": [[1, 2], np.zeros(8), ["a"] * 8],
    },
}


@of_both
def test_wrong_settings_name_the_field(build: Callable[..., Any]) -> None:
    for name, values in WRONG[build].items():
        for value in values:
            with pytest.raises(ParameterError, match=rf"^{name} must .*got ({re.escape(repr(value))}|shape)"):
                build(**{name: value})


# ---- true means ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "system",
    [
        cell(),
        cell(payload_up_bits=50_000.0, max_latency_s=2.0),
        phones(max_latency_s=25.0),
        phones(seed=4, examples=[100] * 8, payload_bits=8e7, compute_round_cv=1.0, max_latency_s=30.0),
    ],
    ids=["cell", "narrow", "phones", "wild"],
)
def test_mean_latencies_are_the_mean_of_many_rounds(system: Any) -> None:
    rounds = 600
    drawn = [[dataclasses.astuple(d)[:3] for d in system.draws(range(8), t)] for t in range(1, rounds + 1)]
    seen = np.minimum(np.sum(drawn, axis=2), system.max_latency_s)
    error = seen.std(axis=0, ddof=1) / np.sqrt(rounds)
    assert (np.abs(mean_latencies(system) - seen.mean(axis=0)) <= 4 * error).all()  # eight clients, one in 2,000 runs


def test_the_deadline_caps_the_mean() -> None:
    late, early = mean_latencies(phones(2, examples=[10_000, 1], payload_bits=8.0, max_latency_s=5.0))
    assert late == 5.0
    assert early < 2.0


# ---- phones --------------------------------------------------------------------------------------------------------

CLIENTS = 4_000
MEGABYTE = 8e6
PHONES = PhoneModel(num_clients=CLIENTS, seed=3, examples=np.full(CLIENTS, 10), payload_bits=MEGABYTE)


def test_a_draw_by_hand() -> None:
    """Own and round's deviates in the order computing, down, up; sd of the round sqrt(ln(1 + cv^2)).

    sqrt(ln 1.16) = .385253, sqrt(ln 1.0009) = .0299933.
    """
    phones = PhoneModel(num_clients=3, seed=11, examples=(5, 7, 9), payload_bits=4e6, seconds_per_example=0.02)
    own = stream(11, "phone", 2).standard_normal(3)
    now = stream(11, "phone-round", 2, 4).standard_normal(3)
    drawn = phones.draw(2, 4)
    per_example = 0.02 * math.exp(0.78 * own[0] + 0.0299933 * now[0])
    assert drawn.compute_s == pytest.approx(9 * per_example, rel=1e-6)
    assert drawn.computing_rate == pytest.approx(1 / per_example, rel=1e-6)
    assert drawn.download_s == pytest.approx(0.5 / (4.3 * math.exp(0.47 * own[1] + 0.385253 * now[1])), rel=1e-6)
    assert drawn.upload_s == pytest.approx(0.5 / (3.3 * math.exp(0.68 * own[2] + 0.385253 * now[2])), rel=1e-6)


def test_without_spread_everybody_takes_the_medians() -> None:
    """1 MB over 4.3 and 3.3 MB/s, 10 examples of .172 s; 3 W x 1.72 s + 1 W x (.2326 + .3030) s = 5.6956 J."""
    spread = ("compute_log_sd", "compute_round_cv", "download_log_sd", "upload_log_sd", "network_round_cv")
    alike = dataclasses.replace(PHONES, **dict.fromkeys(spread, 0.0))
    for k, t in ((0, 1), (77, 9)):
        drawn = alike.draw(k, t)
        assert dataclasses.astuple(drawn) == pytest.approx((1 / 4.3, 1.72, 1 / 3.3, 1 / 0.172), rel=1e-12)
        assert alike.energy_j(drawn) == pytest.approx(5.16 + 1 / 4.3 + 1 / 3.3, rel=1e-12)


def test_a_phone_stays_itself_in_a_smaller_fleet() -> None:
    assert PhoneModel(num_clients=20, seed=3, examples=[10] * 20, payload_bits=MEGABYTE).draw(7, 2) == PHONES.draw(7, 2)


@pytest.mark.parametrize(
    ("download", "compute", "upload", "measured", "joules"),
    [
        (2.0, 5.0, 3.0, None, 3 * 5.0 + 2.0 + 3.0),
        (2.0, 5.0, 3.0, 7.0, 3 * 7.0 + 2.0 + 3.0),
        (2.0, 50.0, 30.0, None, 3 * 50.0 + 2.0 + 8.0),  # 60 s are over while it sends
        (20.0, 50.0, 3.0, None, 3 * 40.0 + 20.0),  # while it trains
        (70.0, 5.0, 3.0, None, 60.0),  # while it receives
        (math.inf, 5.0, math.inf, None, 60.0),
    ],
)
def test_joules_up_to_the_deadline(
    download: float, compute: float, upload: float, measured: float | None, joules: float
) -> None:
    """3 W of the processor, 1 W of the radio either way; everything ends after 60 s."""
    delays = RoundDelays(download_s=download, compute_s=compute, upload_s=upload, computing_rate=1.0)
    assert PHONES.energy_j(delays, measured) == pytest.approx(joules, rel=1e-12)
