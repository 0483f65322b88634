"""One process writes into the folder of a run or comparison, with and without checkpoints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.errors import RunError
from fedsel_flwr.report.run_folder import JOURNAL
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.simulations import Comparison, compare, load_scenario, simulate
from tests.processes import ROOT

OTHER = """
import sys
from filelock import FileLock
lock = FileLock(sys.argv[1] + "/.lock")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
HELD = r"another process writes to '.*'"
SMOKE = load_scenario("smoke", {"rounds": 4, "engine": "vectorized"})


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than these runs."""
    for name in ("plot", "plot_rounds"):
        monkeypatch.setattr(Comparison, name, lambda self, path, *rest: Path(path).touch())


class Stop(Exception):
    pass


def stop(record: RoundRecord) -> None:
    if record.round == 3:
        raise Stop


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another process holds the folder."""
    command = [sys.executable, "-c", OTHER, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        try:
            yield
        finally:
            other.kill()


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_without_checkpoints_is_not_cut_by_a_second_process(resume: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "checkpoint_every": 0}
    with pytest.raises(Stop):
        simulate(SMOKE, on_round=stop, **options)
    before = (tmp_path / JOURNAL).read_bytes()
    assert len(before.splitlines()) == 3
    with held(tmp_path), pytest.raises(RunError, match=HELD):
        simulate(SMOKE, resume=resume, **options)
    assert (tmp_path / JOURNAL).read_bytes() == before
    assert len(simulate(SMOKE, resume=resume, **options).history.rounds) == 4


def test_a_comparison_holds_its_folder_and_lets_it_go(tmp_path: Path) -> None:
    compare(SMOKE, ["round-robin", "random"], seeds=1, folder=tmp_path)
    assert not list(tmp_path.rglob(".lock"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    with held(tmp_path), pytest.raises(RunError, match=HELD):
        compare(SMOKE, ["round-robin", "random"], seeds=2, folder=tmp_path, resume=True)
    (tmp_path / ".lock").unlink()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == before
    with held(tmp_path / "random-seed1"):
        pass
    assert len(compare(SMOKE, ["round-robin", "random"], seeds=2, folder=tmp_path, resume=True).runs) == 4


def test_the_command_says_so_and_names_no_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--selectors", "random", "--rounds", "3", "--no-checkpoints", "--runs-dir", str(tmp_path)]
    assert main(["compare", "smoke", *options]) == 0
    (folder,) = tmp_path.iterdir()
    (folder / "model.safetensors").unlink()
    capsys.readouterr()
    with held(folder):
        assert main(["compare", "--resume", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedsel: error: another process writes to ")
    assert "rounds" not in line
    assert "goes on" not in line
    assert main(["compare", "--resume", str(folder)]) == 0


def test_a_journal_that_was_cut_is_not_said_to_hold_the_rounds_before(tmp_path: Path) -> None:
    first, second, *_ = simulate(SMOKE).history.rounds
    journal = Journal(tmp_path / JOURNAL)
    journal.add(first, [])
    journal.add(second, [])
    (tmp_path / JOURNAL).write_bytes(b"")
    with pytest.raises(RunError, match=r"round 2 cannot be written .* to 0 bytes; rounds before it are lost"):
        journal.close_round()
