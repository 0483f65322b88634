"""The figures of GPFL share their runs, and every figure and table of the paper has a file."""

from __future__ import annotations

import pytest

from fedsel_flwr.simulations.reproductions import reproducing
from fedsel_flwr.simulations.reproductions.paper_figure import figure_names, load_figure
from fedsel_flwr.simulations.reproductions.reproducing import Cell, cells_of, smoke


def fingerprints(name: str) -> set[str]:
    return {cell.fingerprint for cell in cells_of(load_figure(name))}


def test_every_figure_and_table_has_a_file() -> None:
    found = {load_figure(name).figure for name in figure_names() if load_figure(name).paper == "gpfl"}
    assert {"Table I", "Table II", *(f"Fig. {name}" for name in ("1", "2", "3", "4", "5", "6a", "7a", "7b"))} <= found


def test_runs_are_shared() -> None:
    # The table has three more runs, for a question.
    assert len(fingerprints("gpfl-table-2") - fingerprints("gpfl-fig-3")) == 3
    assert fingerprints("gpfl-fig-3") < fingerprints("gpfl-table-2")
    for name in ("gpfl-fig-4", "gpfl-fig-5", "gpfl-fig-6a"):
        assert fingerprints(name) < fingerprints("gpfl-table-2")
    # Only rho = 1 on three seeds is a run of the table.
    assert len(fingerprints("gpfl-fig-7b") & fingerprints("gpfl-table-2")) == 3


def test_smoke_runs_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[str] = []

    def simulate_run(cell: Cell) -> tuple[dict[str, float], dict[str, object]]:
        simulated.append(cell.fingerprint)
        return {"accuracy": 0.5}, {}

    monkeypatch.setattr(reproducing, "simulate_run", simulate_run)
    lines: list[str] = []
    smoke(["gpfl-fig-4", "gpfl-fig-5"], announce=lines.append)
    # Four selectors on one seed.
    assert len(simulated) == 4
    assert [line.split(":")[0] for line in lines] == ["gpfl-fig-4", "gpfl-fig-5"]
