"""Paired effects: published examples, pairs by hand, censored pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.paired import collect, paired_effects, sign_test, student_interval, student_p
from tests.report.made import make_run

# Student 1908, table of the additional hours of sleep of ten patients: second drug minus first.
SLEEP = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
TIMES = {"a": {1: 8.0, 2: 24.0}, "random": {2: 30.0, 1: 10.0, 3: 1.0}}


def test_students_own_example() -> None:
    """R's t.test(extra ~ group, data = sleep, paired = TRUE): 0.7001142 to 2.4598858 around 1.58, p = 0.002833."""
    assert student_interval(SLEEP) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert student_p(SLEEP) == pytest.approx(0.002833, abs=1e-6)
    assert (student_p(np.zeros(3)), student_p(np.ones(3))) == (1.0, 0.0)


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


def test_the_logs_of_the_factors_add_up_to_that_of_the_time() -> None:
    rng = np.random.default_rng(3)
    rounds = {name: dict(enumerate(rng.uniform(50, 99, 6))) for name in ("a", "random")}
    seconds = {name: dict(enumerate(rng.uniform(5, 9, 6))) for name in ("a", "random")}
    time = {name: {seed: rounds[name][seed] * seconds[name][seed] for seed in range(6)} for name in rounds}
    effects = [
        paired_effects(values, "random", figure)[0]
        for values, figure in ((rounds, "rounds_to_target"), (seconds, "seconds_per_round"), (time, "time_to_target_s"))
    ]
    assert effects[0].estimate * effects[1].estimate == pytest.approx(effects[2].estimate)


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
