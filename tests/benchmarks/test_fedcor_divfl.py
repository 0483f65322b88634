"""The benchmark of FedCor and DivFL compares two commits and writes its section of a page."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, environment

SCRIPT = ROOT / "benchmarks" / "fedcor_divfl.py"


def test_a_small_fleet_before_and_after(tmp_path: Path) -> None:
    """A pair of rows for each piece of work; the code of HEAD and the working tree make the same choices."""
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("this is no git clone, and the earlier code comes from git")
    page = tmp_path / "selection.md"
    page.write_text("# Selection at scale\n\n## FedCor and DivFL: before and after\n\nold\n", encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--clients", "60", "--before", "HEAD", "--folder", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=environment(), timeout=100)
    with (tmp_path / "fedcor_divfl.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    pairs = [(name, work) for name, parts in (("fedcor", ("fit", "gaps", "choice")), ("divfl", ("first", "later")))
             for work in parts]  # fmt: skip
    assert [(row["selector"], row["work"], row["code"]) for row in rows] == [
        (*pair, code) for pair in pairs for code in ("before", "after")
    ]
    assert all(0 < float(row["low"]) <= float(row["seconds"]) <= float(row["high"]) for row in rows)
    compared = [row["same_choices"] for row in rows if row["code"] == "after"]
    assert compared == ["", "", "True", "True", "True"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Selection at scale\n\n## FedCor and DivFL: before and after\n\nWritten by")
    assert "| `fedcor`: a choice from given embeddings | 60 | 1 |" in text
    assert "old" not in text.splitlines()
