"""The torch client: what it reports, where its time and energy come from, and that nothing depends on the order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flwr.common import Code, FitIns, GetPropertiesIns, ndarrays_to_parameters
from torch import nn

from fedsel_flwr.clients import torch_client
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.system import SystemModel
from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.wireless import OFDMAChannel

METRICS = {
    "latency_s", "energy_j", "energy_modelled", "download_s", "compute_s", "upload_s", "train_loss", "client_id",
}  # fmt: skip
SYSTEM = SystemModel(num_clients=20, seed=7)
WATT = 10**2.3 / 1000  # 23 dBm
INPUTS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
LABELS = np.arange(12) % 4
GLOBAL = [np.full((4, 3), 0.05, dtype=np.float32), np.zeros(4, dtype=np.float32)]


def client(partition_id: int = 3, *, system: SystemModel = SYSTEM, model: nn.Module | None = None, **how: Any) -> Any:
    """A client with twelve examples of four classes, trained by three steps of four."""
    how = {"latency_mode": "model"} | how
    return TorchClient(
        partition_id=partition_id,
        model=model or nn.Linear(3, 4),
        inputs=INPUTS,
        labels=LABELS,
        settings=TrainingSettings(learning_rate=0.1, batch_size=4),
        system=system,
        **how,
    )


def same(left: list[npt.NDArray[Any]], right: list[npt.NDArray[Any]]) -> bool:
    return [a.tobytes() for a in left] == [a.tobytes() for a in right]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replace training by a wait of known length."""

    def lasting(seconds: float) -> None:
        def train(*args: object) -> float:
            time.sleep(seconds)
            return 1.5

        monkeypatch.setattr(torch_client, "train", train)

    return lasting


@pytest.mark.parametrize("mode", ["model", "measured"])
def test_metrics_are_those_of_the_design(mode: str) -> None:
    _, count, metrics = client(latency_mode=mode).fit(GLOBAL, {"round": 2})
    assert metrics.keys() == METRICS
    assert (count, metrics["client_id"], metrics["energy_modelled"]) == (12, 3, 1)
    assert all(type(metrics[key]) in (int, float) for key in METRICS)  # what a MetricRecord can carry
    assert metrics["latency_s"] == metrics["download_s"] + metrics["compute_s"] + metrics["upload_s"]
    assert 0.5 < metrics["train_loss"] < 2.5  # four classes: ln 4 = 1.386 before training


def test_they_pass_through_flower() -> None:
    """Flower refuses metrics of other types when it turns the client's answer into a message."""
    flower = client().to_client()
    res = flower.fit(FitIns(parameters=ndarrays_to_parameters(GLOBAL), config={"round": 2}))
    assert (res.status.code, res.num_examples, set(res.metrics)) == (Code.OK, 12, METRICS)
    answer = flower.get_properties(GetPropertiesIns(config={}))
    assert (answer.status.code, answer.properties) == (Code.OK, {"client_id": 3, "num_examples": 12})


def test_properties_say_who_and_how_much() -> None:
    assert client(17).get_properties({}) == {"client_id": 17, "num_examples": 12}


def test_model_mode_is_the_draw_of_the_system() -> None:
    for k, round in [(0, 1), (3, 2), (19, 40)]:
        delays = SYSTEM.draw(k, round)
        metrics = client(k).fit(GLOBAL, {"round": round})[2]
        reported = [metrics[key] for key in ("download_s", "compute_s", "upload_s")]
        assert reported == [delays.download_s, delays.compute_s, delays.upload_s]
        assert metrics["energy_j"] == SYSTEM.energy_j(delays)


def test_model_mode_repeats_to_the_last_bit() -> None:
    first, again = client().fit(GLOBAL, {"round": 2}), client().fit(GLOBAL, {"round": 2})
    assert same(first[0], again[0])
    assert first[2] == again[2]
    other = client().fit(GLOBAL, {"round": 3})
    assert not same(first[0], other[0])  # another order of the data
    assert first[2]["download_s"] != other[2]["download_s"]


