"""Builds of the gallery: a new selector, a fact that is missing, a mark of a card that is wrong."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest

from fedsel_flwr.selectors import registry

pytest.importorskip("sphinx", reason="the site needs the extra docs")

import gallery_facts as facts
import small_world
from scenario_keys import tables
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

OURS = facts.ours()
TABLES = tables()
NEWEST = '''"""Newest: a new selector of ours."""

from fedsel_flwr.selectors.base import Selector


class Newest(Selector):
    """Selects the first clients by index. It is short.

    When not to use:
        * The clients differ.

    Deviations: none.

    References:
        No paper.
    """

    name = "newest"
    citations = ("mcmahan2017communication",)

    def __init__(self, *, clients_per_round, seed=None):
        super().__init__(clients_per_round=clients_per_round, seed=seed)

    def _select(self, available):
        return available[: self.clients_per_round]
'''


@pytest.fixture(scope="module")
def run() -> small_world.Played:
    return small_world.play("random")


def _newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str = "newest") -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(source.replace('name = "newest"', f'name = "{name}"'))
    spec = importlib.util.spec_from_file_location(f"fedsel_flwr.selectors.{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"fedsel_flwr.selectors.{name}", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(registry._CLASSES, name, module.Newest)


def _only(monkeypatch: pytest.MonkeyPatch, *shown: str) -> tuple[str, ...]:
    """Build the pages of these selectors and of new ones alone: the site's own build has all pages."""
    every = facts.ours
    monkeypatch.setattr(facts, "ours", lambda: [name for name in every() if name in shown or name not in OURS])
    return shown


def _site(folder: Path) -> Path:
    """Sources of a site with the gallery and with empty pages in place of those that it links to."""
    (folder / "extensions").mkdir(parents=True)
    (folder / "conf.py").write_text('extensions = ["gallery"]\nhtml_theme = "basic"\n')
    (folder / "index.rst").write_text("Site\n====\n\n.. toctree::\n\n   gallery/index\n")
    (folder / "extensions" / "small_world.toml").write_text(small_world.SCENARIO.read_text())
    targets = {"results/selectors", "security", "benchmarks/selection"}
    targets |= {f"papers/{card}" for card in facts.cards()}
    for target in targets:
        page = folder / f"{target}.rst"
        page.parent.mkdir(exist_ok=True)
        page.write_text(f":orphan:\n\n{target}\n{'=' * len(target)}\n")
    keys = "".join(f".. confval:: {key.name}\n\n" for found in TABLES.values() for key in found)
    (folder / "scenario-reference.rst").write_text(f":orphan:\n\nKeys\n====\n\n{keys}")
    return folder


def _build(source: Path, out: Path) -> str:
    said = io.StringIO()
    # Without a namespace, the nodes of one build would be warnings of the next build in this process.
    with docutils_namespace():
        Sphinx(source, source, out / "html", out / "trees", "html", status=None, warning=said).build()
    return said.getvalue()


def test_the_gallery_builds_without_a_warning_and_a_new_selector_has_a_page(
    run: small_world.Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a selector that has a line in the catalogue, and no line anywhere else, and one without a paper."""
    _newest(tmp_path, monkeypatch, NEWEST)
    own = NEWEST.replace('("mcmahan2017communication",)', "()").replace("Deviations: none.", "")
    _newest(tmp_path, monkeypatch, own.replace("    References:\n        No paper.\n", ""), "mine")
    shown = _only(monkeypatch, "fedcm-ts", "fedcm-ucb")
    source = _site(tmp_path / "docs")
    play = small_world.play
    monkeypatch.setattr(small_world, "play", lambda name: play(name) if name == "newest" else run)
    assert _build(source, tmp_path / "build") == ""
    html = tmp_path / "build" / "html" / "gallery"
    assert {file.stem for file in html.glob("*.html")} == {"index", "newest", "mine", *shown}
    page = (html / "newest.html").read_text()
    assert "Selects the first clients by index. It is short." in page
    assert "Of all 500 choices, the 10 fastest" in page
    assert "The cost was not measured." in page
    assert 'href="newest.html"' in (html / "index.html").read_text()
    assert 'href="fedcm-ucb.html"' in (html / "fedcm-ts.html").read_text()
    written = {file: file.stat().st_mtime_ns for file in (source / "gallery").iterdir()}
    monkeypatch.setattr(small_world, "play", lambda name: pytest.fail(f"{name} was played again"))
    _build(source, tmp_path / "build")
    assert {file: file.stat().st_mtime_ns for file in (source / "gallery").iterdir()} == written


FAULTS = {
    "brief": ((" It is short.", ""), "Newest needs two sentences on its idea"),
    "praised": (("When not to use:", "Note:"), 'Newest has no section "When not to use:"'),
    "paced": (("clients_per_round, seed=None", "clients_per_round, pace, seed=None"), "pace"),
}
CARD = "<!-- equations of oort, no-such -->\n$$\nx\n$$\n\n<!-- equations of oort -->\n\nText\n"


def test_a_missing_fact_or_a_wrong_mark_is_a_warning_that_names_it_and_all_others_have_pages(
    run: small_world.Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (change, _) in FAULTS.items():
        _newest(tmp_path, monkeypatch, NEWEST.replace(*change), name)
    (cards := tmp_path / "cards").mkdir()
    source = _site(tmp_path / "docs")
    (cards / "card.md").write_text(CARD)
    _only(monkeypatch, "random")
    monkeypatch.setattr(facts, "CARDS", cards)
    play = small_world.play
    monkeypatch.setattr(small_world, "play", lambda name: play(name) if name == "paced" else run)
    warnings = _build(source, tmp_path / "build")
    for name, (_, said) in FAULTS.items():
        assert re.search(f"no page for the selector '{name}'.*{said}", warnings), warnings
    assert "card.md has equations of 'no-such', which is no selector" in warnings
    assert re.search("card.md has a line .* without an equation", warnings)
    assert {file.stem for file in (tmp_path / "build" / "html" / "gallery").glob("*.html")} == {"index", "random"}
