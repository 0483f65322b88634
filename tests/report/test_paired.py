"""Paired differences and the verdict: a published example, coverage in simulated experiments, the sentence's cases."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.verdict import holm, paired_differences, student_interval, student_p, verdict
from tests.report.made import make_run as run

# Student 1908, table of the additional hours of sleep of ten patients: second drug minus first.
SLEEP = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
TIMES = {"random": [100.0, 110.0, 120.0, 130.0], "fast": [90.0, 96.0, 116.0, 118.0]}


def test_students_own_example() -> None:
    """R's t.test(extra ~ group, data = sleep, paired = TRUE): 0.7001142 to 2.4598858 around 1.58, p = 0.002833."""
    assert student_interval(SLEEP) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert student_p(SLEEP) == pytest.approx(0.002833, abs=1e-6)
    assert student_p(np.zeros(3)) == 1.0


def coverage(seeds: int, experiments: int, interval: Callable[..., tuple[float, float]] = student_interval) -> float:
    """How often the interval of so many Gaussian differences around -7 has it within."""
    draws = np.random.default_rng(seeds).normal(-7.0, 3.0, size=(experiments, seeds))
    ends = np.array([interval(own) for own in draws])
    return float(((ends[:, 0] <= -7.0) & (ends[:, 1] >= -7.0)).mean())


def test_three_hundred_experiments_find_a_normal_interval_out() -> None:
    """Of 300 experiments 95 % within four standard errors of the count, .05; 81 % with the normal quantile."""

    def normal(own: np.ndarray) -> tuple[float, float]:
        half = 1.959964 * own.std(ddof=1) / math.sqrt(len(own))
        return own.mean() - half, own.mean() + half

    assert all(abs(coverage(seeds, 300) - 0.95) < 0.05 for seeds in (3, 5, 10))
    assert coverage(3, 300, normal) < 0.87


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_covers_the_true_difference_as_often_as_it_says(seeds: int) -> None:
    """2,000 experiments: between 93 and 97 %, four standard errors."""
    assert 0.93 <= coverage(seeds, 2000) <= 0.97


def test_holms_own_procedure() -> None:
    """p-values of four hypotheses, corrected by R: p.adjust(c(.01, .04, .03, .005), "holm")."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, math.nan, 0.6])[::2] == [1.0, 1.0]
    assert math.isnan(holm([0.5, math.nan])[1])


def test_many_selectors_make_it_harder_to_differ() -> None:
    """With p = .019 it differs where it is alone, and not among twelve others."""
    alone = [run(name, seed, time) for name, own in TIMES.items() for seed, time in enumerate(own)]
    (one,) = paired_differences(alone, "random", "time_to_target_s")
    assert one.differs
    others = [run(f"same-{i}", seed, 100.0 + 10 * seed + (-1) ** (seed + i)) for i in range(12) for seed in range(4)]
    first, *rest = paired_differences(alone + others, "random", "time_to_target_s")
    assert first.p == pytest.approx(min(1.0, 13 * one.p))
    assert not first.differs
    assert (first.low, first.high) == (one.low, one.high)
    assert not any(other.differs for other in rest)


def test_runs_are_paired_by_seed_whatever_their_order() -> None:
    runs = [
        run("random", 2, 30.0),
        run("a", 1, 8.0),
        run("random", 1, 10.0),
        run("a", 2, 24.0),
        run("random", 3, 1.0),
    ]
    (one,) = paired_differences(runs, "random", "time_to_target_s")
    assert (one.selector, one.reference, one.pairs, one.mean, one.reference_mean) == ("a", "random", 2, -4.0, 20.0)
    half = 12.7062047362 * math.sqrt(8) / math.sqrt(2)  # t with one degree of freedom
    assert (one.low, one.high) == pytest.approx((-4 - half, -4 + half))
    assert not one.differs


def test_a_run_that_never_arrives_leaves_counts_and_no_interval() -> None:
    runs = [run(name, seed, 10.0 + seed) for name in ("a", "random") for seed in range(3)]
    runs[1] = run("a", 1, math.inf, math.inf)
    (one,) = paired_differences(runs, "random", "time_to_target_s")
    assert (one.pairs, one.reached, one.reference_reached) == (3, 2, 3)
    assert all(math.isnan(value) for value in (one.mean, one.low, one.high))
    assert not one.differs


def test_what_cannot_be_paired_is_refused() -> None:
    runs = [run("a", 0, 8.0), run("random", 1, 10.0)]
    for wrong, match in (
        (runs, "seed in common"),
        (runs[:1], "'random' has no run"),
        ([*runs, run("a", 0, 7.0)], "seed 0"),
    ):
        with pytest.raises(ParameterError, match=match):
            paired_differences(wrong, "random", "time_to_target_s")


def test_the_sentence_tells_differences_and_their_absence() -> None:
    runs = [run("random", seed, 100.0 + 10 * seed, 50.0 + seed) for seed in range(5)]
    runs += [run("fast", seed, 70.0 + 10 * seed + seed % 2, 50.0 + seed + (-1) ** seed) for seed in range(5)]
    assert verdict(runs, "random", 0.9).sentence == (
        "random takes 120.0 s and 52.0 J to 90 % accuracy; on the same 5 seeds and partitions, with 95 % intervals, "
        "fast takes 29.6 s less (-30.3 to -28.9 s) and 0.2 J more (-1.2 to +1.6 J: no difference)."
    )


def test_the_sentence_counts_where_somebody_never_arrived() -> None:
    runs = [run("random", seed, math.inf if seed else 10.0, math.inf if seed else 1.0) for seed in range(3)]
    runs += [run("fast", seed, 9.0) for seed in range(3)]
    said = verdict(runs, "random", 0.85).sentence
    assert said.startswith("random reaches 85 % accuracy on 1 of 3 seeds; on the same 3 seeds and partitions fast")
    assert said.endswith("fast reaches it on 3 of 3 (a difference cannot be given).")


def test_the_sentence_is_silent_on_joules_that_nobody_reported() -> None:
    runs = [run(name, seed, 10.0 + seed, math.nan) for name in ("random", "fast") for seed in range(2)]
    said = verdict(runs, "random", 0.9).sentence
    assert " J" not in said
    assert "fast takes 0.0 s more (+0.0 to +0.0 s: no difference)" in said


def test_one_seed_has_a_difference_and_no_interval() -> None:
    runs = [run("a", 0, 8.0), run("random", 0, 10.0)]
    (one,) = paired_differences(runs, "random", "time_to_target_s")
    assert one.mean == -2.0
    assert math.isnan(one.low)
    said = verdict(runs, "random", 0.9).sentence
    assert said == (
        "random takes 10.0 s and 100.0 J to 90 % accuracy; on the same seed and partition (one seed gives no "
        "interval) a takes 2.0 s less and 0.0 J more."
    )


def test_the_sentence_says_when_several_selectors_take_a_difference_away() -> None:
    runs = [run(name, seed, time) for name, own in TIMES.items() for seed, time in enumerate(own)]
    assert "fast takes 10.0 s less (-16.9 to -3.1 s) and" in verdict(runs, "random", 0.9).sentence
    runs += [run(f"same-{i}", seed, 100.0 + 10 * seed + (-1) ** (seed + i)) for i in range(3) for seed in range(4)]
    said = verdict(runs, "random", 0.9).sentence
    assert "fast takes 10.0 s less (-16.9 to -3.1 s, but among so many selectors p = 0.08: no difference)" in said
