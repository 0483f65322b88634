"""What is told while something starts: two lines, running seconds on a terminal, nothing where it is quick or quiet."""

from __future__ import annotations

import re
import time

import pytest

from fedsel_flwr.report import progress
from fedsel_flwr.report.progress import WaitNotice


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "NOTICE_AFTER_S", 0.05)


def test_elsewhere_than_on_a_terminal_there_are_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with WaitNotice("Starting Ray", "Ray started"):
        time.sleep(0.4)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"Starting Ray \.\.\.\nRay started in \d\.\d s\n", err)


def test_what_is_there_is_told_once_and_before_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with WaitNotice("Starting Ray", "Ray started") as started:
        time.sleep(0.2)
        started.done()
        said = capsys.readouterr().err
        time.sleep(0.2)
        started.done()
    assert said.endswith(" s\n")
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_running_seconds_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_stderr_is_terminal", lambda: True)
    with WaitNotice("Starting Ray", "Ray started"):
        time.sleep(1.3)
    err = capsys.readouterr().err
    assert "\rStarting Ray ... 0 s" in err
    assert "\rStarting Ray ... 1 s" in err
    assert err.count("\n") == 1
    assert re.search(r"\r\x1b\[KRay started in 1\.\d s\n$", err)


def test_what_is_quick_or_quiet_or_told_elsewhere_leaves_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    with WaitNotice("Starting Ray", "Ray started"):
        pass
    for waited in (WaitNotice("Starting Ray", "", quiet=True), WaitNotice("Starting Ray", "", tell=told.append)):
        with waited:
            time.sleep(0.2)
    assert capsys.readouterr() == ("", "")
    assert told[0] == "Starting Ray, 0 s"


def test_after_an_error_it_does_not_say_that_it_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), WaitNotice("Starting Ray", "Ray started"):
        {}[time.sleep(0.2)]
    assert capsys.readouterr().err == "Starting Ray ...\n"
