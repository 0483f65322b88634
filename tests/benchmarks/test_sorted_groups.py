"""The benchmark of BSFL beside sorted groups counts what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.theory import sorted_groups
from tests.benchmarks.scripts import load

CLIENTS, M, ROUNDS = 20, 4, 60


@pytest.fixture(scope="module")
def script() -> Any:
    return load("sorted_groups")


@pytest.fixture(scope="module")
def system() -> PhoneModel:
    return PhoneModel(
        num_clients=CLIENTS, seed=3, examples=np.full(CLIENTS, 25), payload_bits=112e6, max_latency_s=60.0
    )


def test_sorted_groups_are_recounted(script: Any, system: PhoneModel) -> None:
    """Five groups in turn; the last quarter is three cycles, rounds 46 to 60."""
    groups, seconds = sorted_groups(mean_latencies(system), M), []
    for number in range(46, 61):
        parts = [system.draw(int(k), number) for k in groups[(number - 1) % 5]]
        seconds.append(max(min(60.0, part.download_s + part.compute_s + part.upload_s) for part in parts))
    (found,) = script.trial(system, script.GROUPS, M, [ROUNDS], seed=1)
    np.testing.assert_allclose(found, [np.mean(seconds), 1.0, 1.0, 1.0], rtol=1e-12)


def test_equal_shares_wait_longer_in_any_other_order(script: Any, system: PhoneModel) -> None:
    best = script.trial(system, script.GROUPS, M, [ROUNDS], seed=1)[0]
    turns = script.trial(system, "round-robin", M, [ROUNDS], seed=1)[0]
    assert turns[1] == best[1] == 1.0
    assert turns[0] > 1.1 * best[0]


def test_a_short_run_is_the_beginning_of_a_long_one(script: Any, system: PhoneModel) -> None:
    for name in script.SELECTORS:
        short, long = script.trial(system, name, M, [40, ROUNDS], seed=2)
        assert np.array_equal(short, script.trial(system, name, M, [40], seed=2)[0])
        assert not np.array_equal(short, long)
