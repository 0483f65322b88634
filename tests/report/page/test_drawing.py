"""Every chart of three pages: its places are columns of its table, and page and CSV file have the table's rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedsel_flwr.report.page.comparison_page import comparison_document
from fedsel_flwr.report.page.deployment_page import deployment_document
from fedsel_flwr.report.page.deployment_tables import read_deployment
from fedsel_flwr.report.page.document import Document, write_page
from fedsel_flwr.simulations import compare, load_scenario
from fedsel_flwr.simulations.comparisons.report_page import page_facts
from tests.browser import Browser, Opened, browser
from tests.report.page.deployments import client, entries, failed, write
from tests.report.page.made_facts import made_facts

__all__ = ["browser"]

FIELDS = {
    "ratios": {"ratio", "low", "high"},
    "targets": {"target", "ratio", "low", "high"},
    "map": {"left", "right", "place", "place_end"},
    "tenths": {"latency_s", "selections_per_client"},
    "selections": {"latency_s", "selections"},
    "jain": {"value", "low", "high"},
    "worst-tenth": {"value", "low", "high"},
    "parts": {"seconds"},
    "regret": {"round", "theta"},
    "slowest": {"round", "round_s", "measured_s"},
    "clients": {"beyond_median_s"},
    # low and high: the ends of a stacked bar; left and right: the round minus a half, and the last round plus a half
    "durations": {"left", "right", "low", "high"},
    "failures": {"left", "right", "low", "high"},
}
"""Chart -> columns of its table that are drawn as places."""


def places(chart: Any) -> set[str]:
    """The columns with numbers that a chart draws as places."""
    found = set()
    for unit in chart.spec.get("layer", [chart.spec]):
        own = unit["encoding"]
        for axis in ("x", "y"):
            if own.get(axis, {}).get("type") == "quantitative":
                found |= {own[name]["field"] for name in (axis, f"{axis}2") if "field" in own.get(name, {})}
    return found


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


def check_charts(opened: Opened, document: Document) -> set[str]:
    """Check every chart as it is shown; returns those without rows."""
    empty = set()
    for chart in document.charts:
        curves = {"round", "accuracy"} if "loss" in chart.rows else {"x", "accuracy", "low", "high"}
        assert places(chart) == FIELDS.get(chart.name, curves), chart.name
        rows = opened.rows(chart.name)
        empty |= set() if rows else {chart.name}
        # The page has the rows of the document that its menus choose, with six digits.
        chosen = {name: opened.page.input_value(f"select[name={menu}]") for name, menu in chart.menus.items()}
        every = [dict(zip(chart.rows, values, strict=True)) for values in zip(*chart.rows.values(), strict=True)]
        wanted = [row for row in every if all(row[name] == value for name, value in chosen.items())]
        assert [{name: same(row[name]) for name in chart.rows} for row in rows] == [
            {name: same(value, 6) for name, value in row.items()} for row in wanted
        ]
        with opened.page.expect_download() as saved:
            opened.page.click(f"#chart-{chart.name} [data-save=csv]")
        assert saved.value.suggested_filename == f"{chart.name}.csv"
        found = pd.read_csv(saved.value.path(), keep_default_na=False, dtype=str).to_dict("records")
        assert len(found) == len(rows)
        for text, row in zip(found, rows, strict=True):
            assert {name: same(value) for name, value in text.items()} == {name: same(row[name]) for name in text}
    return empty


def same(value: Any, digits: int = 17) -> Any:
    """A value of a table, a CSV file or a chart as it can be compared; nothing is an unknown number."""
    try:
        return float(f"{float(value):.{digits}g}") if math.isfinite(float(value)) else ""
    except (TypeError, ValueError):
        return value or ""


@pytest.mark.parametrize("make", [demo, many, deployed], ids=lambda make: make.__name__)
def test_each_chart_draws_the_rows_of_its_table(browser: Browser, tmp_path: Path, make: Any) -> None:
    document = make(tmp_path)
    with browser.open(write_page(document, tmp_path / "report.html")) as opened:
        assert check_charts(opened, document) == set()
        if make is not deployed:
            opened.choose("seed", "2")
            opened.choose("axis", "joules")
            opened.choose("measure", "rounds")
            # In the large comparison, no client of this run failed.
            empty = check_charts(opened, document)
            assert empty == ({"failures"} if make is many else set())
            texts = opened.page.locator(".chart").all_inner_texts()
            assert sum("nothing to show" in text for text in texts) == len(empty)
        assert opened.faults == []
        if make is many:  # curves and maps of many runs are thinned, figures are not
            rows = {chart.name: chart.rows for chart in document.charts}
            assert len(rows["jain"]["seed"]) == 20 * 6
            assert sum(kind == "seed" for kind in rows["ratios"]["kind"]) == 5 * 19 * 5
