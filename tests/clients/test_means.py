"""True mean latencies against the mean of many rounds as they are drawn in a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.device import mean_latencies, quasirandom_points
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.system import SystemModel

CELL = SystemModel(num_clients=8, seed=3)
NARROW = SystemModel(num_clients=8, seed=3, payload_up_bits=50_000.0, max_latency_s=2.0)
PHONES = PhoneModel(num_clients=8, seed=3, examples=range(50, 90, 5), payload_bits=2e7, max_latency_s=25.0)
WILD = PhoneModel(num_clients=8, seed=4, examples=[100] * 8, payload_bits=8e7, compute_round_cv=1.0, max_latency_s=30.0)


@pytest.mark.parametrize("system", [CELL, NARROW, PHONES, WILD])
def test_as_the_mean_of_many_rounds(system: Any) -> None:
    rounds = 600
    seen = np.array(
        [
            [min(d.download_s + d.compute_s + d.upload_s, system.max_latency_s) for d in system.draws(range(8), t)]
            for t in range(1, rounds + 1)
        ]
    )
    error = seen.std(axis=0, ddof=1) / np.sqrt(rounds)
    assert (np.abs(mean_latencies(system) - seen.mean(axis=0)) <= 4 * error).all()  # eight clients, one in 2,000 runs


def test_the_deadline_caps_the_mean() -> None:
    late = PhoneModel(num_clients=2, seed=1, examples=[10_000, 1], payload_bits=8.0, max_latency_s=5.0)
    means = mean_latencies(late)
    assert means[0] == 5.0
    assert means[1] < 2.0


def test_the_points_are_even_and_inside() -> None:
    points = quasirandom_points()
    assert points.shape == (4096, 3)
    assert 0 < points.min() < points.max() < 1
    np.testing.assert_allclose(points.mean(axis=0), 0.5, atol=1e-3)
    np.testing.assert_allclose((points[:, 0] * points[:, 2]).mean(), 0.25, atol=2e-3)
