"""Runs of a comparison side by side: what one process plays, several play too, and nothing of them stays behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest

from fedsel_flwr.callbacks import Recorder
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import Random
from fedsel_flwr.simulations import Comparison, OwnData, compare
from fedsel_flwr.simulations.comparisons import parallel_runs
from fedsel_flwr.simulations.comparisons.parallel_runs import Processes, Report
from tests.e2e.fleet import wait_until
from tests.processes import Command
from tests.simulations.cut_off_runs import BREAKING, parts, smoke

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if "tracker" not in " ".join(child.cmdline())]


class Own(Random):
    """Defined where nothing can be imported from, as in a script."""


class Lines(Recorder):
    """A line for each round of a run, in a file with its name."""

    def __init__(self, *, name: str, params: Any) -> None:
        self._path = Path(f"{name}.lines")

    def write(self, round: int, values: Mapping[str, float]) -> None:
        with self._path.open("a") as file:
            print(round, values["accuracy"], file=file)

    def end(self, *, failed: bool) -> None:
        with self._path.open("a") as file:
            print(failed, file=file)


def test_two_at_a_time_are_the_same_runs(here: Path) -> None:
    """Each is a run of the tracker."""
    told: list[tuple[str, int]] = []
    ended: list[tuple[int, int]] = []
    selectors = {"bsfl": "bsfl", "mine": Own}
    turn = compare(smoke(5), selectors, folder=here / "one", seeds=[3, 5])
    both = compare(
        smoke(5), selectors, jobs=2, folder=here / "two", seeds=[3, 5], track=Lines,
        start_run=lambda label, rounds: told.append((label, rounds)),
        update=lambda record, failed: ended.append((len(told), record.round)),
    )  # fmt: skip
    for alone, run in zip(turn.runs, both.runs, strict=True):
        assert (run.selector, run.scenario) == (alone.selector, alone.scenario)
        assert parts(run.result) == parts(alone.result)
        assert run.result.fingerprints == alone.result.fingerprints
        accuracies = [f"{record.round} {record.accuracy}" for record in run.history.rounds]
        assert Path(f"{run.selector}-seed{run.scenario.seed}.lines").read_text().splitlines() == [*accuracies, "False"]
    read = {(run.selector, run.scenario.seed) for run in Comparison.load(here / "two").runs}
    assert read == {(label, seed) for label in selectors for seed in (3, 5)}
    assert told == [(f"{label}, seed {seed}", 5) for seed in (3, 5) for label in ("bsfl", "mine")]
    assert ended == [(1, 5), (2, 5), (3, 5), (4, 5)]  # each run once, before the next is told of
    assert {path.name for path in (here / "one").iterdir()} == {path.name for path in (here / "two").iterdir()}


def test_what_was_broken_off_goes_on(here: Path, fedsel: Any) -> None:
    """By the command, with a selector from a file; the folder's log has what the other processes said."""
    (here / "mine.py").write_text(BREAKING)
    (here / "broken").touch()
    keys = ["--seeds", "1", "--rounds", "5", "--set", "training.learning_rate=0.05"]
    said = fedsel("compare", "smoke", "--selectors", "bsfl,./mine.py:Mine", "--jobs", "2", *keys, status=2)
    assert re.search(r"the run of 'Mine' on seed 1 failed: ValueError: broken as asked \(mine\.py, line \d+\)", said)
    assert "Resume with: fedsel" in said
    (folder,) = (here / "runs").iterdir()
    (here / "broken").unlink()
    fedsel("compare", "--resume", folder, "--jobs", "1", "--json", "--trust")
    alone = compare(smoke(5, training__learning_rate=0.05), ["bsfl", f"{here / 'mine.py'}:Mine"], seeds=1)
    rounds = {run.selector: repr(run.history.rounds) for run in Comparison.load(folder).runs}
    assert rounds == {run.selector: repr(run.history.rounds) for run in alone.runs}
    assert "ValueError: broken as asked" in (folder / "flower.log").read_text()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"jobs": 0}, "jobs must be a whole number of at least 1, got 0"),
        ({"jobs": 2, "engine": "ray"}, "jobs = 2 runs at a time would share Ray"),
        ({"jobs": 2, "device": "cuda"}, "jobs = 2 runs at a time would share the device 'cuda'"),
    ],
)
def test_what_cannot_be_side_by_side_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsel_flwr.simulations.engine.check_device", lambda device: None)
    with pytest.raises(ParameterError, match=message):
        compare(smoke(5), ["bsfl", "random"], folder=tmp_path / "runs", **keys)
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()

    def locked(clients_per_round: int, seed: int) -> Random:
        with lock:
            return Random(clients_per_round=clients_per_round, seed=seed)

    with pytest.raises(ParameterError, match=r"'mine' cannot be sent to another process \(TypeError: .*lock"):
        compare(smoke(5), {"bsfl": "bsfl", "mine": locked}, jobs=2)


