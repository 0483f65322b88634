"""The run folder: names, round trips, typed columns, and writes that leave the old file or the new one."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.run_folder import (
    atomic_write,
    create_run_folder,
    load_optional,
    read_history,
    read_model,
    write_history,
    write_model,
    write_scenario,
)

NOW = datetime(2026, 3, 4, 5, 6, 7)


def test_a_run_folder_is_new_also_within_one_second(tmp_path: Path) -> None:
    folders = [create_run_folder("digits", tmp_path / "runs", NOW) for _ in range(3)]
    assert [f.name for f in folders] == [f"digits-20260304-050607{end}" for end in ("", "-2", "-3")]
    assert all(f.is_dir() and f.parent == tmp_path / "runs" for f in folders)


@pytest.mark.parametrize(
    ("name", "expected"), [("my scenarios/digits.toml", "my-scenarios-digits.toml"), ("../../x", "x"), ("a:b", "a-b")]
)
def test_a_scenario_name_cannot_leave_the_root(tmp_path: Path, name: str, expected: str) -> None:
    folder = create_run_folder(name, tmp_path, NOW)
    assert folder == tmp_path / f"{expected}-20260304-050607"


def test_run_folders_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="scenario_name"):
        create_run_folder("../", tmp_path, NOW)
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ParameterError, match="runs"):
        create_run_folder("digits", tmp_path / "runs", NOW)


def same(a: object, b: object) -> bool:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or (a == b and type(a) is type(b))


def test_a_history_comes_back_as_it_was(make_history, tmp_path: Path) -> None:
    history = make_history([[3, 1], [0], []], accuracy=[0.1, math.nan, 1 / 3], failed=[(1, 1)])
    paths = write_history(tmp_path / "bsfl-0", history)
    assert paths == (tmp_path / "bsfl-0" / "rounds.parquet", tmp_path / "bsfl-0" / "clients.parquet")
    back = read_history(tmp_path / "bsfl-0")
    for before, after in ((history.rounds, back.rounds), (history.clients, back.clients)):
        assert len(before) == len(after) == 3
        for x, y in zip(before, after, strict=True):
            assert type(x) is type(y)
            assert all(same(vars(x)[name], vars(y)[name]) for name in vars(x))
    assert back.selection_counts(5).tolist() == [1, 1, 0, 1, 0]


def test_the_columns_are_typed_also_when_there_are_no_rows(make_history, tmp_path: Path) -> None:
    for history in (make_history([], accuracy=[]), make_history([[1]], accuracy=[0.5])):
        rounds, clients = write_history(tmp_path, history)
        types = {f.name: str(f.type) for f in pyarrow.parquet.read_schema(rounds)}
        assert (types["round"], types["simulated_s"], types["accuracy"]) == ("int64", "double", "double")
        types = {f.name: str(f.type) for f in pyarrow.parquet.read_schema(clients)}
        assert (types["client_id"], types["client"], types["completed"]) == ("string", "int64", "bool")
        assert types["latency_s"] == "double"


def test_histories_that_cannot_be_read(make_history, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"rounds\.parquet"):
        read_history(tmp_path)
    rounds, clients = write_history(tmp_path, make_history([[1]], accuracy=[0.5]))
    kept = clients.read_bytes()
    clients.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ParameterError, match=r"clients\.parquet"):
        read_history(tmp_path)
    clients.write_bytes(rounds.read_bytes())
    with pytest.raises(ParameterError, match="ClientRecord"):
        read_history(tmp_path)


def test_a_model_comes_back_in_order_with_shapes_and_types(tmp_path: Path) -> None:
    arrays = [np.full((2, 3), i, dtype=np.float32) for i in range(101)]  # "9" and "10", "99" and "100" keep their order
    arrays[1] = np.arange(6, dtype=np.float64).reshape(2, 3).T  # not contiguous
    arrays[2] = np.array(7, dtype=np.int64)  # no dimension
    arrays[3] = np.zeros((0, 4), dtype=np.float16)
    arrays[4] = np.array([True, False])
    path = write_model(tmp_path, arrays)
    assert path.name == "model.safetensors"
    back = read_model(tmp_path)
    assert len(back) == 101
    for before, after in zip(arrays, back, strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        np.testing.assert_array_equal(before, after)


def test_the_names_in_a_model_file(tmp_path: Path) -> None:
    import safetensors.numpy

    path = write_model(tmp_path, [np.zeros(1), np.ones(2)])
    assert sorted(safetensors.numpy.load_file(path)) == ["00", "01"]


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
