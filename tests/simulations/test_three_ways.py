"""A user's selector, model and data against random: by Python, by the command line, by an installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from tests.warm import Warm

ROOT = Path(__file__).resolve().parents[2]
OWN = """
import numpy as np
from torch import nn

from fedsel_flwr.selectors import Selector


class Fastest(Selector):
    client_state = {"_plays": 0, "_total": 0.0}

    def _select(self, available):
        return self._largest(-self._total / np.maximum(self._plays, 1), available)

    def _observe(self, report):
        self._plays[report.clients] += 1
        self._total[report.clients] += report.latency


def network(input_shape, num_classes):
    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.ReLU(), nn.Linear(8, num_classes))


def data():
    draw = np.random.default_rng(5)
    labels = draw.integers(3, size=400)
    inputs = draw.normal(size=(400, 6)) + 2 * np.eye(3)[labels].repeat(2, axis=1)
    return (inputs[:300], labels[:300]), (inputs[300:], labels[300:])
"""
STUDY = """
import sys

from fedsel_flwr.simulations import compare, load_scenario
from mine import Fastest, data, network

if __name__ == "__main__":
    engine, rounds, seeds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    compare(
        load_scenario("smoke", {"rounds": rounds}), [Fastest, "random"], seeds=seeds, engine=engine, model=network,
        data=data(), folder="runs/python",
    )
"""
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "their-study"
version = "1.0"

[project.entry-points."fedsel.selectors"]
quickest = "their_study.parts:Fastest"

[tool.hatch.build.targets.wheel]
packages = ["their_study"]
"""
Run = Callable[[list[str], Path, Path], None]
"""Runs a Python file or fedsel in a folder, with a folder of installed packages beside the environment's."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed a package of somebody's, from its source."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "their_study").mkdir()
    (source / "their_study" / "__init__.py").write_text("")
    (source / "their_study" / "parts.py").write_text(OWN)
    (source / "pyproject.toml").write_text(PYPROJECT)
    argv = ["pip", "install", "--quiet", "--no-build-isolation", "--no-index", "--no-deps", "--target", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", *argv, str(source)],
        env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (target / "their_study" / "parts.py").is_file()
    return target


def three_ways(run: Run, site: Path, folder: Path, engine: str, rounds: int, seeds: int) -> list[dict[str, Path]]:
    """Compare by each way; label and seed -> the run's folder, where the selector is called "own" by each."""
    (folder / "mine.py").write_text(OWN)
    (folder / "study.py").write_text(STUDY)
    nowhere = folder / "nothing"
    run(["study.py", engine, str(rounds), str(seeds)], folder, nowhere)
    how = ["--rounds", str(rounds), "--seeds", str(seeds), "--engine", engine]
    for name, where, own, there in (
        ("command", nowhere, "./mine.py:Fastest", "./mine.py"),
        ("installed", site, "quickest", "their_study.parts"),
    ):
        made = ["--set", f"model.name={there}:network", "--set", f"data.dataset={there}:data", "--runs-dir", name]
        run(["fedsel", "compare", "smoke", "--selectors", f"{own},random", *how, *made], folder, where)
    places = [folder / "runs" / "python", *(next((folder / name).iterdir()) for name in ("command", "installed"))]
    return [
        {path.name.replace("Fastest", "own").replace("quickest", "own"): path for path in place.glob("*-seed*")}
        for place in places
    ]


def check_alike(ways: list[dict[str, Path]], rounds: int, seeds: int) -> None:
    """The same runs by each way, to the last bit; and two selectors that are not the same."""
    python, *others = ways
    assert set(python) == {f"{name}-seed{seed}" for name in ("own", "random") for seed in range(1, seeds + 1)}
    for other in others:
        assert set(other) == set(python)
        for name, place in python.items():
            for file in ("rounds.parquet", "clients.parquet"):
                one, two = pd.read_parquet(place / file), pd.read_parquet(other[name] / file)
                pd.testing.assert_frame_equal(one, two, check_exact=True)
            assert (place / "model.safetensors").read_bytes() == (other[name] / "model.safetensors").read_bytes()
    first = pd.read_parquet(python["own-seed1"] / "rounds.parquet")
    assert len(first) == rounds
    assert first["accuracy"].between(0.2, 1.0).all()
    chosen = [pd.read_parquet(python[f"{name}-seed1"] / "clients.parquet")["client"] for name in ("own", "random")]
    assert list(chosen[0]) != list(chosen[1])


def test_the_same_numbers_by_each_way_vectorized(site: Path, tmp_path: Path) -> None:
    warm = Warm()

    def run(argv: list[str], folder: Path, where: Path) -> None:
        status, said = warm.run(argv, folder, [str(where)])
        assert status == 0, said

    try:
        check_alike(three_ways(run, site, tmp_path, "vectorized", 4, 1), 4, 1)
    finally:
        warm.close()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("engine", "rounds", "seeds"), [("vectorized", 10, 5), ("ray", 2, 1)])
def test_the_same_numbers_by_each_way_in_commands_of_their_own(
    engine: str, rounds: int, seeds: int, site: Path, tmp_path: Path
) -> None:
    def run(argv: list[str], folder: Path, where: Path) -> None:
        program = ["-m", "fedsel_flwr.cli", *argv[1:]] if argv[0] == "fedsel" else argv
        path = os.pathsep.join([str(ROOT), str(where)])
        done = subprocess.run(
            [sys.executable, *program],
            cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=480,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    check_alike(three_ways(run, site, tmp_path, engine, rounds, seeds), rounds, seeds)
