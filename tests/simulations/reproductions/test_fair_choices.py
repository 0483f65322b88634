"""Outcomes of fairness in runs of choices, the bound beside a run, and panels of several curves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.reproductions import figure_pictures
from fedsel_flwr.simulations.reproductions.choice_runs import _fairness, draw_rounds, run_choices
from fedsel_flwr.simulations.reproductions.paper_figure import Picture, Regret, figure_names, load_figure, read_figure
from fedsel_flwr.simulations.reproductions.reproducing import _selector_text, cells_of, open_rows, reproduce, results_of
from fedsel_flwr.simulations.reproductions.result_pages import paper_page
from fedsel_flwr.theory import fair_optimum

KEYS = {
    "num_clients": 3, "clients_per_round": 2, "rounds": 300, "selector": "cs-ucb-q", "seed": 5,
    "partition.kind": "sizes", "partition.sizes": [1500, 1000, 500],
    "selectors.cs-ucb-q.fairness": [0.6, 0.5, 0.4], "selectors.cs-ucb-q.queue_weight": 0.01,
}  # fmt: skip
FAIR = (0.6, 0.5, 0.4)
TEXT = """
paper = "xia"
figure = "Fig. 9"
claim = "A claim."
scenario = "xia-ideal"
runner = "choices"
seeds = 2
[set]
rounds = 40
num_clients = 3
clients_per_round = 2
"selectors.cs-ucb-q.fairness" = [0.6, 0.5, 0.4]
[arms.cs-ucb-q]
[arms.random]
[regret]
kind = "fair"
fairness = [0.6, 0.5, 0.4]
[[checks]]
says = "regret"
outcome = "regret"
left = "cs-ucb-q"
right = "random"
relation = "below"
[picture]
curves = ["regret", "margin_1"]
bound = "bound"
scale = "symlog"
"""


def test_the_fairness_is_met_after_the_last_shortfall() -> None:
    """Client 1 has c_1 = 0.5 and is selected in rounds 2, 4 and 5: its shares are 0, 1/2, 1/3, 2/4, 3/5.

    Its differences are -0.5, 0, -0.167, 0 and 0.1, so that the last shortfall is in round 3. Client 2 has c_2 = 0.1 and
    is selected in every round.
    """
    margins = np.array([[-0.5, 0.9], [0.0, 0.9], [1 / 3 - 0.5, 0.9], [0.0, 0.9], [0.1, 0.9]])
    found = _fairness(margins)
    assert found["rounds_to_fair"] == 4
    assert (found["margin_1"], found["margin_2"], found["lowest_margin"]) == (0.1, 0.9, 0.1)
    assert (found["violated_1"], found["violated_2"]) == (0.0, 0.0)
    cut_off = _fairness(margins[:3])
    assert (cut_off["rounds_to_fair"], cut_off["violated_1"], cut_off["violated_2"]) == (3, 1.0, 0.0)


def test_a_shortfall_below_a_hundredth_counts_as_met() -> None:
    found = _fairness(np.array([[-0.011], [-0.009]]))
    assert (found["rounds_to_fair"], found["violated_1"], found["margin_1"]) == (2, 0.0, -0.009)


def test_the_bound_is_that_of_the_selectors_beta() -> None:
    """(29) by hand: Omega = 0.6² + 0.5² + 0.6² = 0.97, beta = 0.01, T = 300."""
    outcomes, curves = run_choices(load_scenario("xia-ideal", KEYS), Regret(kind="fair", fairness=FAIR))
    learning = (math.pi**2 / 3 + 1) * 3 + 4 * math.sqrt(2 * 3 * 2 * 300 * math.log(300))
    assert outcomes["bound"] == pytest.approx(0.01 * 0.97 * 300 / 2 + 0.99 * learning)
    assert curves["bound"].shape == curves["regret"].shape
    other, _ = run_choices(
        load_scenario("xia-ideal", KEYS | {"selector": "cs-ucb"}), Regret(kind="fair", fairness=FAIR)
    )
    assert "bound" not in other


@pytest.mark.filterwarnings("error")
def test_a_round_without_clients_has_no_reward() -> None:
    """By brute force: every selector takes all of at most two available clients, so the loop needs no selector."""
    keys = {"availability.kind": "bernoulli", "availability.probability": 0.3}
    scenario = load_scenario("xia-ideal", KEYS | keys)
    latency, available = draw_rounds(scenario, scenario.system_model())
    assert (available.sum(axis=1) == 0).sum() > 50
    few = available.sum(axis=1) <= 2
    fair = (0.1, 0.1, 0.1)
    outcomes, _ = run_choices(scenario, Regret(kind="fair", fairness=fair, availability=0.3))
    mean = 1 - mean_latencies(scenario.system_model()) / 5.0
    best, _ = fair_optimum(mean, 0.3, list(fair), 2)
    seen = [(1 - np.minimum(latency[t, available[t]], 5.0) / 5.0).min() if available[t].any() else 0.0
            for t in np.flatnonzero(few)]  # fmt: skip
    rest = [1 - np.minimum(latency[t], 5.0) / 5.0 for t in np.flatnonzero(~few)]
    # With three available clients, the smaller of two rewards is the smallest or the middle one of the three.
    lowest, highest = (sum(np.sort(own)[place] for own in rest) for place in (0, 1))
    regret = 300 * best - sum(seen)
    assert regret - highest - 1e-6 <= outcomes["regret_realized"] <= regret - lowest + 1e-6


def test_the_late_regret_is_that_of_the_last_half() -> None:
    """Round robin with K / m = 4 loses the same in each cycle, so half of the regret belongs to the last half."""
    scenario = load_scenario("xia-ideal", {"rounds": 320, "selector": "round-robin"})
    outcomes, curves = run_choices(scenario, Regret(kind="xia"))
    assert outcomes["regret_late"] == pytest.approx(outcomes["regret"] / 2)
    assert 0 < outcomes["realized_late"] < outcomes["regret_realized"]
    np.testing.assert_allclose(curves["average"] * curves["at"], curves["regret"])


def test_a_picture_has_a_panel_for_each_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = read_figure(TEXT, "xia-fig-9")
    monkeypatch.setattr("fedsel_flwr.simulations.reproductions.reproducing.load_figure", lambda name: figure)
    monkeypatch.setattr("fedsel_flwr.simulations.reproductions.result_pages.write_pages", lambda *_: None)
    reproduce(["xia-fig-9"], tmp_path, announce=lambda line: None)
    drawn: list[Any] = []
    new = figure_pictures._new_figure
    monkeypatch.setattr(figure_pictures, "_new_figure", lambda *size: drawn.append(new(*size)) or drawn[0])
    assert figure_pictures.draw(figure, results_of(figure, tmp_path), tmp_path) == tmp_path / "xia-fig-9.png"
    regret, margin = drawn[0].axes
    assert (regret.get_ylabel(), margin.get_ylabel()) == ("regret of means", "share of client 1 minus c_1")
    labels = regret.get_legend_handles_labels()[1]
    assert labels == ["cs-ucb-q", "bound of cs-ucb-q", "random"]
    assert regret.get_yscale() == "symlog"


def test_a_picture_has_a_panel_for_each_outcome_and_shows_possible_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shares 0 and 1 of two seeds, Student's interval is -5.9 to 6.9, and the bar ends at 0 and 1."""
    figure = read_figure(TEXT, "xia-fig-9")
    picture = Picture(outcomes=("best_above", "regret"), levels={"chance": 0.5})
    figure = figure.model_copy(update={"picture": picture, "seeds": 2})
    rows = open_rows(tmp_path, figure)
    for cell in cells_of(figure):
        rows.add({"fingerprint": cell.fingerprint, "run": cell.run, "selector": cell.arm, "seed": cell.scenario.seed,
                  "cpu_s": 1.0, "outcomes": json.dumps({"regret": 1.0, "best_above": cell.scenario.seed - 1}),
                  "curves": "{}"})  # fmt: skip
    drawn: list[Any] = []
    new = figure_pictures._new_figure
    monkeypatch.setattr(figure_pictures, "_new_figure", lambda *size: drawn.append(new(*size)) or drawn[0])
    figure_pictures.draw(figure, results_of(figure, tmp_path), tmp_path)
    share, regret = drawn[0].axes
    assert (share.get_ylabel(), regret.get_ylabel()) == (
        "share of instances\nbest state, equal steps",
        "regret of means",
    )
    assert share.get_legend_handles_labels()[1] == ["chance", "cs-ucb-q", "random"]
    (bar,) = share.collections[0].get_segments()
    assert [y for _, y in bar] == [0.0, 1.0]


