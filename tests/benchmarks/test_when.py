"""When selection pays: latencies, references, shares, resumption, and the page that its CSV files give."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsel_flwr.clients.device import probe_delays
from tests.benchmarks.scripts import FOLDER, rows_of, run
from tests.processes import ROOT

PAGE = ROOT / "docs" / "results" / "when.md"


def module(name: str) -> Any:
    """A module of ``benchmarks/``, with the modules that it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)


FLEETS, GRIDS, CELLS = module("when_fleet"), module("when_grid"), module("when_cells")
CHECKS, PAGES, PICTURE = module("when_checks"), module("when_page"), module("when_picture")
FLEET = FLEETS.Fleet(6, 2, 0.78, 0.4)


@pytest.fixture(autouse=True)
def _own_modules() -> Any:
    """`run` removes the modules of the folder, and the next test needs the same classes."""
    before = {
        name: one for name, one in sys.modules.items() if str(getattr(one, "__file__", "")).startswith(str(FOLDER))
    }
    yield
    sys.modules.update(before)


# ---- latencies and references --------------------------------------------------------------------------------------


def test_latencies_are_those_of_the_system_model() -> None:
    times, phones = FLEETS.draw_times(FLEET, 3, 4), FLEET.phones(3)
    for number in range(1, 5):
        drawn = [phones.draw(k, number) for k in range(6)]
        expected = [one.download_s + one.compute_s + one.upload_s for one in drawn]
        np.testing.assert_allclose(times.latency[number - 1], expected, rtol=1e-12)
        asked = [probe_delays(phones, one) for one in drawn]
        slowest = max(min(one.download_s + one.compute_s + one.upload_s, phones.max_latency_s) for one in asked)
        assert times.probe[number - 1] == pytest.approx(slowest, rel=1e-12)


def test_spread_scales_all_speeds_and_the_measured_phones_are_the_defaults() -> None:
    phones = FLEETS.Fleet(6, 2, 0.39, 0.4).phones(1)
    assert (phones.compute_log_sd, phones.download_log_sd, phones.upload_log_sd) == pytest.approx((0.39, 0.235, 0.34))
    equal = FLEETS.draw_times(FLEETS.Fleet(6, 2, 0.0, 0.4), 1, 3)
    np.testing.assert_allclose(equal.mean, equal.mean[0], rtol=1e-12)


def test_spread_and_noise_by_hand() -> None:
    """Logs 0, 2 and 4, 6: means 1 and 5, variances 2 and 2; the noise adds 2 / 2 to the means' variance of 8."""
    latency = np.exp([[0.0, 4.0], [2.0, 6.0]])
    times = FLEETS.Times(FLEETS.Fleet(2, 1, 0.0, 0.0), latency, np.zeros(2), latency.mean(axis=0))
    assert times.components() == pytest.approx((math.sqrt(7.0), math.sqrt(2.0)))


def test_random_is_the_mean_over_all_cohorts() -> None:
    """All 15 cohorts of 2 of 6 clients, in each of 4 rounds."""
    times = FLEETS.draw_times(FLEET, 3, 4)
    slowest = [row[list(pair)].max() for row in times.capped for pair in itertools.combinations(range(6), 2)]
    assert times.random_s() == pytest.approx(np.mean(slowest), rel=1e-12)


def test_sorted_groups_by_hand() -> None:
    """Means 1 to 4 s: the groups are {0, 2} and {1, 3}; their slowest take 3, 4 and 5, 9 s; the deadline is 8 s."""
    latency = np.array([[1.0, 4.0, 3.0, 5.0], [2.0, 1.0, 4.0, 9.0]])
    mean = np.array([1.0, 3.0, 2.0, 4.0])
    times = FLEETS.Times(FLEETS.Fleet(4, 2, 0.0, 0.0), latency, np.zeros(2), mean, deadline_s=8.0)
    assert times.groups_s() == pytest.approx((3.0 + 4.0 + 5.0 + 8.0) / 4)


def test_figures_of_a_course_by_hand() -> None:
    """Six rounds of 2 of 4 clients are 3 cycles; the last half, rounded up, is the last two cycles."""
    cohorts = np.array([[0, 1], [2, 3], [0, 1], [0, 2], [0, 1], [0, 3]])
    course = FLEETS.Course(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), cohorts)
    fleet = FLEETS.Fleet(4, 2, 0.0, 0.0)
    seconds, late, jain = course.figures(3, fleet)
    assert (seconds, late) == (3.5, 4.5)
    assert jain == pytest.approx(12**2 / (4 * (5**2 + 3**2 + 2**2 + 2**2)))
    assert course.figures(1, fleet) == (1.5, 1.5, 1.0)


