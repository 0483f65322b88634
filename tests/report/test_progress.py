"""The progress display: the lines in a pipe, and the live display on a terminal."""

from __future__ import annotations

import io
import math
import re
import time

import pytest
from rich.console import Console

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.progress import Progress
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
    [
        (1, [1]),
        (10, list(range(1, 11))),
        (100, [1, *range(10, 101, 10)]),
        (103, [1, *range(11, 100, 11), 103]),
    ],
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
    left = re.findall(r"seed (\d): round +(\d+)/30  accuracy 50\.0 %", text)
    assert left == [("0", "30"), ("1", "9")]
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor, hidden meanwhile, is shown again
    assert text.rindex("failed 4\n") > text.rindex("4 failed")  # nothing of the display is drawn after the last line
