"""The commands that write pages and tables: small ones run, and their figures are worked out again."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.selectors import names
from tests.benchmarks.scripts import FOLDER, load, rows_of, run
from tests.processes import ROOT, environment

SECTION = "## FedCor and DivFL: before and after\n\n"


def test_no_module_of_a_benchmark_takes_the_name_of_another() -> None:
    """A benchmark's folder comes first where Python looks for modules: Numba and torch would import ours."""
    folders = [FOLDER, *(path for path in FOLDER.iterdir() if path.is_dir())]
    stems = {path.stem for folder in folders for path in folder.glob("*.py")} - {"__main__"}
    # Other tests may have added the benchmarks' folders to sys.path.
    found = {stem: spec.origin for stem in sorted(stems) if (spec := importlib.util.find_spec(stem))}
    assert {stem: origin for stem, origin in found.items() if not str(origin).startswith(str(FOLDER))} == {}


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
    assert "Aim: a round of every bandit takes at most 0.25 s. Measured: " in page
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
