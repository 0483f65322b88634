"""The trial above a polling floor: numbers that do not fit, numbers that do, and "auto"."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.benchmarks.scripts import load

SEEDS = 10


@pytest.fixture(scope="module")
def script() -> Any:
    return load("polling_floor")


def test_round_trips_are_those_of_the_trial(script: Any) -> None:
    """Between 6 and 9 s, and 3 s more for the last client."""
    found = script.round_trips(np.repeat(np.arange(5), 2000), np.random.default_rng(0)).reshape(5, 2000)
    assert found.min(axis=1) == pytest.approx([6.0, 6.0, 6.0, 6.0, 9.0], abs=0.01)
    assert found.max(axis=1) == pytest.approx([9.0, 9.0, 9.0, 9.0, 12.0], abs=0.01)
    assert found.mean(axis=1) == pytest.approx([7.5, 7.5, 7.5, 7.5, 10.5], abs=0.1)


@pytest.mark.parametrize(
    ("name", "parameter"), [("bsfl", "min_latency"), ("cs-ucb", "max_latency"), ("cs-ucb-q", "max_latency")]
)
def test_without_any_number_the_slow_client_is_found_in_200_rounds(script: Any, name: str, parameter: str) -> None:
    """Each of 10 seeds."""
    assert script.ratios(script.trial(script.Row(name, {parameter: "auto"}), SEEDS)).max() <= 0.65


@pytest.mark.parametrize(
    ("name", "params", "low", "high"),
    [
        ("bsfl", {"min_latency": 2.0}, 0.8, 1.0),
        ("bsfl", {"min_latency": 7.0, "alpha": 0.1}, 0.35, 0.45),
        ("cs-ucb", {"max_latency": 60.0}, 0.75, 0.85),
        ("cs-ucb", {"max_latency": 20.0}, 0.5, 0.6),
    ],
)
def test_fixed_numbers_learn_as_they_fit(
    script: Any, name: str, params: dict[str, float], low: float, high: float
) -> None:
    """The smaller tau_min or the larger tau_max, the smaller the gap that 3 s make."""
    found = script.ratios(script.trial(script.Row(name, params), 2))
    assert low < found.min() <= found.max() < high


def test_an_odd_time_is_put_in(script: Any) -> None:
    """One answer of 60 s in round 20 makes 3 s small for good; the 19 rounds before are the same."""
    row = script.Row("cs-ucb", {"max_latency": "auto"})
    odd = script.ratios(script.trial(row._replace(odd_s=60.0), 2))
    assert odd.min() > script.ratios(script.trial(row, 2)).max() + 0.3
    assert np.array_equal(*(script.trial(row._replace(rounds=19, odd_s=s), 2) for s in (0.0, 60.0)))
