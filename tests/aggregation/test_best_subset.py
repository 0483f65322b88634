"""FedCA's filter against plain enumeration of all subsets, (4) of Kim et al. (2020)."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsel_flwr.aggregation import best_subset

SCORES = ["loss", "accuracy"]


def score_of(members: tuple[int, ...], logits: np.ndarray, labels: np.ndarray, score: str) -> float:
    """Score the averaged logits of some models: fraction correct, or minus the mean cross-entropy in nats."""
    total = 0.0
    for example, label in enumerate(labels.tolist()):
        rows = [[float(value) for value in logits[model, example]] for model in members]
        mean = [math.fsum(values) / len(members) for values in zip(*rows, strict=True)]
        if score == "accuracy":
            total += max(range(len(mean)), key=mean.__getitem__) == label
        else:
            top = max(mean)
            total += mean[label] - top - math.log(sum(math.exp(value - top) for value in mean))
    return total / len(labels)


def check(logits: np.ndarray, labels: np.ndarray, score: str) -> tuple[int, ...]:
    """Compare with enumeration: the value, and the first of the sets that reach it; returns that set.

    Every set is scored, in the order in which ties are broken: larger first, then the lowest indices.
    """
    sets = [members for size in range(len(logits), 0, -1) for members in combinations(range(len(logits)), size)]
    values = {members: score_of(members, logits, labels, score) for members in sets}
    best = max(values.values())
    expected = next(members for members, value in values.items() if value >= best - 1e-12)
    kept, value = best_subset(logits, labels, score)
    kept = np.asarray(kept)
    assert kept.dtype == np.bool_
    assert kept.shape == (len(logits),)
    assert isinstance(value, float)
    assert value == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert tuple(np.flatnonzero(kept).tolist()) == expected
    return expected


def random_case(n: int, seed: int, examples: int = 10, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Models that know something, each biased to a class of its own."""
    rng = np.random.default_rng([seed, n])
    labels = rng.integers(0, classes, examples)
    logits = rng.normal(0, 1, (n, examples, classes))
    logits[:, np.arange(examples), labels] += 0.4
    logits[np.arange(n), :, rng.integers(0, classes, n)] += rng.uniform(0, 2, n)[:, None]
    return logits, labels


def test_by_hand() -> None:
    """Three models, two examples, two classes; only the difference of the two logits matters, here class 1 - class 0.

    Labels 0 and 1. Differences: model 0 (-3, -1), model 1 (1, 3), model 2 (-4, -6).
    Accuracy: alone 1/2 each (0: only the first is right; 1: only the second; 2: only the first). {0, 1}: (-1, 1): both
        right, 1. {0, 2}: (-3.5, -3.5), {1, 2}: (-1.5, -1.5), all: (-2, -4/3): 1/2                        -> {0, 1}, 1
    Loss, ln(1 + e^d) at label 0 and ln(1 + e^-d) at label 1, on average:
        {0}: (ln(1 + e^-3) + ln(1 + e^1))/2 = (.0486 + 1.3133)/2 = .6809
        {1}: (1.3133 + .0486)/2 = .6809     {2}: (.0181 + 6.0025)/2 = 3.0103
        {0, 1}: ln(1 + e^-1) = .3133        {0, 2}: (.0298 + 3.5298)/2 = 1.7798
        {1, 2}: (.2014 + 1.7014)/2 = .9514  all: (ln(1 + e^-2) + ln(1 + e^4/3))/2 = (.1269 + 1.5676)/2 = .8473
                                                                                                    -> {0, 1}, -.3133
    """
    differences = np.array([[-3.0, -1.0], [1.0, 3.0], [-4.0, -6.0]])
    logits = np.stack([np.zeros_like(differences), differences], axis=2)
    labels = np.array([0, 1])
    for score, expected in (("accuracy", 1.0), ("loss", -0.3132617)):
        kept, value = best_subset(logits, labels, score=score)
        assert kept.tolist() == [True, True, False]
        assert value == pytest.approx(expected, abs=1e-7)


def test_the_average_is_of_logits() -> None:
    """Not of probabilities, and not a vote: one loud model outweighs two quiet ones.

    Label 0, logits (9, 0), (-1, 0), (-1, 0). Accuracy of all: mean (7/3, 0), right, though two of three are wrong, so
    the tie of {0}, {0, 1}, {0, 2} and all goes to the largest set.
    """
    logits = np.array([[[9.0, 0.0]], [[-1.0, 0.0]], [[-1.0, 0.0]]])
    assert best_subset(logits, np.array([0]), "accuracy")[0].tolist() == [True, True, True]
    kept, value = best_subset(logits, np.array([0]), "loss")
    assert kept.tolist() == [True, False, False]
    assert value == pytest.approx(-math.log1p(math.exp(-9)))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("n", [*range(1, 11), 12])