def test_a_run_reports_latencies_and_failures_and_pays_for_probes() -> None:
    """TiFL asks all clients before rounds 1 and 21; a client past the deadline costs the deadline."""
    fleet = FLEETS.Fleet(4, 2, 0.0, 0.0)
    latency = np.tile([1.0, 2.0, 3.0, 99.0], (22, 1))
    times = FLEETS.Times(fleet, latency, np.full(22, 100.0), latency[0], deadline_s=8.0)
    course = FLEETS.run(times, "tifl", {"tiers": 2}, 1)
    assert np.flatnonzero(course.seconds > 100.0).tolist() == [0, 20]
    slowest = latency[np.arange(22)[:, np.newaxis], course.cohorts].max(axis=1)
    expected = np.minimum(slowest, 8.0) + 100.0 * np.isin(np.arange(22), (0, 20))
    np.testing.assert_allclose(course.seconds, expected)


def test_cohorts_of_bsfl_are_similar_then_mixed_then_similar_again() -> None:
    """The page explains by this why the saving falls and rises again: ranks of the latencies within a cohort."""
    fleet = FLEETS.Fleet(100, 5, 0.78, 0.4)
    times = FLEETS.draw_times(fleet, 2, 600)
    course = FLEETS.run(times, "bsfl", {"min_latency": "auto", "exploration": 1.0}, 2)
    ranks = np.argsort(np.argsort(times.mean))[course.cohorts]

    def cycles(first: int, last: int) -> tuple[float, float, float]:
        part = slice(first * fleet.cycle, last * fleet.cycle)
        return float(course.seconds[part].mean()), float(ranks[part].std(axis=1).mean()), float(ranks[part].mean())

    early, middle, late = cycles(1, 3), cycles(3, 5), cycles(15, 30)
    assert early[0] < 0.9 * middle[0]
    assert late[0] < 0.9 * middle[0]
    assert early[1] < 0.6 * middle[1]
    assert late[1] < 0.6 * middle[1]
    assert late[2] < middle[2]


# ---- shares --------------------------------------------------------------------------------------------------------


def test_share_and_interval_by_hand() -> None:
    """Savings 2 and 4 s of ceilings 4 and 4 s: 6 / 8; residuals -1 and 1, so the error is 1 / 4."""
    found = CELLS.ratio(np.array([2.0, 4.0]), np.array([4.0, 4.0]))
    half = stats.t.ppf(0.975, 1) * math.sqrt(2.0) / math.sqrt(2) / 4
    assert (found.value, found.low, found.high) == pytest.approx((0.75, 0.75 - half, 0.75 + half))
    assert math.isnan(CELLS.ratio(np.ones(1), np.ones(1)).low)


def results(random: float, groups: float, bsfl: float, spread: float = 0.2, noise: float = 0.2) -> Any:
    base = {"clients": "4", "per_round": "2", "spread": "0.4", "noise": "0.1", "jain_1": "1"}
    seconds = {"random": random, "sorted-groups": groups, "bsfl": bsfl}
    return CELLS.Results([
        base | {"selector": name, "seed": str(seed), "seconds_1": str(value * seed), "late_1": str(value),
                "latency_spread": str(spread), "latency_noise": str(noise)}
        for name, value in seconds.items() for seed in (1, 2)
    ])  # fmt: skip


def test_a_ceiling_near_zero_has_no_share() -> None:
    fleet = FLEETS.Fleet(4, 2, 0.4, 0.1)
    found = results(10.0, 6.0, 7.0)
    assert found.ceiling(fleet).value == pytest.approx(0.4)
    assert found.saving(fleet, "bsfl", 1).value == pytest.approx(0.3)
    assert found.share(fleet, "bsfl", 1).value == pytest.approx(0.75)
    assert results(10.0, 9.9, 9.0).share(fleet, "bsfl", 1) is None


@pytest.mark.parametrize(
    ("spread", "noise", "zone"),
    [
        (0.2, 0.2, "above"), (0.419, 0.422, "above"), (0.09, 0.0, "between"), (0.36, 0.40, "between"),
        (0.2, 0.3, "between"), (0.105, 0.17, "below"), (0.0, 0.1, "below"),
    ],
)  # fmt: skip
def test_the_rule(spread: float, noise: float, zone: str) -> None:
    """Between ratios 0.6 and 1.0, and below a spread of 0.1, the grid has no fleet: the rule says nothing there."""
    assert results(10.0, 6.0, 7.0, spread, noise).zone(FLEETS.Fleet(4, 2, 0.4, 0.1)) == zone


