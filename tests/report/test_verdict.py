"""The verdict: its word in each case and order, how many seeds would settle it, and what the sentence says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.report import RunSummary
from fedsel_flwr.report.paired import paired_effects, paired_interval
from fedsel_flwr.report.verdict import choose_word, seeds_to_settle, verdict
from tests.report import made

NEVER = math.inf


def make_run(selector: str, seed: int, time: float, **figures: float) -> RunSummary:
    usual = {"simulated_s": 99.0, "jain": 1.0, "worst_tenth": 0.7, "asked_per_round": 10.0}
    return made.make_run(selector, seed, time, **usual | figures)


def effect(*ratios: float):
    times = {"a": dict(enumerate(ratios)), "random": dict.fromkeys(range(len(ratios)), 1.0)}
    return paired_effects(times, "random", "time_to_target_s")[0]


@pytest.mark.parametrize(
    ("ratios", "p", "word"),
    [
        ((0.70, 0.75, 0.80, 0.75, 0.72, 0.78), 0.01, "sooner"),
        ((1.30, 1.25, 1.20, 1.25, 1.22, 1.28), 0.01, "later"),
        ((0.70, 0.75, 0.80, 0.75, 0.72, 0.78), 0.06, "not settled"),
        ((0.50, 1.00, 2.00, 0.50, 1.00, 2.00), 1.00, "not settled"),
        # The interval comes first: a difference of 2 % is significant here, and without practical meaning.
        ((0.98, 0.98, 0.981, 0.98, 0.98, 0.981), 0.001, "no difference"),
        ((1.02, 0.99, 1.00, 1.02, 0.99, 1.00), 0.80, "no difference"),
        # Without the target on some seed the sign test decides; the ratios of the other seeds do not.
        ((0.9, *[NEVER] * 5), 0.01, "later"),
        ((*[1.0] * 5, NEVER), 1.0, "not settled"),
        # Never "sooner" for a selector that reaches the target on fewer seeds, however often it is ahead.
        ((*[0.9] * 5, NEVER), 0.01, "not settled"),
        # Five pairs or fewer settle nothing: two equal ratios would have p = 0.
        ((0.5,), math.nan, "not settled"),
        ((0.5, 0.5), 0.0, "not settled"),
        ((0.70, 0.75, 0.80, 0.75, 0.72), 0.001, "not settled"),
        ((*[1.0] * 5,), 1.0, "not settled"),
    ],
)
def test_the_word(ratios: tuple[float, ...], p: float, word: str) -> None:
    assert choose_word(effect(*ratios), p) == word


def test_the_margin_is_a_parameter() -> None:
    assert choose_word(effect(*2 * (0.98, 0.98, 0.981)), 0.001, margin=1.01) == "sooner"


def test_seeds_to_settle_is_the_first_number_at_which_the_expected_interval_decides() -> None:
    """By hand, for logs of mean -.1 and spread .2: with 18 seeds t is 2.12 and p .049, with 17 it is .056."""
    d = np.array([-0.1 - 0.2, -0.1 + 0.2, -0.1])
    one = effect(*np.exp(d))
    assert one.deviation == pytest.approx(0.2)
    assert seeds_to_settle(one, 1) == 18
    assert seeds_to_settle(one, 2) > 18
    # Without any effect, half of the new estimates are .68 standard errors away: 2.65 * .2 / sqrt(n) = .0488.
    assert seeds_to_settle(effect(*np.exp(d + 0.1)), 1) == pytest.approx((2.66 * 0.2 / math.log(1.05)) ** 2, abs=2)
    assert seeds_to_settle(effect(*np.exp(10 * (d + 0.1))), 1) is None
    assert seeds_to_settle(effect(0.5), 1) is None


def test_seeds_to_settle_counts_signs_if_a_run_never_reached_the_target() -> None:
    """Two of three pairs are sooner: 2 * P(at most 13 of 39) is .053; 14 of 42 .044. Ties settle nothing."""
    assert seeds_to_settle(effect(0.9, 0.9, NEVER), 1) == pytest.approx(40, abs=3)
    assert seeds_to_settle(effect(0.9, NEVER, NEVER, 0.9), 1) is None
    # Of ten pairs one is decided: six decided ones need about 60.
    times = {"a": dict.fromkeys(range(9), NEVER) | {9: 1.0}, "random": dict.fromkeys(range(10), NEVER)}
    (one,) = paired_effects(times, "random", "time_to_target_s")
    assert seeds_to_settle(one, 1) == pytest.approx(60, abs=5)


def test_holm_counts_all_selectors_those_without_the_target_too() -> None:
    """Alone p = .0298 would pass; among three it does not, though two rivals never reach the target."""
    base = np.random.default_rng(1).uniform(90, 110, 6)
    runs = [make_run("random", seed, time) for seed, time in enumerate(base)]
    runs += [
        make_run("fast", seed, time) for seed, time in enumerate(base * np.exp([-0.1, -0.3, 0.02, -0.2, -0.05, -0.02]))
    ]
    alone = verdict(runs, "random", 0.9).selectors[0]
    rivals = [make_run(name, seed, NEVER if seed else 99.0) for name in ("slow", "slower") for seed in range(6)]
    fast, *rest = verdict([*runs, *rivals], "random", 0.9).selectors
    assert fast.p == pytest.approx(3 * alone.p)
    assert fast.time.low == alone.time.low  # the interval is pointwise
    assert [one.word for one in rest] == ["not settled"] * 2


def runs_of(ratio: float, seeds: int = 12, **figures: float):
    """Runs of random and of "fast", which needs about this share of its time."""
    rng = np.random.default_rng(7)
    own = {"rounds_to_target": 10.0, "seconds_per_round": 10.0, "joules_per_round": 1.0}
    runs = [make_run("random", seed, 100.0 + seed, **own) for seed in range(seeds)]
    noise = np.exp(rng.normal(0, 0.02, seeds))
    for seed in range(seeds):
        more = own | figures | {"rounds_to_target": 10.0 + 0.1 * seed}
        runs.append(make_run("fast", seed, ratio * (100.0 + seed) * noise[seed], **more))
    return runs


def test_the_sentence_of_a_gain() -> None:
    first, second, third = verdict(runs_of(0.8), "random", 0.9).sentence.splitlines()
    assert first.startswith("random reaches 90 % accuracy after 105.5 simulated seconds on average.")
    assert second.startswith(
        "- fast reaches this accuracy 20 % sooner (19 to 21 %). Seconds per round: equal within 5 %"
    )
    assert second.endswith("Accuracy at the end: +0.0 points (+0.0 to +0.0).")  # said in any case
    assert "Holm" not in third  # one selector needs no correction


def test_the_sentence_never_praises_speed_alone() -> None:
    """A selector that is sooner and ends worse, less fair, with more clients asked: each is said."""
    runs = runs_of(0.8, accuracy=0.785, jain=0.4, asked_per_round=15.0, worst_tenth=0.3)
    said = verdict(runs, "random", 0.7).sentence
    for words in (
        "Accuracy at the end: -11.5 points (-11.5 to -11.5).",
        "Accuracy of the worst tenth of the clients: -40.0 points (-40.0 to -40.0).",
        "Jain's index of participation: 0.40 (random: 1.00).",
        "Clients asked per round: 15.0 (random: 10.0).",
    ):
        assert words in said


def test_the_sentence_counts_runs_without_the_target() -> None:
    runs = [make_run("random", seed, NEVER if seed else 10.0) for seed in range(8)]
    runs += [make_run("fast", seed, 9.0) for seed in range(8)]
    said = verdict(runs, "random", 0.85).sentence
    assert said.startswith("random reaches 85 % accuracy on 1 of 8 seeds. Compared with random, on the same 8 seeds")
    counts = "sooner on 8, later on 0, undecided on 0; sign test, p = 0.008"
    assert f"fast reaches the target on 8 of 8 seeds, random on 1 ({counts}): sooner." in said


def test_a_run_that_ended_before_the_others_time_is_undecided() -> None:
    """Runs end after as many rounds, so shorter rounds end them earlier: a later time says nothing about them."""
    runs = [make_run("random", seed, 90.0, simulated_s=99.0) for seed in range(8)]
    runs += [make_run("fast", seed, NEVER, simulated_s=80.0 if seed else 95.0) for seed in range(8)]
    (one,) = verdict(runs, "random", 0.85).selectors
    assert (one.time.sooner, one.time.later, one.word) == (0, 1, "not settled")


def test_pairs_within_the_margin_are_ties_of_the_sign_test() -> None:
    """One per cent on 19 seeds, and one run without the target, are no gain."""
    runs = [make_run("random", seed, 90.0 if seed else NEVER) for seed in range(20)]
    runs += [make_run("fast", seed, 89.0) for seed in range(20)]
    (one,) = verdict(runs, "random", 0.85).selectors
    assert (one.time.sooner, one.time.later, one.word) == (1, 0, "not settled")


def test_a_selector_with_fewer_seeds_says_so() -> None:
    said = verdict([run for run in runs_of(0.8) if run.selector == "random" or run.seed < 9], "random", 0.9).sentence
    assert "- fast (on 9 of these seeds) reaches this accuracy" in said


def test_one_seed_gives_no_interval() -> None:
    assert verdict([make_run("a", 0, 8.0), make_run("random", 0, 10.0)], "random", 0.9).sentence.splitlines() == [
        "random reaches 90 % accuracy after 10.0 simulated seconds. Compared with random, on one seed, which gives "
        "no interval:",
        "- a needs 0.80 times the time: not settled by one seed. Accuracy at the end: +0.0 points.",
    ]


def test_few_seeds_are_said_to_be_few() -> None:
    said = verdict(runs_of(0.8, seeds=5), "random", 0.9).sentence
    assert "fast needs 0.80 times the time (0." in said
    assert "not settled (a new comparison would need about 6 seeds)" in said
    assert "orientation only: a verdict needs at least 6 seeds, and 10 are usual (--seeds 10)" in said
    assert "--seeds" not in verdict(runs_of(0.8, seeds=6), "random", 0.9).sentence
    runs = [
        make_run(name, seed, 9.0 + seed * factor % 5) for name, factor in (("random", 1), ("a", 2)) for seed in range(7)
    ]
    assert "7 seeds are few: 10 are usual. Plan 10 new ones" in verdict(runs, "random", 0.9).sentence


def test_the_number_of_new_seeds_settles_about_half_of_the_cases_without_a_difference() -> None:
    """Brute force: 1,000 new comparisons of equal selectors with the number of seeds that an estimate near 1 gives."""
    number = seeds_to_settle(effect(*np.exp(0.1 * np.tile([-1.0, 1.0], 5))), 1)
    assert number is not None
    low, high = paired_interval(0.105 * np.random.default_rng(0).standard_normal((1000, number)))
    assert 0.4 < ((low > -math.log(1.05)) & (high < math.log(1.05))).mean() < 0.6


def test_a_pair_without_a_ratio_is_decided_by_signs() -> None:
    """A time of 0 has no log; six of seven pairs are clear."""
    times = {"a": dict(enumerate([0.0] + [50.0] * 6)), "random": dict.fromkeys(range(7), 100.0)}
    (one,) = paired_effects(times, "random", "time_to_target_s")
    assert (one.censored, choose_word(one, one.p)) == (True, "sooner")


def test_the_profile_has_each_selector_at_each_target() -> None:
    times = {0.8: {"random": {0: 4.0, 1: 5.0}, "fast": {0: 2.0, 1: NEVER}}}
    found = verdict(runs_of(0.8), "random", 0.9, times=times).profile
    assert [(one.selector, one.reached, one.pairs) for one in found[0.8]] == [("fast", 1, 2)]
