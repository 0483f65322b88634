"""Pictures of reproduced figures: a panel for each curve and outcome, PCZFL's balls, and figures that lack runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.simulations.reproductions import figure_pictures
from fedsel_flwr.simulations.reproductions.claims import verdict_of
from fedsel_flwr.simulations.reproductions.paper_figure import PaperFigure, Picture, load_figure, read_figure
from fedsel_flwr.simulations.reproductions.rows import Cell, Rows, cells_of, open_rows, results_of
from tests.simulations.reproductions.test_rows import FIGURE
from tests.simulations.reproductions.test_training_runs import BALLS

TEXT = """
paper = "xia"
figure = "Fig. 9"
claim = "A claim."
scenario = "xia-ideal"
runner = "choices"
seeds = 2
set = { rounds = 40, num_clients = 3, clients_per_round = 2, "selectors.cs-ucb-q.fairness" = [0.6, 0.5, 0.4] }
arms = { cs-ucb-q = {}, random = {} }
regret = { kind = "fair", fairness = [0.6, 0.5, 0.4] }
checks = [{ says = "regret", outcome = "regret", left = "cs-ucb-q", right = "random", relation = "below" }]
picture = { curves = ["regret", "margin_1"], bound = "bound", scale = "symlog" }
"""


def add(rows: Rows, cell: Cell, outcomes: dict[str, float], curves: dict[str, list[float]] | None = None) -> None:
    """Add the row of a run that was not played."""
    rows.add({"fingerprint": cell.fingerprint, "run": cell.run, "selector": cell.arm, "seed": cell.scenario.seed,
              "cpu_s": 1.0, "outcomes": json.dumps(outcomes), "curves": json.dumps(curves or {})})  # fmt: skip


def drawn_panels(figure: PaperFigure, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """The panels and labels of a picture, which is not drawn."""
    seen: list[Any] = []
    note = lambda panels, path, labels, columns: seen.extend((panels, labels))  # noqa: E731
    monkeypatch.setattr(figure_pictures, "save_picture", note)
    figure_pictures.draw(figure, results_of(figure, folder), folder)
    panels, labels = seen
    return panels, labels


def test_a_picture_has_a_panel_for_each_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = read_figure(TEXT, "xia-fig-9")
    rows = open_rows(tmp_path, figure)
    for cell in cells_of(figure):
        rows.add(cell.simulate())
    assert figure_pictures.draw(figure, results_of(figure, tmp_path), tmp_path) == tmp_path / "xia-fig-9.png"
    panels, labels = drawn_panels(figure, tmp_path, monkeypatch)
    axes = [panel.spec["layer"][-1]["encoding"]["y"] for panel in panels]
    assert [axis["title"] for axis in axes] == [["regret of means"], ["share of client 1 minus c_1"]]
    assert axes[0]["scale"]["type"] == "symlog"
    used = [sorted({labels[row["series"]] for row in panel.rows}) for panel in panels]
    assert used == [["bound of cs-ucb-q", "cs-ucb-q", "random"]] * 2


def test_a_picture_has_a_panel_for_each_outcome_and_shows_possible_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shares 0 and 1 of two seeds, Student's interval is -5.9 to 6.9, and the bar ends at 0 and 1."""
    figure = read_figure(TEXT, "xia-fig-9")
    picture = Picture(outcomes=("best_above", "regret"), levels={"chance": 0.5})
    figure = figure.model_copy(update={"picture": picture, "seeds": 2})
    rows = open_rows(tmp_path, figure)
    for cell in cells_of(figure):
        add(rows, cell, {"regret": 1.0, "best_above": cell.scenario.seed - 1})
    (share, regret), _ = drawn_panels(figure, tmp_path, monkeypatch)
    titles = [panel.spec["layer"][0]["encoding"]["y"]["title"] for panel in (share, regret)]
    assert titles == [["share of instances", "best state, equal steps"], ["regret of means"]]
    assert share.spec["layer"][-1]["mark"]["text"] == "chance"
    assert [(row["low"], row["value"], row["high"]) for row in share.rows] == [(0, 0.5, 1)] * 2


def test_an_arm_that_sometimes_never_gets_there_is_in_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedCM reaches FedAvg's accuracy in rounds 10 to 50, and on the last of six seeds never."""
    figure = read_figure(FIGURE.format(other="fedavg"), "kim-table-5")
    figure = figure.model_copy(update={"picture": Picture(outcomes=("rounds_to.fedavg",)), "seeds": 6})
    rows = open_rows(tmp_path, figure)
    for cell in cells_of(figure):
        seed, final = cell.scenario.seed, 0.5 if cell.arm == "fedavg" else 0.4
        curves = {"record_at": [10 * seed], "record": [0.4 if cell.arm == "fedcm" and seed == 6 else 0.6]}
        add(rows, cell, {"accuracy_last10": final}, curves)
    ((panel,), labels) = drawn_panels(figure, tmp_path, monkeypatch)
    found = {labels[row["series"]]: (row["low"], row["value"], row["high"]) for row in panel.rows}
    # The interval of a median of six values is all of them.
    assert found == {"fedavg": (10, 35, 60), "fedcm": (10, 35, 50)}


def test_an_illustration_with_arms_has_runs_and_a_picture(tmp_path: Path) -> None:
    figure = read_figure(BALLS, "pczfl-fig-0")
    assert figure_pictures.draw(figure, results_of(figure, tmp_path), tmp_path) is None
    open_rows(tmp_path, figure).add(cells_of(figure)[0].simulate())
    results = results_of(figure, tmp_path)
    assert len(results.missing) == 1
    assert verdict_of(figure, results).word == "illustration"
    path = figure_pictures.draw(figure, results, tmp_path)
    assert path is not None
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_picture_that_needs_runs_of_another_arm_waits_for_them(tmp_path: Path) -> None:
    """The rounds to FedAvg's accuracy are unknown without FedAvg."""
    figure = load_figure("kim-table-5")
    cell = next(one for one in cells_of(figure, 1) if one.arm == "fedpdp")
    curves = {"at": [1, 2], "record_at": [1, 2], "record": [0.4, 0.6]}
    add(open_rows(tmp_path, figure), cell, {"accuracy_last10": 0.5}, curves)
    assert figure_pictures.draw(figure, results_of(figure, tmp_path), tmp_path) is None
    assert list(tmp_path.glob("*.png")) == []
