"""``fedsel run`` with Flower on Ray, killed and gone on with: the same files as those of the run that was not."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.processes import Command
from tests.simulations.cut_off_runs import content

ROUNDS = 10
KILLS = 3


def fedsel(folder: Path, *argv: str) -> Command:
    """The command, in a folder of its own."""
    return Command(sys.executable, "-m", "fedsel_flwr.cli", *argv, folder=folder, cwd=folder)


def finished(command: Command) -> Path:
    """Wait for its end; returns the folder that it names."""
    try:
        assert command.wait(500) == 0, command.stdout[-3000:] + command.stderr[-3000:]
        return Path(command.stdout.splitlines()[-1])
    finally:
        command.kill()


def killed(command: Command, folder: Path, rounds: int, seconds: float) -> None:
    """Kill it a while after some rounds have ended, and what it has started after it."""
    deadline = time.monotonic() + 400
    try:
        while not any(path.read_bytes().count(b"\n") >= rounds for path in folder.glob("runs/*/journal.jsonl")):
            assert command.poll() is None, command.stdout[-3000:] + command.stderr[-3000:]
            assert time.monotonic() < deadline, command.stdout[-3000:] + command.stderr[-3000:]
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait(60) == -signal.SIGKILL
    finally:
        command.kill()
    assert command.left() == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("api", "base"), [("legacy", "fedadam"), ("message", "fedadam"), ("message", "fedavg")])
def test_killed_again_and_again(api: str, base: str, tmp_path: Path) -> None:
    """Three times at random moments, each time gone on with in the same folder."""
    keys = ("--set", f"api={api}", "--set", f"aggregation.base={base}", "--selector", "fedcm-ts")
    argv = ("run", "smoke", "--rounds", str(ROUNDS), "--num-cpus", "2", *keys)
    (tmp_path / "straight").mkdir()
    straight = finished(fedsel(tmp_path / "straight", *argv))
    generator, place = np.random.default_rng(len(api + base)), tmp_path / "cut"
    place.mkdir()
    done = 0
    for kill in range(KILLS):
        if kill:
            (cut_off,) = (place / "runs").iterdir()
            argv = ("run", "--resume", str(cut_off))
        done += int(generator.integers(1, 3))
        killed(fedsel(place, *argv), place, done, float(generator.uniform(0.0, 0.5)))
    (cut_off,) = (place / "runs").iterdir()
    assert finished(fedsel(place, "run", "--resume", str(cut_off))) == cut_off
    assert content(cut_off) == content(straight)
    assert finished(fedsel(place, "run", "--resume", str(cut_off))) == cut_off  # it is over: no Ray is started
    assert content(cut_off) == content(straight)
