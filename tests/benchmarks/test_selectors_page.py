"""The pages of the comparison of selectors: every number follows from the rows, and the stored pages from the CSV."""

from __future__ import annotations

import csv
import dataclasses
import doctest
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedsel_flwr.simulations.reproductions.rows import Rows
from tests.benchmarks.scripts import FOLDER, cells_of, rows_of, run

RESULTS = FOLDER.parent / "docs" / "results"
HOME = FOLDER / "selectors"


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """The modules of the benchmark, as attributes."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (FOLDER, HOME):
            patch.syspath_prepend(str(folder))
        names = ("effects", "runs", "lineup", "cells", "sections", "frontier", "advice", "formats")
        yield type("Modules", (), {name: __import__(name) for name in names})
    for key, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[key]


RATIOS = {
    "bsfl": (0.7, 1.0), "oort": (0.6, 0.9), "fedcs": (0.3, 1.5), "sorted-groups": (0.6, 1.1), "divfl": (1.4, 1.2),
    "fedcs-5": (0.3, 1.0), "random-filtered": (0.8, 0.75), "bsfl-auto": (0.77, 1.0),
}  # fmt: skip
"""Label -> true ratios of seconds and joules to random selection."""
REACHED = {"genie": 0, "fedcs-5": 0, "lsh": 1}
"""Label -> number of seeds on which it reaches the target; the others always do."""


def fabricated(modules: Any, label: str, seed: int, scenario: Any, fingerprint: str) -> Any:
    """A row whose seconds and joules have known ratios: noise of a seed is common, own noise is 2 %."""
    rng = np.random.default_rng([seed, sum(map(ord, label))])
    common = math.exp(0.3 * math.sin(7 * seed))
    asked = 42.0 if label == "fedcs" else float(scenario.clients_per_round)
    time, joules = RATIOS.get(label, (1.0, 1.0))
    crowd = (asked / 5) ** 0.3 if label.startswith("random-") and label != "random-again" else 1.0
    rounds = 40.0 if label.startswith("random-80") else 100.0
    per_round = 10_000 / rounds * common * time / crowd * math.exp(0.02 * rng.normal())
    energy = 70_000 / rounds * common * joules * crowd * math.exp(0.02 * rng.normal())
    accuracy = 0.65 if label == "fedcs-5" else 0.8
    reached = seed <= REACHED.get(label, seed)
    return modules.runs.RunRow(
        selector=label, seed=seed, accuracy=0.8, time_to_target_s=rounds * per_round if reached else math.inf,
        energy_to_target_j=rounds * energy if reached else math.inf, energy_j=3 * rounds * energy,
        jain=0.3 if label == "oort" else 0.97, failed_clients=30, simulated_s=3 * rounds * per_round,
        accuracy_last10=accuracy + 0.01 * rng.normal(), rounds_to_all=20.0,
        rounds_to_target=rounds if reached else math.inf,
        asked_per_round=asked, seconds_per_round=per_round if reached else math.nan,
        joules_per_round=energy if reached else math.nan, worst_tenth=0.5 + 0.05 * rng.normal(),
        world="shards", fingerprint=fingerprint,
        rounds=300, probe_s=0.0, probe_j=0.0, available=100.0, median_plays=15.0, server_ms=1.0, run_s=36.0,
        curve_s=(1.0, 2.0), curve_j=(1.0, 2.0), curve_accuracy=(0.1, 0.2),
    )  # fmt: skip


def fabricate(modules: Any, path: Path, left_out: tuple[str, ...] = ()) -> None:
    """Write rows of world (a) for the tables, the controls and the frontier."""
    lineup = modules.lineup
    scenario = lineup.load_scenario(lineup.world_file("shards"), {})
    entries = {one.label: one for one in lineup.frontier_entries(scenario, 10)}
    entries |= {one.label: one for one in [*lineup.table_entries(scenario, 20), *lineup.ablation_entries(10)]}
    rows = Rows(path, modules.runs.COLUMNS, modules.runs.KEY)
    for entry in entries.values():
        for seed in range(1, entry.seeds + 1):
            own = lineup.entry_scenario("shards", entry, seed, {})
            if entry.label not in left_out:
                fingerprint = modules.cells.Cell(own, entry.label).fingerprint
                row = fabricated(modules, entry.label, seed, own, fingerprint)
                rows.add(modules.runs.row_values(row))


@pytest.fixture(scope="module")
def written(modules: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with fabricated rows, and the pages written from them."""
    folder = tmp_path_factory.mktemp("pages")
    fabricate(modules, folder / "selectors-runs.csv")
    run("selectors", "--page-only", "--page", folder / "selectors.md")
    return folder


