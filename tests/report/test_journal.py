"""The journal of a run: every finished round is there, whatever happened to the one after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.run_folder import JOURNAL, read_history, read_journal, write_history
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.journal import Journal


@pytest.fixture
def history(make_history) -> History:
    return make_history([[0, 1], [2, 0], [1]], accuracy=[0.1, float("nan"), 0.3], failed=[(2, 0)])


def write_journal(history: History, folder: Path, rounds: int = 3) -> None:
    journal = Journal(folder / JOURNAL)
    for record in history.rounds[:rounds]:
        journal.add(record, [row for row in history.clients if row.round == record.round])
    journal.close_round()


def same(one: History, other: History) -> bool:
    return repr((one.rounds, one.clients)) == repr((other.rounds, other.clients))  # NaN is not itself


def test_what_was_written_is_read_back(history: History, tmp_path: Path) -> None:
    write_journal(history, tmp_path)
    assert same(read_journal(tmp_path), history)
    assert same(read_history(tmp_path), history)


def test_parquet_files_take_the_journals_place(history: History, tmp_path: Path) -> None:
    write_journal(history, tmp_path, 2)
    write_history(tmp_path, history)
    assert same(read_history(tmp_path), history)


@pytest.mark.parametrize("lost", [1, 2, 40, 200])
def test_a_line_that_was_cut_off_is_passed_over(history: History, tmp_path: Path, lost: int) -> None:
    write_journal(history, tmp_path)
    path = tmp_path / JOURNAL
    os.truncate(path, path.stat().st_size - lost)
    found = read_journal(tmp_path)
    assert [record.round for record in found.rounds] == [1, 2]
    assert [row.round for row in found.clients] == [1, 1, 2, 2]


def test_each_round_is_on_disk_when_the_process_dies(history: History, tmp_path: Path) -> None:
    code = (
        "import os, sys; from fedsel_flwr.rounds.journal import Journal;"
        "from fedsel_flwr.rounds.records import RoundRecord; journal = Journal(sys.argv[1] + '/journal.jsonl');"
        "new = lambda r: RoundRecord(round=r, num_available=1, num_selected=0, num_completed=0, round_s=0.0,"
        " simulated_s=0.0, energy_j=0.0, total_energy_j=0.0);"
        "[(journal.add(new(r), []), journal.close_round()) for r in (1, 2, 3)]; os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    assert done.returncode == -9
    assert [record.round for record in read_journal(tmp_path).rounds] == [1, 2, 3]


def test_a_damaged_line_is_refused_by_number(history: History, tmp_path: Path) -> None:
    write_journal(history, tmp_path)
    path = tmp_path / JOURNAL
    path.write_text(path.read_text().replace('"round": 2', '"runde": 2', 1))
    with pytest.raises(ParameterError, match="line 2 of"):
        read_journal(tmp_path)
    with pytest.raises(ParameterError, match="journal"):
        read_journal(tmp_path / "elsewhere")
