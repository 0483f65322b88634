"""The table as a reader sees it: in a pipe, at 80 columns, on an old encoding."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report import SelectorRow, aggregate
from fedsel_flwr.report.tables import latex_table, render_table, runs_frame, safe_texts, summary_frame
from fedsel_flwr.report.verdict import verdict
from tests.processes import run_python
from tests.report.made import make_run

RUN = make_run(energy=1234.4, energy_j=2468.8)
INF = math.inf


def render(rows: list[SelectorRow], width: int = 80, **options: Any) -> str:
    out = io.StringIO()
    render_table(rows, 0.8, Console(file=out, width=width), **options)
    return out.getvalue()


def words(line: str) -> str:
    return " ".join(line.split())


def test_the_table_at_80_columns() -> None:
    """Two tables, as one would be wider; a target that was not always reached has counts and no mean."""
    figures = [(0.8, 10.0, 1234.4), (0.9, INF, INF), (1.0, 14.0, 1238.4)]
    bsfl = [make_run("bsfl", i, time, energy, accuracy=a) for i, (a, time, energy) in enumerate(figures)]
    never = {"time_to_target_s": INF, "energy_to_target_j": INF, "failed_clients": 120}
    choice = [replace(r, selector="power-of-choice", **never) for r in bsfl]
    odd = [replace(r, selector="[bold]mine", time_to_target_s=123.44 + r.seed, energy_to_target_j=5.0) for r in bsfl]
    lines = render(aggregate([*bsfl, *choice, *odd])).splitlines()
    assert max(map(len, lines)) <= 80
    assert "time to 80 %" in lines[0]
    assert lines[1].split() == ["selector", "%", "simulated", "s", "to", "80", "%,", "J"]
    assert words(lines[3]) == "bsfl 90.0 ±10.0 2 of 3 reach it 2 of 3 reach it"
    assert words(lines[4]) == "power-of-choice 90.0 ±10.0 never never"
    assert words(lines[5]).startswith("[bold]mine 90.0 ±10.0 124.4")  # a name is text, never markup
    assert lines[6].strip() == "mean ± sample standard deviation over 3 seeds"
    second = lines[7:]
    assert words(second[1]) == "selector index clients"
    assert words(second[3]) == "bsfl 0.500 ±0.000 3.0 ±0.0"
    assert words(lines[-1]).startswith("80 % is reached when the mean of 15 evaluated rounds in a row reaches it.")


def test_one_seed_has_no_spread_and_a_short_run_says_so() -> None:
    text = render(aggregate([RUN, replace(RUN, selector="random", time_to_target_s=math.inf)]), target_window=3)
    assert "±" not in text
    bsfl, random = text.splitlines()[3:5]
    assert bsfl.split() == ["bsfl", "90.0", "10.0", "1234", "0.500", "3"]
    assert random.split() == ["random", "90.0", "never", "1234", "0.500", "3"]
    assert "judged by the mean of all it has (here 3)" in text


def test_a_figure_that_no_seed_has_takes_no_column_and_numbers_of_seeds_may_differ() -> None:
    text = render(aggregate([replace(RUN, accuracy=math.nan, jain=math.nan)]))
    assert text.splitlines()[3].split() == ["bsfl", "-", "10.0", "1234", "3"]
    text = render(aggregate([RUN, replace(RUN, seed=1), replace(RUN, selector="random")]))
    assert "over 1 to 2 seeds" in text


def test_ratios_and_profile_against_the_reference() -> None:
    runs = [make_run("random", seed, 10.0, seconds_per_round=2.0, rounds_to_target=5.0) for seed in range(6)]
    ratios = 2 * (math.exp(-0.06), 1.0, math.exp(0.06))  # symmetric: Student's interval
    runs += [
        make_run("bsfl", i, 8 * one, seconds_per_round=8 * one / 5, rounds_to_target=5.0)
        for i, one in enumerate(ratios)
    ]
    times = {0.8: {"random": {0: 4.0, 1: 5.0}, "bsfl": {0: 2.0, 1: INF}}}
    text = render(aggregate(runs), width=120, verdict=verdict(runs, "random", 0.8, times=times))
    ratio = "0.80 (0.76-0.85)"  # exp of the mean log ratio ± 2.571 · .0537 / √6
    assert f"bsfl {ratio} {ratio} 1.00 (1.00-1.00) 1.00 (1.00-1.00) sooner" in words(text)
    assert "to 80 %, ratio to random with 95 % interval" in text
    assert "bsfl 1 of 2 (against 2)" in words(text)  # the profile


def test_the_frame_has_the_columns_of_a_comparison() -> None:
    runs = [make_run(name, seed, time) for name, time in (("bsfl", 8.0), ("random", 10.0)) for seed in range(6)]
    frame = summary_frame(runs, verdict(runs, "random", 0.8)).set_index("selector")
    assert list(frame.index) == ["bsfl", "random"]
    assert list(frame.verdict) == ["sooner", "reference"]
    for name in ("time", "seconds_per_round", "rounds", "energy", "joules_per_round"):
        assert {f"{name}_ratio", f"{name}_ratio_low", f"{name}_ratio_high"} <= set(frame.columns)
    assert {"time_p", "asked_per_round", "accuracy_difference", "accuracy_low", "seeds_to_settle"} <= set(frame.columns)
    assert frame.time_ratio["bsfl"] == pytest.approx(0.8)
    assert "verdict" not in summary_frame(runs, None).columns


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_in_a_pipe_the_text_is_plain_and_nothing_is_folded(encoding: str) -> None:
    name = "a-selector-with-a-name-that-is-far-too-long-for-any-table-of-eighty-columns"
    code = (
        "from fedsel_flwr.report import aggregate; from fedsel_flwr.report.tables import render_table;"
        "from tests.report.made import make_run;"
        f"render_table(aggregate(make_run({name!r}, s, 3.0, accuracy=.5 + s / 10) for s in range(2)), 0.8)"
    )
    text = run_python("-c", code, PYTHONIOENCODING=encoding).stdout
    assert "\x1b" not in text
    row = text.splitlines()[3].replace("|", " ")  # the rules between columns in ASCII
    plus_minus = {"utf-8": "±", "ascii": "+/-"}[encoding]
    assert row.split()[:3] == [name, "55.0", f"{plus_minus}7.1"]
    assert row.split()[-2:] == ["3.0", f"{plus_minus}0.0"]


def test_a_target_in_percent_is_refused() -> None:
    with pytest.raises(ParameterError, match="target_accuracy"):
        render_table([], 80)


def test_latex_commands_in_labels_are_text() -> None:
    """TeX reads ^^5c as a backslash, and a bracket after the end of a row as its option."""
    runs = [make_run(label, 1) for label in ("random", r"^^5cinput", "a~b_", "[1cm]", "*")]
    assert [line.split(" & ")[0] for line in latex_table(runs, None, 0.8).splitlines()[4:9]] == [
        "random", r"\textasciicircum{}\textasciicircum{}5cinput", r"a\textasciitilde{}b\_", "{[}1cm]", "{*}",
    ]  # fmt: skip


def test_texts_that_a_spreadsheet_would_compute() -> None:
    """Only texts get an apostrophe, and only in a file for a spreadsheet."""
    labels = ["=1+1", "+1", "-2", "@SUM(1)", "a=1"]
    table = runs_frame([make_run(label, 1, time=-5.0) for label in labels])
    safe = safe_texts(table)
    assert safe["selector"].tolist() == ["'=1+1", "'+1", "'-2", "'@SUM(1)", "a=1"]
    assert (safe.drop(columns="selector").dtypes == table.drop(columns="selector").dtypes).all()
    assert table["selector"].tolist() == labels
