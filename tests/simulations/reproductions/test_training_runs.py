"""Outcomes of runs of training: who was selected how often, the late gain, and the processor time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.reproductions.paper_figure import PaperFigure, read_figure
from fedsel_flwr.simulations.reproductions.rows import cells_of
from fedsel_flwr.simulations.reproductions.training_runs import outcomes_of, run_training
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from tests.report.made import make_history

COHORTS = [[0, 1, 2, 3], [0, 1], [0, 2], [0, 3], [0, 1]]
"""The clients of each round. In round 1, all clients are selected, as in GPFL's initialization."""
BALLS = """
paper = "pczfl"
figure = "Fig. 0"
claim = "Balls."
scenario = "smoke"
illustration = true
seeds = 2
set = { rounds = 8, "clients.energy_score_low" = 0.5, "aggregation.warmup_rounds" = 2 }
arms = { pczfl = {} }
picture = { curves = ["balls"] }
"""


@pytest.fixture(scope="module")
def figure() -> PaperFigure:
    return read_figure(BALLS, "pczfl-fig-0")


def result_of(cohorts: list[list[int]]) -> RunResult:
    """Return a run with these cohorts, and the accuracies 0.1, 0.2, 0.3 and so on."""
    return RunResult(make_history(cohorts, accuracy=[t / 10 for t in range(1, len(cohorts) + 1)]), [np.zeros(1)])


def scenario_of(selector: str, **keys: object) -> Scenario:
    return load_scenario("smoke", {"selector": selector, "num_clients": 4, "clients_per_round": 2, "rounds": 5, **keys})


@pytest.mark.parametrize(
    ("selector", "keys", "cohorts", "coverage", "counts", "seen"),
    [
        # GPFL's initialization is no selection. Rounds 2 to 5 select client 0 four times, client 1 twice, and clients 2
        # and 3 once. The last new client, 3, comes in round 4, which is the third round after the initialization.
        ("gpfl", {}, COHORTS, 3, [4, 2, 1, 1], [2, 3, 4, 4, 4]),
        ("random", {}, COHORTS, 1, [5, 3, 2, 2], [4, 4, 4, 4, 4]),
        ("gpfl", {"aggregation.warmup_rounds": 1}, COHORTS, 1, [5, 3, 2, 2], [4, 4, 4, 4, 4]),
        ("random", {}, [[0, 1], [0, 2], [0, 1]], 4, [3, 2, 1, 0], [2, 3, 3]),  # client 3 is never selected
    ],
)
def test_who_was_selected_how_often_and_when_all_were(
    selector: str, keys: dict[str, int], cohorts: list[list[int]], coverage: int, counts: list[int], seen: list[int]
) -> None:
    found, curves = outcomes_of(scenario_of(selector, **keys), result_of(cohorts))
    assert (found["coverage_rounds"], found["largest_count"]) == (coverage, counts[0])
    assert found["seen_share"] == 1 - counts.count(0) / 4
    assert (curves["rank"].tolist(), curves["counts"].tolist()) == ([1, 2, 3, 4], counts)
    assert curves["seen"].tolist() == seen


def test_late_gain() -> None:
    # Five rounds: the mean of 0.1 to 0.5, minus that of the first half, 0.1 to 0.3.
    found, _ = outcomes_of(scenario_of("random"), result_of(COHORTS))
    assert found["late_gain"] == pytest.approx(0.3 - 0.2)


def test_the_simulated_time_of_the_first_200_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsel_flwr.simulations.reproductions.training_runs.TIMED_ROUNDS", 3)
    result = result_of(COHORTS)
    found, _ = outcomes_of(scenario_of("random"), result)
    assert found["simulated_s_200"] == result.history.rounds[2].simulated_s


def test_recording_balls_changes_no_outcome(figure: PaperFigure) -> None:
    first, second = (cell.scenario for cell in cells_of(figure))
    outcomes, curves = run_training(first)
    plain, others = outcomes_of(first, simulate(first, engine="vectorized", quiet=True))
    clock = {"run_s"}
    assert outcomes["run_s"] > 0
    assert outcomes.keys() - clock == plain.keys() - clock >= {"score_energy", "cohort"}
    for name, value in plain.items():
        assert outcomes[name] == value or math.isnan(value), name
    assert curves["balls_rounds"].tolist() == [0, 2, 8]
    for name, values in others.items():
        np.testing.assert_array_equal(curves[name], values)
    # Only the first seed has balls.
    assert not any(name.startswith("balls") for name in run_training(second)[1])


def test_before_training_one_ball_holds_all_clients(figure: PaperFigure) -> None:
    """The first ball has the centre (0.5, 0.5) and the radius 1, and all contexts have the initial model's accuracy."""
    _, curves = run_training(cells_of(figure)[0].scenario)
    assert [curves[f"balls_0_{part}"].tolist() for part in ("x", "y", "radius", "front")] == [[0.5], [0.5], [1], [1]]
    assert len(curves["contexts_0_x"]) == len(curves["contexts_8_y"]) == load_scenario("smoke").num_clients
    assert len(set(curves["contexts_0_x"])) == 1
    np.testing.assert_array_equal(curves["contexts_0_y"], curves["contexts_8_y"])  # scores are fixed
    assert curves["balls_8_front"].max() == 1
    x, y = curves["contexts_8_x"], curves["contexts_8_y"]
    centres = np.column_stack([curves["balls_8_x"], curves["balls_8_y"]])
    apart = np.hypot(x[:, None] - centres[:, 0], y[:, None] - centres[:, 1])
    assert (apart <= curves["balls_8_radius"] + 1e-9).any(axis=1).all()  # each client is in a ball


def test_records_and_the_spread_over_the_clients() -> None:
    # With 8 rounds, the curve "accuracy" has a point for each round.
    keys = {"rounds": 8, "num_clients": 6, "clients_per_round": 2, "selector": "random", "engine": "vectorized"}
    scenario = load_scenario("digits", keys)
    result = simulate(scenario, engine="vectorized", quiet=True)
    outcomes, curves = outcomes_of(scenario, result)
    expected: list[tuple[int, float]] = []
    for number, accuracy in enumerate((one.accuracy for one in result.history.rounds), start=1):
        if all(accuracy > earlier for _, earlier in expected):
            expected.append((number, accuracy))
    assert [*zip(curves["record_at"], curves["record"], strict=True)] == expected
    assert 1 < len(expected) < 8
    accuracies = result.client_accuracies
    mean = sum(accuracies) / 6
    assert outcomes["client_spread"] == pytest.approx(np.sqrt(sum((one - mean) ** 2 for one in accuracies) / 6))
    assert outcomes["client_spread"] > 0