def test_measured_mode_reports_the_training_time_alone(training: Callable[[float], None]) -> None:
    training(0.05)
    start = time.perf_counter()
    metrics = client(latency_mode="measured").fit(GLOBAL, {"round": 2})[2]
    elapsed = time.perf_counter() - start
    assert 0.05 <= metrics["compute_s"] <= elapsed
    delays = SYSTEM.draw(3, 2)
    assert metrics["compute_s"] != delays.compute_s
    assert (metrics["download_s"], metrics["upload_s"]) == (delays.download_s, delays.upload_s)
    assert client().fit(GLOBAL, {"round": 2})[2]["compute_s"] == delays.compute_s  # the model looks at no clock


def test_measured_time_is_read_from_perf_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([100.0, 100.75])
    monkeypatch.setattr(torch_client, "train", lambda *args: 1.5)
    monkeypatch.setattr(torch_client.time, "perf_counter", lambda: next(readings))
    metrics = client(latency_mode="measured").fit(GLOBAL, {"round": 2})[2]
    monkeypatch.undo()
    assert metrics["compute_s"] == 0.75


def test_measured_training_takes_time() -> None:
    assert 0 < client(latency_mode="measured").fit(GLOBAL, {"round": 2})[2]["compute_s"] < 60


def test_energy_by_hand_in_model_mode() -> None:
    """Transmit power x airtime, and 1e-28 F x cycles x f^2 with 1e7 cycles for each of two samples."""
    delays = SYSTEM.draw(3, 2)
    frequency = 1e7 * delays.computing_rate
    metrics = client().fit(GLOBAL, {"round": 2})[2]
    assert metrics["energy_j"] == pytest.approx(WATT * delays.upload_s + 1e-28 * 2e7 * frequency**2, rel=1e-12)