def test_faults_are_found_before_a_process_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last of the selectors needs what the data do not have; the partition has a row twice."""
    started: list[Any] = []
    monkeypatch.setattr(Processes, "play", lambda *args: started.append(args))
    examples = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2
    rows = [list(range(10 * k, 10 * k + 10)) for k in range(10)]
    for partition, last, said in (
        (rows, "pczfl", r"pczfl .* needs a validation set on the server"),
        ([[1, 1], *rows[1:]], "bsfl", "row 1 occurs 2 times"),
    ):
        own = OwnData(train=examples, test=examples, partition=partition)
        with pytest.raises(ParameterError, match=said):
            compare(smoke(5), ["random", last], seeds=2, jobs=2, data=own, folder=tmp_path / "study")
    assert not started
    assert not (tmp_path / "study" / "plan.json").exists()


def workers(of: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(of).children() if "popen_loky" in " ".join(child.cmdline())]


def die(number: int, _shared: None, _report: Report) -> int:
    if number:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.slow
def test_a_process_that_is_killed_is_told_of() -> None:
    with pytest.raises(RunError, match="a worker process was killed, perhaps because memory ran out"):
        list(Processes(2, threads=1).map(die, [0, 1], ["zero", "one"]))


KEPT: list[Any] = []


def keep_data(number: int, _shared: None, _report: Report) -> int:
    """Keep 400 MB from the second call on, as runs keep their data set."""
    if number == 1:
        KEPT.append(np.ones(50_000_000))
        # loky looks at the memory once a second.
        time.sleep(1.1)
    return os.getpid()


def test_a_worker_keeps_its_data_for_the_next_run() -> None:
    pids = dict(Processes(1, threads=1).map(keep_data, [0, 1, 2], ["a", "b", "c"]))
    assert len(set(pids.values())) == 1


def test_a_worker_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its next report, because a killed parent cannot end it."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    common = cloudpickle.dumps((lambda given, shared, report: report(given), None))
    for parent in (os.getppid(), os.getppid() + 1):
        parallel_runs._call(cloudpickle.dumps(3), common, parent)
    assert ended == [1]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_process(signum: signal.Signals, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "fedsel_flwr.cli", "compare", "smoke", "--rounds", "100000", "--jobs", "2"]
    with Command(
        *argv, "--selectors", "bsfl,random", "--seeds", "1", "--quiet", folder=tmp_path, cwd=tmp_path
    ) as command:
        checkpoints = "runs/*/*/checkpoints/*"
        wait_until(lambda: any(tmp_path.glob(checkpoints)) and len(workers(command.pid)) == 2, 90, "nothing has begun")
        there = psutil.Process(command.pid).children(recursive=True)
        os.kill(command.pid, signum)
        assert command.wait(60) == (130 if signum == signal.SIGINT else -9)
        assert psutil.wait_procs(there, timeout=60)[1] == []
        assert "Traceback" not in command.stderr
