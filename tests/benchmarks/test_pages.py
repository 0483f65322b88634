"""The commands that write pages and tables: small ones run, and their figures are worked out again."""

from __future__ import annotations

import importlib.util
import math
import os
import re
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
from tests.benchmarks.scripts import FOLDER, load, rows_of, run
from tests.processes import ROOT, environment

SECTION = "## FedCor and DivFL: before and after\n\n"


def test_no_module_of_a_benchmark_takes_the_name_of_another() -> None:
    """A benchmark's folder comes first where Python looks for modules: Numba and torch would import ours."""
    folders = [FOLDER, *(path for path in FOLDER.iterdir() if path.is_dir())]
    stems = {path.stem for folder in folders for path in folder.glob("*.py")} - {"__main__"}
    assert [stem for stem in sorted(stems) if importlib.util.find_spec(stem)] == []


def test_selection_of_a_small_fleet(tmp_path: Path) -> None:
    """A row for each selector, new and seen; no round is shorter than its selector's part; one section is kept."""
    section = f"{SECTION}Of another command.\n"
    (tmp_path / "selection.md").write_text(f"# Selection at scale\n\nold\n\n{section}", encoding="utf-8")
    run("selection.py", "--clients", 60, "--cohorts", 5, "--folder", tmp_path)
    rows = rows_of(tmp_path / "selection.csv")
    assert {(row["selector"], row["fleet"]) for row in rows} == {
        (name, fleet) for name in names() for fleet in ("new", "seen")
    }
    assert all(0 < float(row["selector_s"]) <= float(row["round_s"]) for row in rows)
    assert all(0 < int(row["chosen"]) <= 5 for row in rows)
    page = (tmp_path / "selection.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in page for name in names())
    assert "Every bandit within 0.25 s a round: the slowest is" in page
    assert page.endswith(f".\n\n{section}")
    assert "old" not in page.splitlines()


def test_fedcor_and_divfl_before_and_after(tmp_path: Path) -> None:
    """A pair of rows for each piece of work; the code of HEAD and the working tree make the same choices."""
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("this is no git clone, and the earlier code comes from git")
    page = tmp_path / "selection.md"
    page.write_text(f"# Selection at scale\n\n{SECTION}old\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", environment())
        run("fedcor_divfl.py", "--clients", 60, "--before", "HEAD", "--folder", tmp_path)
    rows = rows_of(tmp_path / "fedcor_divfl.csv")
    pairs = [("fedcor", "fit"), ("fedcor", "gaps"), ("fedcor", "choice"), ("divfl", "first"), ("divfl", "later")]
    assert [(row["selector"], row["work"], row["code"]) for row in rows] == [
        (*pair, code) for pair in pairs for code in ("before", "after")
    ]
    assert all(0 < float(row["low"]) <= float(row["seconds"]) <= float(row["high"]) for row in rows)
    compared = [row["same_choices"] for row in rows if row["code"] == "after"]
    assert compared == ["", "", "True", "True", "True"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Selection at scale\n\n{SECTION}Written by")
    assert "| `fedcor`: a choice from given embeddings | 60 | 1 |" in text
    assert "old" not in text.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_resident_memory_of_a_long_run_does_not_grow() -> None:
    """10,000 rounds with 1,000 clients in the vectorized engine: after a tenth of the rounds as at the end."""
    command = [sys.executable, str(FOLDER / "long_run.py"), "--rounds", "10000"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=1100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = re.search(
        r"after round 1000 .*after round 10000 \S+ MB \((\S+) %\), after the run .* \((\S+) %\)", done.stdout
    )
    assert said, done.stdout
    grown, at_last = map(float, said.groups())
    assert abs(grown) < 1.5, done.stdout  # with the history in memory about 6
    assert abs(at_last) < 5, done.stdout
    assert "10000 rounds, 100000 clients' records, selected 100000 times" in done.stdout


# ---- old and new in turn -------------------------------------------------------------------------------------------

TURNS = load("old_and_new")


@pytest.mark.parametrize("turns", [6, 9, 15])
def test_the_interval_of_the_median_ratio_covers_it(turns: int) -> None:
    drawn = np.exp(np.random.default_rng(turns).normal(size=(2000, turns)))  # the true median is 1
    inside = [low <= 1 <= high for _, low, high in (TURNS.median_interval(list(row)) for row in drawn)]
    assert np.mean(inside) > 0.94


def test_the_verdict_and_one_measure_of_this_checkout() -> None:
    said = [TURNS.verdict(*bounds) for bounds in ((1.06, 1.4), (0.9, 1.2), (1.0, 1.06), (0.8, 0.88))]
    assert said == ["slower", "not decided", "no slower", "no slower"]
    assert TURNS.in_process(TURNS.ROOT, "round-500", None) > 0


# ---- the comparison of selectors -----------------------------------------------------------------------------------

RUNS = dict[tuple[str, str, str], History]


def histories(folder: Path) -> RUNS:
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
    """Mean of the last 15 measured accuracies so far."""
    measured = [r.accuracy for r in history.rounds if r.simulated_s <= seconds and not math.isnan(r.accuracy)]
    return float(np.mean(measured[-15:])) if measured else math.nan


def know_the_truth(runs: RUNS) -> None:
    """The genie takes the same fastest clients in every round; the groups share the rounds equally."""
    runs = {key: history for key, history in runs.items() if key[0] == "cell" and key[2] == "1"}
    genie, groups = runs["cell", "genie", "1"], runs["cell", "sorted-groups", "1"]
    fastest, times = {row.client_id for row in genie.clients}, defaultdict(list)
    assert len(fastest) == 3
    for row in [row for history in runs.values() for row in history.clients]:
        times[row.client_id].append(row.latency_s)
    means = {client: float(np.mean(seconds)) for client, seconds in times.items()}
    assert max(means[client] for client in fastest) < np.median(list(means.values()))
    counts = groups.selection_counts(20)
    assert counts.max() - counts.min() <= 1
    assert len({tuple(sorted(r.client_id for r in groups.clients if r.round == n)) for n in range(1, 8)}) == 7


def test_some_selectors_in_one_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures are worked out again from the histories; a second command plays only what is missing."""
    contenders = ("random", "bsfl", "fedcs", "power-of-choice")
    command = ("selectors", "--smoke", "--runs-dir", tmp_path, "--worlds", "cell", "--selectors", *contenders)
    run(*command, "--workers", 1)
    assert "0 of 14 runs are there" in capsys.readouterr().out
    runs, table = histories(tmp_path), rows_of(tmp_path / "smoke-runs.csv")
    assert len(runs) == len(table) == 2 * 7
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
        ratio = row["figure"] in ("time_to_target_s", "energy_to_target_j")
        each = np.array([math.log(of[seed] / to[seed]) if ratio else of[seed] - to[seed] for seed in of])
        if np.isfinite(each).all() and each.std() > 0:
            half = stats.t.ppf(0.975, 1) * each.std(ddof=1) / math.sqrt(2)
            for name, end in (("difference", each.mean()), ("high", each.mean() + half)):
                expected = 100 * (math.exp(end) - 1) if ratio else end
                assert float(row[name]) == pytest.approx(expected, rel=1e-2, abs=1e-4)
    know_the_truth(runs)
    page = (tmp_path / "smoke.md").read_text(encoding="utf-8")
    assert all(f"\n| {one} |" in page for one in contenders)
    assert all(f"\n| *{one}* |" in page for one in ("genie", "sorted-groups", "random-again"))
    assert (tmp_path / "smoke-cell.png").stat().st_size > 10_000

    victim = next(path for path in tmp_path.glob("cell-bsfl-seed2-*/cost.json"))
    kept = {path: os.stat(path).st_mtime_ns for path in tmp_path.glob("*/cost.json") if path != victim}
    victim.unlink()
    run(*command, "--workers", 1)
    assert "13 of 14 runs are there" in capsys.readouterr().out
    assert victim.exists()
    assert {path: os.stat(path).st_mtime_ns for path in kept} == kept


@pytest.mark.slow
def test_every_selector(tmp_path: Path) -> None:
    """All of them, in the two worlds that need no other data, in two processes."""
    command = [sys.executable, str(FOLDER / "selectors"), "--smoke", "--runs-dir", str(tmp_path)]
    subprocess.run(command, check=True, env=environment(), timeout=300)
    assert {label for _, label, _ in histories(tmp_path)} == {*names(), "genie", "sorted-groups", "random-again"}
