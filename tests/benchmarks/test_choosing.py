"""docs/selectors.md, which selector to choose: its claims and numbers are those of the results."""

from __future__ import annotations

import re

import numpy as np
from scipy import stats

from fedsel_flwr.selectors import names
from tests.benchmarks.scripts import FOLDER, cells_of, rows_of

RESULTS = FOLDER.parent / "docs" / "results"
PAGE = RESULTS.parent / "selectors.md"


def test_the_page_about_choosing_says_what_the_stored_page_has() -> None:
    """Each claim of docs/selectors.md about the three worlds, read from the tables that the rows give."""
    page = (RESULTS / "selectors.md").read_text("utf-8")
    text = " ".join(PAGE.read_text("utf-8").split())
    worlds = dict(zip("abc", re.split(r"\n## \([bcd]\)", page)[:3], strict=True))

    def of(world: str, label: str, column: int = 2) -> str:
        return cells_of(worlds[world], "### Time to", label)[column]

    for label in ("power-of-choice", "cpow-d"):
        assert all(of(world, label).startswith("later") for world in "ab")
    assert (of("a", "active-fl"), of("b", "active-fl")) == ("later", "not settled")
    assert [of(world, "rpow-d") for world in "abc"] == ["not settled", "sooner", "not settled"]
    assert [of(world, "gpfl") for world in "abc"] == ["not settled"] * 3
    assert [of(world, "fedcm-ucb") for world in "abc"] == ["sooner", "sooner", "not settled"]
    assert of("c", "tifl") == "not settled"
    probed = {label: "probe" in of("a", label, 1) for label in ("power-of-choice", "cpow-d", "active-fl", "rpow-d")}
    assert probed == {"power-of-choice": True, "cpow-d": True, "active-fl": True, "rpow-d": False}
    assert "probe" in of("a", "fedcor", 1)
    missed, sooner = re.match(r"missed the target on (\d+) of 20 seeds \(sooner on (\d+)", of("a", "oort")).groups()
    assert missed == "1"
    assert f"In (a), it was sooner on {sooner} of 20 seeds, but missed the target on one" in text
    seeds = [re.match(r"missed the target on (\d+) of", of(world, "pczfl"))[1] for world in "ac"]
    assert f"In (a), it missed the target on {seeds[0]} of 20 seeds, and in (c) on {seeds[1]} of 5. In (b), it" in text
    assert of("b", "pczfl") == "later"
    assert all("missed the target" in of(world, f"fedcs-{5 if world != 'c' else 10}") for world in "abc")
    assert "It asked {}, {} and {} clients".format(*(of(world, "fedcs", 4) for world in "abc")) in text
    joules = cells_of(worlds["a"], "### Energy, accuracy", "fedcor")[2].split()[0]
    assert f"and {joules} times the joules. In (b), where its probes took {float(of('b', 'fedcor', 12)):.0f} %" in text
    assert f"In (b), its probes took {float(of('b', 'tifl', 12)):.0f} % of the time" in text
    counts = re.findall(r"^- \*\*Sooner\*\* \((\d+)\)", page, re.MULTILINE)
    assert "random selection, {} were sooner in (a), {} in (b), and {} in (c)".format(*counts) in text
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| [^|]* \| sooner \| [^|]* \| ([\d.]+) \|", worlds["a"], re.M)
    equal = [label for label, asked in rows if float(asked) < 6]
    assert equal == ["fedcor", "fedcm-ts", "fedcm-ucb", "bsfl", "cs-ucb", "tifl"]
    assert len(equal) == int(counts[0])
    joules = cells_of(worlds["a"], "### Energy, accuracy", "tifl")[2].split()[0]
    assert f"in (a), with {joules} times the joules" in text
    part = worlds["a"][worlds["a"].index("### Rows that separate") :]
    ratios = dict(re.findall(r"^\| `([a-z-]+)` \| `random(?:-filtered)?` \| [^|]*\| ([\d.]+) ", part, re.M))
    assert f"already needed {ratios['random-filtered']} times the time" in text
    low, high = sorted((ratios["fedcm-ts"], ratios["fedcm-ucb"]))
    assert f"needed {low} to {high} times the time of random selection with the filter" in text
    assert "In (a), the two did not differ clearly" in text
    times: dict[str, list[float]] = {}
    for row in rows_of(RESULTS / "selectors-runs.csv"):
        if row["world"] == "shards" and row["selector"] in ("bsfl", "cs-ucb"):
            times.setdefault(row["selector"], []).append(float(row["time_to_target_s"]))
    assert len(times["bsfl"]) == 20
    assert stats.ttest_rel(np.log(times["bsfl"]), np.log(times["cs-ucb"])).pvalue > 0.05


def test_the_numbers_of_the_cases_stand_in_the_results() -> None:
    """Each ratio of docs/selectors.md is in the row of a selector that its case names."""
    text = PAGE.read_text("utf-8").partition("The cases:")[2].partition("## ")[0]
    results = (RESULTS / "selectors.md").read_text("utf-8")
    rows = {name: re.findall(rf"^\| `{name}`.*", results, re.MULTILINE) for name in names()}
    seen = 0
    for case in re.split(r"^ *- ", " ".join(text.split("\n\n")), flags=re.MULTILINE)[1:]:
        case = " ".join(case.split())
        said = [row for name in re.findall(r"`([a-z-]+)`", case) for row in rows.get(name, [])]
        for ratio in re.findall(r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", case):
            assert any(ratio in row for row in said), (ratio, case[:80])
            seen += 1
    assert seen > 20