# ---- the command and its page --------------------------------------------------------------------------------------


def test_small_grid_is_computed_once_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second command changes nothing; without some lines, it computes the same ones; training gives the same."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    page = tmp_path / "when.md"
    run("when.py", "--smoke", "--page", page)
    files = [tmp_path / name for name in ("when.csv", "when-training.csv", "when.md", "when.png")]
    first = [file.read_bytes() for file in files]
    assert len(rows_of(files[0])) == 2 * 2 * len(GRIDS.variants())
    run("when.py", "--smoke", "--page", page)
    assert [file.read_bytes() for file in files] == first
    lines = first[0].splitlines(keepends=True)
    files[0].write_bytes(b"".join(lines[:40]) + lines[40][:17])  # an interrupted line
    run("when.py", "--smoke", "--page", page)

    def without_cost(content: bytes) -> list[bytes]:
        return [line.rpartition(b",")[0] for line in content.splitlines()]

    assert without_cost(files[0].read_bytes()) == without_cost(first[0])
    trained = rows_of(files[1])
    assert {row["selector"] for row in trained} == set(CHECKS.TRAINED)
    for row in trained:
        if row["selector"] != "oort":  # its choices depend on losses
            assert float(row["training_s"]) == pytest.approx(float(row["choices_s"]), rel=1e-4)


def test_a_fingerprint_names_what_a_row_depends_on() -> None:
    grid = GRIDS.make_grid(True, None)
    found = {grid.fingerprint(fleet, variant, seed) for fleet, seed, variant in grid.runs()}
    assert len(found) == len(list(grid.runs()))
    longer = GRIDS.Grid(grid.fleets, (1, 6), grid.seeds)
    assert not found & {longer.fingerprint(fleet, variant, seed) for fleet, seed, variant in longer.runs()}


def page_rows(seeds: int) -> list[list[dict[str, str]]]:
    """The rows of the page, those of the grid with the first seeds only."""
    grid, *checks = (rows_of(PAGE.with_name(f"when{part}.csv")) for part in ("", "-training", "-known"))
    return [[row for row in grid if int(row["seed"]) <= seeds], *checks]


def page_of(seeds: int, wanted: int) -> str:
    text, *_ = PAGES.page_text(PAGE, GRIDS.make_grid(False, wanted), *page_rows(seeds), "a machine")
    return str(text)


def test_a_page_with_missing_seeds_is_called_interim() -> None:
    said = "Interim: 2 of 3 seeds of each run are done."
    assert said in page_of(2, 3).split("![", 1)[0]
    assert "Interim" not in page_of(2, 2)


def test_the_page_names_the_values_that_no_fleet_has() -> None:
    rows = [row for row in page_rows(2)[0] if row["selector"] == "random"]
    latencies: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("clients", "spread", "noise"))
        latencies.setdefault(key, []).append((float(row["latency_spread"]), float(row["latency_noise"])))
    means = [np.mean(own, axis=0) for own in latencies.values()]
    ratios, spreads = [s / n for s, n in means], [s for s, _ in means]
    low, high = max(r for r in ratios if r < 0.8), min(r for r in ratios if r > 0.8)
    text = " ".join(page_of(2, 2).split())
    assert f"No fleet has a ratio of spread to noise between {low:.2f} and {high:.2f}." in text
    low, high = max(s for s in spreads if s < 0.05), min(s for s in spreads if s > 0.05)
    assert f"No fleet has a spread between {low:.2f} and {high:.2f}." in text


def test_the_page_tells_the_course_of_a_deployments_savings() -> None:
    """Smallest and largest saving and Jain's index after 5, 15 and 50 plays, and how many fleets have a dip."""
    text, found = page_of(20, 20), CELLS.Results(page_rows(20)[0])
    fleets = [fleet for fleet in GRIDS.make_grid(False, 20).fleets if found.zone(fleet) == "above"]
    savings = {n: [round(100 * found.saving(f, "bsfl auto", n).value) for f in fleets] for n in (5, 15, 50)}
    jains = {n: [found.jain(f, "bsfl auto", n) for f in fleets] for n in savings}
    for n, own in savings.items():
        assert f"| {n} | {min(own)}…{max(own)} | {min(jains[n]):.2f}…{max(jains[n]):.2f} |\n" in text
    exact = {n: [found.saving(f, "bsfl auto", n).value for f in fleets] for n in savings}
    dips = [sum(b < a for a, b in zip(exact[n], exact[m], strict=True)) for n, m in ((5, 15), (15, 50))]
    assert dips[0] > 0 == dips[1]
    said = f"In {dips[0]} of these fleets, the saving is smaller after 15 plays than after 5 plays. In none of these"
    assert said in " ".join(text.split())