def test_equals_enumeration(n: int, score: str) -> None:
    """Of twelve models 4,095 subsets."""
    seeds = range(6) if n < 8 else (3,)
    sizes = {len(check(*random_case(n, seed, examples=6 if n == 12 else 10), score)) for seed in seeds}
    assert n < 5 or sizes - {n}  # a model was left out of one of them


@settings(max_examples=60, deadline=None)
@given(data=st.data(), score=st.sampled_from(SCORES))
def test_equals_enumeration_with_many_ties(data: st.DataObject, score: str) -> None:
    """Few examples and models that repeat one another: many sets score alike; class ties are kept out."""
    n, examples, classes = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4)), data.draw(st.integers(2, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, 2, (n, examples, classes))[rng.integers(0, n, n)]
    check(logits, rng.integers(0, classes, examples), score)


@pytest.mark.parametrize(
    ("differences", "expected", "accuracy"),
    [
        # one example: {0, 1}, {0, 2}, {0, 3} are right, all larger sets are wrong
        ([[5, -4, -4, -4]], [0, 1], 1.0),
        ([[-4, -4, 5, -4]], [0, 2], 1.0),
        ([[-4, -4, -4, 5]], [0, 3], 1.0),
        # the largest set is right
        ([[5, -4, -4, 5]], [0, 1, 2, 3], 1.0),
        # {1, 2} alone of the pairs; {0, 1, 2}: -2 is wrong
        ([[-12, 5, 5, -12]], [1, 2], 1.0),
        # two examples: {0, 3} gets only the first right, {1, 2} only the second; 0 is the lowest index of all
        ([[5, -10, -10, -4], [-10, 5, -4, -10]], [0, 3], 0.5),
        # one model is kept, however bad
        ([[-2]], [0], 0.0),
    ],
)
def test_ties_go_to_the_lowest_indices(differences: list[list[float]], expected: list[int], accuracy: float) -> None:
    """Labels 0; a set is right if its sum of differences of logits, class 0 - class 1, is positive."""
    by_model = np.array(differences, dtype=np.float64).T
    logits = np.stack([by_model, np.zeros_like(by_model)], axis=2)
    kept, value = best_subset(logits, np.zeros(len(differences), dtype=np.int64), "accuracy")
    assert np.flatnonzero(kept).tolist() == expected
    assert value == accuracy


@pytest.mark.parametrize("score", SCORES)
def test_types_and_scales(score: str) -> None:
    """float32 as it comes from torch, lists, int32 labels; nothing is changed; huge logits do not overflow."""
    logits, labels = random_case(5, 1)
    before = logits.copy(), labels.copy()
    kept, value = best_subset(logits=logits, labels=labels, score=score)
    np.testing.assert_array_equal(logits, before[0])
    np.testing.assert_array_equal(labels, before[1])
    logits.setflags(write=False)
    for other in (logits, logits.astype(np.float32), logits.tolist(), np.asfortranarray(logits)):
        same, close = best_subset(other, labels.astype(np.int32), score)
        np.testing.assert_array_equal(same, kept)
        assert close == pytest.approx(value, abs=1e-5)
    assert math.isfinite(best_subset(logits * 1e6, labels, score)[1])
    shifted = logits + 1000.0 * np.arange(5)[:, None, None]  # a constant per model changes no probability
    np.testing.assert_array_equal(best_subset(shifted, labels, score)[0], kept)
    assert best_subset(logits, labels)[1] == best_subset(logits, labels, "loss")[1] < 0  # the default


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("n", [25, 60])
def test_greedy_beyond_the_limit(n: int, score: str) -> None:
    """Never empty, never worse than the best single model, the value is that of the set."""
    for seed in range(3):
        logits, labels = random_case(n, seed, examples=30)
        kept, value = best_subset(logits, labels, score)
        assert kept.any()
        members = tuple(np.flatnonzero(kept).tolist())
        assert value == pytest.approx(score_of(members, logits, labels, score), abs=1e-9)
        singles = [score_of((model,), logits, labels, score) for model in range(n)]
        assert value >= max(singles) - 1e-12


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("huge", range(6))
def test_a_huge_model_leaves_no_rounding_behind(huge: int, score: str) -> None:
    """One of six models has logits 1e20 times as large: sets without it are scored as if it were not there."""
    for seed in range(4):
        logits, labels = random_case(6, seed)
        logits[huge] *= 1e20
        kept = check(logits, labels, score)
        assert score == "accuracy" or huge not in kept


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("n", [2, 5, 21], ids=["two", "threads", "greedy"])
def test_sums_that_overflow_do_not_warn(n: int, score: str) -> None:
    """Logits of 1.7e308, of which two do not add up to a number: nothing is raised or warned (warnings are errors).

    Models 0 and 1 are right on both examples and best alone, at the largest score there is; the others are wrong.
    """
    logits = np.zeros((n, 2, 2))
    logits[:, :, 1] = 1.7e308
    logits[:2] = logits[:2, :, ::-1]
    with np.errstate(all="raise"):
        kept, value = best_subset(logits, np.array([0, 0]), score)
    assert kept[:2].any()
    assert value == (1.0 if score == "accuracy" else 0.0)
    kept, value = best_subset(-logits[:1], np.array([0, 1]), score)  # minus a cross-entropy of 1.7e308 / 2
    assert kept.tolist() == [True]
    assert value == (0.5 if score == "accuracy" else -1.7e308 / 2)


@pytest.mark.parametrize("n", [2, 21], ids=["exact", "greedy"])
@pytest.mark.parametrize("difference", [1e-6, 1e-8, 1e-9, 1e-11, 1e-14])
def test_a_small_difference_is_no_tie_but_rounding_is(difference: float, n: int) -> None:
    """Model 0 is right by 1, model 1 by 1 + difference, the others are wrong.

    The loss falls with the margin d by 1/(1 + e^d) = .27 a unit at 1: {1} is .27e-9 better than {0} at 1e-9. {0, 1} has
    the mean margin 1 + 0.5e-9, half as much better, though it is larger and 0 the lower index. At 1e-14, below the
    rounding of a mean of many examples, the larger set wins.
    """
    logits = np.array([[[1.0, 0.0]], [[1.0 + difference, 0.0]], *[[[0.0, 50.0]]] * (n - 2)])
    kept, value = best_subset(logits, np.array([0]))
    assert np.flatnonzero(kept).tolist() == ([1] if difference > 1e-13 else [0, 1])
    assert value == pytest.approx(-math.log1p(math.exp(-1 - difference)), abs=1e-14)


def test_greedy_ties_are_relative() -> None:
    """25 copies of a model that is wrong by about 3e5: their sums differ in rounding, far above 1e-12; all are kept."""
    logits = np.tile(np.array([[[0.0, 1e5 * math.pi], [0.0, 1e5 * math.e]]]), (25, 1, 1))
    values = [score_of(tuple(range(size)), logits, np.array([0, 0]), "loss") for size in range(1, 26)]
    sums = [float(np.add.reduce(logits[:size, 0, 1])) * (1.0 / size) for size in range(1, 26)]
    assert np.ptp(sums) > 1e-12  # so that an absolute tolerance would see differences
    kept, value = best_subset(logits, np.array([0, 0]), "loss")
    assert kept.all()
    assert value == pytest.approx(values[0], rel=1e-12)


LOGITS = np.zeros((2, 3, 4))
LABELS = np.zeros(3, dtype=np.int64)


@pytest.mark.parametrize(
    ("logits", "labels", "score", "named"),
    [
        (LOGITS[0], LABELS, "loss", "logits"), (LOGITS[None], LABELS, "loss", "logits"),
        (LOGITS[:0], LABELS, "loss", "logits"), (LOGITS[:, :0], LABELS[:0], "loss", "logits"),
        (LOGITS * math.nan, LABELS, "loss", "logits"), (LOGITS + math.inf, LABELS, "accuracy", "logits"),
        (LOGITS, LABELS[:2], "loss", "labels"), (LOGITS, LABELS[:, None], "loss", "labels"),
        (LOGITS, [0, 1, 4], "loss", "labels"), (LOGITS, [0, -1, 2], "accuracy", "labels"),
        (LOGITS, [0.0, 0.5, 2.0], "loss", "labels"), (LOGITS, LABELS, "dirac", "score"), (LOGITS, LABELS, "", "score"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_by_name(logits: Any, labels: Any, score: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must"):
        best_subset(logits, labels, score)
