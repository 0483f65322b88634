"""The benchmark of selection runs every selector and writes a table and a page."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from fedsel_flwr.selectors import names
from tests.processes import environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "selection.py"


def test_a_small_fleet(tmp_path: Path) -> None:
    """A row for each selector, new and seen; no round is shorter than its selector's part; one section is kept."""
    section = "## FedCor and DivFL: before and after\n\nOf another command.\n"
    (tmp_path / "selection.md").write_text(f"# Selection at scale\n\nold\n\n{section}", encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--clients", "60", "--cohorts", "5", "--folder", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=environment(), timeout=100)
    with (tmp_path / "selection.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
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
