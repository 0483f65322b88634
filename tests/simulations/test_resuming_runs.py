"""Runs and commands that are killed: a resumed run is bit for bit the uninterrupted one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.processes import Command
from tests.simulations.cut_off_runs import FASTEST, Run, after_rounds, command, content, killed
from tests.strategies.zygote import Zygote, in_memory

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    process = Zygote(tmp_path_factory.mktemp("results"), "tests.simulations.cut_off_runs")
    yield process
    process.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as place:
        yield place


@pytest.mark.parametrize(
    ("run", "moments"),
    [
        (Run("fedadam", "fedcm-ts", rounds=10, every=4), 3),
        (Run("fedadam", "bsfl", rounds=10, every=3, concurrency=9), 3),
        pytest.param(Run("fedavg", "oort", every=4, concurrency=9), 20, marks=pytest.mark.slow),
        pytest.param(Run("fedavg", "bsfl"), 20, marks=pytest.mark.slow),
        pytest.param(Run("fedadam", "gpfl"), 20, marks=pytest.mark.slow),
        pytest.param(Run("fedadam", "fedcm-ts", every=4), 20, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_killed_at_random_moments(run: Run, moments: int, zygote: Zygote, folder: Path) -> None:
    straight = zygote.call(run.play)
    generator = np.random.default_rng(len(run.base + run.selector))
    cut_off = 0
    for trial in range(moments):
        place, progress = folder / str(trial), folder / f"{trial}-progress"
        progress.write_bytes(b"")
        rounds, seconds = int(generator.integers(0, run.rounds)), float(generator.uniform(0.0, 0.02))

        def reached(progress: Path = progress, rounds: int = rounds, seconds: float = seconds) -> bool:
            if progress.stat().st_size < rounds:
                return False
            time.sleep(seconds)
            return True

        cut_off += killed(zygote, reached, run.play, place, progress)
        rest = zygote.call(run.play, place)
        where = f"killed {seconds:.4f} s after round {rounds}"
        assert rest[:-1] == straight[:-1], where
        assert straight[-1][-len(rest[-1]) :] == rest[-1], where
        assert len(rest[-1]) <= run.rounds - rounds + run.every + 1, f"{where}: rounds that were kept were run again"
    assert cut_off > moments // 2
    again = zygote.call(run.play, place)
    assert again[:-1] == straight[:-1], "a run that has finished returns its result"
    assert again[-1] == straight[-1][-1:]


# ---- the command ---------------------------------------------------------------------------------------------------


def begun(zygote: Zygote, folder: Path, when: Callable[[], bool] | None, *argv: str) -> Path:
    """Run a command in a folder, and kill it at a moment where one is given; returns the folder that it made."""
    folder.mkdir(parents=True, exist_ok=True)
    if when is None:
        status, _, err = zygote.call(command, [*argv], folder)
        assert (status, err) == (0, "")
    else:
        assert killed(zygote, when, command, [*argv], folder)
    (made,) = (folder / "runs").iterdir()
    return made


def test_a_run_goes_on_in_its_folder(zygote: Zygote, folder: Path) -> None:
    (folder / "mine.py").write_text(FASTEST)
    argv = ("run", "smoke", "--engine", "vectorized", "--rounds", "24", "--selector", f"{folder}/mine.py:Fastest")
    argv += ("--set", "aggregation.base=fedadam", "--set", "selectors.Fastest.patience=2.0")
    straight = begun(zygote, folder / "straight", None, *argv)
    journals = "cut/runs/*/journal.jsonl"
    cut_off = begun(
        zygote, folder / "cut", lambda: any(path.stat().st_size > 8_000 for path in folder.glob(journals)), *argv
    )
    assert any((cut_off / "checkpoints").glob("round-*"))
    status, out, err = zygote.call(command, ["run", "--resume", str(cut_off), "--trust"], folder)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == str(cut_off)
    assert "round  1/24" not in out  # it went on
    assert content(cut_off) == content(straight)
    again, told, _ = zygote.call(command, ["run", "--resume", str(cut_off), "--trust"], folder)
    assert again == 0
    assert told.splitlines()[-6:] == out.splitlines()[-6:]  # the table and the folder
    assert content(cut_off) == content(straight)


@pytest.mark.slow
def test_a_run_goes_on_from_a_folder_of_checkpoints(zygote: Zygote, folder: Path) -> None:
    """One line for the first start and for every other; what has ended goes on to a later round."""
    line = ["run", "smoke", "--engine", "vectorized", "--quiet", "--checkpoint-dir", "kept", "--resume", "--rounds"]
    made = []
    for rounds in ("5", "9", "9"):
        status, out, err = zygote.call(command, [*line, rounds], folder)
        assert (status, err) == (0, "")
        made.append(Path(out.splitlines()[-1]))
    straight = begun(zygote, folder / "straight", None, "run", "smoke", "--engine", "vectorized", "--rounds", "9")
    for place in made[1:]:
        expected, found = dict(content(straight)), dict(content(place))
        assert expected.pop("plan.json") != found.pop("plan.json")
        assert found == expected
    assert sorted(path.stem for path in (folder / "kept").glob("round-*")) == [f"round-{k:06d}" for k in (7, 8, 9)]


# ---- on Ray --------------------------------------------------------------------------------------------------------


def fedsel(folder: Path, *argv: str, after: int | None = None, seconds: float = 0.0) -> Path:
    """Run the command in a folder; kill it a while ``after`` some rounds, if given; returns the run's folder."""
    folder.mkdir(exist_ok=True)
    with Command(sys.executable, "-m", "fedsel_flwr.cli", *argv, folder=folder, cwd=folder) as running:
        if after is None:
            assert running.wait(500) == 0, running.stdout[-3000:] + running.stderr[-3000:]
            return Path(running.stdout.splitlines()[-1])
        after_rounds(running, folder, after)
        time.sleep(seconds)
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait(60) == -signal.SIGKILL
    assert running.left() == []
    (made,) = (folder / "runs").iterdir()
    return made


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("api", "base"), [("legacy", "fedadam"), ("message", "fedadam"), ("message", "fedavg")])
def test_on_ray_killed_again_and_again(api: str, base: str, tmp_path: Path) -> None:
    keys = ("--set", f"api={api}", "--set", f"aggregation.base={base}", "--selector", "fedcm-ts")
    argv: tuple[str, ...] = ("run", "smoke", "--rounds", "10", "--num-cpus", "2", *keys)
    straight = fedsel(tmp_path / "straight", *argv)
    generator, place, done = np.random.default_rng(len(api + base)), tmp_path / "cut", 0
    for _ in range(3):
        done += int(generator.integers(1, 3))
        cut_off = fedsel(place, *argv, after=done, seconds=float(generator.uniform(0.0, 0.5)))
        argv = ("run", "--resume", str(cut_off))
    for _ in range(2):  # the second time it is over: no Ray is started
        assert fedsel(place, *argv) == cut_off
        assert content(cut_off) == content(straight)
