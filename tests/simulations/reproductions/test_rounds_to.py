"""The outcome "rounds_to.ARM": the first round in which an arm has another arm's final accuracy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.reproductions.claims import judge
from fedsel_flwr.simulations.reproductions.paper_figure import PaperFigure, read_figure
from fedsel_flwr.simulations.reproductions.reproducing import Results, cells_of
from fedsel_flwr.simulations.reproductions.result_pages import paper_page
from fedsel_flwr.simulations.reproductions.rows import FINGERPRINT
from fedsel_flwr.simulations.reproductions.training_runs import outcomes_of
from fedsel_flwr.simulations.scenario_files import load_scenario

FIGURE = """
paper = "kim"
figure = "Table 5"
claim = "FedCM reaches FedAvg's accuracy in a quarter of the rounds."
scenario = "digits"
seeds = 2

[arms.fedavg]
selector = "random"
[arms.fedcm]
selector = "fedcm-ts"

[[checks]]
says = "rounds"
outcome = "rounds_to.{other}"
left = "fedcm"
right = 100.0
relation = "below"
"""


def _figure(other: str = "fedavg") -> PaperFigure:
    return read_figure(FIGURE.format(other=other), "kim-table-5")


def _results(figure: PaperFigure, final: dict[int, float], records: dict[int, dict[str, list[float]]]) -> Results:
    """Return results in which FedAvg has these final accuracies, and FedCM these records, by seed."""
    rows = []
    for cell in cells_of(figure):
        seed = cell.scenario.seed
        own = ({"accuracy_last10": final[seed]}, {}) if cell.arm == "fedavg" else ({}, {"at": [1, 100]} | records[seed])
        outcomes, curves = map(json.dumps, own)
        rows.append({FINGERPRINT: cell.fingerprint, "cpu_s": "1", "outcomes": outcomes, "curves": curves})
    return Results(cells_of(figure), rows)  # type: ignore[arg-type]


def test_the_first_round_with_the_other_arms_final_accuracy_on_the_same_seed() -> None:
    figure = _figure()
    # Seed 1: the target 0.6 is reached exactly, in round 20. Seed 2: 0.8 is reached in round 31 by 0.85.
    records = {
        1: {"record_at": [1, 4, 20, 60], "record": [0.2, 0.59, 0.6, 0.9]},
        2: {"record_at": [2, 31], "record": [0.3, 0.85]},
    }
    results = _results(figure, {1: 0.6, 2: 0.8}, records)
    assert results.values("rounds_to.fedavg", "fedcm", "") == {1: 20, 2: 31}
    (finding,) = judge(figure, results.values).findings
    assert finding.estimate == pytest.approx(math.sqrt(0.20 * 0.31))


def test_an_arm_that_never_has_the_accuracy_counts_with_its_rounds() -> None:
    figure = _figure()
    records = {seed: {"record_at": [1, 9], "record": [0.2, 0.7]} for seed in (1, 2)}
    results = _results(figure, {1: 0.7001, 2: math.nan}, records)
    found = results.values("rounds_to.fedavg", "fedcm", "")
    assert found[1] == 100
    assert math.isnan(found[2])


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(ParameterError, match="there is no arm 'fedavgm'"):
        _figure("fedavgm")


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


def test_a_run_that_two_figures_share_counts_once_in_the_hours(tmp_path: Path) -> None:
    # One run of 1,800 seconds per arm and seed: 4 runs, two hours.
    figure = _figure()
    cells = cells_of(figure)
    rows = [
        {FINGERPRINT: cell.fingerprint, "cpu_s": "1800", "outcomes": '{"accuracy_last10":0.5}', "curves": "{}"}
        for cell in cells
    ]
    twin = figure.model_copy(update={"name": "kim-fig-3"})
    found = {one.name: Results(cells_of(one), rows) for one in (figure, twin)}  # type: ignore[arg-type]
    assert found[figure.name].cpu_s == 7200
    page = paper_page("kim", [figure, twin], found, tmp_path)
    assert "The finished runs took 2.00 hours of one core " in page
