"""Comparisons on a Ray cluster of two raylets: the same files as on one machine, whatever ends in between."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedsel_flwr.simulations.comparisons.plan import PLAN
from tests.e2e.fleet import wait_until
from tests.processes import Command
from tests.simulations.cut_off_runs import content
from tests.simulations.raylets import CLEAN, MARKS, Cluster

pytestmark = [*MARKS, pytest.mark.timeout(1800)]

SELECTORS = ("bsfl", "cs-ucb", "random")
OWN = '''
from pathlib import Path

import numpy as np
import torch

import fedsel_flwr
from fedsel_flwr.selectors import Random


class Mine(Random):
    """At random; it notes where its code, this package and its process are."""

    def _select(self, available):
        if self.round == 1:
            with Path("{seen}").open("a") as file:
                print(__file__, fedsel_flwr.__file__, Path.cwd(), file=file)
        return super()._select(available)


class Net(torch.nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.inner = torch.nn.Linear(int(np.prod(input_shape)), num_classes)

    def forward(self, x):
        return self.inner(x.flatten(1))


def examples():
    with np.load("examples.npz") as file:  # only in the folder of the command
        return tuple((file[f"{part}_inputs"], file[f"{part}_labels"]) for part in ("train", "test"))
'''
# Parts that only Python can pass, some of them defined where nothing can be imported from.
IN_PYTHON = """
import sys
import numpy as np, torch
from fedsel_flwr.selectors import Random
from fedsel_flwr.simulations import OwnData, compare, load_scenario

class Mine(Random):
    pass

def net(input_shape, num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, num_classes))

generator = np.random.default_rng(0)
part = generator.normal(size=(200, 4)), np.arange(200) % 3
own = OwnData(train=part, test=part, validation=part)
scenario = load_scenario("smoke", {"rounds": 6})
found = [
    compare(scenario, {"mine": Mine, "bsfl": "bsfl"}, seeds=2, model=net, data=own, quiet=True, **where)
    for where in ({}, {"ray_address": sys.argv[1], "jobs": 2})
]
print([
    (run.name, repr(run.history), [a.tobytes() for a in run.result.arrays], run.result.fingerprints)
    for run in found[0].runs
] == [
    (run.name, repr(run.history), [a.tobytes() for a in run.result.arrays], run.result.fingerprints)
    for run in found[1].runs
], len(found[1].runs), found[0].to_csv() == found[1].to_csv())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its processes do not find this package by a path: what they run has travelled."""
    with closing(Cluster(tmp_path_factory.mktemp("cluster"), {"PYTHONPATH": ""})) as made:
        yield made


def fedsel(folder: Path, *argv: str, env: Mapping[str, str] | None = None) -> Command:
    """A command with one thread a run, in a folder of its own."""
    command = (sys.executable, "-m", "fedsel_flwr.cli", *argv)
    return Command(*command, folder=folder / "said", cwd=folder, env=CLEAN | {"OMP_NUM_THREADS": "1", **(env or {})})


def played(folder: Path, *argv: str, env: Mapping[str, str] | None = None) -> Path:
    """The folder of a comparison whose command, in a folder of its own, has ended, and of which nothing is left."""
    folder.mkdir(exist_ok=True)
    with fedsel(folder, *argv, env=env) as command:
        assert command.wait(900) == 0, command.stdout[-3000:] + command.stderr[-3000:]
        assert command.left() == []
    (place,) = (folder / "runs").iterdir()
    return place


def results(folder: Path) -> dict[str, Any]:
    """What the files say, but for the plan, which names the machines, and the page, which names the folder's age."""
    return {name: text for name, text in content(folder).items() if name != PLAN}


def runs_of(cluster: Cluster) -> AbstractContextManager[set[tuple[int, str]]]:
    """While the block runs: (raylet, run) for each run that a raylet was seen to play."""
    return cluster.watched(lambda number: {(number, name) for name in cluster.tasks(number)})


def compared(*options: str, rounds: int = 40, seeds: int = 4) -> tuple[str, ...]:
    size = ("--seeds", str(seeds), "--rounds", str(rounds))
    return ("compare", "smoke", "--selectors", ",".join(SELECTORS), *size, *options)


def test_a_cluster_and_one_process_leave_the_same_folder(cluster: Cluster, tmp_path: Path) -> None:
    """Three selectors on four seeds; RAY_ADDRESS alone distributes nothing."""
    with runs_of(cluster) as seen:
        there = played(tmp_path / "there", *compared("--ray-address", cluster.address, "--jobs", "2"))
    assert {number for number, _ in seen} == {0, 1}  # both raylets played runs
    with runs_of(cluster) as seen:
        here = played(tmp_path / "here", *compared("--jobs", "1"), env={"RAY_ADDRESS": cluster.address})
    assert not seen
    mine, theirs = results(here), results(there)
    assert mine == theirs
    for picture in ("comparison.png", "rounds.png"):
        assert (here / picture).read_bytes() == (there / picture).read_bytes()
    runs = [f"{name}-seed{seed}" for name in SELECTORS for seed in range(1, 5)]
    files = [f"{run}/{name}" for run in runs for name in ("rounds.parquet", "clients.parquet", "model.safetensors")]
    assert {*files, "runs.csv", "summary.json", "verdict.json"} < mine.keys()
    plan = json.loads((there / PLAN).read_text())
    assert (plan["where"], plan["jobs"]) == ({"ray_address": cluster.address}, 2)
    assert "ray_address" not in json.loads((here / PLAN).read_text())["where"]