def test_runs_with_different_fingerprints_have_different_descriptions() -> None:
    """The file of rows holds one row for each description, selector and seed."""
    described: dict[tuple[str, str, str, str], str] = {}
    for figure in map(load_figure, figure_names()):
        if figure.left_out or figure.illustration:
            continue
        for cell in cells_of(figure, 1):
            key = figure.paper, figure.runner, cell.run, _selector_text(cell.scenario)
            assert described.setdefault(key, cell.fingerprint) == cell.fingerprint, (figure.name, key)


def test_a_run_that_two_figures_share_counts_once_in_the_hours(tmp_path: Path) -> None:
    """Two figures with equal runs of 1,800 s each: 4 runs, so 2.00 hours and not 4.00."""
    figure = read_figure(TEXT, "xia-fig-9")
    rows = open_rows(tmp_path, figure)
    for cell in cells_of(figure):
        rows.add({"fingerprint": cell.fingerprint, "run": cell.run, "selector": cell.arm, "seed": cell.scenario.seed,
                  "cpu_s": 1800.0, "outcomes": '{"regret":1}', "curves": "{}"})  # fmt: skip
    twin = figure.model_copy(update={"name": "xia-fig-10"})
    found = {one.name: results_of(one, tmp_path) for one in (figure, twin)}
    page = paper_page("xia", [figure, twin], found, tmp_path)
    assert "took 2.00 hours" in page
