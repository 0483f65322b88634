"""The table as a reader sees it: in a pipe, at 80 columns, on an old encoding."""

from __future__ import annotations

import dataclasses
import io
import math
import subprocess
import sys

import pytest
from rich.console import Console

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report import RunSummary, SelectorRow, aggregate
from fedsel_flwr.report.tables import render_table

RUN = RunSummary(
    selector="bsfl",
    seed=0,
    accuracy=0.9,
    time_to_target_s=10.0,
    energy_to_target_j=1234.4,
    energy_j=2468.8,
    jain=0.5,
    failed_clients=3,
    simulated_s=20.0,
)


def rows_of_three_selectors() -> list[SelectorRow]:
    bsfl = [
        dataclasses.replace(RUN, seed=0, accuracy=0.80, time_to_target_s=10.0),
        dataclasses.replace(RUN, seed=1, accuracy=0.90, time_to_target_s=math.inf, energy_to_target_j=math.inf),
        dataclasses.replace(RUN, seed=2, accuracy=1.00, time_to_target_s=14.0, energy_to_target_j=1238.4),
    ]
    choice = [
        dataclasses.replace(
            r, selector="power-of-choice", time_to_target_s=math.inf, energy_to_target_j=math.inf, failed_clients=120
        )
        for r in bsfl
    ]
    odd = [
        dataclasses.replace(r, selector="[bold]mine", time_to_target_s=123.44 + r.seed, energy_to_target_j=5.0)
        for r in bsfl
    ]
    return aggregate([*bsfl, *choice, *odd])


def render(rows: list[SelectorRow], width: int = 80) -> str:
    out = io.StringIO()
    render_table(rows, 0.8, Console(file=out, width=width))
    return out.getvalue()


def words(line: str) -> str:
    return " ".join(line.split())


def test_the_table_at_80_columns() -> None:
    lines = render(rows_of_three_selectors()).splitlines()
    assert max(map(len, lines)) <= 80
    assert "time to 80 %" in lines[0]
    assert lines[1].split() == ["selector", "%", "simulated", "s", "to", "80", "%,", "J", "index", "clients"]
    assert words(lines[3]) == "bsfl 90.0 ±10.0 12.0 ±2.8 1236 ±3 0.500 ±0.000 3.0 ±0.0"
    assert lines[4].split() == ["(2", "of", "3)"] * 2  # under time and energy, because the line would be longer than 80
    assert words(lines[5]) == "power-of-choice 90.0 ±10.0 never never 0.500 ±0.000 120.0 ±0.0"
    assert words(lines[6]).startswith("[bold]mine 90.0 ±10.0 124.4 ±1.0")  # a name is text, never markup
    assert lines[7].strip() == "mean ± sample standard deviation over 3 seeds"
    assert len(lines) == 8


def test_the_count_of_seeds_stands_in_the_line_where_there_is_room() -> None:
    lines = render(rows_of_three_selectors(), width=100).splitlines()
    assert words(lines[3]) == "bsfl 90.0 ±10.0 12.0 ±2.8 (2 of 3) 1236 ±3 (2 of 3) 0.500 ±0.000 3.0 ±0.0"


def test_one_seed_has_no_spread() -> None:
    text = render(aggregate([RUN, dataclasses.replace(RUN, selector="random", time_to_target_s=math.inf)]))
    assert "±" not in text
    bsfl, random = text.splitlines()[3:5]
    assert bsfl.split() == ["bsfl", "90.0", "10.0", "1234", "0.500", "3"]
    assert random.split() == ["random", "90.0", "never", "1234", "0.500", "3"]


def test_a_figure_that_no_seed_has_is_a_dash() -> None:
    text = render(aggregate([dataclasses.replace(RUN, accuracy=math.nan, jain=math.nan)]))
    assert text.splitlines()[3].split() == ["bsfl", "-", "10.0", "1234", "-", "3"]


def test_the_caption_says_when_selectors_have_different_numbers_of_seeds() -> None:
    text = render(aggregate([RUN, dataclasses.replace(RUN, seed=1), dataclasses.replace(RUN, selector="random")]))
    assert "over 1 to 2 seeds" in text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_in_a_pipe_the_text_is_plain_and_nothing_is_folded(encoding: str) -> None:
    code = (
        "from fedsel_flwr.report import RunSummary, aggregate;"
        "from fedsel_flwr.report.tables import render_table;"
        "name = 'a-selector-with-a-name-that-is-far-too-long-for-any-table-of-eighty-columns';"
        "runs = [RunSummary(selector=name, seed=s, accuracy=.5 + s / 10, time_to_target_s=3.,"
        " energy_to_target_j=1., energy_j=1., jain=1.,"
        " failed_clients=0, simulated_s=9.) for s in range(2)];"
        "render_table(aggregate(runs), 0.8)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONIOENCODING": encoding},
    )
    text = done.stdout.decode(encoding)
    assert "\x1b" not in text
    row = text.splitlines()[3].replace("|", " ")  # the rules between columns in ASCII
    plus_minus = {"utf-8": "±", "ascii": "+/-"}[encoding]
    assert row.split()[0] == "a-selector-with-a-name-that-is-far-too-long-for-any-table-of-eighty-columns"
    assert row.split()[1:3] == ["55.0", f"{plus_minus}7.1"]
    assert row.split()[-2:] == ["0.0", f"{plus_minus}0.0"]


def test_a_target_in_percent_is_refused() -> None:
    with pytest.raises(ParameterError, match="target_accuracy"):
        render_table([], 80)
