"""Every chart of three pages: each drawn item is at the place of its value, and the CSV file has the same rows."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedsel_flwr.report.page import deployment_tables
from fedsel_flwr.report.page.comparison_page import comparison_document
from fedsel_flwr.report.page.deployment_page import deployment_document
from fedsel_flwr.report.page.deployment_tables import read_deployment
from fedsel_flwr.report.page.document import Document, write_page
from fedsel_flwr.simulations import compare, load_scenario
from fedsel_flwr.simulations.comparisons.report_page import page_facts
from tests.browser import Browser, Opened, browser
from tests.report.page.deployments import client, entries, failed, refuse, write
from tests.report.page.made_facts import made_facts

__all__ = ["browser"]

FIELDS = {
    "ratios": {"ratio", "low", "high"},
    "targets": {"target", "ratio", "low"},
    "map": {"left", "place"},
    "tenths": {"latency_s", "selections_per_client"},
    "selections": {"latency_s", "selections"},
    "jain": {"value", "low"},
    "worst-tenth": {"value", "low"},
    "parts": {"seconds"},
    "regret": {"round", "theta"},
    "slowest": {"round", "round_s", "measured_s"},
    "clients": {"beyond_median_s"},
    # low and high: the ends of a stacked bar; left and right: the round minus a half, and the last round plus a half
    "durations": {"left", "low"},
    "failures": {"left", "low"},
}
"""Chart -> columns of its table that are drawn as places. Where there are two ends, the first one."""


def demo(folder: Path) -> Document:
    """The demo with fewer rounds and seeds."""
    scenario = load_scenario("phones", {"rounds": 30, "engine": "vectorized", "target_accuracy": 0.2})
    return comparison_document(page_facts(compare(scenario, ["bsfl", "cs-ucb", "random"], seeds=3), folder))


def many(folder: Path) -> Document:
    return comparison_document(made_facts([f"selector-{i}" for i in range(20)], 5, 150))


def deployed(folder: Path) -> Document:
    times = {"download_s": 0.5, "compute_s": 1.0, "upload_s": 0.25}
    rows = [client(f"site-{k}", 2.0 + k, **times) for k in range(7)]
    given = [
        (60.0, [rows[k % 7], failed("site-7"), rows[(k + 2) % 7]])
        if k % 5 == 0
        else (max(2.0 + k % 7, 2.0 + (k + 1) % 7), [rows[k % 7], rows[(k + 1) % 7]])
        for k in range(70)
    ]
    return deployment_document(read_deployment(write(folder / "run", entries(*given, accuracy=0.5))))


def check_charts(opened: Opened, document: Document) -> Counter[str]:
    """Check every chart as it is shown; returns the number of items of each."""
    counts: Counter[str] = Counter()
    for chart in document.charts:
        placed = opened.placed(chart.name)
        assert [one for one in placed if not one["is_right"]] == []
        counts[chart.name] = len(placed)
        curves = {"round", "accuracy"} if "loss" in chart.rows else {"x", "accuracy", "low"}
        assert {one["field"] for one in placed} <= FIELDS.get(chart.name, curves)
        rows = opened.rows(chart.name)
        # The page has the rows of the document that its menus choose, with six digits.
        chosen = {name: opened.page.input_value(f"select[name={menu}]") for name, menu in chart.menus.items()}
        every = [dict(zip(chart.rows, values, strict=True)) for values in zip(*chart.rows.values(), strict=True)]
        wanted = [row for row in every if all(row[name] == value for name, value in chosen.items())]
        assert [{name: same(row[name]) for name in chart.rows} for row in rows] == [
            {name: same(value, 6) for name, value in row.items()} for row in wanted
        ]
        with opened.page.expect_download() as saved:
            opened.page.click(f"#chart-{chart.name} [data-save=csv]")
        found = pd.read_csv(saved.value.path(), keep_default_na=False, dtype=str).to_dict("records")
        assert len(found) == len(rows)
        for text, row in zip(found, rows, strict=True):
            assert {name: same(value) for name, value in text.items()} == {name: same(row[name]) for name in text}
    return counts


def same(value: Any, digits: int = 17) -> Any:
    """A value of a table, a CSV file or a chart as it can be compared; nothing is an unknown number."""
    try:
        return float(f"{float(value):.{digits}g}") if math.isfinite(float(value)) else ""
    except (TypeError, ValueError):
        return value or ""


@pytest.mark.parametrize("make", [demo, many, deployed], ids=lambda make: make.__name__)
def test_each_item_is_at_the_place_of_its_value(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.setattr(deployment_tables, "advise", refuse)
    document = make(tmp_path)
    with browser.open(write_page(document, tmp_path / "report.html")) as opened:
        counts = check_charts(opened, document)
        assert all(counts.values()), counts
        # Every line has all points of its curve: two axes for each row.
        for name in ("accuracy", "tenths", "regret", "slowest"):
            if name in counts:
                assert counts[name] >= 2 * len(opened.rows(name))
        if make is not deployed:
            opened.choose("seed", "2")
            opened.choose("axis", "joules")
            opened.choose("measure", "rounds")
            counts = check_charts(opened, document)
            # In the large comparison, no client of this run failed.
            empty = {chart.name for chart in document.charts if not counts[chart.name]}
            assert empty == ({"failures"} if make is many else set())
            texts = opened.page.locator(".chart").all_inner_texts()
            assert sum("nothing to show" in text for text in texts) == len(empty)
        assert opened.faults == []
        if make is many:  # curves and maps of many runs are thinned, figures are not
            rows = {chart.name: chart.rows for chart in document.charts}
            assert len(rows["jain"]["seed"]) == 20 * 6
            assert sum(kind == "seed" for kind in rows["ratios"]["kind"]) == 5 * 19 * 5