def test_the_page_tells_how_many_fleets_below_the_limits_have_no_spread() -> None:
    text, found = " ".join(page_of(2, 2).split()), CELLS.Results(page_rows(2)[0])
    below = [fleet for fleet in GRIDS.make_grid(False, 2).fleets if found.zone(fleet) == "below"]
    equal = [fleet for fleet in below if fleet.spread == 0]
    assert 0 < len(equal) < len(below)
    assert f"Of the {len(below)} fleets below the limits, {len(equal)} have no spread at all" in text


def test_a_world_with_absent_clients_has_no_ceiling() -> None:
    """The page calls the saving of sorted groups no ceiling in world c, where their shares are not equal."""
    runs = [row for row in rows_of(PAGE.with_name("selectors-runs.csv")) if row["selector"] == "sorted-groups"]
    jains = {w: [float(r["jain"]) for r in runs if r["world"] == w] for w in ("shards", "cell", "trace")}
    assert max(jains["trace"]) < 0.5 < 0.95 < min(jains["shards"] + jains["cell"])
    known = page_of(2, 2).split("## Worlds that were measured before")[1]
    marked = [line.split("|")[1].strip() for line in known.splitlines() if "no ceiling" in line and line[0] == "|"]
    assert marked == ["c"]


def test_the_page_names_savings_that_chance_explains() -> None:
    """With training in world b, the interval of BSFL contains 0; without training, it does not."""
    (said,) = [one for one in " ".join(page_of(2, 2).split()).split(". ") if "interval that contains 0" in one]
    assert "bsfl in b with training" in said
    assert "cs-ucb in b without training" in said
    assert "bsfl in b without training" not in said


def test_seconds_with_training_come_from_the_runs_of_the_comparison_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text("world,selector,seed,simulated_s,rounds\nshards,bsfl,2,900,300\ncell,bsfl,2,30,300\n")
    monkeypatch.setattr(CHECKS, "MEASURED_RUNS", runs)
    CHECKS._runs.cache_clear()
    try:
        assert [CHECKS._measured(*one) for one in (("shards", "bsfl", 2), ("shards", "bsfl", 3))] == ["3", ""]
    finally:
        CHECKS._runs.cache_clear()


def test_oort_is_marked_and_not_in_the_picture() -> None:
    """Its clients report equal losses here; after more plays than with training, nothing checks its savings."""
    assert "oort" not in PICTURE.LINES
    cells = [
        cell.strip() for line in page_of(2, 2).split("## Compared with")[0].splitlines() for cell in line.split("|")
    ]
    assert "oort, equal losses" in cells
    assert "oort" not in cells


def test_tables_and_picture_have_spread_and_noise_next_to_the_keys() -> None:
    found = results(10.0, 6.0, 7.0, spread=0.21, noise=0.17)
    assert PICTURE.ticks(found, [FLEETS.Fleet(4, 2, 0.4, 0.1)]) == (["0.4\n(0.21)"], ["0.1\n(0.17)"])
    savings = page_of(2, 2).split("## Savings in each fleet")[1].split("## ")[0]
    assert savings.count("| spread | noise | ceiling | bsfl auto | bsfl auto 0.1 | bsfl | cs-ucb auto |") == 2


def test_the_page_of_selectors_says_what_the_csv_file_has() -> None:
    """The measured phones, 25 of 500 in a round: BSFL's saving is about twice that of CS-UCB; both fall."""
    text = " ".join((ROOT / "docs" / "selectors.md").read_text(encoding="utf-8").split())
    assert "`bsfl` saved about twice as much as `cs-ucb` after 50 selections of each phone" in text
    assert "Both savings can become smaller in a long run" in text
    found, fleet = CELLS.Results(page_rows(20)[0]), FLEETS.Fleet(500, 25, 0.78, 0.4)
    first, bsfl, early, late = (
        found.saving(fleet, name, plays) for name in ("bsfl auto", "cs-ucb auto") for plays in (5, 50)
    )
    assert 1.6 < bsfl.value / late.value < 2.8
    assert late.high < early.low
    assert bsfl.value < first.value


@pytest.mark.skipif(not PAGE.exists(), reason="the page was not written yet")
def test_the_page_is_what_its_csv_files_give() -> None:
    found = [rows_of(PAGE.with_name(f"when{part}.csv")) for part in ("", "-training", "-known")]
    text, *_ = PAGES.page_text(PAGE, GRIDS.make_grid(False, None), *found, PAGES.machine_of(PAGE))
    assert text == PAGE.read_text(encoding="utf-8")
