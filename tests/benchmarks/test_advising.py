"""The table of docs/advising.md: it is that of the CSV file, and keeps what the page says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.benchmarks.scripts import FOLDER, load, rows_of
from tests.pages import ROOT

PAGE = ROOT / "docs" / "advising.md"
RUNS = ROOT / "docs" / "results" / "selectors-runs.csv"


def test_the_page_has_the_table_of_the_rows() -> None:
    table = load("advising").table()
    assert f"<!-- benchmarks/advising.csv -->\n{table}<!-- end -->" in PAGE.read_text("utf-8")


def test_the_means_are_as_near_as_the_page_says() -> None:
    rows = rows_of(FOLDER / "advising.csv")
    for scenario in ("phones", "digits"):
        for selector in ("random", "bsfl", "cs-ucb", "cs-ucb-q", "tifl", "sorted groups"):
            own = [row for row in rows if (row["scenario"], row["selector"]) == (scenario, selector)]
            assert len(own) == 3
            guess, real = (sum(float(row[name]) for row in own) for name in ("predicted_s", "real_s"))
            assert guess == pytest.approx(real, rel=0.15 if scenario == "digits" else 0.05)


@pytest.mark.parametrize("scenario", ["phones", "digits"])
def test_the_errors_of_the_savings_are_those_of_the_rows(scenario: str) -> None:
    rows = [row for row in rows_of(FOLDER / "advising.csv") if row["scenario"] == scenario]
    usual = {row["seed"]: float(row["real_s"]) for row in rows if row["selector"] == "random"}
    errors, hits = [], 0
    for row in rows:
        if row["selector"] in ("bsfl", "cs-ucb", "cs-ucb-q", "tifl"):
            real = 1 - float(row["real_s"]) / usual[row["seed"]]
            errors.append(100 * abs(float(row["saving"]) - real))
            hits += float(row["saving_low"]) <= real <= float(row["saving_high"])
    line = f"| {scenario} | {sum(errors) / len(errors):.1f} | {max(errors):.1f} | {hits} of {len(errors)} |\n"
    assert line in PAGE.read_text("utf-8")


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
    path.write_text(
        ",".join(script.FIELDS) + "\nphones,1,random,30,40,0,0,0\nphones,2,random,20,10,0,0,0\n"
        "phones,1,bsfl,15,20,0.5,0.45,0.55\nphones,2,bsfl,12,9,0.4,0.3,0.5\n"
    )
    # The real savings are 1 - 20 / 40 = 50 %, in its interval, and 1 - 9 / 10 = 10 %, outside.
    assert script.table(path).splitlines()[2:] == [
        "| phones | random | 25.0 | 25.0 | - | - | - | - |",
        "| phones | bsfl | 13.5 | 14.5 | 45 % | 30 % | 50, 10 % | 1 of 2 |",
    ]


def test_the_beginning_says_what_a_deadline_and_more_clients_did() -> None:
    """The ratios of the page are those of the stored runs on seeds 1 to 10."""
    text = PAGE.read_text("utf-8").split("<!-- docs/results/selectors-runs.csv -->")[1].split("<!-- end -->")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text[0].strip().splitlines()[2:]]
    runs = {(row["selector"], int(row["seed"])): row for row in rows_of(RUNS) if row["world"] == "shards"}

    def ratio(label: str, other: str, figure: str) -> str:
        own, others = ([float(runs[one, seed][figure]) for seed in range(1, 11)] for one in (label, other))
        logs = np.log(own) - np.log(others)
        half = stats.t.ppf(0.975, 9) * logs.std(ddof=1) / np.sqrt(10)
        mean, low, high = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
        return f"{mean:.2f} ({low:.2f} to {high:.2f})"

    pairs = [
        ("random-5-90s", "random"), ("random-10", "random"), ("random-10-60s", "random"), ("bsfl-10", "random-10-60s"),
    ]  # fmt: skip
    assert [(line[0].split("`")[1], line[1].strip("`")) for line in lines] == pairs
    for line, pair in zip(lines, pairs, strict=True):
        assert line[2:] == [ratio(*pair, figure) for figure in ("time_to_target_s", "energy_to_target_j")]
    # A deadline of 40 or 60 s without more phones: some runs missed the target.
    missed = {s: [float(runs[f"random-5-{s}s", n]["time_to_target_s"]) for n in range(1, 11)] for s in (40, 60)}
    assert all(np.isinf(own).any() for own in missed.values())
    assert "With 5 phones and a deadline of 40 or 60 s, some runs missed the target" in " ".join(text[1].split())


def test_the_reasons_for_rare_coverage_have_the_numbers_of_the_rows() -> None:
    rows = rows_of(FOLDER / "advising.csv")
    usual = {(row["scenario"], row["seed"]): float(row["real_s"]) for row in rows if row["selector"] == "random"}
    hits = [
        float(row["saving_low"])
        <= 1 - float(row["real_s"]) / usual[row["scenario"], row["seed"]]
        <= float(row["saving_high"])
        for row in rows
        if row["selector"] in ("bsfl", "cs-ucb", "cs-ucb-q", "tifl")
    ]
    own = [row for row in rows if (row["scenario"], row["selector"]) == ("digits", "random")]
    guess, real = (np.mean([float(row[name]) for row in own]) for name in ("predicted_s", "real_s"))
    text = " ".join(PAGE.read_text("utf-8").split())
    assert f"contain the real saving in only {sum(hits)} of {len(hits)} cases" in text
    assert f"it predicts {guess:.2f} s a round for `random`, and the runs need {real:.2f} s" in text
