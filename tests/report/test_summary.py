"""The figures of a run and their spread over seeds, against values worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report import RunSummary, aggregate, find_target_round, jain_index, summarize

RUN = RunSummary(
    selector="bsfl",
    seed=0,
    accuracy=0.9,
    time_to_target_s=10.0,
    energy_to_target_j=1.0,
    energy_j=2.0,
    jain=0.5,
    failed_clients=3,
    simulated_s=20.0,
)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 5, 5, 5], 1.0),
        ([7, 0, 0, 0], 0.25),  # one of n: 1/n
        ([1, 2, 3], 36 / (3 * 14)),
        ([4, 2, 0, 0], 36 / (4 * 20)),
    ],
)
def test_jain_index_by_hand(counts: list[int], expected: float) -> None:
    assert jain_index(counts) == pytest.approx(expected, abs=1e-15)


def test_jain_index_of_nothing_is_nan_and_of_large_counts_does_not_overflow() -> None:
    assert math.isnan(jain_index([0, 0]))
    assert math.isnan(jain_index([]))
    assert jain_index([4_000_000_000, 4_000_000_000, 0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("counts", [[1, -1], [math.nan, 1], [[1, 2], [3, 4]]])
def test_jain_index_refuses_what_is_not_a_vector_of_counts(counts: list[float]) -> None:
    with pytest.raises(ParameterError, match="counts"):
        jain_index(counts)


def test_summarize_by_hand(make_history) -> None:
    history = make_history(
        [[0, 1], [0, 2], [0, 1]],
        accuracy=[0.4, 0.7, 0.6],
        round_s=[2.0, 3.0, 1.5],
        failed=[(1, 1), (3, 0)],
        energy_j=0.5,
    )
    run = summarize(history, selector="bsfl", seed=4, num_clients=4, target_accuracy=0.55)
    # counts 3, 2, 1, 0: 36 / (4 · 14); (.4 + .7) / 2 reaches the target in round 2, after 2 + 3 s and 4 · .5 J
    assert run == RunSummary(
        selector="bsfl",
        seed=4,
        accuracy=0.6,
        time_to_target_s=5.0,
        energy_to_target_j=2.0,
        energy_j=3.0,
        jain=pytest.approx(36 / 56),
        failed_clients=2,
        simulated_s=6.5,
        loss=run.loss,
        # all three measured rounds: 17/30, the largest distance that of .4; 15 % of 3 rounds are 1, half of them 2
        accuracy_last10=pytest.approx(17 / 30),
        deviation_last10=pytest.approx(17 / 30 - 0.4),
        accuracy_15=0.4,
        accuracy_50=pytest.approx(0.55),
        rounds_to_target=2,
        rounds_to_all=math.inf,  # client 3 never was
        score_energy=run.score_energy,
        asked_per_round=2.0,
    )
    assert math.isnan(run.score_energy)


def test_the_last_ten_measured_rounds(make_history) -> None:
    """Of 21 rounds every second is measured: .00, .02, ... .20; the last ten are .02 to .20, until round 4 .00, .02."""
    accuracy = [math.nan if i % 2 else i / 100 for i in range(21)]
    run = summarize(
        make_history([[i % 3] for i in range(21)], accuracy=accuracy), selector="x", seed=1, num_clients=3,
        target_accuracy=0.5,
    )  # fmt: skip
    assert run.accuracy_last10 == pytest.approx(0.11)
    assert run.deviation_last10 == pytest.approx(0.09)
    assert run.accuracy_15 == pytest.approx(0.01)  # ceil(.15 * 21) = 4 rounds
    assert run.accuracy_50 == pytest.approx(0.05)  # 11 rounds: .00 to .10
    assert (run.rounds_to_all, run.rounds_to_target) == (3, math.inf)


def test_the_target_is_reached_by_the_mean_of_five_measured_rounds(make_history) -> None:
    """A lucky round does not count, nor does a round without measurement, nor the sixth last."""
    accuracy = [0.0, 0.95, 0.75, math.nan, 0.75, 0.75, 0.8]  # means: .475, .567, -, .6125, .64; the last five: .8
    history = make_history([[0]] * 7, accuracy=accuracy)
    assert find_target_round(history.rounds, 0.8).round == 7
    assert find_target_round(history.rounds[:-1], 0.8) is None
    assert find_target_round(history.rounds, 0.81) is None
    assert find_target_round(history.rounds, 0.64).round == 6


def test_summarize_passes_over_rounds_without_a_measurement(make_history) -> None:
    history = make_history([[0], [1], [0]], accuracy=[math.nan, 0.8, math.nan])
    run = summarize(history, selector="random", seed=0, num_clients=2, target_accuracy=0.8)
    assert (run.accuracy, run.time_to_target_s, run.simulated_s) == (0.8, 2.0, 3.0)


def test_summarize_says_infinity_when_the_target_is_never_reached(make_history) -> None:
    history = make_history([[0], [1]], accuracy=[0.1, 0.7999])
    assert summarize(history, selector="x", seed=0, num_clients=2, target_accuracy=0.8).time_to_target_s == math.inf


def test_summarize_of_a_run_without_rounds(make_history) -> None:
    run = summarize(make_history([], accuracy=[]), selector="x", seed=0, num_clients=2, target_accuracy=0.8)
    assert math.isnan(run.accuracy)
    assert math.isnan(run.jain)
    assert (run.time_to_target_s, run.energy_j, run.failed_clients, run.simulated_s) == (math.inf, 0.0, 0, 0.0)


@pytest.mark.parametrize("target", [0, -0.1, 80, math.nan])
def test_a_target_that_is_no_fraction_is_refused(make_history, target: float) -> None:
    with pytest.raises(ParameterError, match="target_accuracy"):
        summarize(make_history([], accuracy=[]), selector="x", seed=0, num_clients=1, target_accuracy=target)


def test_aggregate_by_hand() -> None:
    runs = [
        dataclasses.replace(RUN, selector="random", seed=0, accuracy=0.5),
        dataclasses.replace(RUN, seed=0, accuracy=0.8, time_to_target_s=10.0, failed_clients=1),
        dataclasses.replace(RUN, seed=1, accuracy=0.9, time_to_target_s=math.inf, failed_clients=2),
        dataclasses.replace(RUN, seed=2, accuracy=1.0, time_to_target_s=14.0, failed_clients=6),
    ]
    random, bsfl = aggregate(runs)
    assert (random.selector, random.seeds, bsfl.selector, bsfl.seeds) == ("random", 1, "bsfl", 3)  # first appearance
    assert (bsfl.accuracy.mean, bsfl.accuracy.deviation) == pytest.approx((0.9, 0.1))  # divisor n - 1
    assert (bsfl.failed_clients.mean, bsfl.failed_clients.deviation) == pytest.approx((3.0, math.sqrt(7)))
    time = bsfl.time_to_target_s  # of the two seeds that reached the target
    assert (time.mean, time.count, time.total) == (12.0, 2, 3)
    assert time.deviation == pytest.approx(math.sqrt(8))
    assert random.accuracy.mean == 0.5
    assert math.isnan(random.accuracy.deviation)  # one seed has no spread


def test_aggregate_when_no_seed_reached_the_target() -> None:
    (row,) = aggregate([dataclasses.replace(RUN, seed=s, time_to_target_s=math.inf) for s in range(2)])
    assert row.time_to_target_s.count == 0
    assert math.isnan(row.time_to_target_s.mean)
    assert aggregate([]) == []
