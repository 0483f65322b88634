"""The load test of a SuperLink: light nodes speak the fleet protocol, and a history is compared with what they did."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> Any:
    """The module of ``benchmarks/NAME.py``."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; its other files lie beside it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return load("superlink_load")


STANDSTILL_S = 10.0
"""On a machine that stands still messages are lost: a SuperLink gives up nodes, a node requests. It is asked again."""


@pytest.mark.e2e
@pytest.mark.e2e_ci
@pytest.mark.timeout(280)
def test_a_small_load_on_a_real_superlink_loses_nothing(script: Any, tmp_path: Path) -> None:
    case = script.Case(nodes=20, cohort=8, arrays=1, rounds=3)
    behaviour = script.Behaviour(shortest_s=0.1, longest_s=0.3, failing=0.3, leaving=0.2)
    for folder in (tmp_path / "once", tmp_path / "again"):
        folder.mkdir()
        found = asyncio.run(script.measured(case, folder, behaviour, timeout_s=50.0, limit_s=125.0, idle_s=0.0))
        kinds, lines = script.compared(found.rounds, found.works, found.left)
        if max(found.waits_s) < STANDSTILL_S and not kinds["timeouts"]:
            break
    told = f"{found.ended}; {kinds}; longest wait {max(found.waits_s):.1f} s; {found.troubles}; {found.logged}"
    assert found.ended == "", told
    assert lines == [], told
    assert [len(line["clients"]) for line in found.rounds] == [8, 8, 8]
    assert kinds["answers"] > 0
    assert kinds["failures"] > 0
    assert kinds["answers"] + kinds["failures"] + kinds["left"] == 24, told
    assert {round for round, _ in found.left} == {1, 2, 3}
    assert script.row_of(case, found)["beyond_s"] > 0.0
    mark = f"FLWR_HOME={tmp_path}"
    assert not [one for one in psutil.process_iter() if one.pid != os.getpid() and mark in _environment(one)]


@pytest.mark.e2e
@pytest.mark.e2e_ci
@pytest.mark.timeout(200)
def test_a_round_goes_on_without_a_node_that_leaves_in_an_upload(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    nodes = sys.modules["superlink_nodes"]
    send_object, left = nodes.Node._send_object, list[Any]()

    async def interrupted(self: Any, *args: Any) -> None:
        if not left:
            left.append(self)
            self._fleet._later(self.leave(1, 4.0))
        await (asyncio.sleep(60.0) if left == [self] and self._fleet.round == 1 else send_object(self, *args))

    monkeypatch.setattr(nodes.Node, "_send_object", interrupted)
    case, behaviour = script.Case(nodes=20, cohort=8, arrays=1, rounds=2), script.Behaviour(0.1, 0.3, 0.0, 0.02)
    found = asyncio.run(script.measured(case, tmp_path, behaviour, timeout_s=15.0, limit_s=150.0, idle_s=0.0))
    first, second = ([row for row in line["clients"] if row["completed"]] for line in found.rounds)
    (interrupted_row,) = (row for row in found.rounds[0]["clients"] if row["client_id"] == str(left[0].id))
    assert interrupted_row["timed_out"]
    # An answer that arrives in the same quarter second waits with the interrupted one, and is lost too.
    assert len(first) >= 4
    assert len(second) == 8


def _environment(process: psutil.Process) -> str:
    try:
        return "".join(f"{key}={value}\n" for key, value in process.environ().items())
    except psutil.Error:
        return ""
