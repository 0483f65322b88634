"""The site's extensions: pages outside ``docs/``, names of other packages, the API reference, equations."""

from __future__ import annotations

import importlib
import io
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import FENCE, PAGES, ROOT

pytest.importorskip("sphinx", reason="the site needs the extra docs")

import generated
import inventories
import redirects
import repository
from markdown_it import MarkdownIt
from mathml import mathml
from mdit_py_plugins.dollarmath import dollarmath_plugin
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import docutils_namespace
from sphinx.util.inventory import InventoryFile

TABLE = tomllib.loads(inventories.NAMES.read_text("utf-8"))


def links(page: Path) -> list[str]:
    """The files of the repository that a page links to, as paths in it."""
    found = re.findall(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [((page.parent / target).resolve()).relative_to(ROOT).as_posix() for target in found]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and those that the page sets itself."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = [re.sub(r"[^\w\- ]", "", title.lower()).strip() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {title.replace(" ", "-") for title in titles} | set(re.findall(r'<a id="([^"]+)">', text))


def test_each_markdown_file_that_a_page_links_to_is_a_page() -> None:
    shown = {*repository.PAGES.values(), *repository.HOME}
    assert [file for file in shown if not (ROOT / file).is_file()] == []
    pages = [*PAGES, *(ROOT / file for file in repository.PAGES.values())]
    found = {link for page in pages for link in links(page) if link.endswith(".md") and not link.startswith("docs/")}
    assert found <= shown


def test_a_file_of_code_that_a_page_links_to_has_a_page(tmp_path: Path) -> None:
    files = repository.linked_files([ROOT / "docs" / "own-selector.md", ROOT / "docs" / "releasing.md"])
    assert ROOT / "fedsel_flwr" / "selectors" / "columns.py" in files
    assert ROOT / ".github" / "workflows" / "publish.yml" in files
    (file,) = [file for file in files if file.name == "columns.py"]
    page = repository.write_source_page(file, tmp_path)
    assert page == tmp_path / "fedsel_flwr" / "selectors" / "columns.py.md"
    assert file.read_text("utf-8") in page.read_text("utf-8")
    before = page.stat().st_mtime_ns
    repository.write_source_page(file, tmp_path)
    assert page.stat().st_mtime_ns == before


@pytest.mark.parametrize("site", TABLE)
def test_names_of_other_packages_exist_and_have_an_address(site: str, tmp_path: Path) -> None:
    url, file = inventories.write(tmp_path)[site]
    with open(file, "rb") as stream:
        inventory = InventoryFile.load(stream, url, lambda base, page: base + page)
    classes = inventory["py:class"]
    assert set(classes) == set(TABLE[site]) - {"url"}
    for name, item in classes.items():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
        assert item.uri.startswith(url)
        assert "$" not in item.uri


def _tokens(parser: MarkdownIt, text: str) -> Iterator[tuple[str, str]]:
    for token in parser.enable("table").parse(text):
        yield from ((one.type, one.content) for one in token.children or [token])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_equations_are_mathml_and_plain_markdown_leaves_them_as_they_are(page: Path) -> None:
    """On GitHub, Markdown may read an equation first: an underscore must not begin emphasis, nor a backslash escape."""
    text = page.read_text("utf-8")
    tokens = list(_tokens(MarkdownIt("commonmark").use(dollarmath_plugin, allow_space=False), text))
    found = [(kind, tex) for kind, tex in tokens if kind.startswith("math")]
    assert bool(found) == (page.parent.name == "papers" and page.stem != "README")
    assert not found or [tex for kind, tex in tokens if kind == "text" and "$" in tex] == []
    shown = "".join(tex or " " for _, tex in _tokens(MarkdownIt("commonmark"), text))
    shown = " ".join(shown.split())
    for kind, tex in found:
        assert mathml(tex, as_block=kind == "math_block").startswith("<math")
        assert " ".join(tex.split()) in shown


@pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")  # MyST's parser
def test_equations_anchors_and_links_of_a_page(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "conf.py").write_text(
        'extensions = ["myst_nb", "mathml", "repository"]\nhtml_math_renderer = "mathml"\n'
        'myst_enable_extensions = ["dollarmath"]\nhtml_theme = "basic"\nmyst_heading_anchors = 3\n'
    )
    (source / "index.md").write_text(
        "# First\n\n$x^2$ and\n\n$$\n\\sqrt{y}\n$$\n\n[over](#here.it_is), [second.md](second.md#there.it_is)\n\n"
        '<a id="here.it_is"></a>\n\nText\n\n```{toctree}\nsecond\n```\n'
    )
    (source / "second.md").write_text('# A second page\n\n| a |\n| --- |\n| <a id="there.it_is"></a>b |\n')
    warnings = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, docutils_namespace():
        patch.setattr(repository, "PAGES", {})
        patch.setattr(repository, "linked_files", lambda pages: set())
        Sphinx(source, source, tmp_path / "out", tmp_path / "trees", "html", status=None, warning=warnings).build()
    assert warnings.getvalue() == ""
    text = (tmp_path / "out" / "index.html").read_text("utf-8")
    for there in ("<msup>", "<msqrt>", 'href="#here.it_is"', 'id="here.it_is"', 'href="second.html#there.it_is"'):
        assert there in text
    assert "mathjax@" not in text.lower()
    assert '<script src="http' not in text
    assert "second.md" not in text
    assert 'id="there.it_is"' in (tmp_path / "out" / "second.html").read_text("utf-8")


def test_a_generated_table_takes_the_place_of_what_readers_of_the_repository_see() -> None:
    source = [
        "A\n\n<!-- generated: arguments of list -->\n\nB\n\n<!-- generated: arguments of cite -->\nC\n<!-- end -->\nD\n"
    ]
    generated.replace(None, "page", source)  # type: ignore[arg-type]
    shown, cite = source[0].split("\nB\n")
    assert "| `--json` | print JSON" in shown
    assert "| `SELECTOR` | print the papers" in cite
    assert "C" not in cite.splitlines()
    assert cite.endswith("\nD\n")
    with pytest.raises(ExtensionError, match="page asks for the table 'no such'"):
        generated.replace(None, "page", ["<!-- generated: no such -->"])  # type: ignore[arg-type]


def test_an_old_address_leads_to_a_section_that_is_there() -> None:
    for old, new in redirects.MOVED.items():
        page, _, anchor = new.partition("#")
        assert not (ROOT / "docs" / f"{old}.md").exists()
        assert not anchor or anchor in anchors(ROOT / "docs" / f"{page}.md"), new
