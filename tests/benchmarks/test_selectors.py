"""The comparison of selectors: rows as an independent simulation computes them, and repeated commands."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.history import History
from fedsel_flwr.selectors import names
from fedsel_flwr.simulations import load_scenario, simulate
from tests.benchmarks.scripts import FOLDER, rows_of, run
from tests.processes import environment

SMOKE = {
    "data.dataset": "digits", "num_clients": 20, "clients_per_round": 3, "rounds": 8, "target_accuracy": 0.4,
    "data.validation_fraction": 0.1, "training.local_steps": 5, "training.learning_rate": 0.2,
}  # fmt: skip
CONTENDERS = ("random", "bsfl", "fedcs", "power-of-choice")


def history_of(selector: str, seed: int) -> History:
    """Simulate a run of the world (b) in its small form, without the code of the benchmark."""
    changes = SMOKE | {"selector": selector, "seed": seed}
    return simulate(load_scenario(FOLDER / "selectors" / "cell.toml", changes), quiet=True).history


def command(folder: Path, *selectors: str) -> tuple[Any, ...]:
    return ("selectors", "--smoke", "--page", folder / "page.md", "--worlds", "cell", "--selectors", *selectors)


def test_rows_equal_an_independent_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(*command(tmp_path, *CONTENDERS))
    assert "0 of 16 runs are finished" in capsys.readouterr().out
    rows = {(row["selector"], row["seed"]): row for row in rows_of(tmp_path / "page-runs.csv")}
    labels = (*CONTENDERS, "fedcs-3", "genie", "sorted-groups", "random-again")
    assert set(rows) == {(label, seed) for label in labels for seed in "12"}
    for selector in CONTENDERS:
        row, history = rows[selector, "2"], history_of(selector, 2)
        rounds = history.rounds
        seconds, joules = sum(r.round_s for r in rounds), sum(r.energy_j for r in rounds)
        assert float(row["simulated_s"]) == pytest.approx(seconds, rel=1e-6)
        assert float(row["energy_j"]) == pytest.approx(joules, rel=1e-6)
        assert float(row["probe_s"]) == pytest.approx(sum(r.probe_s for r in rounds), rel=1e-6)
        assert float(row["asked_per_round"]) == pytest.approx(len(history.clients) / 8, rel=1e-6)
        asked = [sum(r.client == k for r in history.clients) for k in range(20)]
        assert float(row["median_plays"]) == np.median(asked)
        # Every second round is measured, and 15 rounds are more than there are.
        measured = [r for r in rounds if math.isfinite(r.accuracy)]
        means = [np.mean([r.accuracy for r in measured[: i + 1]]) for i in range(4)]
        assert [float(x) for x in row["curve_accuracy"].split()] == pytest.approx(means, rel=1e-3)
        assert [float(x) for x in row["curve_s"].split()] == pytest.approx([r.simulated_s for r in measured], rel=1e-3)
        assert 0 < float(row["server_ms"]) < 1000
        assert float(row["run_s"]) > 0
    # The genie asks the same 3 of 20 clients in every round; The groups have 2, 3, 3, 3, 3, 3 and 3
    # clients from the fastest to the slowest. In 8 rounds, the fastest group has 2 turns.
    assert {float(rows["genie", seed]["jain"]) for seed in "12"} == {0.15}
    counts = np.array([1] * 18 + [2] * 2)
    assert float(rows["sorted-groups", "1"]["jain"]) == pytest.approx(counts.sum() ** 2 / (20 * (counts**2).sum()))
    assert float(rows["fedcs-3", "1"]["asked_per_round"]) == 3 < float(rows["fedcs", "1"]["asked_per_round"])
    page = (tmp_path / "page.md").read_text("utf-8")
    assert all(f"| `{label}` |" in page for label in (*CONTENDERS, "fedcs-3"))
    assert all(f"| *{label}* |" in page for label in ("genie", "sorted-groups", "random-again"))
    assert float(rows["random-again", "1"]["simulated_s"]) != float(rows["random", "1"]["simulated_s"])


def test_a_repeated_command_simulates_only_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page-runs.csv"
    run(*command(tmp_path, "random"))
    before = path.read_text("utf-8")
    run(*command(tmp_path, "random"))
    assert "8 of 8 runs are finished" in capsys.readouterr().out
    assert path.read_text("utf-8") == before
    # As after an interruption: one row is missing, and another one is incomplete.
    lines = before.splitlines(keepends=True)
    path.write_text("".join([*lines[:2], *lines[3:-1], lines[-1][:40]]), "utf-8")
    run(*command(tmp_path, "random"))
    assert "6 of 8 runs are finished" in capsys.readouterr().out
    after = path.read_text("utf-8").splitlines(keepends=True)
    columns = after[0].rstrip("\n").split(",")
    timed = {columns.index("server_ms"), columns.index("run_s")}
    for new, old in zip(after, lines, strict=True):
        pairs = zip(new.split(","), old.split(","), strict=True)
        assert {i for i, (one, other) in enumerate(pairs) if one != other} <= timed


@pytest.mark.slow
def test_every_selector(tmp_path: Path) -> None:
    """All selectors in two processes, in the two worlds that need no other data."""
    line = [sys.executable, str(FOLDER / "selectors"), "--smoke", "--page", str(tmp_path / "page.md")]
    subprocess.run([*line, "--worlds", "shards", "cell", "--workers", "2"], check=True, env=environment(), timeout=300)
    rows = rows_of(tmp_path / "page-runs.csv")
    references = {"fedcs-3", "genie", "sorted-groups", "random-again"}
    assert {row["selector"] for row in rows} == {*names(), *references}
    assert len(rows) == 2 * 2 * (len(names()) + len(references))
