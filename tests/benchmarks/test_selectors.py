"""The comparison page: a small one is made, its figures follow from the runs, and what was played stays played."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.rounds.history import History
from fedsel_flwr.selectors import names
from tests.processes import environment

FOLDER = Path(__file__).parents[2] / "benchmarks" / "selectors"


def run(folder: Path, *options: str) -> str:
    """Run the command's smoke test; returns what it printed."""
    command = [sys.executable, str(FOLDER), "--smoke", "--runs-dir", str(folder), *options]
    made = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    return made.stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    """A CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def histories(folder: Path) -> dict[tuple[str, str, str], History]:
    """World, label, seed -> history."""
    found = {}
    for cost in folder.glob("*/cost.json"):
        world, rest = cost.parent.name.split("-", 1)
        label, seed, _ = rest.rsplit("-", 2)
        found[world, label, seed.removeprefix("seed")] = read_history(cost.parent)
    return found


def by_seed(table: list[dict[str, Any]], scenario: str, label: str, figure: str) -> dict[str, float]:
    """A figure of a selector's runs."""
    return {row["seed"]: float(row[figure]) for row in table if (row["scenario"], row["selector"]) == (scenario, label)}


def accuracy_at(history: History, seconds: float) -> float:
    """Mean of the last five measured accuracies so far."""
    measured = [r.accuracy for r in history.rounds if r.simulated_s <= seconds and not math.isnan(r.accuracy)]
    return float(np.mean(measured[-5:])) if measured else math.nan


def know_the_truth(runs: dict[tuple[str, str, str], History]) -> None:
    """The genie takes the same fastest clients in every round; the groups share the rounds equally."""
    runs = {key: history for key, history in runs.items() if key[0] == "cell" and key[2] == "1"}
    genie, groups = runs["cell", "genie", "1"], runs["cell", "sorted-groups", "1"]
    assert len({row.client_id for row in genie.clients}) == 3
    fastest, times = {row.client_id for row in genie.clients}, defaultdict(list)
    for row in [row for history in runs.values() for row in history.clients]:
        times[row.client_id].append(row.latency_s)
    means = {client: float(np.mean(seconds)) for client, seconds in times.items()}
    assert max(means[client] for client in fastest) < np.median(list(means.values()))
    counts = groups.selection_counts(20)
    assert counts.max() - counts.min() <= 1
    chosen = [tuple(sorted(r.client_id for r in groups.clients if r.round == n)) for n in range(1, 8)]
    assert len(set(chosen)) == 7


def test_some_selectors_in_one_world(tmp_path: Path) -> None:
    """Figures are worked out again from the histories; a second command plays only what is missing."""
    few = ("--worlds", "cell", "--selectors", "random", "bsfl", "fedcs", "power-of-choice", "--workers", "1")
    said = run(tmp_path, *few)
    assert "0 of 14 runs are there" in said
    runs = histories(tmp_path)
    table = rows_of(tmp_path / "smoke-runs.csv")
    assert len(runs) == len(table) == 2 * 7
    contenders = ("random", "bsfl", "fedcs", "power-of-choice")
    for row in table:
        history = runs[row["scenario"], row["selector"], row["seed"]]
        equal = min(runs[row["scenario"], one, row["seed"]].rounds[-1].simulated_s for one in contenders)
        expected = accuracy_at(history, equal)
        assert float(row["equal_s"]) == pytest.approx(equal, rel=1e-5)
        assert float(row["accuracy_at_s"]) == pytest.approx(expected, rel=1e-5, nan_ok=True)
        assert float(row["simulated_s"]) == pytest.approx(sum(r.round_s for r in history.rounds), rel=1e-5)
        assert float(row["probe_j"]) == pytest.approx(np.mean([r.probe_j for r in history.rounds]), rel=1e-5)
        assert int(row["selections"]) == len(history.clients)
        assert 0 < float(row["server_ms"]) < 1000
    for row in rows_of(tmp_path / "smoke-differences.csv"):
        of, to = (by_seed(table, row["scenario"], label, row["figure"]) for label in (row["selector"], "random"))
        each = np.array([of[seed] - to[seed] for seed in of])
        if np.isfinite(each).all() and each.std() > 0:
            assert float(row["difference"]) == pytest.approx(each.mean(), rel=1e-3, abs=1e-5)
            half = stats.t.ppf(0.975, 1) * each.std(ddof=1) / math.sqrt(2)
            assert float(row["high"]) - float(row["difference"]) == pytest.approx(half, rel=1e-2, abs=1e-5)
    know_the_truth(runs)
    page = (tmp_path / "smoke.md").read_text(encoding="utf-8")
    assert all(f"\n| {one} |" in page for one in contenders)
    assert all(f"\n| *{one}* |" in page for one in ("genie", "sorted-groups", "random-again"))
    assert (tmp_path / "smoke-cell.png").stat().st_size > 10_000

    victim = next(path for path in tmp_path.glob("cell-bsfl-seed2-*/cost.json"))
    kept = {path: os.stat(path).st_mtime_ns for path in tmp_path.glob("*/cost.json") if path != victim}
    victim.unlink()
    assert "13 of 14 runs are there" in run(tmp_path, *few)
    assert victim.exists()
    assert {path: os.stat(path).st_mtime_ns for path in kept} == kept


@pytest.mark.slow
def test_every_selector(tmp_path: Path) -> None:
    """All of them, in the two worlds that need no other data."""
    run(tmp_path)
    assert {label for _, label, _ in histories(tmp_path)} == {*names(), "genie", "sorted-groups", "random-again"}