@pytest.fixture(scope="module")
def interim(modules: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As written, but a selector of the tables and a row of joules.md have no runs."""
    folder = tmp_path_factory.mktemp("interim")
    fabricate(modules, folder / "selectors-runs.csv", left_out=("nccb", "oort-40"))
    run("selectors", "--page-only", "--page", folder / "selectors.md")
    return folder


def test_ratios_follow_from_the_rows(written: Path) -> None:
    """Geometric means and Student's intervals, computed here from the CSV."""
    text = (written / "selectors.md").read_text("utf-8")
    seconds: dict[str, list[float]] = {}
    for row in rows_of(written / "selectors-runs.csv"):
        seconds.setdefault(row["selector"], []).append(float(row["time_to_target_s"]))
    for label in ("bsfl", "oort", "fedcs", "divfl", "cs-ucb"):
        logs = np.log(seconds[label]) - np.log(seconds["random"])
        half = stats.t.ppf(0.975, 19) * logs.std(ddof=1) / math.sqrt(20)
        mean, low, high = (math.exp(x) for x in (logs.mean(), logs.mean() - half, logs.mean() + half))
        found = cells_of(text, "### Time to 75 %", label)
        assert found[7] == f"{mean:.2f} ({low:.2f} to {high:.2f})"
        assert found[5] == f"{stats.gmean(seconds[label]):,.0f}"
    words = {label: cells_of(text, "### Time to 75 %", label)[2] for label in ("bsfl", "divfl", "cs-ucb", "random")}
    assert words == {"bsfl": "sooner", "divfl": "later", "cs-ucb": "no difference", "random": "reference"}
    assert cells_of(text, "### Time to 75 %", "genie")[5:8] == ["0 of 20 seeds", "-", "-"]


def test_a_row_that_missed_the_target_says_so(written: Path) -> None:
    """The runs of fedcs-5 end before random reaches the target, so the sign test decides on no seed."""
    text = (written / "selectors.md").read_text("utf-8")
    accuracy: dict[str, list[float]] = {}
    for row in rows_of(written / "selectors-runs.csv"):
        accuracy.setdefault(row["selector"], []).append(float(row["accuracy_last10"]))
    gap = 100 * np.mean(np.subtract(accuracy["fedcs-5"], accuracy["random"]))
    short = cells_of(text, "### Time to 75 %", "fedcs-5")
    assert re.fullmatch(
        r"missed the target on 20 of 20 seeds \(sooner on 0, later on 0, undecided on 20\), "
        rf"accuracy {gap:.1f} \(-1\d\.\d to -1\d\.\d\) points",
        short[2],
    )
    rare = cells_of(text, "### Time to 75 %", "lsh")
    assert rare[2].startswith("later; missed the target on 19 of 20 seeds (sooner on 0, later on 1")
    # No mean over the single successful run.
    assert rare[5] == "1 of 20 seeds"
    advice = text.split("## Which selector when")[1]
    assert f"  - `fedcs-5`: {short[2]}." in advice
    assert "`fedcs-5`" not in next(line for line in advice.splitlines() if line.startswith("- **Not settled**"))
    # Seconds a round of the whole run exist for all selectors.
    shorter = next(line for line in advice.splitlines() if line.startswith("- **Shorter rounds**"))
    assert re.findall(r"`([a-z0-9-]+)`", shorter) == ["bsfl", "oort", "fedcs-5"]


def test_the_window_limits_rows_with_few_rounds(written: Path) -> None:
    """The first window has 30 rounds: 40 rounds are below 45, and 100 rounds are not."""
    text, joules = ((written / name).read_text("utf-8") for name in ("selectors.md", "joules.md"))
    assert cells_of(text, "### Time to 75 %", "bsfl")[6] == "100"
    assert cells_of(text, "### More clients", "random-40")[4] == "100"
    assert cells_of(text, "### More clients", "random-80")[4] == "40, limited by the window"
    assert cells_of(joules, "## All rows", "random-80")[4] == "40, limited by the window"
    limited = next(line for line in joules.splitlines() if line.startswith("- **Limited by the window**"))
    assert re.findall(r"`([a-z0-9-]+)`", limited) == ["random-80", "random-80-40s", "random-80-60s", "random-80-90s"]


def test_a_page_with_missing_runs_has_no_verdicts(written: Path, interim: Path) -> None:
    """A verdict before the last run would be an early look, which makes p too small."""
    whole, part = ((folder / "selectors.md").read_text("utf-8") for folder in (written, interim))
    assert cells_of(whole, "### Time to 75 %", "bsfl")[2:4] == ["sooner", "< 0.001"]
    assert cells_of(whole, "### Time to 75 %", "sorted-groups")[2:4] == ["reference", "< 0.001, not corrected"]
    assert "The tables compare the runs of 20 seeds." in whole
    assert cells_of(part, "### Time to 75 %", "bsfl")[2:4] == ["interim, 20 of 20 seeds", "-"]
    assert "**Interim: `random` ran on 20 of 20 seeds.** Runs are missing." in part
    # The runs of the controls are complete.
    assert cells_of(part, "### More clients", "random-80")[1] == "sooner"
    advice = part.split("## Which selector when")[1]
    assert "No advice yet" in advice
    assert "ooner" not in advice
    answer = (interim / "joules.md").read_text("utf-8").split("## Why not just ask more phones?")[1]
    assert answer.strip().startswith("**Not measured yet.**")
    assert "Not shown to be beaten" not in answer
    assert "Not measured yet" not in (written / "joules.md").read_text("utf-8")


def test_columns_without_runs_are_hidden(modules: Any, tmp_path: Path) -> None:
    """A column of dashes would look like a result."""
    more = tuple(f"{name}-{n}" for name in modules.lineup.MATCHED for n in modules.lineup.matched_cohorts(name))
    fabricate(modules, tmp_path / "selectors-runs.csv", left_out=more)
    run("selectors", "--page-only", "--page", tmp_path / "selectors.md")
    text = (tmp_path / "joules.md").read_text("utf-8")
    assert "| selector | 5 clients: time | 5 clients: joules |\n" in text


def test_worlds_together_show_intervals_of_equal_cohorts(modules: Any) -> None:
    """FedCS asks 42 clients in world (a), so it is not compared across worlds."""
    scenario = modules.lineup.load_scenario(modules.lineup.world_file("shards"), {})
    labels = ("random", "bsfl", "cs-ucb", "fedcs")
    rows = [fabricated(modules, label, seed, scenario, "") for label in labels for seed in range(1, 6)]
    few = [dataclasses.replace(row, asked_per_round=5.0) for row in rows if row.selector != "cs-ucb"]
    worlds = [
        modules.effects.World(scenario, letter, own, contenders=labels)
        for letter, own in (("a", rows), ("b", few), ("c", few[:0]))
    ]
    text = modules.advice.advice(worlds).split("### Worlds (a) and (b) together")[1]
    assert "| selector | (a), 5 seeds | (b), 5 seeds |" in text
    assert re.search(r"^\| `bsfl` \| 0\.7\d \(0\.\d+ to 0\.\d+\) \| 0\.7", text, re.M)
    assert re.findall(r"^\| `([a-z-]+)`", text, re.M) == ["bsfl"]
    assert "ooner" not in text


def test_shares_of_the_ceiling_are_those_of_the_fabricated_rows(written: Path) -> None:
    """Sorted groups save 40 % of the seconds a round, BSFL 30 % and Oort 40 %: shares of 75 and 100 %."""
    text = (written / "selectors.md").read_text("utf-8")
    assert re.search(r"\*\*The ceiling is (39|40|41) %", text)
    for label, true in (("bsfl", 75), ("oort", 100), ("cs-ucb", 0), ("sorted-groups", 100)):
        share, low, high = map(int, re.findall(r"-?\d+", cells_of(text, "### Time to 75 %", label)[10]))
        assert low - 1 <= true <= high + 1
        assert abs(share - true) <= 4
    assert cells_of(text, "### Time to 75 %", "fedcs")[10] == "-"


def test_rows_that_separate_two_causes(written: Path) -> None:
    """The filter alone needs 0.8 times the seconds, FedCM 1 / 0.8 times those, and BSFL 0.7 / 0.77."""
    text = (written / "selectors.md").read_text("utf-8")
    part = text[text.index("### Rows that separate") :].split("\n### ")[0]
    found = {tuple(re.findall(r"`([a-z-]+)`", line)): line.split("|") for line in part.splitlines() if "| `" in line}
    wanted = {
        ("random-filtered", "random"): (0.8, 0.75), ("bsfl-auto", "random"): (0.77, 1.0),
        ("fedcm-ts", "random-filtered"): (1.25, 1.333), ("fedcm-ucb", "random-filtered"): (1.25, 1.333),
        ("bsfl", "bsfl-auto"): (0.7 / 0.77, 1.0),
    }  # fmt: skip
    assert set(found) == set(wanted)
    for pair, (time, joules) in wanted.items():
        assert float(found[pair][4].split()[0]) == pytest.approx(time, abs=0.03)
        assert float(found[pair][7].split()[0]) == pytest.approx(joules, abs=0.03)
        assert found[pair][3].strip() == "10 seeds of 10"


def test_the_column_reads_follows_from_the_selectors(modules: Any, written: Path) -> None:
    text = (written / "selectors.md").read_text("utf-8")
    known = {
        "bsfl": "latency", "fedcm-ts": "server data", "fedcs-5": "latency", "random": "nothing",
        "sorted-groups": "true latencies", "random-again": "nothing",
    }  # fmt: skip
    assert {label: cells_of(text, "### Time to 75 %", label)[1] for label in known} == known
    for name in modules.lineup.names():
        told, kind = modules.lineup.reads(name), modules.lineup.describe(name)
        assert ("probe: " in told) == bool(kind["probes"])
        assert ("latency" in told) == ("latency" in kind["reads"])


def test_a_row_that_misses_the_target_shows_what_its_p_value_means(modules: Any) -> None:
    """Oort misses the target once, and is sooner on the other seeds: p is small, and the word cannot be sooner."""
    scenario = modules.lineup.load_scenario(modules.lineup.world_file("shards"), {})
    rows = [fabricated(modules, label, seed, scenario, "") for label in ("oort", "random") for seed in range(1, 21)]
    rows[0] = dataclasses.replace(rows[0], time_to_target_s=math.inf, energy_to_target_j=math.inf)
    rows[0] = dataclasses.replace(rows[0], rounds_to_target=math.inf, seconds_per_round=math.nan)
    world = modules.effects.World(scenario, "a", rows, contenders=("oort", "random"))
    line = next(one for one in modules.sections.time_table(world).splitlines() if one.startswith("| `oort` |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2].startswith("missed the target on 1 of 20 seeds (sooner on 19, later on 1, undecided on 0)")
    assert cells[3] == "< 0.001, more often sooner"


def test_without_equal_shares_there_is_no_ceiling(modules: Any) -> None:
    """Absent clients: sorted groups ask fewer clients, or the same few clients again."""
    scenario = modules.lineup.load_scenario(modules.lineup.world_file("shards"), {})
    labels = ("random", "sorted-groups", "bsfl")
    rows = [fabricated(modules, label, seed, scenario, "") for label in labels for seed in range(1, 6)]

    def page(**changes: float) -> str:
        own = [dataclasses.replace(row, **changes) if row.selector == "sorted-groups" else row for row in rows]
        world = modules.effects.World(scenario, "a", own, contenders=("bsfl", "random"))
        return str(modules.sections.section(world, "a.png") + modules.advice.advice([world]))

    for some in (page(jain=0.3), page(asked_per_round=4.4)):
        assert "**No ceiling at equal shares.**" in some
        assert "orientation only" in some
        assert "hare of the ceiling, %" not in some
        assert "Share of the ceiling" not in some
    assert re.search(r"\*\*The ceiling is (39|40|41) %", page())
    assert "| share of the ceiling, % |" in page()


def test_an_interim_world_compares_on_common_seeds_and_sorts_by_name(modules: Any) -> None:
    """BSFL ran on seeds 1 and 2, random selection on 1 to 4: its second number is random on seeds 1 and 2."""
    scenario = modules.lineup.load_scenario(modules.lineup.world_file("shards"), {})
    ran = {"random": (1, 2, 3, 4), "oort": (1, 2, 3, 4), "bsfl": (1, 2), "sorted-groups": (3,)}
    rows = [fabricated(modules, label, seed, scenario, "") for label, seeds in ran.items() for seed in seeds]
    labels = ("random", "oort", "bsfl")
    world = modules.effects.World(scenario, "a", rows, missing=["bsfl"] * 2, contenders=labels)
    text = modules.sections.section(world, "a.png")
    times = {(row.selector, row.seed): row for row in rows}
    own, usual = (stats.gmean([times[label, seed].time_to_target_s for seed in (1, 2)]) for label in ("bsfl", "random"))
    assert cells_of(text, "### Time to", "bsfl")[5] == f"{own:,.0f}; {usual:,.0f}"
    assert cells_of(text, "### Time to", "bsfl")[2] == "interim, 2 of 4 seeds"
    assert modules.sections.ordered(world) == ["bsfl", "oort", "random", "sorted-groups"]
    both = [times[label, 3].simulated_s / 300 for label in ("random", "sorted-groups")]
    assert "On average over 1 common seed, a round takes " in text
    assert f"takes {both[0]:.3g} s with `random`, and {both[1]:.3g} s with `sorted-groups`" in text


def test_lists_without_verdicts_are_corrected(modules: Any) -> None:
    """20 selectors, one of which needs fewer joules by chance: p is 0.03 before the correction."""
    effect = modules.effects.paired_effects

    def one(name: str, logs: list[float]) -> Any:
        values = {name: dict(enumerate(np.exp(logs))), "random": dict.fromkeys(range(len(logs)), 1.0)}
        return effect(values, "random", "energy_to_target_j")[0]

    rng = np.random.default_rng(3)
    noise = rng.normal(size=20)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    effects = {f"s{i}": one(f"s{i}", list(noise)) for i in range(18)}
    effects |= {"clear": one("clear", list(noise * 0.1 - 1)), "chance": one("chance", list(noise - 0.53))}
    assert 0.02 < effects["chance"].p < 0.05
    told = modules.advice._below(effects, list(effects))
    assert told == "`clear`. Only before the correction: `chance`"


def test_values_from_true_latencies_are_those_of_the_seeds_on_the_pages(modules: Any) -> None:
    """The pages say from which seeds the deadline of FedCS and BSFL's least latency come."""
    for world, seeds in (("shards", "1 to 5"), ("cnn", "1 to 5"), ("cell", "1 to 3"), ("trace", "1 and 2")):
        told = modules.lineup.world_file(world).read_text("utf-8")
        lines = [line for line in told.splitlines() if line.startswith(("min_latency =", "deadline ="))]
        assert lines
        assert all(line.endswith(f"on seeds {seeds}") for line in lines)


def test_a_jackknife_by_hand(modules: Any) -> None:
    """Reductions 0.1, 0.2 and 0.3 against 0.4: the share of the geometric means, and three leave-one-out shares."""
    own, groups = np.log([0.9, 0.8, 0.7]), np.log([0.6, 0.6, 0.6])
    share = modules.effects.jackknife_share(own, groups)
    whole = (1 - (0.9 * 0.8 * 0.7) ** (1 / 3)) / 0.4
    some = [(1 - math.sqrt(a * b)) / 0.4 for a, b in ((0.8, 0.7), (0.9, 0.7), (0.9, 0.8))]
    pseudo = np.array([3 * whole - 2 * one for one in some])
    half = 4.302653 * pseudo.std(ddof=1) / math.sqrt(3)
    assert share.estimate == pytest.approx(whole)
    assert (share.low, share.high) == pytest.approx((pseudo.mean() - half, pseudo.mean() + half))


def test_a_seed_without_random_selection_does_not_count(modules: Any) -> None:
    """Means and ratios are over the same seeds."""
    scenario = modules.lineup.load_scenario(modules.lineup.world_file("shards"), {})
    rows = [fabricated(modules, label, seed, scenario, "") for label in ("bsfl", "random") for seed in (1, 2, 3)]
    world = modules.effects.World(scenario, "a", [row for row in rows if (row.selector, row.seed) != ("random", 3)])
    assert world.reached("bsfl") == (2, 2)
    assert len(world.run_seconds) == 5


def test_missing_rows_and_their_price(interim: Path) -> None:
    """20 runs of a row that has none cost as much as the mean of the others: 36 s each. The other worlds have none."""
    text = (interim / "selectors.md").read_text("utf-8")
    assert (
        "**Missing: 20 runs, about 0.2 hours of one core.** Runs of each row, with core-hours: `nccb` 20 (0.20)."
        in text
    )
    assert "**Missing: 520 runs, about 1.8 hours of one core.** All runs are missing." in text
    assert "--worlds trace`." in text
    assert "about 5.8 hours of one core.** All runs are missing. This command" in text[text.index("## (d)") :]


def test_advice_compares_equal_cohorts(written: Path) -> None:
    text = (written / "selectors.md").read_text("utf-8").split("## Which selector when")[1]
    sooner = next(line for line in text.splitlines() if line.startswith("- **Sooner** "))
    assert re.findall(r"`([a-z-]+)`", sooner) == ["oort", "bsfl"]
    fair = next(line for line in text.splitlines() if line.startswith("- **Sooner, with nearly equal shares**"))
    assert re.findall(r"`([a-z-]+)`", fair) == ["random", "bsfl"]
    assert "is `random-80-" in next(line for line in text.splitlines() if line.startswith("- **The fastest row of"))
    assert "**`fedcs` asks 42 clients a round**, and `random` 5." in text
    assert re.search(r"^- \*\*Later\*\* \(2\): `divfl` 1\.4\d \(1\.\d\d to 1\.\d\d\) and `lsh`\.$", text, re.M)


def test_the_frontier_names_the_rows_that_no_other_row_beats(written: Path) -> None:
    """Random with more clients is faster and needs more joules. Oort needs less of both than BSFL with 5 clients."""
    text = (written / "joules.md").read_text("utf-8")
    best = next(line for line in text.splitlines() if line.startswith("- **Not shown to be beaten"))
    names = re.findall(r"`([a-z0-9-]+)`", best.split("Rows of random")[0])
    means = next(line for line in text.splitlines() if line.startswith("- **Smallest means"))
    assert re.findall(r"`([a-z0-9-]+)`", means.split("Rows of random")[0])[:2] == ["fedcs", "oort"]
    assert "`random-80` needs 0.4" in text
    # 2 to 16 times the clients: 2 ** 0.3 = 1.23 and 16 ** 0.3 = 2.30.
    lead, both = text.split("## Why not just ask more phones?")[1].strip().splitlines()[:3:2]
    assert lead.startswith("**With random selection, more phones save seconds and cost joules.** The rows ask 10 to 80")
    told = re.findall(
        r"(Without|With) a deadline, they need ([\d.]+) to ([\d.]+) times the seconds and ([\d.]+) to ([\d.]+) times",
        lead,
    )
    assert [one[0] for one in told] == ["Without", "With"]
    for _, fast, slow, low, high in told:
        assert 0.42 < float(fast) < 0.45 < 0.78 < float(slow) < 0.84
        assert 1.2 < float(low) < 1.27 < 2.25 < float(high) < 2.35
    # Only Oort has 0.6 times the seconds and 0.9 times the joules; the others have ratios of 1 in one of the two.
    number, rows_below = re.match(r"\*\*(\d+) of the (\d+) rows that reached", both).groups()
    assert 1 <= int(number) < int(rows_below)
    assert re.search(r"The fastest of them is `oort(-\d+)?`: 0\.\d\d \(0\.\d\d to 0\.\d\d\) times the seconds", both)
    assert "chosen among all rows, and the intervals are not corrected" in both
    assert re.search(
        r"\*\*The fastest row of a selector\*\* is `fedcs`. Compared with `random-80-[469]0s`, it needs 0\.[67]", text
    )
    assert "**The fastest of this page's selectors with 5 clients** is `oort`." in text
    assert {"oort", "fedcs"} <= set(names)
    assert {"random", "bsfl", "random-80"}.isdisjoint(names)
    assert cells_of(text, "## All rows", "bsfl")[12] == "`oort`"
    assert cells_of(text, "## All rows", "fedcs-5")[12] == "-"
    assert cells_of(text, "## All rows", "fedcs")[2] == "none; `fedcs` plans for 40"
    assert cells_of(text, "## All rows", "random-20-60s")[2] == "60"
    rows = {(row["selector"], row["seed"]): row for row in rows_of(written / "selectors-runs.csv")}
    for column, figure in ((8, "accuracy_last10"), (9, "worst_tenth")):
        gaps = np.array([
            100 * (float(rows["oort", seed][figure]) - float(rows["random", seed][figure]))
            for seed in map(str, range(1, 11))
        ])  # fmt: skip
        half = stats.t.ppf(0.975, 9) * gaps.std(ddof=1) / math.sqrt(10)
        mean, low, high = (f"{one:+.1f}" for one in (gaps.mean(), gaps.mean() - half, gaps.mean() + half))
        assert cells_of(text, "## All rows", "oort")[column] == f"{mean} ({low} to {high})"
    # 16 times the clients: 16 ** 0.3 = 2.30 in both directions.
    ratios = cells_of(text, "## All rows", "random-80")
    assert 0.42 < float(ratios[5].split()[0]) < 0.45
    assert 2.25 < float(ratios[7].split()[0]) < 2.35
    assert (written / "joules.png").stat().st_size > 10_000
    assert (written / "selectors-shards.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["formats", "effects", "lineup"])
def test_examples_in_docstrings(modules: Any, name: str) -> None:
    module = getattr(modules, name)
    found = doctest.testmod(module, extraglobs={"math": math})
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("name", ["selectors.md", "joules.md"])
def test_the_stored_page_is_the_program_of_its_rows(name: str, tmp_path: Path) -> None:
    rows = RESULTS / "selectors-runs.csv"
    (tmp_path / rows.name).write_bytes(rows.read_bytes())
    run("selectors", "--page-only", "--page", tmp_path / "selectors.md")
    assert (tmp_path / name).read_text("utf-8") == (RESULTS / name).read_text("utf-8")


def test_a_fingerprint_does_not_depend_on_other_selectors_or_texts(modules: Any) -> None:
    load = modules.lineup.load_scenario
    path = modules.lineup.world_file("shards")

    def of(label: str = "bsfl", **changes: Any) -> str:
        keys = {"selector": "bsfl"} | {key.replace("__", "."): value for key, value in changes.items()}
        return str(modules.cells.Cell(load(path, keys), label).fingerprint)

    assert of() == of(data__data_dir="/elsewhere") == of(selectors__fedcs__deadline=50.0) == of(description="other")
    different = {of(), of(seed=2), of(selectors__bsfl__alpha=2.0), of(label="bsfl-again"), of(rounds=301)}
    assert len(different) == 5


def test_other_data_are_refused(modules: Any, tmp_path: Path) -> None:
    """A row from other images or another trace would have the fingerprint of the right ones."""
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"):
        (raw / name).write_bytes(b"other")
    scenario = modules.lineup.load_scenario(modules.lineup.world_file("shards"), {"data.data_dir": str(tmp_path)})
    with pytest.raises(ValueError, match=r"SHA-256 of t10k-images-idx3-ubyte, train-images-idx3-ubyte differs"):
        modules.cells.Cell(scenario, "random").check_data()


def test_every_value_set_by_hand_has_a_reason(modules: Any) -> None:
    worlds = [
        modules.effects.World(modules.lineup.load_scenario(modules.lineup.world_file(name), {}), letter, [])
        for letter, name in zip("abcd", modules.lineup.WORLDS, strict=True)
    ]
    lines = modules.sections.hand_set_values(worlds).splitlines()[2:]
    assert len(lines) >= 9
    assert all(line.split("|")[4].strip() for line in lines)


def test_stored_rows_are_sorted_and_unique() -> None:
    with (RESULTS / "selectors-runs.csv").open(encoding="utf-8") as file:
        keys = [(row["world"], row["selector"], int(row["seed"])) for row in csv.DictReader(file)]
    assert keys == sorted(set(keys))
