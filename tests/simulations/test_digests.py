"""A finished run is read only as it was written: a flipped bit in any of its files is found, and the file is named."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.simulations import Comparison, load_scenario, simulate
from fedsel_flwr.simulations.results import read_run
from fedsel_flwr.simulations.run_record import write_record

SMOKE = load_scenario("smoke", {"rounds": 3, "engine": "vectorized"})
FILES = ("clients.parquet", "model.safetensors", "regret.parquet", "rounds.parquet", "run.json", "scenario.toml")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digests") / "run"
    simulate(SMOKE, folder=folder)
    assert tuple(sorted(path.name for path in folder.iterdir())) == FILES
    return folder


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused(name: str, run: Path, tmp_path: Path) -> None:
    content = (run / name).read_bytes()
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for place in np.random.default_rng(7).choice(8 * len(content), size=20, replace=False).tolist():
        (folder / name).write_bytes(flipped(content, place))
        with pytest.raises(ParameterError):
            Comparison.load(folder)
    (folder / name).write_bytes(content)
    assert len(Comparison.load(folder).runs) == 1


def test_the_file_is_named_with_the_cure(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    model = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(flipped(model, 8 * len(model) - 20))
    said = r"model.safetensors' is damaged: its content has another digest than run.json says. .*--replay"
    with pytest.raises(ParameterError, match=said):
        Comparison.load(folder)
    with pytest.raises(FedSelError, match=said):
        simulate(SMOKE, folder=folder, resume=True)


def test_a_file_that_is_gone_is_named(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "regret.parquet").unlink()
    with pytest.raises(ParameterError, match=r"regret.parquet' cannot be compared with its digest: No such file"):
        Comparison.load(folder)


def test_a_name_in_the_record_leads_nowhere_else(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    record = json.loads((folder / "run.json").read_text())
    record["files"]["../run/model.safetensors"] = record["files"]["model.safetensors"]
    write_record(folder, record)
    with pytest.raises(ParameterError, match=r"'\.\./run/model.safetensors' is no file of a run"):
        read_run(folder)


def test_a_run_of_an_older_version_is_read_with_a_warning(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({key: record[key] for key in ("scenario", "selector", "versions")}))
    with caplog.at_level(logging.WARNING, "fedsel_flwr"):
        assert len(Comparison.load(folder).runs) == 1
    assert f"{folder} holds a run of an older version, without a digest of each file" in caplog.text
    with pytest.raises(RunError, match=r"the run in '.*run' is of an older version, which wrote no digest of each"):
        simulate(SMOKE, folder=folder, resume=True)
