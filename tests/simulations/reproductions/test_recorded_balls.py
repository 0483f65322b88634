"""Runs of training: PCZFL's balls are recorded, drawn, and change nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.reproductions.figure_pictures import draw
from fedsel_flwr.simulations.reproductions.paper_figure import PaperFigure, read_figure
from fedsel_flwr.simulations.reproductions.reproducing import cells_of, open_rows, results_of, verdict_of
from fedsel_flwr.simulations.reproductions.result_pages import paper_page
from fedsel_flwr.simulations.reproductions.training_runs import outcomes_of, run_training
from fedsel_flwr.simulations.scenario_files import load_scenario

BALLS = """
paper = "pczfl"
figure = "Fig. 0"
claim = "Balls."
scenario = "smoke"
illustration = true
seeds = 2
set = { rounds = 8, "clients.energy_score_low" = 0.5, "aggregation.warmup_rounds" = 2 }
arms = { pczfl = {} }
picture = { curve = "balls" }
"""


@pytest.fixture(scope="module")
def figure() -> PaperFigure:
    return read_figure(BALLS, "pczfl-fig-0")


def test_recording_balls_changes_no_outcome(figure: PaperFigure) -> None:
    first, second = (cell.scenario for cell in cells_of(figure))
    outcomes, curves = run_training(first)
    plain, others = outcomes_of(first, simulate(first, engine="vectorized", quiet=True))
    clock = {"run_s", "run_s_200"}
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


def test_an_illustration_with_arms_has_runs_and_a_picture(figure: PaperFigure, tmp_path: Path) -> None:
    assert draw(figure, results_of(figure, tmp_path), tmp_path) is None
    rows = open_rows(tmp_path, figure)
    rows.add(cells_of(figure)[0].simulate())
    results = results_of(figure, tmp_path)
    assert len(results.missing) == 1
    assert verdict_of(figure, results).word == "illustration"
    path = draw(figure, results, tmp_path)
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_an_illustration_without_arms_has_no_runs_seeds_or_minutes(tmp_path: Path) -> None:
    sketch = read_figure(BALLS.replace("arms = { pczfl = {} }", ""), "pczfl-fig-0")
    assert not sketch.has_runs
    page = paper_page("pczfl", [sketch], {sketch.name: results_of(sketch, tmp_path)}, tmp_path)
    assert "| illustration |  |  |" in page
    assert "Runs:" not in page


def test_the_hours_of_a_page_count_a_shared_run_once(figure: PaperFigure, tmp_path: Path) -> None:
    """Two figures with the same two runs of 1,800 s each: one hour, not two."""
    rows = open_rows(tmp_path, figure)
    for cell in cells_of(figure):
        own = {"fingerprint": cell.fingerprint, "run": cell.run, "selector": "pczfl", "seed": cell.scenario.seed}
        rows.add(own | {"cpu_s": 1800.0, "outcomes": "{}", "curves": "{}"})
    other = read_figure(BALLS, "pczfl-fig-00")
    found = {one.name: results_of(one, tmp_path) for one in (figure, other)}
    assert [one.cpu_s for one in found.values()] == [3600, 3600]
    assert "took 1.00 hours of one core" in paper_page("pczfl", [figure, other], found, tmp_path)