def test_energy_by_hand_in_measured_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor runs at its clock frequency for the measured 0.75 s."""
    readings = iter([0.0, 0.75])
    monkeypatch.setattr(torch_client, "train", lambda *args: 1.5)
    monkeypatch.setattr(torch_client.time, "perf_counter", lambda: next(readings))
    metrics = client(latency_mode="measured").fit(GLOBAL, {"round": 2})[2]
    monkeypatch.undo()
    delays = SYSTEM.draw(3, 2)
    frequency = 1e7 * delays.computing_rate
    expected = WATT * delays.upload_s + 1e-28 * (0.75 * frequency) * frequency**2
    assert metrics["energy_j"] == pytest.approx(expected, rel=1e-12)


def test_sending_stops_at_the_deadline() -> None:
    """With a payload of 10 Mbit the upload would last minutes: 23 dBm until tau_max, no longer."""
    system = SystemModel(num_clients=20, seed=7, payload_up_bits=1e7, effective_capacitance=0.0)
    metrics = client(system=system).fit(GLOBAL, {"round": 2})[2]
    assert metrics["upload_s"] > 5
    assert metrics["latency_s"] > 5  # reported uncapped: the strategy tells a late client from a slow one
    airtime = 5 - metrics["download_s"] - metrics["compute_s"]
    assert metrics["energy_j"] == pytest.approx(WATT * airtime, rel=1e-12)


def test_sleep_lasts_as_long_as_reported() -> None:
    start = time.perf_counter()
    metrics = client(delay="sleep").fit(GLOBAL, {"round": 2})[2]
    elapsed = time.perf_counter() - start
    assert 0.05 < metrics["latency_s"] < 0.5
    assert metrics["latency_s"] - 1e-3 <= elapsed < metrics["latency_s"] + 1


def test_sleep_does_not_count_the_training_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    readings, naps = iter([100.0, 100.25]), list[float]()
    monkeypatch.setattr(torch_client, "train", lambda *args: 1.5)
    monkeypatch.setattr(torch_client.time, "perf_counter", lambda: next(readings))
    monkeypatch.setattr(torch_client.time, "sleep", naps.append)
    metrics = client(delay="sleep", latency_mode="measured").fit(GLOBAL, {"round": 2})[2]
    monkeypatch.undo()
    assert metrics["latency_s"] == metrics["download_s"] + 0.25 + metrics["upload_s"]
    assert naps == [pytest.approx(metrics["download_s"] + metrics["upload_s"])]


def test_sleep_ends_at_the_deadline() -> None:
    system = SystemModel(num_clients=20, seed=7, payload_up_bits=1e9, max_latency_s=0.1)
    start = time.perf_counter()
    metrics = client(system=system, delay="sleep").fit(GLOBAL, {"round": 2})[2]
    assert metrics["latency_s"] > 1000
    assert 0.099 <= time.perf_counter() - start < 2


@pytest.mark.parametrize("mode", ["model", "measured"])
def test_virtual_delays_are_not_waited_for(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(torch_client.time, "sleep", naps.append)
    assert client(latency_mode=mode).fit(GLOBAL, {"round": 2})[2]["latency_s"] > 0
    assert naps == []


def test_a_channel_that_carries_nothing_gives_infinite_latency_and_finite_energy() -> None:
    system = SystemModel(num_clients=20, seed=7, downlink=OFDMAChannel(noise_power_dbm=4000.0))
    metrics = client(system=system).fit(GLOBAL, {"round": 2})[2]
    assert metrics["latency_s"] == metrics["download_s"] == math.inf
    assert metrics["energy_j"] == pytest.approx(2e7 * 1e-28 * (1e7 * SYSTEM.draw(3, 2).computing_rate) ** 2)


def test_order_of_calls_changes_nothing() -> None:
    """One scratch model for all clients of a process, clients and rounds in any order."""
    model = nn.Linear(3, 4)
    pairs = [(k, round) for k in (0, 3, 19) for round in (1, 2, 7)]
    outcomes = []
    for order in (pairs, pairs[::-1], pairs[::2] + pairs[1::2]):
        outcomes.append({(k, r): client(k, model=model).fit(GLOBAL, {"round": r}) for k, r in order})
    for pair in pairs:
        first, *others = (outcome[pair] for outcome in outcomes)
        assert all(same(first[0], other[0]) and first[2] == other[2] for other in others)
    draws = {astuple(SYSTEM.draw(*pair)) for pair in pairs}
    assert len(draws) == len(pairs)


def test_nothing_is_shared_with_the_caller() -> None:
    one = client()
    received = [array.copy() for array in GLOBAL]
    first = one.fit(received, {"round": 1})[0]
    kept = [array.copy() for array in first]
    assert same(received, GLOBAL)
    assert not same(first, GLOBAL)  # it did train
    one.fit(received, {"round": 2})
    assert same(first, kept)  # the answer of round 1 is not the scratch model


def test_global_random_state_stays() -> None:
    one = client()  # building the model draws from torch's state
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    one.fit(GLOBAL, {"round": 2})
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


@pytest.mark.parametrize("config", [{}, {"round": "2"}, {"round": 2.0}, {"round": True}, {"server_round": 2}])
def test_fit_without_a_round_says_what_is_missing(config: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"config must carry the absolute round as an integer.*, got "):
        client().fit(GLOBAL, config)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"latency_mode": "guess"}, r"latency_mode must be one of measured, model, got 'guess'"),
        ({"delay": "wait"}, r"delay must be one of virtual, sleep, got 'wait'"),
    ],
)
def test_unknown_modes_are_refused(how: dict[str, str], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        client(**how)


def test_a_wrong_model_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"expected 2 arrays.*got 1"):
        client().fit(GLOBAL[:1], {"round": 1})


def test_evaluate_by_hand() -> None:
    """Zero weights: every class has probability 1/4, and the first class is predicted for all."""
    zeros = [np.zeros_like(array) for array in GLOBAL]
    loss, count, metrics = client().evaluate(zeros, {})
    assert loss == pytest.approx(math.log(4), rel=1e-6)
    assert (count, metrics) == (12, {"accuracy": 0.25, "client_id": 3})


def test_get_parameters_are_the_models() -> None:
    model = nn.Linear(3, 4)
    assert same(client(model=model).get_parameters({}), get_arrays(model))
