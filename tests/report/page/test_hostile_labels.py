"""Labels that look like code, paths of properties, or formulas: every chart is still drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsel_flwr.report.page.comparison_page import comparison_document
from fedsel_flwr.report.page.document import write_page
from fedsel_flwr.simulations.scenario_files import check_label
from tests.browser import Browser, Opened, browser
from tests.report.page.made_facts import made_facts

__all__ = ["browser"]

LABELS = [
    ["a$&b", "a$`b", "a$'b", "$$", "$1", "$<name>", "random", "legend", '"legend":null', "null"],
    ["constructor", "__proto__", "toString", "valueOf", "hasOwnProperty", "prototype", "length", "NaN", "0"],
    ["x title", "chosen seed", "datum['x']", "[0]", "a[0]", "a.b", "labels[0]", "rows", "series", "selector"],
    ["=1+1", "+1", "-2+3", "@SUM(1)", "<svg onload=alert(1)>", "&#x3c;b&#x3e;", "${a(1)}", "{{7*7}}", "a&hide=b"],
]


def check_drawn(opened: Opened) -> None:
    """Every chart has a view or says that it has no rows."""
    assert opened.page.inner_text("#problem") == ""
    assert opened.faults == []
    drawn = opened.page.evaluate("Object.keys(window.fedsel.views).length")
    nothing = sum("nothing to show" in text for text in opened.page.locator(".chart").all_inner_texts())
    assert drawn + nothing == opened.page.locator("figure").count()


@pytest.mark.parametrize("labels", LABELS, ids=["dollars", "properties", "words of the page", "formulas"])
def test_every_label_draws_all_charts(labels: list[str], browser: Browser, tmp_path: Path) -> None:
    assert [check_label(label) for label in labels] == labels
    facts = made_facts(labels, 2, 180, text=labels[0])
    with browser.open(write_page(comparison_document(facts), tmp_path / "report.html")) as opened:
        check_drawn(opened)
        assert f"ratio to {labels[0]}" in str(opened.page.locator("#chart-ratios svg").text_content())
        for menu, value in (("measure", "rounds"), ("axis", "joules"), ("seed", "1"), ("selector", labels[1])):
            opened.choose(menu, value)
            check_drawn(opened)
        assert {row["selector"] for row in opened.rows("jain")} == {*labels}
        names = opened.page.locator("#chart-jain .role-axis-label text").all_text_contents()
        assert {*labels} <= {*names}
        with opened.page.expect_download() as saved:
            opened.page.click("#chart-jain [data-save=csv]")
        lines = saved.value.path().read_text().splitlines()
        with opened.page.expect_download() as saved:
            opened.page.click("#chart-jain [data-save=svg]")
        assert len(saved.value.path().read_text()) > 1000
    if "=1+1" in labels:
        begin = [line.split(",")[1][:2] for line in lines[1:5]]
        assert begin == ["'=", "'+", "'-", "'@"]
        assert lines[1].split(",")[2:] != []
