"""The phones: a draw by hand, the laws between and within clients, probes, joules and faults."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.device import RoundDelays, System, probe_delays
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.clients.training import train
from fedsel_flwr.clients.training_settings import TrainingSettings, examples_per_round
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds.architectures import build_model
from tests.processes import environment

CLIENTS = 10_000
MEGABYTE = 8e6
PHONES = PhoneModel(num_clients=CLIENTS, seed=3, examples=np.full(CLIENTS, 10), payload_bits=MEGABYTE)


def parts(draws: list[RoundDelays]) -> np.ndarray[Any, Any]:
    """Logarithms of download, training and upload, shape (3, n)."""
    return np.log([[d.download_s for d in draws], [d.compute_s for d in draws], [d.upload_s for d in draws]])


@pytest.fixture(scope="module")
def fleet() -> np.ndarray[Any, Any]:
    return parts(PHONES.draws(range(CLIENTS), 1))


def test_defaults_are_the_measured_figures() -> None:
    """932 phone models: 172 ms, log sd .78; FLASH's Wi-Fi: .47 and .68, medians 4.3 : 3.3, variation .4."""
    p = PHONES
    assert (p.seconds_per_example, p.compute_log_sd, p.compute_round_cv) == (0.172, 0.78, 0.03)
    assert (p.download_log_sd, p.upload_log_sd, p.network_round_cv) == (0.47, 0.68, 0.4)
    assert p.download_bytes_per_s / p.upload_bytes_per_s == pytest.approx(4.3 / 3.3)


def test_many_at_once_are_the_single_draws() -> None:
    ids = [CLIENTS - 1, *range(50)]
    assert PHONES.draws(ids, 5) == [PHONES.draw(k, 5) for k in ids]
    with pytest.raises(ParameterError, match=f"got {CLIENTS}"):
        PHONES.draws([0, CLIENTS], 5)


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
    for k, t in ((0, 1), (77, 1), (77, 9)):
        drawn = alike.draw(k, t)
        assert dataclasses.astuple(drawn) == pytest.approx((1 / 4.3, 1.72, 1 / 3.3, 1 / 0.172), rel=1e-12)
        assert alike.energy_j(drawn) == pytest.approx(5.16 + 1 / 4.3 + 1 / 3.3, rel=1e-12)


def test_medians_and_spreads_between_clients(fleet: np.ndarray[Any, Any]) -> None:
    """10,000 clients in one round; own and round's variances add. Median: 4 standard errors; sd: 4 / sqrt(2n)."""
    network = math.log(1 + 0.4**2)
    expected = [(1 / 4.3, 0.47**2 + network), (1.72, 0.78**2 + math.log(1 + 0.03**2)), (1 / 3.3, 0.68**2 + network)]
    for values, (median, variance) in zip(fleet, expected, strict=True):
        sd = math.sqrt(variance)
        assert np.median(values) == pytest.approx(math.log(median), abs=4 * 1.2533 * sd / math.sqrt(CLIENTS))
        assert values.std() == pytest.approx(sd, rel=4 / math.sqrt(2 * CLIENTS))
    ratio = math.exp(np.median(fleet[2]) - np.median(fleet[0]))
    assert ratio == pytest.approx(4.3 / 3.3, rel=0.05)


def test_spread_of_what_clients_keep() -> None:
    """Means over 40 rounds of 2,000 clients: log sd .78, .47, .68, but for 1/40 of the round's variance."""
    draws = np.array([parts([PHONES.draw(k, t) for t in range(1, 41)]).mean(axis=1) for k in range(2000)])
    for values, sd in zip(draws.T, (0.47, 0.78, 0.68), strict=True):
        assert values.std() == pytest.approx(sd, rel=4 / math.sqrt(2 * 2000) + 0.01)


def test_variation_within_a_client() -> None:
    """3,000 rounds of one client: coefficient of variation .4 of the network's seconds, .03 of the processor's."""
    within = np.exp(parts([PHONES.draw(5, t) for t in range(3000)]))
    for values, variation in zip(within, (0.4, 0.03, 0.4), strict=True):
        assert values.std() / values.mean() == pytest.approx(variation, rel=0.1)
    correlation = np.corrcoef(np.log(within))
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 4 / math.sqrt(3000)


def test_processor_downlink_and_uplink_are_independent(fleet: np.ndarray[Any, Any]) -> None:
    correlation = np.corrcoef(fleet)
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 4 / math.sqrt(CLIENTS)


def test_order_restart_and_copies_change_no_draw() -> None:
    names = [(k, t) for k in range(20) for t in range(1, 6)]
    forward = {name: PHONES.draw(*name) for name in names}
    copied = pickle.loads(pickle.dumps(PHONES))
    for name in reversed(names):
        assert forward[name] == dataclasses.replace(PHONES).draw(*name) == copied.draw(*name)
    assert dataclasses.replace(PHONES, seed=4).draw(0, 1) != forward[0, 1]
    fewer = PhoneModel(num_clients=20, seed=3, examples=[10] * 20, payload_bits=MEGABYTE)
    assert fewer.draw(7, 2) == forward[7, 2]  # a phone stays itself in a smaller fleet


