"""Files of figures: their arms, cells and checks, and errors that name the fault."""

from __future__ import annotations

import re

import pytest

from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.reproductions.paper_figure import PAPERS, figure_names, load_figure, read_figure

TEXT = """
paper = "xia"
figure = "Fig. 9"
claim = "A claim."
scenario = "smoke"
runner = "choices"
seeds = 2
set = { rounds = 7 }
arms = { random = {}, "bsfl slow" = { selector = "bsfl", params = { min_latency = 0.5 }, only = ["three"] } }
cells = { two = { clients_per_round = 2 }, three = { clients_per_round = 3, "regret.alpha" = 2.0 } }
regret = { kind = "bsfl" }
[[checks]]
says = "it"
outcome = "regret"
left = "random @ three"
right = "bsfl slow @ three"
relation = "above"
"""


def test_an_arm_in_a_cell_is_a_scenario() -> None:
    figure = read_figure(TEXT, "xia-fig-9")
    scenario = figure.scenario_of("bsfl slow", "three", 2)
    assert (scenario.selector, scenario.seed, scenario.rounds, scenario.clients_per_round) == ("bsfl", 2, 7, 3)
    assert scenario.selectors["bsfl"]["min_latency"] == 0.5
    assert (figure.regret_in("random", "two").alpha, figure.regret_in("random", "three").alpha) == (1.0, 2.0)


def test_the_runs_leave_out_cells_in_which_an_arm_does_not_run() -> None:
    runs = list(read_figure(TEXT, "xia-fig-9").runs())
    assert len(runs) == 6
    assert ("two", "bsfl slow", 1) not in runs
    assert len(list(read_figure(TEXT, "xia-fig-9").runs(1))) == 3


@pytest.mark.parametrize(
    ("keys", "seeds"),
    [
        ("cell_seeds = {two = 1}", {"two": {1}, "three": {1, 2}}),
        # New seeds begin after those that were looked at.
        ("first_seed = 21\ncell_seeds = {two = 1}", {"two": {21}, "three": {21, 22}}),
    ],
)
def test_a_cell_of_a_question_can_have_fewer_seeds(keys: str, seeds: dict[str, set[int]]) -> None:
    runs = [*read_figure(TEXT.replace("seeds = 2", f"seeds = 2\n{keys}"), "xia-fig-9").runs()]
    assert {own: {seed for cell, _, seed in runs if cell == own} for own in seeds} == seeds


def test_only_seeds_with_the_paper_s_slowest_client_count() -> None:
    found = read_figure(TEXT.replace("seeds = 2", "seeds = 2\nfirst_seed = 3\nslowest_client = 2"), "xia-fig-9")
    seeds = sorted({seed for _, _, seed in found.runs()})
    slowest = {
        seed: int(mean_latencies(found.scenario_of("random", "two", seed).system_model()).argmax()) + 1
        for seed in range(3, seeds[-1] + 1)
    }
    assert seeds == [seed for seed, client in slowest.items() if client == 2]
    assert len(seeds) == 2 < len(slowest)


def test_each_cell_of_a_check_can_be_a_reading() -> None:
    text = TEXT.replace('left = "random @ three"', 'left = "random"').replace('"bsfl slow @ three"', "3.0")
    figure = read_figure(text.replace('relation = "above"', 'relation = "above"\nreading = "*"'), "xia-fig-9")
    assert figure.readings == ("two", "three")
    assert [(one.check.reading, one.left.cell) for one in figure.comparisons()] == [("two", "two"), ("three", "three")]


def test_a_check_that_names_its_cells_is_one_comparison() -> None:
    (one,) = read_figure(TEXT, "xia-fig-9").comparisons()
    assert (str(one.left), str(one.right)) == ("random, three", "bsfl slow, three")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("random @ three", "rando @ three", "there is no arm 'rando'"),
        ("bsfl slow @ three", "bsfl slow @ two", "arm 'bsfl slow' does not run in cell 'two'"),
        ('right = "bsfl slow @ three"', "", "a check needs left and right"),
        ('outcome = "regret"', 'outcome = "regret"\npaper = [1.0, 2.0, 3.0]', "paper must have 2 numbers"),
        ("seeds = 2", "seeds = 2\ncell_seeds = {three = 1}", "cell 'three' takes part in a check"),
        ("seeds = 2", "seeds = 2\ncell_seeds = {four = 1}", "there is no cell 'four'"),
        ("seeds = 2", "seed = 2", "seed: Extra inputs"),
        ("seeds = 2", "seeds = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_names_the_fault(old: str, new: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        read_figure(TEXT.replace(old, new), "xia-fig-9")


def test_an_unknown_figure_names_the_command_that_lists_all() -> None:
    with pytest.raises(ParameterError, match=r"there is no figure 'xia-fig-99'\. fedsel reproduce --list shows"):
        load_figure("xia-fig-99")


@pytest.mark.parametrize("name", figure_names())
def test_every_figure_of_the_package_can_be_read(name: str) -> None:
    figure = load_figure(name)
    assert figure.illustration or figure.left_out or (figure.checks and figure.arms)
    for cell, arm, seed in figure.runs(1):
        figure.scenario_of(arm, cell, seed)


def test_figures_are_sorted_by_paper_and_number() -> None:
    papers = [name.partition("-")[0] for name in figure_names()]
    assert list(dict.fromkeys(papers)) == [paper for paper in PAPERS if paper in papers]
    for paper in PAPERS:
        numbers = [int(re.search("[0-9]+", name)[0]) for name in figure_names() if name.startswith(f"{paper}-fig-")]
        assert numbers == sorted(numbers)
