"""The document of a page: names are data, never markup; scripts only by their hashes; sizes."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.page import document
from fedsel_flwr.report.page.comparison_page import comparison_document
from fedsel_flwr.report.page.document import render, write_page
from fedsel_flwr.simulations.scenario_files import check_label
from tests.browser import Browser, Opened, browser
from tests.report.page.made_facts import made_facts

__all__ = ["browser"]
LABELS = {
    "markup": [
        "</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 2'>", "<!--<script>",
        "a\"b'c&d`e${window.hacked = 3}", "datum.x = [toString()]; window.hacked = 4",
    ],
    "dollars": ["a$&b", "a$`b", "a$'b", "$$", "$1", "$<name>", "random", "legend", '"legend":null', "null"],
    "properties": [
        "constructor", "__proto__", "toString", "valueOf", "hasOwnProperty", "prototype", "length", "NaN", "0",
    ],
    "words of the page": [
        "x title", "chosen seed", "datum['x']", "[0]", "a[0]", "a.b", "labels[0]", "rows", "series", "selector",
    ],
    "formulas": [
        "=1+1", "+1", "-2+3", "@SUM(1)", "<svg onload=alert(1)>", "&#x3c;b&#x3e;", "${a(1)}", "{{7*7}}", "a&hide=b",
    ],
}  # fmt: skip


def check_drawn(opened: Opened) -> None:
    """Every chart has a view or says that it has no rows."""
    assert opened.page.inner_text("#problem") == ""
    assert opened.faults == []
    drawn = opened.page.evaluate("Object.keys(window.fedsel.views).length")
    nothing = sum("nothing to show" in text for text in opened.page.locator(".chart").all_inner_texts())
    assert drawn + nothing == opened.page.locator("figure").count()


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_are_data_and_draw_all_charts(labels: list[str], browser: Browser, tmp_path: Path) -> None:
    assert [check_label(label) for label in labels if "/" not in label] == [one for one in labels if "/" not in one]
    text = " ".join(labels)
    facts = made_facts(labels, 2, 180, text=text)
    with browser.open(write_page(comparison_document(facts), tmp_path / "report.html")) as opened:
        page = opened.page
        check_drawn(opened)
        assert page.title() == page.inner_text("h1") == text
        assert f"ratio to {labels[0]}" in str(page.locator("#chart-ratios svg").text_content())
        menus = (("measure", "rounds"), ("axis", "joules"), ("seed", "1"), *(("selector", one) for one in labels[:5]))
        for menu, value in menus:
            opened.choose(menu, value)
            check_drawn(opened)
        assert {row["selector"] for row in opened.rows("jain")} == {*labels}
        # The labels are drawn as texts, the long ones cut off, and a tooltip shows them as texts too.
        drawn = page.locator("#chart-jain .role-axis-label text").all_text_contents()
        assert {label[:20] for label in labels} <= {one[:20] for one in drawn}
        page.hover("#chart-jain .mark-symbol.role-mark > path >> nth=1")
        page.wait_for_selector("#vg-tooltip-element.visible")
        opened.open_all()
        with page.expect_download() as saved:
            page.click("#chart-jain [data-save=csv]")
        lines = saved.value.path().read_text().splitlines()
        with page.expect_download() as saved:
            page.click("#chart-jain [data-save=svg]")
        assert saved.value.suggested_filename == "jain.svg"
        assert len(svg := saved.value.path().read_text()) > 1000
        assert svg.startswith("<svg")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main script, main img, body > img").count() == 0
        assert opened.faults == []
    if "=1+1" in labels:
        assert [line.split(",")[1][:2] for line in lines[1:5]] == ["'=", "'+", "'-", "'@"]
        assert lines[1].split(",")[2:] != []


def test_the_policy_allows_only_the_two_scripts() -> None:
    text = render(comparison_document(made_facts(["random", "bsfl"], 2, 20)))
    head = re.search(r'<meta http-equiv="Content-Security-Policy" content="(.+?)">', text)
    assert head is not None
    assert text.index("Content-Security-Policy") < text.index("<style>")
    scripts = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert len(scripts) == 2
    assert dict(one.strip().split(" ", 1) for one in head[1].replace("&#39;", "'").split(";")) == {
        "default-src": "'none'", "script-src": " ".join(f"'sha256-{one}'" for one in hashes),
        "style-src": "'unsafe-inline'", "img-src": "data: blob:", "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip


def test_the_browser_refuses_another_script(browser: Browser, tmp_path: Path) -> None:
    """The check of the faults above would see a violation."""
    text = render(comparison_document(made_facts(["random", "bsfl"], 2, 20)))
    (tmp_path / "more.html").write_text(text.replace("</main>", "</main><script>window.hacked = 1</script>"))
    with browser.open(tmp_path / "more.html") as opened:
        assert opened.page.evaluate("window.hacked") is None
        assert any("Content Security Policy" in fault for fault in opened.faults)


def test_the_same_runs_give_the_same_page() -> None:
    first, second = (render(comparison_document(made_facts(["random", "bsfl"], 2, 20))) for _ in range(2))
    assert first == second


def test_without_a_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = comparison_document(made_facts(["random", "bsfl"], 2, 20))
    monkeypatch.setattr(document, "PACKAGES", ("jinja2", "no_such_package"))
    with pytest.raises(RunError, match=r"needs no_such_package\. .* pip install 'fedsel-flwr\[report\]'"):
        write_page(page, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_one_seed_and_one_selector_have_a_page(browser: Browser, tmp_path: Path) -> None:
    for count, (selectors, seeds) in enumerate(((["random"], 1), (["random", "bsfl"], 1), (["random"], 3))):
        path = write_page(comparison_document(made_facts(selectors, seeds, 12)), tmp_path / f"{count}.html")
        with browser.open(path) as opened:
            assert opened.faults == []
            assert opened.page.locator(".chart svg").count() == opened.page.locator("figure").count() >= 7
