"""Old and new in turn: the interval of the median ratio covers it, and the verdict reads it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.scripts import load

SCRIPT = load("old_and_new")


@pytest.mark.parametrize("turns", [6, 9, 15])
def test_the_interval_covers_the_median(turns: int) -> None:
    drawn = np.exp(np.random.default_rng(turns).normal(size=(4000, turns)))  # the true median is 1
    inside = [low <= 1 <= high for _, low, high in (SCRIPT.median_interval(list(row)) for row in drawn)]
    assert np.mean(inside) > 0.94


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(1.06, 1.4, "slower"), (0.9, 1.2, "not decided"), (1.0, 1.06, "no slower"), (0.8, 0.88, "no slower")],
)
def test_the_verdict(low: float, high: float, said: str) -> None:
    assert SCRIPT.verdict(low, high) == said


def test_one_measure_runs_on_this_checkout() -> None:
    assert SCRIPT.in_process(SCRIPT.ROOT, "round-500", None) > 0
