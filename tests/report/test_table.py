"""The table as a reader sees it: in a pipe, at 80 columns, on an old encoding."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report import SelectorRow, aggregate
from fedsel_flwr.report.tables import render_table
from tests.report.made import make_run

RUN = make_run(energy=1234.4, energy_j=2468.8)
INF = math.inf


def rows_of_three_selectors() -> list[SelectorRow]:
    figures = [(0.8, 10.0, 1234.4), (0.9, INF, INF), (1.0, 14.0, 1238.4)]
    bsfl = [make_run("bsfl", i, time, energy, accuracy=a) for i, (a, time, energy) in enumerate(figures)]
    choice = [
        replace(r, selector="power-of-choice", time_to_target_s=INF, energy_to_target_j=INF, failed_clients=120)
        for r in bsfl
    ]
    odd = [replace(r, selector="[bold]mine", time_to_target_s=123.44 + r.seed, energy_to_target_j=5.0) for r in bsfl]
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
    text = render(aggregate([RUN, replace(RUN, selector="random", time_to_target_s=math.inf)]))
    assert "±" not in text
    bsfl, random = text.splitlines()[3:5]
    assert bsfl.split() == ["bsfl", "90.0", "10.0", "1234", "0.500", "3"]
    assert random.split() == ["random", "90.0", "never", "1234", "0.500", "3"]


def test_a_figure_that_no_seed_has_is_a_dash_and_numbers_of_seeds_may_differ() -> None:
    text = render(aggregate([replace(RUN, accuracy=math.nan, jain=math.nan)]))
    assert text.splitlines()[3].split() == ["bsfl", "-", "10.0", "1234", "-", "3"]
    text = render(aggregate([RUN, replace(RUN, seed=1), replace(RUN, selector="random")]))
    assert "over 1 to 2 seeds" in text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_in_a_pipe_the_text_is_plain_and_nothing_is_folded(encoding: str) -> None:
    name = "a-selector-with-a-name-that-is-far-too-long-for-any-table-of-eighty-columns"
    code = (
        "from fedsel_flwr.report import aggregate; from fedsel_flwr.report.tables import render_table;"
        "from tests.report.made import make_run;"
        f"render_table(aggregate(make_run({name!r}, s, 3.0, accuracy=.5 + s / 10) for s in range(2)), 0.8)"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60, env=environment)
    text = done.stdout.decode(encoding)
    assert "\x1b" not in text
    row = text.splitlines()[3].replace("|", " ")  # the rules between columns in ASCII
    plus_minus = {"utf-8": "±", "ascii": "+/-"}[encoding]
    assert row.split()[:3] == [name, "55.0", f"{plus_minus}7.1"]
    assert row.split()[-2:] == ["3.0", f"{plus_minus}0.0"]


def test_a_target_in_percent_is_refused() -> None:
    with pytest.raises(ParameterError, match="target_accuracy"):
        render_table([], 80)
