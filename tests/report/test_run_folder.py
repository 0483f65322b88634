"""The run folder: names, round trips, typed columns, and writes that leave the old file or the new one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from safetensors.numpy import load_file

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.run_folder import (
    JOURNAL,
    atomic_write,
    create_run_folder,
    load_optional,
    read_history,
    read_journal,
    read_model,
    write_history,
    write_model,
    write_scenario,
)
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.journal import Journal
from tests.report.made import make_history

NOW = datetime(2026, 3, 4, 5, 6, 7)


def test_a_run_folder_is_new_also_within_one_second(tmp_path: Path) -> None:
    folders = [create_run_folder("digits", tmp_path / "runs", NOW) for _ in range(3)]
    assert [f.name for f in folders] == [f"digits-20260304-050607{end}" for end in ("", "-2", "-3")]
    assert all(f.is_dir() and f.parent == tmp_path / "runs" for f in folders)


@pytest.mark.parametrize(
    ("name", "expected"), [("my scenarios/digits.toml", "my-scenarios-digits.toml"), ("../../x", "x"), ("a:b", "a-b")]
)
def test_a_scenario_name_cannot_leave_the_root(tmp_path: Path, name: str, expected: str) -> None:
    assert create_run_folder(name, tmp_path, NOW) == tmp_path / f"{expected}-20260304-050607"


def test_run_folders_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="scenario_name"):
        create_run_folder("../", tmp_path, NOW)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ParameterError, match="runs"):
        create_run_folder("digits", tmp_path / "runs", NOW)


@pytest.fixture
def history() -> History:
    return make_history([[3, 1], [0], []], accuracy=[0.1, math.nan, 1 / 3], failed=[(1, 1)])


def same(one: History, other: History) -> bool:
    return repr((one.rounds, one.clients)) == repr((other.rounds, other.clients))  # NaN is not itself


def test_a_history_comes_back_as_it_was(history: History, tmp_path: Path) -> None:
    paths = write_history(tmp_path / "bsfl-0", history)
    assert paths == (tmp_path / "bsfl-0" / "rounds.parquet", tmp_path / "bsfl-0" / "clients.parquet")
    assert same(read_history(tmp_path / "bsfl-0"), history)
    assert read_history(tmp_path / "bsfl-0").selection_counts(5).tolist() == [1, 1, 0, 1, 0]


def test_the_columns_are_typed_also_when_there_are_no_rows(tmp_path: Path) -> None:
    for history in (make_history([], accuracy=[]), make_history([[1]], accuracy=[0.5])):
        rounds, clients = write_history(tmp_path, history)
        types = {f.name: str(f.type) for f in pyarrow.parquet.read_schema(rounds)}
        assert (types["round"], types["simulated_s"], types["accuracy"]) == ("int64", "double", "double")
        types = {f.name: str(f.type) for f in pyarrow.parquet.read_schema(clients)}
        assert (types["client_id"], types["client"], types["completed"]) == ("string", "int64", "bool")
        assert types["latency_s"] == "double"


def test_histories_that_cannot_be_read(tmp_path: Path) -> None:
    for read, name in ((read_history, "rounds.parquet"), (read_journal, f"holds no {JOURNAL}")):
        with pytest.raises(ParameterError, match=name):
            read(tmp_path)
    rounds, clients = write_history(tmp_path, make_history([[1]], accuracy=[0.5]))
    kept = clients.read_bytes()
    clients.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ParameterError, match=r"clients\.parquet"):
        read_history(tmp_path)
    clients.write_bytes(rounds.read_bytes())
    with pytest.raises(ParameterError, match="ClientRecord"):
        read_history(tmp_path)


def with_column(name: str, value: Any) -> Callable[[pyarrow.Table], pyarrow.Table]:
    """Put one value into a column of every row."""

    def change(own: pyarrow.Table) -> pyarrow.Table:
        values = pyarrow.array([value] * own.num_rows)
        return own.set_column(own.schema.names.index(name), own.schema.field(name), values)

    return change


BOMBS: dict[str, tuple[str, Callable[[pyarrow.Table], pyarrow.Table], str]] = {
    "many rows": ("clients", lambda own: own.take(pyarrow.array([0] * 2_000_000)), r"it has 2,000,000 rows, more than"),
    "many rounds": ("rounds", lambda own: own.take(pyarrow.array([0] * 1_500_000)), r"it has 1,500,000 rows"),
    "a long text": ("clients", with_column("problem", "x" * 10**6), r"a text has more than 16,384 characters"),
    "reversed": ("rounds", lambda own: own.take(pyarrow.array([2, 1, 0])), "round 2 is not expected after round 3"),
    "huge": ("clients", with_column("latency_s", 1e308), r"latency_s = 1e\+308, expected a number from 0 to 1e\+100"),
}


@pytest.mark.parametrize(("name", "change", "words"), BOMBS.values(), ids=BOMBS)
def test_histories_of_strangers_are_bounded(
    name: str, change: Callable[[pyarrow.Table], pyarrow.Table], words: str, tmp_path: Path
) -> None:
    write_history(tmp_path, make_history([[1], [2], [1, 2]], accuracy=[0.5] * 3))
    path = tmp_path / f"{name}.parquet"
    pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(path)), path, compression="zstd")
    with pytest.raises(ParameterError, match=words) as refusal:
        read_history(tmp_path)
    assert len(str(refusal.value)) < 600


LINES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an object": (lambda line: line["round"].update(round={}), "round = a dict of 0, expected int"),
    "a text": (lambda line: line["clients"][0].update(latency_s="x" * 9999), "latency_s = 'xxx"),
    "an infinite number": (lambda line: line["round"].update(num_available=math.inf), "num_available = inf, expected"),
    "below 0": (lambda line: line["clients"][0].update(client=-1), "client = -1, expected int"),
    "no clients": (lambda line: line.update(clients=None), "NoneType"),
    "an unknown key": (lambda line: line["round"].update({"k" * 9999: 1}), "unexpected keyword"),
}


@pytest.mark.parametrize(("change", "words"), LINES.values(), ids=LINES)
def test_a_line_of_another_form_is_refused(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    write_journal(make_history([[1], [2]], accuracy=[0.5] * 2), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    change(lines[1])
    (tmp_path / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ParameterError, match=f"line 2 of .*{words}") as refusal:
        read_journal(tmp_path)
    assert len(str(refusal.value)) < 600


def test_a_model_comes_back_in_order_with_shapes_and_types(tmp_path: Path) -> None:
    arrays = [np.full((2, 3), i, dtype=np.float32) for i in range(101)]  # "9" and "10", "99" and "100" keep their order
    arrays[1] = np.arange(6, dtype=np.float64).reshape(2, 3).T  # not contiguous
    arrays[2] = np.array(7, dtype=np.int64)  # no dimension
    arrays[3] = np.zeros((0, 4), dtype=np.float16)
    arrays[4] = np.array([True, False])
    path = write_model(tmp_path, arrays)
    assert path.name == "model.safetensors"
    assert sorted(load_file(path))[:2] == ["000", "001"]
    back = read_model(tmp_path)
    assert len(back) == 101
    for before, after in zip(arrays, back, strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        np.testing.assert_array_equal(before, after)


def test_models_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"model\.safetensors"):
        read_model(tmp_path)
    path = write_model(tmp_path, [np.arange(3.0)])
    for wrong in (np.array(["text"]), np.arange(3, dtype=">f4")):
        with pytest.raises(ParameterError, match="01"):
            write_model(tmp_path, [np.zeros(2), wrong])
    np.testing.assert_array_equal(read_model(tmp_path)[0], [0, 1, 2])  # a refused write keeps the old model
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ParameterError, match=r"model\.safetensors"):
        read_model(tmp_path)


def test_a_scenario_is_written_as_it_is(tmp_path: Path) -> None:
    text = "# für später\nclients = 200\n"
    path = write_scenario(tmp_path, text)
    assert path == tmp_path / "scenario.toml"
    assert path.read_bytes() == text.encode()


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def fail_halfway() -> None:
        with atomic_write(target) as temporary:
            temporary.write_text("half of the n")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_halfway()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    with atomic_write(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_missing_package_is_one_clear_error() -> None:
    with pytest.raises(RunError, match=r"needs surely_absent.*pip install 'fedsel-flwr\[sim\]'"):
        load_optional("surely_absent.part")


# ---- the journal: every finished round is there, whatever happened to the one after it ----------------------------


def write_journal(history: History, folder: Path, rounds: int = 3) -> None:
    journal = Journal(folder / JOURNAL)
    for record in history.rounds[:rounds]:
        journal.add(record, [row for row in history.clients if row.round == record.round])
    journal.close_round()


def test_a_journal_is_read_until_parquet_files_take_its_place(history: History, tmp_path: Path) -> None:
    write_journal(history, tmp_path)
    assert same(read_journal(tmp_path), history)
    assert same(read_history(tmp_path), history)
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
    assert [row.round for row in found.clients] == [1, 1, 2]