def test_own_code_and_data_travel(cluster: Cluster, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    sets = {}
    for part, count in (("train", 300), ("test", 100)):
        sets[f"{part}_labels"] = np.arange(count) % 3
        sets[f"{part}_inputs"] = generator.normal(size=(count, 4)) + sets[f"{part}_labels"][:, np.newaxis]
    places = {}
    for name, options in (("there", ("--ray-address", cluster.address)), ("here", ())):
        # In one folder, because references in a scenario are absolute paths.
        home = tmp_path / "home"
        home.mkdir()
        (home / "mine.py").write_text(OWN.replace("{seen}", str(tmp_path / name)))
        np.savez(home / "examples.npz", **sets)
        own = ("--set", "model.name=./mine.py:Net,data.dataset=./mine.py:examples")
        argv = ("compare", "smoke", "--selectors", "./mine.py:Mine,bsfl", "--seeds", "2", "--rounds", "6", *own)
        places[name] = tmp_path / f"{name}-runs"
        shutil.move(played(home, *argv, *options), places[name])
        shutil.rmtree(home)
    mine, theirs = results(places["here"]), results(places["there"])
    different = {name for name in mine if mine[name] != theirs.get(name)}
    # The text of mine.py names a file, so its fingerprint differs.
    assert {name.rpartition("/")[2] for name in different} <= {"run.json", "report.html"}
    noted = [line.split() for line in (tmp_path / "there").read_text().splitlines()]
    assert len(noted) == 2
    for own_file, package, folder in noted:
        assert Path(package).parent.parent == Path(own_file).parent == Path(folder)
        assert "runtime_resources" in folder
        assert Path(own_file).name.startswith("fedsel_own_mine_")


def test_parts_from_python_travel(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IN_PYTHON)
    with Command(
        sys.executable, "script.py", cluster.address, folder=tmp_path / "said", cwd=tmp_path,
        env=CLEAN | {"OMP_NUM_THREADS": "1"},
    ) as command:  # fmt: skip
        assert command.wait(300) == 0, command.stderr
        assert command.stdout == "True 4 True\n"


def test_what_was_broken_off_is_finished_without_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """Ctrl-C leaves the finished runs and no process; other machines play the rest."""
    options = compared("--ray-address", cluster.address, rounds=400, seeds=2)
    with fedsel(tmp_path, *options) as command:
        runs = tmp_path / "runs"
        wait_until(
            lambda: len([*runs.rglob("model.safetensors")]) >= 2 and any(cluster.tasks(number) for number in range(2)),
            300, "no run has finished while another one plays",
        )  # fmt: skip
        command.interrupt()
        assert command.wait(60) == 130, command.stderr
        assert command.left() == []
        wait_until(lambda: not any(cluster.tasks(number) for number in range(2)), 30, "orphans")
        (folder,) = runs.iterdir()
        kept = {path.parent.name for path in runs.rglob("model.safetensors")}
        assert 2 <= len(kept) < 6
        (said,) = command.stderr.splitlines()
        assert said.startswith(f"fedsel: interrupted; {folder} holds ")
        assert all(f"{name}: 400 rounds, finished" in said for name in kept)
        assert said.endswith(f"Resume with: fedsel compare --resume {folder} --trust")
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
    ages = {name: (folder / name / "model.safetensors").stat().st_mtime_ns for name in kept}
    with fedsel(tmp_path, "compare", "--resume", str(folder), "--ray-address", "local") as command:
        assert command.wait(300) == 0, command.stderr
    assert ages == {name: (folder / name / "model.safetensors").stat().st_mtime_ns for name in kept}  # only read
    assert results(folder) == results(played(tmp_path / "whole", *compared(rounds=400, seeds=2)))


def test_figures_are_played_there_too(cluster: Cluster, tmp_path: Path) -> None:
    rows = []
    for where, options in (("there", ("--ray-address", cluster.address)), ("here", ())):
        place = tmp_path / where
        place.mkdir()
        command = fedsel(place, "reproduce", "xia-fig-1b", "--seeds", "1", "--out", "out", *options)
        with runs_of(cluster) as seen, command:
            assert command.wait(900) == 0, command.stdout[-2000:] + command.stderr[-3000:]
        assert where == "there" or not seen
        with (place / "out" / "xia-choices.csv").open(newline="") as file:
            rows.append([row | {"cpu_s": ""} for row in csv.DictReader(file)])
    assert rows[0] == rows[1] != []


def test_a_raylet_that_is_killed_costs_only_time(cluster: Cluster, tmp_path: Path) -> None:
    """The last test, because the cluster then has one raylet. The head stays: the command is connected to it."""
    (tmp_path / "there").mkdir()
    options = compared("--ray-address", cluster.address, "--jobs", "2", rounds=700, seeds=1)
    with runs_of(cluster) as seen, fedsel(tmp_path / "there", *options) as command:
        wait_until(lambda: cluster.tasks(1) and cluster.tasks(0), 200, "no run on the second raylet")
        time.sleep(2.0)  # some rounds
        (lost,) = cluster.tasks(1)
        (raylet,) = [child for child in cluster.children(1) if child.name() == "raylet"]
        os.kill(raylet.pid, 9)
        psutil.wait_procs([raylet], 10)
        wait_until(lambda: (0, lost) in seen, 200, f"{lost} was not played again")
        assert command.wait(900) == 0, command.stderr
        assert command.left() == []
        assert "cluster: 3 of 3 runs finished, 0 in progress, 0 waiting" in command.stdout
    (there,) = (tmp_path / "there" / "runs").iterdir()
    assert "Ray: " in (there / "flower.log").read_text()
    assert results(played(tmp_path / "here", *compared(rounds=700, seeds=1))) == results(there)
