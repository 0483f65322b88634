"""Files that lie outside ``docs/`` in the site: links to them work there as on a web page of the repository.

A Markdown file of :data:`PAGES` becomes a page. Sphinx reads it in its place, so that nothing is copied, and warnings
name the file. A file of another kind, to which a page links, becomes a page with its text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.project import Project
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security-policy": "SECURITY.md",
    "examples/deployment": "examples/deployment/README.md",
    "examples/drop-in": "examples/drop-in/README.md",
    "examples/selection-compare": "examples/selection-compare/README.md",
    "examples/selection-quickstart": "examples/selection-quickstart/README.md",
    "benchmarks/checkpoints": "benchmarks/checkpoints.md",
    "benchmarks/engines": "benchmarks/ENGINES.md",
    "benchmarks/liars": "benchmarks/liars.md",
    "benchmarks/many-clients": "benchmarks/many_clients.md",
    "benchmarks/mutants": "benchmarks/mutants.md",
    "benchmarks/results": "benchmarks/RESULTS.md",
    "benchmarks/selection": "benchmarks/selection.md",
}
"""Page of the site -> file of the repository."""
HOME = ("README.md", "docs/README.md")
"""Files that the home page and "Get started" include. Links to them lead to the home page."""
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".sh": "bash", ".cff": "yaml"}
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")


class Pages(Project):
    """The pages of a site, with those that lie outside its source folder.

    Attributes:
        files: Page -> absolute path of its file.
        linked: Absolute path of a file -> page that links to it lead to.
    """

    files: dict[str, Path]
    linked: dict[Path, str]

    def discover(self, *args: Any, **kwargs: Any) -> set[str]:
        """Return the pages, those elsewhere included."""
        super().discover(*args, **kwargs)
        for name, path in self.files.items():
            self.docnames.add(name)
            self._docname_to_path[name] = path
            self._path_to_docname[path] = name
        self._path_to_docname.update(self.linked)
        return self.docnames


def begin(app: Sphinx) -> None:
    """Let Sphinx find the pages that lie elsewhere."""
    pages = Pages(app.project.srcdir, app.project.source_suffix)
    pages.files = {name: ROOT / file for name, file in PAGES.items()}
    pages.linked = {ROOT / file: "index" for file in HOME}
    for file in linked_files([*DOCS.glob("*.md"), *DOCS.glob("[pr]*/*.md"), *pages.files.values()]):
        name = f"source/{file.relative_to(ROOT).as_posix()}"
        pages.files[name] = write_source_page(file, Path(app.doctreedir).parent / "source")
        pages.linked[file] = name
    app.project = app.env.project = pages


def linked_files(pages: list[Path]) -> set[Path]:
    """Return the files outside ``docs/``, and not in Markdown, to which pages link."""
    links = {(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text("utf-8"))}
    return {
        file
        for file in links
        if file.is_file() and not file.is_relative_to(DOCS) and file.suffix not in (".md", ".png")
    }


def write_source_page(file: Path, folder: Path) -> Path:
    """Write a page with the text of a file, if it has changed, and return the page's path."""
    name = file.relative_to(ROOT).as_posix()
    fence = "`" * 8
    text = f"# {name}\n\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text('utf-8')}{fence}\n"
    page = folder / f"{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    if not page.is_file() or page.read_text("utf-8") != text:
        page.write_text(text, encoding="utf-8")
    return page


class Anchors(SphinxTransform):
    """Makes targets of ``<a id="name"></a>``, so that links to them are checked as links to headings are."""

    # Before MyST looks for the targets of links within a page.
    default_priority = 870
    _anchor = re.compile(r'\s*<a id="([^"]+)">\s*(?:</a>)?\s*')

    def apply(self, **kwargs: Any) -> None:
        """Replace each anchor, and note its name."""
        for raw in list(self.document.findall(nodes.raw)):
            if match := self._anchor.fullmatch(raw.astext()):
                target = nodes.target("", "", ids=[match[1]], names=[match[1]])
                self.document.note_explicit_target(target)
                within = isinstance(raw.parent, nodes.TextElement)
                raw.replace_self(target if within else nodes.paragraph("", "", target))
            elif raw.astext().strip() == "</a>":
                raw.parent.remove(raw)


class LinksOfReadme(SphinxTransform):
    """Resolves the links of a part of README.md that another page includes: they are relative to the repository."""

    default_priority = 871

    def apply(self, **kwargs: Any) -> None:
        """Resolve links to files that do not exist where the including page lies."""
        for link in self.document.findall(pending_xref):
            if link["reftype"] == "myst" and not link.get("refdomain"):
                path, _, anchor = link["reftarget"].partition("#")
                if path and (ROOT / path).is_file() and (page := self.env.path2doc(ROOT / path)):
                    link.update_all_atts({"refdomain": "doc", "reftarget": page, "reftargetid": anchor}, replace=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.connect("builder-inited", begin, priority=100)
    for transform in (Anchors, LinksOfReadme):
        app.add_transform(transform)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
