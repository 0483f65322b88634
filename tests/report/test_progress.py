"""The progress display: the lines in a pipe, and the live display on a terminal."""

from __future__ import annotations

import io
import math
import re
import time

import pytest
from rich.console import Console

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.progress import Progress, RunsProgress
from tests.report.made import make_history


def plain() -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(Console(file=out, width=40)), out


def run(progress: Progress, label: str, rounds: int, stop_after: int | None = None) -> None:
    history = make_history([[0, 1]] * rounds, accuracy=[0.5] * rounds, round_s=[0.5] * rounds)
    progress.start_run(label, rounds)
    for record in history.rounds[:stop_after]:
        progress.update(record, failures=record.round // 2)


def test_one_line_says_everything() -> None:
    progress, out = plain()
    with progress:
        run(progress, "[bsfl], seed 0", 3)
    lines = out.getvalue().splitlines()  # one line each, also where the console is narrower
    assert lines[2] == "[bsfl], seed 0: round 3/3  accuracy 50.0 %  simulated 1.50 s  energy 3.00 J  failed 1"
    assert len(lines) == 3


def rounds_in(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"round +(\d+)/", text)]


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [(1, [1]), (10, list(range(1, 11))), (100, [1, *range(10, 101, 10)]), (103, [1, *range(11, 100, 11), 103])],
)
def test_about_ten_lines_per_run_with_the_first_and_the_last(rounds: int, expected: list[int]) -> None:
    progress, out = plain()
    with progress:
        run(progress, "bsfl", rounds)
    assert rounds_in(out.getvalue()) == expected


def test_a_run_that_ends_early_or_is_interrupted_still_shows_its_last_round() -> None:
    progress, out = plain()

    def interrupted() -> None:
        with progress:
            run(progress, "a", 100, stop_after=17)
            run(progress, "b", 100, stop_after=20)
            run(progress, "c", 100, stop_after=13)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert rounds_in(out.getvalue()) == [1, 10, 17, 1, 10, 20, 1, 10, 13]


def test_what_was_not_measured_is_a_dash_and_an_update_before_a_run_is_refused() -> None:
    progress, out = plain()
    (record,) = make_history([[0]], accuracy=[math.nan], energy_j=math.nan).rounds
    with progress:
        with pytest.raises(RunError, match="start_run"):
            progress.update(record, failures=0)
        progress.start_run("a", 1)
        progress.update(record, failures=0)
    assert out.getvalue() == "a: round 1/1  accuracy -  simulated 1.00 s  energy - J  failed 0\n"


def test_on_a_terminal_the_display_is_live_and_each_run_leaves_one_line() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, force_interactive=True, color_system=None)
    with Progress(console) as progress:
        run(progress, "bsfl, seed 0", 30)
        run(progress, "bsfl, seed 1", 30, stop_after=9)
        deadline = time.monotonic() + 10  # a thread draws ten times a second
        while "9/30  50.0 %  4.50 s  9.00 J  4 failed" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    text = out.getvalue()
    assert re.search(r"seed 1 ━+ +9/30  50\.0 %  4\.50 s  9\.00 J  4 failed", text.replace("╸", "━"))
    assert re.findall(r"seed (\d): round +(\d+)/30  accuracy 50\.0 %", text) == [("0", "30"), ("1", "9")]
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor, hidden meanwhile, is shown again
    assert text.rindex("failed 4\n") > text.rindex("4 failed")  # nothing of the display is drawn after the last line


# ---- runs on a cluster ---------------------------------------------------------------------------------------------


def test_runs_on_a_cluster_are_about_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fedsel_flwr.report.progress.time.monotonic", lambda: now[0])
    progress, out = plain()
    with progress:
        for finished in range(41):
            progress.show_runs(RunsProgress(finished, 40, {"a": 2} if finished < 40 else {}, 50 * finished, 2000))
            now[0] += 3.0
    lines = out.getvalue().splitlines()
    assert len(lines) == 11  # one at the start, and one for each tenth
    assert lines[0] == "cluster: 0 of 40 runs finished, 2 in progress on 1 node, 38 waiting"
    assert lines[5].endswith("20 of 40 runs finished, 2 in progress on 1 node, 18 waiting, about 60 s left")
    assert lines[-1] == "cluster: 40 of 40 runs finished, 0 in progress, 0 waiting"


def test_a_node_that_is_lost_is_a_line_but_not_one_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fedsel_flwr.report.progress.time.monotonic", lambda: now[0])
    progress, out = plain()
    with progress:
        for nodes in ({}, {"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, {"b": 1}):
            progress.show_runs(RunsProgress(0, 9, nodes))
            now[0] += 6.0
    assert [re.findall(r"on (\d)", line) for line in out.getvalue().splitlines()] == [[], ["2"], ["1"]]


def test_on_a_terminal_the_runs_have_a_bar_below_the_current_run() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, force_interactive=True, width=160))
    with progress:
        progress.show_runs(RunsProgress(1, 3, {"a": 1, "b": 1}, 150, 300))
        run(progress, "bsfl, seed 0", 5)
        progress.show_runs(RunsProgress(2, 3, {"b": 1}, 250, 300))
        assert progress._live is not None
        bars = [(task.description, task.completed, task.total) for task in progress._live.tasks]
        (figures,) = [task.fields["figures"] for task in progress._live.tasks[:1]]
        progress._live.refresh()
    assert bars == [("2 of 3 runs", 250, 300), ("bsfl, seed 0", 5, 5)]
    assert figures == "1 in progress, nodes: 1, 0 waiting"
    assert "bsfl, seed 0: round 5/5" in out.getvalue()  # the line stays when the bars go
