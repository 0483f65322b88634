"""The time of a round, Xia (7), and of a cohort larger than the channels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.wireless import round_time


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
def test_by_hand(latency: list[float], channels: int, seconds: float) -> None:
    assert round_time(latency, channels) == seconds
    assert isinstance(round_time(latency, channels), float)


def test_against_a_plain_loop() -> None:
    generator = np.random.default_rng(5)
    for _ in range(200):
        latency = generator.uniform(0, 5, generator.integers(1, 30))
        channels = int(generator.integers(1, 12))
        copy = latency.copy()
        wanted = math.fsum(max(latency[i : i + channels]) for i in range(0, latency.size, channels))
        assert round_time(latency, np.int64(channels)) == pytest.approx(wanted, rel=1e-14)
        np.testing.assert_array_equal(latency, copy)


def test_wrong_arguments_are_refused_by_name() -> None:
    """A latency that is negative, unknown or endless would poison the clock of the whole run."""
    for channels in (0, -1, 2.5, "3", None):
        for cohort in ([1.0], []):
            with pytest.raises(ParameterError, match=r"^channels must"):
                round_time(cohort, channels)
    for latency in ([-1.0], [math.nan, 1.0], [math.inf], [[1.0]], 1.0):
        with pytest.raises(ParameterError, match=r"^latency_s must"):
            round_time(latency, 2)
