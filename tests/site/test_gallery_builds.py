"""Builds of the gallery: a new selector, a fact that is missing, a mark of a card that is wrong."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import registry

pytest.importorskip("sphinx", reason="the site needs the extra docs")

import gallery_facts as facts
import small_world
from scenario_keys import tables
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

OURS = facts.ours()
TABLES = tables()
Runs = dict[str, small_world.Played]
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


def _newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> ModuleType:
    """Add a selector to the catalogue of this process."""
    file = tmp_path / "newest.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("fedsel_flwr.selectors.newest", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fedsel_flwr.selectors.newest", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(registry._CLASSES, "newest", module.Newest)
    return module


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
    """Build the site, and return its warnings."""
    said = io.StringIO()
    # Without a namespace, the nodes of one build would be warnings of the next build in this process.
    with docutils_namespace():
        Sphinx(source, source, out / "html", out / "trees", "html", status=None, warning=said).build()
    return said.getvalue()


def test_the_gallery_builds_without_a_warning_and_a_new_selector_has_a_page(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a selector that has a line in the catalogue, and no line anywhere else."""
    _newest(tmp_path, monkeypatch, NEWEST)
    shown = _only(monkeypatch, "fedcm-ts", "fedcm-ucb", "oort", "random")
    source = _site(tmp_path / "docs")
    play = small_world.play
    monkeypatch.setattr(small_world, "play", lambda name: runs[name] if name in runs else play(name))
    assert _build(source, tmp_path / "build") == ""
    html = tmp_path / "build" / "html" / "gallery"
    assert {file.stem for file in html.glob("*.html")} == {"index", "newest", *shown}
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((" It is short.", ""), "Newest needs two sentences on its idea"),
        (("When not to use:", "Note:"), 'Newest has no section "When not to use:"'),
        (("clients_per_round, seed=None", "clients_per_round, pace, seed=None"), "pace"),
    ],
)
def test_a_missing_fact_is_a_warning_that_names_it_and_all_others_have_pages(
    change: tuple[str, str], said: str, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _newest(tmp_path, monkeypatch, NEWEST.replace(*change))
    _only(monkeypatch, "random")
    play = small_world.play
    monkeypatch.setattr(small_world, "play", lambda name: play(name) if "pace" in change[1] else runs["random"])
    warnings = _build(_site(tmp_path / "docs"), tmp_path / "build")
    assert re.search(f"no page for the selector 'newest'.*{said}", warnings)
    assert len(warnings.splitlines()) == 1
    assert {file.stem for file in (tmp_path / "build" / "html" / "gallery").glob("*.html")} == {"index", "random"}


def test_a_selector_of_ones_own_needs_no_paper_no_card_and_no_deviations(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = NEWEST.replace("citations = (MCMAHAN,)", "citations = ()").replace("Deviations: none.", "")
    _newest(tmp_path, monkeypatch, own.replace("    References:\n        No paper.\n", ""))
    _only(monkeypatch)
    monkeypatch.setattr(small_world, "play", lambda name: runs["random"])
    assert _build(_site(tmp_path / "docs"), tmp_path / "build") == ""
    assert (tmp_path / "build" / "html" / "gallery" / "newest.html").is_file()


def test_a_selector_that_cannot_play_names_the_world() -> None:
    with pytest.raises(ParameterError, match="unknown selector"):
        small_world.play("no-such-selector")


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (
            "<!-- equations of oort, no-such -->\n$$\nx\n$$\n",
            "card.md has equations of 'no-such', which is no selector",
        ),
        ("<!-- equations of oort -->\n\nText\n", "card.md has a line .* without an equation"),
    ],
)
def test_a_mark_without_a_selector_or_an_equation_is_a_warning(
    card: str, said: str, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cards := tmp_path / "cards").mkdir()
    (cards / "card.md").write_text(card)
    source = _site(tmp_path / "docs")
    _only(monkeypatch, "random")
    monkeypatch.setattr(facts, "CARDS", cards)
    monkeypatch.setattr(small_world, "play", lambda name: runs[name])
    assert re.search(said, _build(source, tmp_path / "build"))
