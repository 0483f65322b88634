"""The load test of a SuperLink: light nodes speak the fleet protocol, and a history is compared with what they did."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.benchmarks.scripts import FOLDER, load


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; its other files lie beside it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return load("superlink_load")


def _row(node: int, *, completed: bool = True, problem: str = "", timed_out: bool = False) -> dict[str, Any]:
    return {"client_id": str(node), "completed": completed, "problem": problem, "timed_out": timed_out}


def _failed(node: int, problem: str, *, timed_out: bool = False) -> dict[str, Any]:
    return _row(node, completed=False, problem=problem, timed_out=timed_out)


GONE = "node unavailable: its SuperNode stopped reporting"
RAISED = "exception: RuntimeError: the battery is empty"


@pytest.mark.parametrize(
    ("rows", "did", "kinds"),
    [
        ([_row(1), _failed(2, RAISED)], {1: "answered", 2: "failed"}, {"answers": 1, "failures": 1}),
        ([_failed(3, GONE), _failed(4, GONE)], {3: "left"}, {"left": 2}),
        ([_failed(1, "no answer within 9 s", timed_out=True)], {1: "answered"}, {"timeouts": 1}),
        ([_failed(1, GONE)], {1: "answered"}, {"lost": 1}),  # it never left
        ([], {1: "answered"}, {"lost": 1}),
        ([_row(1)], {}, {"wrong": 1}),
        ([_row(1)], {1: "failed"}, {"wrong": 1}),
        ([_failed(1, "exception: OSError: disk")], {1: "answered"}, {"wrong": 1}),
        ([_row(1), _row(1)], {1: "answered"}, {"answers": 2, "wrong": 1}),
    ],
)
def test_each_selected_client_is_compared_with_its_node(
    script: Any, rows: list[dict[str, Any]], did: dict[int, str], kinds: dict[str, int]
) -> None:
    works = [script.Work(node, 1, 1.0, outcome) for node, outcome in did.items()]
    rows = [*rows, _row(9)]
    works.append(script.Work(9, 1, 1.0, "answered"))
    found, lines = script.compared([{"round": 1, "clients": rows}], works, {(1, 3), (1, 4)})
    found["answers"] -= 1
    assert +found == kinds
    assert len(lines) == kinds.get("lost", 0) + kinds.get("wrong", 0)


def test_a_message_that_was_received_twice_is_wrong(script: Any) -> None:
    works = [script.Work(1, 1, 1.0, "answered")] * 2
    found, (line,) = script.compared([{"round": 1, "clients": [_row(1)]}], works, set())
    assert found["wrong"] == 1
    assert "2 times" in line


@pytest.mark.e2e
@pytest.mark.e2e_ci
@pytest.mark.timeout(280)
def test_a_small_load_on_a_real_superlink_loses_nothing(script: Any, tmp_path: Path) -> None:
    case = script.Case(nodes=20, cohort=8, arrays=1, rounds=3)
    behaviour = script.Behaviour(shortest_s=0.1, longest_s=0.3, failing=0.3, leaving=0.2)
    found = asyncio.run(script.measured(case, tmp_path, behaviour, limit_s=200.0, idle_s=0.0))
    assert found.ended == ""
    kinds, lines = script.compared(found.rounds, found.works, found.left)
    assert lines == []
    assert [len(line["clients"]) for line in found.rounds] == [8, 8, 8]
    assert kinds["answers"] > 0
    assert kinds["failures"] > 0
    assert kinds["answers"] + kinds["failures"] + kinds["left"] == 24
    assert {round for round, _ in found.left} == {1, 2, 3}
    assert script.row_of(case, found)["beyond_s"] > 0.0
    mark = f"FLWR_HOME={tmp_path / 'home'}"
    assert not [one for one in psutil.process_iter() if one.pid != os.getpid() and mark in _environment(one)]


def _environment(process: psutil.Process) -> str:
    try:
        return "".join(f"{key}={value}\n" for key, value in process.environ().items())
    except psutil.Error:
        return ""


def test_the_table_in_the_documentation_has_the_numbers_of_the_csv_file(script: Any) -> None:
    measured = {
        (row["nodes"], row["cohort"], row["arrays"]): row for row in script.read_rows(FOLDER / "superlink_load.csv")
    }
    text = (FOLDER.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
    section = text.partition("## A SuperLink under load")[2].partition("\n## ")[0]
    lines = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ") and line[2].isdigit()
    ]
    told = {tuple(int(cell.replace(",", "")) for cell in line[:3]): line[3:] for line in lines}
    assert told.keys() == measured.keys()
    for case, (rounds, *cells) in told.items():
        row = measured[case]
        finished, planned = row["finished"], row["rounds"]
        assert rounds == (f"{finished}" if finished == planned else f"{finished} of {planned}")
        if not finished:
            assert cells == ["-"] * 9
            continue
        seconds = [f"{row[name]:.1f}" for name in ("round_s", "beyond_s", "beyond_95_s", "superlink_cpu_s")]
        memory = [f"{row[name]:.0f}" for name in ("superlink_mb", "server_app_mb")]
        assert cells == [
            *seconds, f"{row['server_app_cpu_s']:.2f}", *memory, str(row["timeouts"]), str(row["lost"] + row["wrong"])
        ]  # fmt: skip
