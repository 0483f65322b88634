"""kill -9 of a Ray actor in the middle of a real run: what goes on, what ends, and what was lost."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedsel_flwr.report.run_folder import read_history, read_model
from fedsel_flwr.simulations import simulate
from tests.e2e.fleet import wait_until
from tests.flwr_command import ANSI, LocalSuperLink
from tests.processes import Command, command_line
from tests.simulations.cut_off_runs import after_rounds, rounds_in, smoke
from tests.simulations.ray_runs import at_work

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROUNDS = 60
SLOW_CLIENTS = {"training.local_epochs": 20}
"""So that a round takes a while, and an actor dies in the middle of one."""


def kill_an_actor(processes: Iterable[psutil.Process], timeout: float = 20.0) -> None:
    family, deadline = list(processes), time.monotonic() + timeout
    while time.monotonic() < deadline:
        for process in filter(at_work, family):
            return process.kill()
    raise AssertionError(f"no actor at work among {family}")


def simulates(family: Iterable[psutil.Process]) -> bool:
    """Whether a simulation still runs; ``flwr run`` ends with its log."""
    return any("flwr-simulation" in part for process in family for part in command_line(process))


def test_fedsel_run_goes_on_and_loses_nothing(api: str, tmp_path: Path) -> None:
    """Two actors are killed; Ray starts them again and gives them their messages once more."""
    sets = [part for key, value in {**SLOW_CLIENTS, "api": api}.items() for part in ("--set", f"{key}={value}")]
    argv = ("run", "smoke", "--rounds", str(ROUNDS), "--num-cpus", "2", "--runs-dir", str(tmp_path / "runs"), *sets)
    with Command(sys.executable, "-m", "fedsel_flwr.cli", *argv, folder=tmp_path / "said", cwd=tmp_path) as command:
        for rounds in (2, 6):
            after_rounds(command, tmp_path / "runs", rounds)
            kill_an_actor(psutil.Process(command.pid).children(recursive=True))
        assert command.wait(400) == 0, command.stdout[-3000:] + command.stderr[-3000:]
        assert command.left() == []
    history = read_history(Path(command.stdout.splitlines()[-1]))
    assert [(r.num_completed, r.simulated_s) for r in history.rounds] == [
        (r.num_completed, r.simulated_s) for r in simulate(smoke(ROUNDS, api=api, **SLOW_CLIENTS)).history.rounds
    ]


def test_flwr_run_ends_with_the_reason_and_goes_on_after_that(api: str, tmp_path: Path) -> None:
    """Flower's pool hands out the dead actor: the run ends, and the next one goes on from its last checkpoint."""
    config = {"scenario": "smoke", "rounds": ROUNDS, "api": api, "runs_dir": str(tmp_path / "runs")}
    config |= {"checkpoint_dir": str(tmp_path / "checkpoints")}
    config |= {"set": ", ".join(f"{key}={value}" for key, value in SLOW_CLIENTS.items())}
    federation = "num-supernodes=10 client-resources-num-cpus=1 init-args-num-cpus=2"
    with LocalSuperLink(tmp_path / "flwr") as superlink:

        def run(**more: object) -> Command:
            pairs = " ".join(f"{key}={value!r}" for key, value in {**config, **more}.items())
            return superlink.run("--run-config", pairs, "--federation-config", federation)

        command = run()
        after_rounds(command, tmp_path / "checkpoints", 3)
        kill_an_actor(superlink.family())
        command.wait(400)
        played, said = rounds_in(tmp_path / "checkpoints"), " ".join(ANSI.sub("", command.stdout).split())
        assert "a Ray actor has died" in said, command.stdout[-3000:]
        assert re.search(rf"resume = true.* after round \d+ .*'{tmp_path / 'checkpoints'}'", said)
        assert "Traceback" not in said.partition("a Ray actor has died")[2]
        before = set((tmp_path / "runs").iterdir())  # the rounds that were done, and the model after the last of them
        wait_until(lambda: not simulates(superlink.family()), 200, "a simulation still runs")
        command = run(resume="must")
        assert command.wait(400) == 0
        after = set((tmp_path / "runs").iterdir()) - before
        assert after, command.stdout[-3000:]
    (folder,) = after
    history = read_history(folder)
    assert played < ROUNDS
    assert [record.round for record in history.rounds] == list(range(1, ROUNDS + 1))
    failed = {row.round: row.problem for row in history.clients if not row.completed}
    assert len(failed) <= 1, failed  # at most the round in which the actor died, one client of it
    if not failed:
        # One client after the other, as on Ray: compiled loops round otherwise, and in 24,000 epochs one example may
        # change the side of a rectifier.
        whole = simulate(smoke(ROUNDS, api=api, **SLOW_CLIENTS), backend="sequential")
        for ours, theirs in zip(read_model(folder), whole.arrays, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
