"""What a run leaves behind when it is cut off: every finished round, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.rounds import journal
from fedsel_flwr.simulations import Comparison, compare, load_scenario, simulate
from fedsel_flwr.simulations.results import describe_runs

ARGV = ["compare", "smoke", "--rounds", "400", "--selectors", "bsfl,random", "--runs-dir"]


def smoke(**overrides: Any) -> Any:
    return load_scenario("smoke", {"rounds": 6, "engine": "vectorized", **overrides})


def cut_off(folder: Path, end: signal.Signals) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Start a comparison, end it after some rounds; what it said, and its folder."""
    command = [sys.executable, "-m", "fedsel_flwr.cli", *ARGV, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 100
        while not any(path.stat().st_size > 9000 for path in folder.glob("*/*/journal.jsonl")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(end)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    (run,) = folder.iterdir()
    return subprocess.CompletedProcess(command, process.returncode, out, err), run


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("end", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_comparison_that_is_cut_off_leaves_every_finished_round(
    end: signal.Signals, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, folder = cut_off(tmp_path, end)
    assert done.returncode == status
    rounds = [record.round for record in read_history(folder / "bsfl-seed1").rounds]
    assert rounds == list(range(1, len(rounds) + 1))
    assert 1 < len(rounds) < 400
    if end == signal.SIGINT:
        assert done.stderr.splitlines()[-1].startswith(f"fedsel: interrupted; {folder} holds bsfl-seed1: ")
        assert int(done.stderr.split(": ")[-1].split()[0]) == len(rounds)
        assert "Traceback" not in done.stderr
    whole = simulate(smoke(rounds=len(rounds)), selector=None)
    assert [(r.round, r.simulated_s) for r in read_history(folder / "bsfl-seed1").rounds] == [
        (r.round, r.simulated_s) for r in whole.history.rounds
    ]
    loaded = Comparison.load(folder)
    assert [(run.selector, len(run.history.rounds)) for run in loaded.cut_off] == [("bsfl", len(rounds))]
    assert len(loaded.table()) == 0
    with pytest.raises(ParameterError, match=rf"no run was finished: 'bsfl' after {len(rounds)} rounds"):
        loaded.report(tmp_path / "report")
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"fedsel: error: no run was finished: 'bsfl' after {len(rounds)} rounds")


def test_a_finished_run_has_no_journal_and_is_what_simulate_returned(tmp_path: Path) -> None:
    result = simulate(smoke(), folder=tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "run.json", "scenario.toml", "rounds.parquet", "clients.parquet", "model.safetensors",
        "regret.parquet",
    }  # fmt: skip
    assert repr(read_history(tmp_path / "run").rounds) == repr(result.history.rounds)


def test_a_history_that_is_not_in_memory_is_that_of_a_run_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = simulate(smoke()).history
    monkeypatch.setattr(journal, "LAST_ROUNDS", 1)
    told: list[Any] = []
    kept = simulate(smoke(), folder=tmp_path / "run", on_round=told.append).history
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert repr((kept.rounds, kept.clients)) == repr((plain.rounds, plain.clients))
    assert told == kept.rounds
    again = read_history(tmp_path / "elsewhere")
    assert repr((again.rounds, again.clients)) == repr((plain.rounds, plain.clients))


def test_a_run_that_was_cut_off_is_left_out_and_named(tmp_path: Path) -> None:
    compare(smoke(), ["bsfl", "random"], seeds=2, folder=tmp_path)

    class Stop(Exception):
        pass

    def stop(record: Any) -> None:
        if record.round == 3:
            raise Stop

    with pytest.raises(Stop):
        simulate(smoke(seed=3), on_round=stop, folder=tmp_path / "bsfl-seed3")
    loaded = Comparison.load(tmp_path)
    assert len(loaded.runs) == 4
    assert [(run.selector, run.scenario.seed, len(run.history.rounds)) for run in loaded.cut_off] == [("bsfl", 3, 3)]
    assert describe_runs(tmp_path).startswith(
        "bsfl-seed1: 6 rounds, finished; bsfl-seed2: 6 rounds, finished; bsfl-seed3: 3 ro"
    )


def test_a_full_disk_is_one_line_that_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fills_up(record: Any) -> None:
        if record.round == 2:
            monkeypatch.setattr(os, "pwrite", lambda *args: os.write(full, b"-"))

    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(RunError, match=r"round 3 cannot be written .*No space left on device; the rounds before"):
            simulate(smoke(), on_round=fills_up, folder=tmp_path / "run")
    finally:
        os.close(full)
    assert len(read_history(tmp_path / "run").rounds) == 2


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot be begun: (Not a directory|File exists)"):
        simulate(smoke(), folder=tmp_path / "file" / "run")
