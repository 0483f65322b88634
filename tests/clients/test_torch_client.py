"""The torch client: what it reports, where its time and energy come from, and that nothing depends on the order."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.system import SystemModel
from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.wireless import OFDMAChannel
from tests.clients.helpers import DELAYS, FREQUENCY, SYSTEM, WATT, Clock, same

METRICS = {"latency_s", "energy_j", "energy_modelled", "download_s", "compute_s", "upload_s", "train_loss", "client_id"}
INPUTS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
LABELS = np.arange(12) % 4
GLOBAL = [np.full((4, 3), 0.05, dtype=np.float32), np.zeros(4, dtype=np.float32)]


def client(partition_id: int = 3, *, system: SystemModel = SYSTEM, model: nn.Module | None = None, **how: Any) -> Any:
    """A client with twelve examples of four classes, trained by three steps of four."""
    settings = TrainingSettings(learning_rate=0.1, batch_size=4)
    return TorchClient(
        partition_id=partition_id, model=model or nn.Linear(3, 4), inputs=INPUTS, labels=LABELS, settings=settings,
        system=system, **{"latency_mode": "model"} | how,
    )  # fmt: skip


def metrics_of(**how: Any) -> Any:
    """What client 3 reports of round 2."""
    return client(**how).fit(GLOBAL, {"round": 2})[2]


@pytest.mark.parametrize("mode", ["model", "measured"])
def test_metrics_are_those_of_the_design(mode: str) -> None:
    _, count, metrics = client(latency_mode=mode).fit(GLOBAL, {"round": 2})
    assert metrics.keys() == METRICS
    assert (count, metrics["client_id"], metrics["energy_modelled"]) == (12, 3, 1)
    assert all(type(metrics[key]) in (int, float) for key in METRICS)  # what Flower's messages can carry
    assert metrics["latency_s"] == metrics["download_s"] + metrics["compute_s"] + metrics["upload_s"]
    assert 0.5 < metrics["train_loss"] < 2.5  # four classes: ln 4 = 1.386 before training
    assert 0 < metrics["compute_s"] < 60


def test_modelled_times_and_joules_are_the_draw_of_the_system() -> None:
    """Joules: transmit power x airtime, and 1e-28 F x cycles x f^2 with 1e7 cycles for each of two samples."""
    for k, round in [(0, 1), (3, 2), (19, 40)]:
        delays = SYSTEM.draw(k, round)
        metrics = client(k).fit(GLOBAL, {"round": round})[2]
        reported = [metrics[key] for key in ("download_s", "compute_s", "upload_s")]
        assert reported == [delays.download_s, delays.compute_s, delays.upload_s]
        assert metrics["energy_j"] == SYSTEM.energy_j(delays)
    assert metrics_of()["energy_j"] == pytest.approx(WATT * DELAYS.upload_s + 1e-28 * 2e7 * FREQUENCY**2, rel=1e-12)


def test_measured_are_the_seconds_of_training_and_its_joules(clock: Clock) -> None:
    """The processor runs at its clock frequency for the measured 0.75 s; the model looks at no clock."""
    clock.lasting(train=0.75)
    metrics = metrics_of(latency_mode="measured")
    assert (metrics["download_s"], metrics["compute_s"], metrics["upload_s"]) == (
        DELAYS.download_s, 0.75, DELAYS.upload_s,
    )  # fmt: skip
    expected = WATT * DELAYS.upload_s + 1e-28 * (0.75 * FREQUENCY) * FREQUENCY**2
    assert metrics["energy_j"] == pytest.approx(expected, rel=1e-12)
    assert metrics_of()["compute_s"] == DELAYS.compute_s
    assert clock.naps == []  # virtual delays are not waited for


@pytest.mark.parametrize(
    ("mode", "options", "left"),
    [
        ("model", {}, lambda metrics: metrics["latency_s"] - 0.01),
        ("measured", {}, lambda metrics: metrics["download_s"] + metrics["upload_s"]),
        ("model", {"payload_up_bits": 1e9, "max_latency_s": 0.1}, lambda metrics: 0.1 - 0.01),
    ],
    ids=["modelled", "measured", "until the deadline"],
)
def test_sleep_lasts_as_long_as_reported(clock: Clock, mode: str, options: dict[str, Any], left: Any) -> None:
    """And measured training is not counted twice."""
    clock.lasting(train=0.01)
    metrics = metrics_of(system=SystemModel(num_clients=20, seed=7, **options), latency_mode=mode, delay="sleep")
    assert clock.naps == [pytest.approx(left(metrics))]
    if options:
        assert metrics["latency_s"] > 1000


def test_a_channel_that_carries_nothing_gives_infinite_latency_and_finite_energy() -> None:
    metrics = metrics_of(system=SystemModel(num_clients=20, seed=7, downlink=OFDMAChannel(noise_power_dbm=4000.0)))
    assert metrics["latency_s"] == metrics["download_s"] == math.inf
    assert metrics["energy_j"] == pytest.approx(2e7 * 1e-28 * FREQUENCY**2)


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
    assert len({astuple(SYSTEM.draw(*pair)) for pair in pairs}) == len(pairs)
    assert not same(outcomes[0][3, 1][0], outcomes[0][3, 2][0])  # another order of the data


class Drifting(nn.Module):
    """Shifts its inputs by a running mean that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(3, 4), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.layer(x - self.mean)


def test_what_a_module_remembers_does_not_reach_the_next_client_or_evaluation() -> None:
    """The clients of a process share one module."""
    model = Drifting()
    alone, before = client(3, model=Drifting()), client(3, model=Drifting()).evaluate(GLOBAL, {})
    client(0, model=model).fit(GLOBAL, {"round": 1})
    after = client(3, model=model)
    assert same(after.fit(GLOBAL, {"round": 1})[0], alone.fit(GLOBAL, {"round": 1})[0])
    assert after.evaluate(GLOBAL, {}) == before


def test_nothing_is_shared_with_the_caller_and_no_global_random_state_moves() -> None:
    one = client()  # building the model draws from torch's state
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    received = [array.copy() for array in GLOBAL]
    first = one.fit(received, {"round": 1})[0]
    kept = [array.copy() for array in first]
    assert same(received, GLOBAL)
    assert not same(first, GLOBAL)  # it did train
    one.fit(received, {"round": 2})
    assert same(first, kept)  # the answer of round 1 is not the scratch model
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


@pytest.mark.parametrize("config", [{}, {"round": "2"}, {"round": 2.0}, {"round": True}, {"server_round": 2}])
def test_fit_without_a_round_says_what_is_missing(config: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"config must carry the absolute round"):
        client().fit(GLOBAL, config)


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"latency_mode must .*measured, model, got 'guess'"):
        client(latency_mode="guess")
    with pytest.raises(ParameterError, match=r"delay must .*virtual, sleep, got 'wait'"):
        client(delay="wait")


def test_evaluate_by_hand() -> None:
    """Zero weights: every class has probability 1/4, and the first class is predicted for all."""
    loss, count, metrics = client().evaluate([np.zeros_like(array) for array in GLOBAL], {})
    assert loss == pytest.approx(math.log(4), rel=1e-6)
    assert (count, metrics) == (12, {"accuracy": 0.25, "client_id": 3})