def test_a_probe_costs_a_download_a_third_of_the_training_and_64_bit() -> None:
    whole, probe = PHONES.draw(4, 2), probe_delays(PHONES, PHONES.draw(4, 2))
    assert probe.download_s == whole.download_s
    assert probe.compute_s == pytest.approx(whole.compute_s / 3, rel=1e-12)
    assert probe.upload_s == pytest.approx(whole.upload_s * 64 / MEGABYTE, rel=1e-12)
    gradient = probe_delays(PHONES, whole, forward_passes=3, bits=PHONES.payload_up_bits)
    assert dataclasses.astuple(gradient) == pytest.approx(dataclasses.astuple(whole), rel=1e-12)


@pytest.mark.parametrize(
    ("download", "compute", "upload", "joules"),
    [
        (2.0, 5.0, 3.0, 3 * 5.0 + 2.0 + 3.0),
        (2.0, 50.0, 30.0, 3 * 50.0 + 2.0 + 8.0),  # 60 s are over while it sends
        (20.0, 50.0, 3.0, 3 * 40.0 + 20.0),  # while it trains
        (70.0, 5.0, 3.0, 60.0),  # while it receives
        (math.inf, 5.0, math.inf, 60.0),
    ],
)
def test_joules_up_to_the_deadline(download: float, compute: float, upload: float, joules: float) -> None:
    """3 W of the processor, 1 W of the radio either way; everything ends after 60 s."""
    delays = RoundDelays(download_s=download, compute_s=compute, upload_s=upload, computing_rate=1.0)
    assert PHONES.energy_j(delays) == pytest.approx(joules, rel=1e-12)
    if download == 2.0 and compute == 5.0:
        assert PHONES.energy_j(delays, 7.0) == pytest.approx(3 * 7.0 + 5.0, rel=1e-12)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_measured_seconds_must_be_seconds(seconds: float) -> None:
    with pytest.raises(ParameterError, match="compute_s must be finite and at least 0"):
        PHONES.energy_j(PHONES.draw(0, 1), seconds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_clients": 0}, "num_clients must be a whole number of at least 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"payload_bits": 0.0}, "payload_bits must be a finite number above 0"),
        ({"seconds_per_example": math.nan}, "seconds_per_example must be a finite number above 0"),
        ({"upload_bytes_per_s": -1.0}, "upload_bytes_per_s must be a finite number above 0"),
        ({"max_latency_s": 0.0}, "max_latency_s must be a finite number above 0"),
        ({"compute_log_sd": -0.1}, "compute_log_sd must be a finite number of at least 0"),
        ({"radio_power_w": math.inf}, "radio_power_w must be a finite number of at least 0"),
        ({"examples": [1, 2]}, r"a number above 0 for each of 10000 clients, got shape \(2,\)"),
        ({"examples": np.zeros(CLIENTS)}, "a number above 0 for each of 10000 clients"),
        ({"examples": ["a"] * CLIENTS}, "a number above 0 for each of 10000 clients"),
    ],
)
def test_faults_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        dataclasses.replace(PHONES, **change)


@pytest.mark.parametrize("partition_id", [-1, CLIENTS])
def test_there_is_no_other_client(partition_id: int) -> None:
    with pytest.raises(ParameterError, match=f"below num_clients = 10000, got {partition_id}"):
        PHONES.draw(partition_id, 1)


def test_it_needs_no_torch_and_is_a_system() -> None:
    system: System = PHONES
    assert system.payload_up_bits == MEGABYTE
    code = "import sys, fedsel_flwr.clients.phones; print(sorted({'torch', 'flwr', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "[]"


class Counting(np.ndarray[Any, Any]):
    """Inputs that count the rows that are taken from them."""

    taken = 0

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, np.ndarray):
            Counting.taken += len(rows)
        return np.asarray(self)[rows]


@pytest.mark.parametrize("size", [1, 3, 7, 8, 20])
@pytest.mark.parametrize("plan", [{"local_epochs": 3}, {"local_steps": 5}, {"local_steps": 1}, {"local_steps": 6}])
def test_examples_of_a_round_are_those_that_training_takes(size: int, plan: dict[str, int]) -> None:
    settings = TrainingSettings(learning_rate=0.1, batch_size=4, **plan)
    inputs = np.zeros((size, 1, 2, 2), dtype=np.float32).view(Counting)
    Counting.taken = 0
    labels = np.zeros(size, dtype=np.int64)
    train(build_model("logistic", (1, 2, 2), 2, 0), inputs, labels, settings, np.random.default_rng(0))
    assert examples_per_round(settings, np.array([size])).tolist() == [Counting.taken]
