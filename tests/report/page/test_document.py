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
from tests.browser import Browser, browser
from tests.report.page.made_facts import made_facts

__all__ = ["browser"]
EVIL = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "a\"b'c&d`e${window.hacked = 3}",
    "datum.x = [toString()]; window.hacked = 4",
    "<!--<script>",
]


def test_names_are_data_never_markup(browser: Browser, tmp_path: Path) -> None:
    facts = made_facts(EVIL, 2, 30, text=" ".join(EVIL))
    with browser.open(write_page(comparison_document(facts), tmp_path / "evil.html")) as opened:
        page = opened.page
        assert opened.faults == []
        assert page.evaluate("window.hacked") is None
        assert page.title() == " ".join(EVIL)
        assert page.inner_text("h1") == " ".join(EVIL)
        assert {row["selector"] for row in opened.rows("jain")} == set(EVIL)
        # The labels are drawn as text, and a tooltip shows them as text too.
        drawn = page.locator("#chart-jain .chart text").all_text_contents()
        assert any(text.startswith("</script>") for text in drawn)
        page.hover("#chart-jain .mark-symbol.role-mark > path >> nth=1")
        page.wait_for_selector("#vg-tooltip-element.visible")
        opened.open_all()
        for name in EVIL:
            opened.choose("selector", name)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main script, main img, body > img").count() == 0
        assert opened.faults == []


def test_the_policy_allows_only_the_two_scripts() -> None:
    text = render(comparison_document(made_facts(["random", "bsfl"], 2, 20)))
    head = re.search(r'<meta http-equiv="Content-Security-Policy" content="(.+?)">', text)
    assert head is not None
    assert text.index("Content-Security-Policy") < text.index("<style>")
    policy = dict(one.strip().split(" ", 1) for one in head[1].replace("&#39;", "'").split(";"))
    scripts = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert len(scripts) == 2
    assert policy == {
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
        facts = made_facts(selectors, seeds, 12)
        path = write_page(comparison_document(facts), tmp_path / f"{count}.html")
        with browser.open(path) as opened:
            assert opened.faults == []
            assert opened.page.locator(".chart svg").count() == opened.page.locator("figure").count() >= 7
