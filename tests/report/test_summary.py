"""The figures of a run and their spread over seeds, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report import RunSummary, aggregate, find_target_rounds, jain_index, summarize
from fedsel_flwr.rounds.history import History
from tests.report.made import make_history, make_run


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 5, 5, 5], 1.0),
        ([7, 0, 0, 0], 0.25),  # one of n: 1/n
        ([1, 2, 3], 36 / (3 * 14)),
        ([4, 2, 0, 0], 36 / (4 * 20)),
        ([4_000_000_000, 4_000_000_000, 0], 2 / 3),  # nothing overflows
        ([0, 0], math.nan),
        ([], math.nan),
    ],
)
def test_jain_index_by_hand(counts: list[int], expected: float) -> None:
    assert jain_index(counts) == pytest.approx(expected, abs=1e-15, nan_ok=True)


@pytest.mark.parametrize("counts", [[1, -1], [math.nan, 1], [[1, 2], [3, 4]]])
def test_jain_index_refuses_what_is_not_a_vector_of_counts(counts: list[float]) -> None:
    with pytest.raises(ParameterError, match="counts"):
        jain_index(counts)


def test_summarize_by_hand() -> None:
    history = make_history(
        [[0, 1], [0, 2], [0, 1]], accuracy=[0.4, 0.7, 0.6], round_s=[2.0, 3.0, 1.5], failed=[(1, 1), (3, 0)]
    )
    run = summarize(history, selector="bsfl", seed=4, num_clients=4, target_accuracy=0.55, target_rounds=2)
    # counts 3, 2, 1, 0: 36 / (4 · 14); (.4 + .7) / 2 reaches the target in round 2, after 2 + 3 s and 4 · .5 J
    # all three measured rounds: 17/30, the largest distance that of .4; 15 % of 3 rounds are 1, half of them 2
    assert run == RunSummary(
        selector="bsfl", seed=4, accuracy=0.6, time_to_target_s=5.0, energy_to_target_j=2.0, energy_j=3.0,
        jain=pytest.approx(36 / 56), failed_clients=2, simulated_s=6.5, loss=1.5,
        accuracy_last10=pytest.approx(17 / 30), deviation_last10=pytest.approx(17 / 30 - 0.4), accuracy_15=0.4,
        accuracy_50=pytest.approx(0.55), rounds_to_target=2,
        rounds_to_all=math.inf,  # client 3 never was
        score_energy=run.score_energy, asked_per_round=2.0, seconds_per_round=2.5, joules_per_round=1.0,
        megabytes_down=run.megabytes_down, megabytes_up=run.megabytes_up, worst_tenth=run.worst_tenth, target_window=2,
    )  # fmt: skip
    assert np.isnan([run.score_energy, run.megabytes_down, run.megabytes_up, run.worst_tenth]).all()  # not known


def test_the_last_ten_measured_rounds() -> None:
    """Of 21 rounds every second is measured: .00, .02, ... .20; the last ten are .02 to .20, until round 4 .00, .02."""
    history = make_history([[i % 3] for i in range(21)], accuracy=[math.nan if i % 2 else i / 100 for i in range(21)])
    run = summarize(history, selector="x", seed=1, num_clients=3, target_accuracy=0.5)
    assert run.accuracy_last10 == pytest.approx(0.11)
    assert run.deviation_last10 == pytest.approx(0.09)
    assert run.accuracy_15 == pytest.approx(0.01)  # ceil(.15 * 21) = 4 rounds
    assert run.accuracy_50 == pytest.approx(0.05)  # 11 rounds: .00 to .10
    assert (run.rounds_to_all, run.rounds_to_target) == (3, math.inf)


def reached(history: History, target: float, window: int = 5) -> int | None:
    (record,) = find_target_rounds(history.rounds, [target], window)
    return None if record is None else record.round


def test_the_target_is_reached_by_the_mean_of_a_full_window_of_measured_rounds() -> None:
    """A lucky round does not count, nor does a window that is not full, nor a round without a measurement."""
    accuracy = [0.0, 0.95, 0.75, math.nan, 0.75, 0.75, 0.8]  # means of five: .64 in round 6, .8 in round 7
    history = make_history([[0]] * 7, accuracy=accuracy)
    assert [reached(history, target) for target in (0.5, 0.64, 0.65, 0.8, 0.81)] == [6, 6, 7, 7, None]
    assert find_target_rounds(history.rounds, [0.81, 0.5], 5) == [None, history.rounds[5]]
    # With fewer measured rounds than the window all of them count, and no earlier mean: (0 + .95) / 2 = .475.
    assert reached(history, 0.4, window=15) == 7
    assert reached(make_history([[0]] * 2, accuracy=accuracy[:2]), 0.4) == 2
    assert find_target_rounds([], [0.5]) == [None]
    run = summarize(history, selector="x", seed=1, num_clients=3, target_accuracy=0.6)
    assert (run.rounds_to_target, run.target_window) == (7, 6)


def test_the_factors_of_time_and_energy_and_the_megabytes_to_the_target() -> None:
    """Two clients in each of two rounds of 2 and 4 s; one update of the first round did not arrive."""
    history = make_history([[0, 1], [0, 2], [0, 1]], accuracy=[0.8, 0.8, 0.8], round_s=[2.0, 4.0, 9.0], failed=[(1, 1)])
    options = {"target_accuracy": 0.8, "target_rounds": 2, "model_bytes": (3e6, 2e6)}
    run = summarize(history, selector="x", seed=1, num_clients=3, **options)
    assert (run.rounds_to_target, run.seconds_per_round, run.joules_per_round) == (2, 3.0, 1.0)
    assert run.rounds_to_target * run.seconds_per_round == run.time_to_target_s
    assert (run.megabytes_down, run.megabytes_up) == (4 * 3.0, 3 * 2.0)
    never = summarize(history, selector="x", seed=1, num_clients=3, **options | {"target_accuracy": 0.9})
    assert (never.megabytes_down, never.time_to_target_s) == (math.inf, math.inf)
    assert math.isnan(never.seconds_per_round)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [(np.linspace(0, 1, 21), 0.05), ([0.5, math.nan, 0.2], 0.2), ([math.nan], math.nan), ([], math.nan)],
)
def test_the_worst_tenth_of_the_clients(accuracies: Any, expected: float) -> None:
    """Of 21 clients three: 0, .05 and .1."""
    options = {"target_accuracy": 0.5, "client_accuracies": accuracies}
    run = summarize(make_history([[0]], accuracy=[0.5]), selector="x", seed=1, num_clients=3, **options)
    assert run.worst_tenth == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("accuracy", "last", "time", "simulated"),
    [
        ([math.nan, 0.8, math.nan], 0.8, 2.0, 3.0),  # rounds without a measurement are passed over
        ([0.1, 0.7999], 0.7999, math.inf, 2.0),  # the target is never reached
        ([], math.nan, math.inf, 0.0),
    ],
)
def test_summarize_short_runs(accuracy: list[float], last: float, time: float, simulated: float) -> None:
    history = make_history([[0]] * len(accuracy), accuracy=accuracy)
    run = summarize(history, selector="x", seed=0, num_clients=2, target_accuracy=0.8)
    assert run.accuracy == pytest.approx(last, nan_ok=True)
    assert (run.time_to_target_s, run.simulated_s, run.energy_j) == (time, simulated, 0.5 * len(accuracy))
    assert (math.isnan(run.jain), run.failed_clients) == (not accuracy, 0)


@pytest.mark.parametrize("target", [0, -0.1, 80, math.nan])
def test_a_target_that_is_no_fraction_is_refused(target: float) -> None:
    with pytest.raises(ParameterError, match="target_accuracy"):
        summarize(make_history([], accuracy=[]), selector="x", seed=0, num_clients=1, target_accuracy=target)


def test_aggregate_by_hand() -> None:
    random, bsfl, never = aggregate([
        make_run("random", 0, accuracy=0.5),
        make_run("bsfl", 0, 10.0, accuracy=0.8, failed_clients=1),
        make_run("bsfl", 1, math.inf, accuracy=0.9, failed_clients=2),
        make_run("bsfl", 2, 14.0, accuracy=1.0, failed_clients=6),
        *(make_run("never", seed, math.inf) for seed in range(2)),
    ])  # fmt: skip
    assert (random.selector, random.seeds, bsfl.selector, bsfl.seeds) == ("random", 1, "bsfl", 3)  # first appearance
    assert (bsfl.accuracy.mean, bsfl.accuracy.deviation) == pytest.approx((0.9, 0.1))  # divisor n - 1
    assert (bsfl.failed_clients.mean, bsfl.failed_clients.deviation) == pytest.approx((3.0, math.sqrt(7)))
    time = bsfl.time_to_target_s  # no mean over the two seeds that reached the target
    assert (time.count, time.total, time.never) == (2, 3, 1)
    assert np.isnan([time.mean, time.deviation]).all()
    assert random.accuracy.mean == 0.5
    assert math.isnan(random.accuracy.deviation)  # one seed has no spread
    assert never.time_to_target_s.count == 0
    assert math.isnan(never.time_to_target_s.mean)
    assert aggregate([]) == []
