"""Paired effects: published examples, pairs by hand, censored pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.paired import collect, holm, paired_effects, paired_interval, paired_p, sign_test
from tests.report.made import make_run

# Student 1908, table of the additional hours of sleep of ten patients: second drug minus first.
SLEEP = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
TIMES = {"a": {1: 8.0, 2: 24.0}, "random": {2: 30.0, 1: 10.0, 3: 1.0}}


def student_interval(differences: np.ndarray) -> tuple[float, float]:
    """SciPy's."""
    low, high = stats.ttest_1samp(differences, 0.0).confidence_interval()
    return float(low), float(high)


def test_students_own_example() -> None:
    """R's t.test(extra ~ group, data = sleep, paired = TRUE): 0.7001142 to 2.4598858 around 1.58, p = 0.002833."""
    assert student_interval(SLEEP) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert paired_interval(SLEEP, skewed=False) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert paired_p(SLEEP, skewed=False) == pytest.approx(0.002833, abs=1e-6)
    mirrored = np.concatenate([SLEEP, 2 * SLEEP.mean() - SLEEP])  # without skewness both tests are Student's
    assert paired_interval(mirrored) == pytest.approx(student_interval(mirrored))
    assert paired_p(mirrored) == pytest.approx(float(stats.ttest_1samp(mirrored, 0.0).pvalue))


def test_no_p_value_is_below_that_of_equal_signs() -> None:
    """Two values of a coin: with six tied pairs, one of 19 equal selectors passed in 46 % of 2,000 cases before."""
    assert [float(paired_p(d)) for d in (np.zeros(3), np.ones(3), np.ones(10))] == [1.0, 0.25, 2.0**-9]
    tied = np.random.default_rng(1).choice([-1.0, 1.0], (2000, 19, 6))
    assert sum(min(holm(p)) <= 0.05 for p in paired_p(tied).tolist()) == 0


def test_the_skewness_adjusted_test_by_hand() -> None:
    """Differences 0, 0, 0, 4: mean 1, sd 2, deviations -1, -1, -1, 3, skewness 4/(3 * 2) * (27 - 3)/8 = 2, x = 1/2.

    t = 2 (1/2 + 2/24 + 2/12 + 4/216) = 1.537; Student's is 1, so the larger p is Student's. At -1, x = -1/2 and
    t = 2 (-1/2 + 2/24 + 2/12 - 4/216) = -.537: the p of t = .537 is larger than that of -1.
    """
    d = np.array([0.0, 0.0, 0.0, 4.0])
    assert paired_p(d) == pytest.approx(2 * stats.t.sf(1.0, 3))
    assert paired_p(d - 2.0) == pytest.approx(2 * stats.t.sf(2 * (1 / 2 - 2 / 24 - 2 / 12 + 4 / 216), 3))


@pytest.mark.parametrize("n", [6, 7, 10])
@pytest.mark.parametrize("shape", [0.2, 1.0, 50.0])
def test_the_interval_holds_exactly_the_values_that_neither_test_excludes(n: int, shape: float) -> None:
    """Brute force: the p-value of the differences to each of many true values."""
    rng = np.random.default_rng(n)
    for sign in (-1.0, 1.0):
        d = sign * rng.gamma(shape, 1 / shape, n)
        low, high = paired_interval(d)
        grid = np.linspace(low - (high - low), high + (high - low), 600)
        inside = paired_p(d[np.newaxis] - grid[:, np.newaxis]) >= 0.05
        np.testing.assert_array_equal(inside, (grid >= low) & (grid <= high))
        assert low <= student_interval(d)[0] + 1e-12
        assert high >= student_interval(d)[1] - 1e-12


def test_skewed_ratios_without_an_effect_seldom_look_settled() -> None:
    """Gamma, shape .5, ten pairs: Student's test is wrong in 14 % of 4,000 experiments."""
    d = np.random.default_rng(5).gamma(0.5, 1.0, (4000, 10)) - 0.5
    assert (stats.ttest_1samp(d, 0.0, axis=1).pvalue <= 0.05).mean() > 0.12
    assert (paired_p(d) <= 0.05).mean() < 0.065


def test_ratios_are_geometric_means_of_pairs_with_the_same_seed() -> None:
    """8/10 and 24/30 are both .8; seed 3 has no partner."""
    (one,) = paired_effects(TIMES, "random", "time_to_target_s")
    assert (one.selector, one.reference, one.pairs, one.reference_mean) == ("a", "random", 2, 20.0)
    assert one.values == pytest.approx((0.8, 0.8))
    assert (one.estimate, one.low, one.high) == pytest.approx((0.8, 0.8, 0.8))
    assert one.differs
    assert not one.censored

    (one,) = paired_effects({"a": {1: 5.0, 2: 20.0}, "b": {1: 10.0, 2: 10.0}}, "b", "time_to_target_s")
    half = 12.7062047362 * (math.log(4) / math.sqrt(2)) / math.sqrt(2)  # t with one degree of freedom
    assert one.estimate == pytest.approx(1.0)
    assert (one.low, one.high) == pytest.approx((math.exp(-half), math.exp(half)))
    assert (one.sooner, one.later, one.differs) == (1, 1, False)
    assert one.deviation == pytest.approx(math.log(4) / math.sqrt(2))


def test_accuracies_are_compared_in_points() -> None:
    (one,) = paired_effects(TIMES, "random", "accuracy")
    assert (one.is_ratio, one.estimate, one.values) == (False, -4.0, (-2.0, -6.0))


def test_a_run_without_the_target_leaves_counts_and_a_sign_test() -> None:
    never = math.inf
    own = {1: 9.0, 2: never, 3: 8.0, 4: 9.0, 5: never}
    other = {1: 10.0, 2: 10.0, 3: never, 4: 10.0, 5: never}
    (one,) = paired_effects({"a": own, "random": other}, "random", "time_to_target_s")
    assert (one.pairs, one.reached, one.reference_reached, one.censored) == (5, 3, 3, True)
    assert (one.sooner, one.later) == (3, 1)  # both never: a tie
    assert one.p == sign_test(3, 1)
    assert np.isnan([one.estimate, one.low, one.high, one.reference_mean]).all()
    assert not one.differs


@pytest.mark.parametrize(("own", "p"), [({1: math.nan, 2: 3.0}, math.nan), ({1: 0.0, 2: 0.0}, 1.0)])
def test_an_unknown_value_has_no_ratio(own: dict[int, float], p: float) -> None:
    """Joules that nobody reported are NaN or 0."""
    (one,) = paired_effects({"a": own, "random": {1: 0.0, 2: 0.0}}, "random", "energy_to_target_j")
    assert math.isnan(one.estimate)
    assert one.p == pytest.approx(p, nan_ok=True)


def test_one_seed_has_a_ratio_and_no_interval() -> None:
    (one,) = paired_effects({"a": {0: 8.0}, "random": {0: 10.0}}, "random", "time_to_target_s")
    assert one.estimate == pytest.approx(0.8)
    assert np.isnan([one.low, one.high, one.p]).all()


def test_runs_without_a_pair_are_refused() -> None:
    with pytest.raises(ParameterError, match="seed in common"):
        paired_effects({"a": {0: 8.0}, "random": {1: 10.0}}, "random", "accuracy")
    with pytest.raises(ParameterError, match="'random' has no run"):
        paired_effects({"a": {0: 8.0}}, "random", "accuracy")
    with pytest.raises(ParameterError, match="seed 0"):
        collect([make_run("a", 0), make_run("a", 0)], "accuracy")
