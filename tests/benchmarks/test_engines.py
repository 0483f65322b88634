"""The comparison of engines: workers take turns, one that fails is out, and the page says what happened."""

from __future__ import annotations

import csv
import dataclasses
import os
import platform
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

from tests.processes import command_line

ENGINES = Path(__file__).parents[2] / "benchmarks" / "engines"
MODULES = ("cast", "environments", "floor", "machine", "networks", "page", "racing", "running", "task", "turns")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the benchmark, which is no package."""
    monkeypatch.syspath_prepend(str(ENGINES))
    loaded = ModuleType("engines")
    for name in MODULES:
        setattr(loaded, name, __import__(name))
    yield loaded
    for name in MODULES:
        sys.modules.pop(name)


def _runners(engines: Any, folder: Path, **variants: dict[str, Any]) -> list[Any]:
    command = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
    return [
        engines.running.Runner(
            name.split("_")[0],
            name,
            command,
            {"out": str(folder / f"{name}.npz"), **plan},
            {"PYTHONPATH": str(ENGINES)},
        )
        for name, plan in variants.items()
    ]


def test_workers_take_turns(engines: Any, tmp_path: Path) -> None:
    slow, fast, lost, broken, alone = runners = _runners(
        engines, tmp_path, loop_slow={"seconds": 0.3}, loop_fast={"seconds": 0.01},
        pfl_lost={"seconds": 0.01, "broken": 3}, flower_broken={"broken": "at once"}, flgo_alone={"seconds": 0.02},
    )  # fmt: skip
    nowhere = engines.running.Runner("ray", "nowhere", [str(tmp_path / "no-python")], {})
    runners.append(nowhere)
    said: list[str] = []
    engines.racing.race(runners, tmp_path, turns=2, trial=2, say=said.append, idle_s=0.2)

    assert [len(runner.turns) for runner in runners] == [2, 4, 2, 0, 4, 0]
    assert slow.failure == "slower than loop_fast"
    assert lost.failure == "ended: ValueError: lost"
    assert broken.failure == "ended: ValueError: cannot train"
    assert "No such file" in nowhere.failure
    assert (fast.failure, alone.failure) == ("", "")
    assert all(turn["seconds"] >= 0.01 for turn in fast.turns)
    assert fast.first >= 0.01
    assert 0 <= fast.idle < 0.5
    assert "ready after" in said[1]
    with np.load(fast.trained) as arrays:  # the first round and four turns
        np.testing.assert_array_equal(arrays["0000"], np.full((2, 3), 5.0))
    assert slow.trained is None
    children = [" ".join(command_line(child)) for child in psutil.Process(os.getpid()).children()]
    assert not [line for line in children if "fake_worker" in line]


def test_the_page_has_ratios_of_the_same_turn(engines: Any, tmp_path: Path) -> None:
    ours, flower, pfl, slower = (
        engines.running.Runner(player, variant, [], {}, startup=1.0, first=2.0, idle=idle)
        for player, variant, idle in (
            ("vectorized-1", "", 0.0), ("flower", "2 actors", 0.2), ("pfl", "1 thread", 0.0), ("pfl", "2 threads", 0.0),
        )
    )  # fmt: skip
    ours.turns = [{"seconds": s, "training": s / 2, "backend": "manual"} for s in (0.1, 0.2, 0.4, 0.1)]
    flower.turns = [{"seconds": s} for s in (1.0, 2.0, 4.0, 3.0)]  # 10, 10, 10, 30 times ours
    pfl.turns = [{"seconds": s} for s in (0.2, 0.6, 1.6, 0.5)]  # 2, 3, 4, 5
    slower.turns, slower.failure = [{"seconds": 7.0}], "slower than 1 thread"
    runners = [
        dataclasses.asdict(runner) | {"version": "1.0", "loss": 1.0, "accuracy": accuracy}
        for runner, accuracy in ((ours, 0.70), (flower, 0.71), (pfl, 0.60), (slower, float("nan")))
    ]
    result = {
        "model": "mlp", "runners": runners, "absent": {"flgo": "pip: ERROR: none"}, "turns": 2, "trial": 1,
        "floor": {"operations": 10**9, "rates": {1: 1e11}}, "data": "Random images", "when": "today",
        "machine": "this", "load": 0.7, "stolen": 0.12,
        "settings": {"clients": 500, "examples": 120, "cohort": 25, "epochs": 1, "batch": 10},
    }  # fmt: skip
    page, table = tmp_path / "page.md", tmp_path / "page.csv"
    engines.page.write({"mlp": result}, page, table)
    text = page.read_text()

    assert (
        "| Flower on Ray | 1.0 | 2 actors | 1.0 | 2.00 | 2.50 | 1.75-3.25 | 1.50 / 3.50 | **10.0** | 10.0-15.0" in text
    )
    assert "(load 0.7 before the start, the host gave 12% of the time that was asked for to others)" in text
    assert "10.0 times as fast as Flower on Ray and 3.5 times as fast as the fastest peer (pfl-research)" in text
    assert "pfl-research: 1 thread 0.200, 2 threads 7.00" in text
    assert "| FLGo | | pip: ERROR: none |" in text
    assert "Our round takes 15.0 times that" in text  # 0.15 s of 0.01 s
    assert "pfl-research ends -0.100 from the median accuracy" in text
    assert "Flower on Ray takes 0.20 of a core while it waits" in text
    with table.open() as file:
        rows = list(csv.reader(file))
    assert ["mlp", "pfl", "1 thread", "turn", "2", "1.600000"] in rows
    assert len(rows) == 1 + 4 * 2 + 4 + 4 + 4 + 1


def test_the_machine_is_named(engines: Any, tmp_path: Path) -> None:
    table = tmp_path / "cpuinfo"
    table.write_text("processor\t: 0\nmodel name\t: A processor @ 2.80GHz\nprocessor\t: 1\nmodel name\t: Another\n")
    assert engines.machine.processor(table) == "A processor @ 2.80GHz"
    assert engines.machine.processor(tmp_path / "none") == platform.machine()
    assert f"{os.cpu_count()} cores, Python {platform.python_version()}" in engines.machine.machine("cpu")


def test_stolen_time_is_a_share_of_what_was_wanted(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = namedtuple("times", ["user", "system", "idle", "iowait", "steal", "guest"])
    said = iter([times(10, 5, 100, 1, 2, 4), times(16, 6, 150, 3, 5, 9)])
    monkeypatch.setattr(engines.machine.psutil, "cpu_times", lambda: next(said))
    assert engines.machine.Processors().stolen() == pytest.approx(3 / 10)  # of 6 + 1 + 3; 5 of the user's 6 are guests'
    monkeypatch.setattr(engines.machine.psutil, "cpu_times", lambda: times(10, 5, 100, 1, 2, 4))
    assert engines.machine.Processors().stolen() == 0


def test_the_floor_counts_products(engines: Any) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    settings = {"batch_size": 4, "clients_per_round": 3, "local_epochs": 2}
    forward = 2 * 4 * (6 * 5 + 5 * 2)
    backward = 2 * 4 * (6 * 5 + 2 * 5 * 2)  # the first layer needs no gradient by its input
    steps = 3 * 2 * 3  # ten examples are three batches
    assert engines.floor.operations_per_round(model, settings, 10, (1, 2, 3)) == steps * (forward + backward)
    assert engines.floor.rate("cpu", torch.get_num_threads(), size=64, seconds=0.01) > 0


def test_every_worker_is_there(engines: Any) -> None:
    for player in engines.cast.PLAYERS.values():
        assert player.worker.is_file()
        assert not player.environment or (ENGINES / "requirements" / f"{player.environment}.txt").is_file()
        assert all("threads" in plan for plan in player.variants.values())
