"""The record of a run: a flipped bit in any file of a finished run is found, and the file is named."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.simulations import Comparison, load_scenario, simulate
from fedsel_flwr.simulations.results import read_run
from fedsel_flwr.simulations.run_record import write_record

SMOKE = load_scenario("smoke", {"rounds": 3, "engine": "vectorized"})
FILES = (
    "client-accuracy.parquet", "clients.parquet", "model.safetensors", "regret.parquet", "rounds.parquet", "run.json",
    "scenario.toml",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digests") / "run"
    simulate(SMOKE, folder=folder)
    # The wall times have no digest, because equal runs have equal records.
    assert {path.name for path in folder.iterdir()} == {*FILES, "timing.parquet"}
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def flip(file: Path, content: bytes, place: int) -> None:
    """Write the content with one bit flipped."""
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    file.write_bytes(changed)


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused(name: str, copied: Path) -> None:
    content = (copied / name).read_bytes()
    for place in np.random.default_rng(7).choice(8 * len(content), size=20, replace=False).tolist():
        flip(copied / name, content, place)
        with pytest.raises(ParameterError):
            Comparison.load(copied)
    (copied / name).write_bytes(content)
    assert len(Comparison.load(copied).runs) == 1


def test_the_file_is_named_with_the_cure(copied: Path) -> None:
    model = (copied / "model.safetensors").read_bytes()
    flip(copied / "model.safetensors", model, 8 * len(model) - 20)
    said = r"model.safetensors' is damaged: its content does not match the digest in run.json. .*--replay"
    with pytest.raises(ParameterError, match=said):
        Comparison.load(copied)
    with pytest.raises(FedSelError, match=said):
        simulate(SMOKE, folder=copied, resume=True)


def test_a_file_that_is_gone_is_named(copied: Path) -> None:
    (copied / "regret.parquet").unlink()
    with pytest.raises(ParameterError, match=r"regret.parquet' cannot be compared with its digest: No such file"):
        Comparison.load(copied)


def test_a_name_in_the_record_leads_nowhere_else(copied: Path) -> None:
    record = record_of(copied)
    record["files"]["../run/model.safetensors"] = record["files"]["model.safetensors"]
    write_record(copied, record)
    with pytest.raises(ParameterError, match=r"'\.\./run/model.safetensors' is not a file of a run"):
        read_run(copied)


def test_a_run_of_an_older_version_is_read_with_a_warning(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = record_of(copied)
    old = json.dumps({key: record[key] for key in ("scenario", "selector", "versions")})
    (copied / "run.json").write_text(old)
    with caplog.at_level(logging.WARNING, "fedsel_flwr"):
        assert len(Comparison.load(copied).runs) == 1
    assert f"{copied} holds a run of an older version without file digests" in caplog.text
    with pytest.raises(RunError, match=r"the run in '.*run' was written by an older version without file digests"):
        simulate(SMOKE, folder=copied, resume=True)
