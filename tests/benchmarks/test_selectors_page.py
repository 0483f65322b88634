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
from tests.benchmarks.scripts import FOLDER, rows_of, run

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
    "fedcs-5": (0.3, 1.0),
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
        joules_per_round=energy if reached else math.nan, worst_tenth=0.5, world="shards", fingerprint=fingerprint,
        rounds=300, probe_s=0.0, probe_j=0.0, available=100.0, median_plays=15.0, server_ms=1.0, run_s=36.0,
        curve_s=(1.0, 2.0), curve_j=(1.0, 2.0), curve_accuracy=(0.1, 0.2),
    )  # fmt: skip


def fabricate(modules: Any, path: Path, left_out: tuple[str, ...] = ()) -> None:
    """Write rows of world (a) for the tables, the controls and the frontier."""
    lineup = modules.lineup
    scenario = lineup.load_scenario(lineup.world_file("shards"), {})
    entries = {one.label: one for one in lineup.frontier_entries(scenario, 10)}
    entries |= {one.label: one for one in lineup.table_entries(scenario, 20)}
    rows = Rows(path, modules.runs.COLUMNS, modules.runs.KEY)
    for entry in entries.values():
        for seed in range(1, entry.seeds + 1):
            own = lineup.entry_scenario("shards", entry, seed, {})
            if entry.label not in left_out:
                fingerprint = modules.cells.Cell(own, entry.label).fingerprint
                row = fabricated(modules, entry.label, seed, own, fingerprint)
                rows.add(modules.runs.row_values(row))


def cells_of(text: str, heading: str, label: str) -> list[str]:
    """The cells of a row in the first table after a heading."""
    part = text[text.index(heading) :]
    (line,) = re.findall(rf"^\| [`*]{re.escape(label)}[`*] \|.*$", part.split("\n\n![")[0].split("\n### ")[0], re.M)[:1]
    return [cell.strip() for cell in line.strip("|").split("|")]


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
        assert found[6] == f"{mean:.2f} ({low:.2f} to {high:.2f})"
        assert found[4] == f"{stats.gmean(seconds[label]):,.0f}"
    words = {label: cells_of(text, "### Time to 75 %", label)[1] for label in ("bsfl", "divfl", "cs-ucb", "random")}
    assert words == {"bsfl": "sooner", "divfl": "later", "cs-ucb": "no difference", "random": "reference"}
    assert cells_of(text, "### Time to 75 %", "genie")[4:7] == ["0 of 20 seeds", "-", "-"]


def test_a_row_that_missed_the_target_says_so(written: Path) -> None:
    """The runs of fedcs-5 end before random reaches the target, so the sign test decides on no seed."""
    text = (written / "selectors.md").read_text("utf-8")
    accuracy: dict[str, list[float]] = {}
    for row in rows_of(written / "selectors-runs.csv"):
        accuracy.setdefault(row["selector"], []).append(float(row["accuracy_last10"]))
    gap = 100 * np.mean(np.subtract(accuracy["fedcs-5"], accuracy["random"]))
    short = cells_of(text, "### Time to 75 %", "fedcs-5")
    assert re.fullmatch(
        rf"missed the target on 20 of 20 seeds, accuracy {gap:.1f} \(-1\d\.\d to -1\d\.\d\) points", short[1]
    )
    rare = cells_of(text, "### Time to 75 %", "lsh")
    assert rare[1].startswith("later; missed the target on 19 of 20 seeds, accuracy ")
    # No mean over the single successful run.
    assert rare[4] == "1 of 20 seeds"
    advice = text.split("## Which selector when")[1]
    assert f"  - `fedcs-5`: {short[1]}." in advice
    assert "`fedcs-5`" not in next(line for line in advice.splitlines() if line.startswith("- **Not settled**"))
    # Seconds a round of the whole run exist for all selectors.
    shorter = next(line for line in advice.splitlines() if line.startswith("- **Shorter rounds**"))
    assert re.findall(r"`([a-z0-9-]+)`", shorter) == ["bsfl", "oort", "fedcs-5"]


def test_the_window_limits_rows_with_few_rounds(written: Path) -> None:
    """The first window has 30 rounds: 40 rounds are below 45, and 100 rounds are not."""
    text, joules = ((written / name).read_text("utf-8") for name in ("selectors.md", "joules.md"))
    assert cells_of(text, "### Time to 75 %", "bsfl")[5] == "100"
    assert cells_of(text, "### More clients", "random-40")[4] == "100"
    assert cells_of(text, "### More clients", "random-80")[4] == "40, limited by the window"
    assert cells_of(joules, "## All rows", "random-80")[4] == "40, limited by the window"
    limited = next(line for line in joules.splitlines() if line.startswith("- **Limited by the window**"))
    assert re.findall(r"`([a-z0-9-]+)`", limited) == ["random-80", "random-80-40s", "random-80-60s", "random-80-90s"]


def test_a_page_with_missing_runs_has_no_verdicts(written: Path, interim: Path) -> None:
    """A verdict before the last run would be an early look, which makes p too small."""
    whole, part = ((folder / "selectors.md").read_text("utf-8") for folder in (written, interim))
    assert cells_of(whole, "### Time to 75 %", "bsfl")[1:3] == ["sooner", "< 0.001"]
    assert cells_of(whole, "### Time to 75 %", "sorted-groups")[1:3] == ["reference", "< 0.001, not corrected"]
    assert "The tables compare the runs of 20 seeds." in whole
    assert cells_of(part, "### Time to 75 %", "bsfl")[1:3] == ["interim, 20 of 20 seeds", "-"]
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
        share, low, high = map(int, re.findall(r"-?\d+", cells_of(text, "### Time to 75 %", label)[9]))
        assert low - 1 <= true <= high + 1
        assert abs(share - true) <= 4
    assert cells_of(text, "### Time to 75 %", "fedcs")[9] == "-"


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
    assert re.search(
        r"\*\*The fastest row of a selector\*\* is `fedcs`. Compared with `random-80-[469]0s`, it needs 0\.[67]", text
    )
    assert "**The fastest of this page's selectors with 5 clients** is `oort`." in text
    assert {"oort", "fedcs"} <= set(names)
    assert {"random", "bsfl", "random-80"}.isdisjoint(names)
    assert cells_of(text, "## All rows", "bsfl")[10] == "`oort`"
    # 16 times the clients: 16 ** 0.3 = 2.30 in both directions.
    ratios = cells_of(text, "## All rows", "random-80")
    assert 0.42 < float(ratios[5].split()[0]) < 0.45
    assert 2.25 < float(ratios[7].split()[0]) < 2.35
    assert (written / "joules.png").stat().st_size > 10_000
    assert (written / "selectors-shards.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["formats", "effects"])
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
