"""``fedsel run`` on a Ray cluster of two raylets: both work, the choices stay, and nothing is left or ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.fleet import wait_until
from tests.processes import ROOT, Command
from tests.simulations.cut_off_runs import content
from tests.simulations.raylets import CLEAN, MARKS, Cluster

pytestmark = [*MARKS, pytest.mark.timeout(500)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(tmp_path / "cluster")) as made:
        yield made


def started(folder: Path, address: str, *options: str) -> Command:
    argv = (sys.executable, "-m", "fedsel_flwr.cli", "run", *options, "--runs-dir", str(folder / "runs"))
    return Command(*argv, folder=folder, cwd=ROOT, env=CLEAN | {"RAY_ADDRESS": address})


def finished(folder: Path, address: str, *options: str) -> Path:
    with started(folder, address, *options) as command:
        assert command.wait(240) == 0, command.stdout[-3000:] + command.stderr[-3000:]
        assert command.left() == []
        (model,) = (folder / "runs").rglob("model.safetensors")
        return model.parent


def ended(actors: Iterable[dict[str, Any]]) -> bool:
    alive = [a["pid"] for a in actors if psutil.pid_exists(a["pid"]) and psutil.Process(a["pid"]).status() != "zombie"]
    return not alive and all(actor["state"] == "DEAD" for actor in actors)


LARGE = ("digits", "--set", "num_clients=500", "--set", "clients_per_round=25", "--rounds", "3", "--set")


@pytest.mark.parametrize("options", [(*LARGE, "api=legacy"), (*LARGE, "api=message"), ("smoke",)])
def test_both_raylets_work_and_nothing_is_left(options: tuple[str, ...], cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.told()
    assert len(before["nodes"]) == 2
    assert before["actors"] == []
    with cluster.watched(cluster.actors) as seen:
        there = finished(tmp_path / "two", cluster.address, *options)
    after = cluster.told()
    assert after["nodes"] == before["nodes"]  # fedsel has not ended what it did not start
    assert all(command.poll() is None for command in cluster.commands)
    actors = {actor["pid"]: actor for actor in after["actors"]}
    assert {actors[pid]["node"] for pid in seen} == set(before["nodes"])  # clients ran on both
    assert ended(actors.values())
    assert cluster.stop() == []
    alone = finished(tmp_path / "one", "", *options)
    files = ("clients.parquet", "rounds.parquet", "model.safetensors")
    assert [content(there)[name] for name in files] == [content(alone)[name] for name in files]


def test_a_run_that_is_broken_off_leaves_the_cluster_and_no_actor(cluster: Cluster, tmp_path: Path) -> None:
    with started(tmp_path / "two", cluster.address, "smoke", "--rounds", "10000") as command:
        with cluster.watched(cluster.actors) as seen:
            wait_until(lambda: len(seen) >= 2, 120, "two actors at work")
        command.interrupt()
        assert command.wait(60) == 130, command.stderr
        assert command.left() == []
        wait_until(lambda: ended(cluster.told()["actors"]), 60, "Ray notices that the server has gone")
        told = cluster.told()
        assert (len(told["nodes"]), len(told["actors"])) == (2, 2)
        assert cluster.stop() == []
