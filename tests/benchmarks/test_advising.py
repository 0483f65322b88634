"""The table of docs/advising.md: it is that of the CSV file, and keeps what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.scripts import FOLDER, load, rows_of
from tests.pages import ROOT

PAGE = ROOT / "docs" / "advising.md"


def test_the_page_has_the_table_of_the_rows() -> None:
    table = load("advising").table()
    assert f"<!-- benchmarks/advising.csv -->\n{table}<!-- end -->" in PAGE.read_text("utf-8")


def test_the_means_are_as_near_as_the_page_says() -> None:
    rows = rows_of(FOLDER / "advising.csv")
    for scenario in ("phones", "digits"):
        for selector in ("random", "bsfl", "cs-ucb", "sorted groups"):
            own = [row for row in rows if (row["scenario"], row["selector"]) == (scenario, selector)]
            assert len(own) == 3
            guess, real = (sum(float(row[name]) for row in own) for name in ("predicted_s", "real_s"))
            assert guess == pytest.approx(real, rel=0.1)


def test_a_short_run_gives_every_row() -> None:
    script = load("advising")
    rows = list(script.rows_of("phones", 1, 40))
    assert [row["selector"] for row in rows] == [*script.SELECTORS, script.GROUPS]
    # 40 rounds of random selection contain two rows of a client, which is enough for seconds per round within a fifth.
    guess, real = (float(rows[0][name]) for name in ("predicted_s", "real_s"))
    assert guess == pytest.approx(real, rel=0.2)


def test_the_table_by_hand(tmp_path: Path) -> None:
    script = load("advising")
    path = tmp_path / "rows.csv"
    path.write_text("scenario,seed,selector,predicted_s,real_s\nphones,1,random,30,40\nphones,2,random,20,10\n")
    assert script.table(path).splitlines()[2] == "| phones | random | 25.0 | 25.0 | 1.00 | 0.75 to 2.00 |"
