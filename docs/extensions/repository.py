"""Files that lie outside ``docs/`` in the site: links to them work there as on a web page of the repository.

A Markdown file of :data:`PAGES` becomes a page. Sphinx reads it in its place, so that nothing is copied, and warnings
name the file. A file of another kind, to which a page links, becomes a page with its text.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref, toctree
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
    "benchmarks/intervals": "benchmarks/intervals.md",
    "benchmarks/engines": "benchmarks/ENGINES.md",
    "benchmarks/late-replies": "benchmarks/late_replies.md",
    "benchmarks/liars": "benchmarks/liars.md",
    "benchmarks/many-clients": "benchmarks/many_clients.md",
    "benchmarks/mutants": "benchmarks/mutants.md",
    "benchmarks/results": "benchmarks/RESULTS.md",
    "benchmarks/selection": "benchmarks/selection.md",
    "benchmarks/superlink-load": "benchmarks/superlink_load.md",
}
"""Page of the site -> file of the repository."""
HOME = ("README.md", "docs/README.md")
"""Files that the home page and "Get started" include. Links to them lead to the home page."""
BELOW = {
    "papers/README": "papers/*",
    "results/README": "results/*",
    "scaling": "benchmarks/*",
    "examples": "examples/*",
}
"""Page with a list of links -> the pages that the navigation shows below it."""
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".sh": "bash"}
"""Files of code, which have a page if another page links to them. Files of data are downloads."""
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
            # Relative, because the search index lists these paths.
            self._docname_to_path[name] = Path(os.path.relpath(path, self.srcdir))
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
        pages.files[name] = write_source_page(file, Path(app.outdir).parent / "source")
        pages.linked[file] = name
    app.project = app.env.project = pages


def linked_files(pages: list[Path]) -> set[Path]:
    """Return the files of code outside ``docs/`` to which pages link."""
    links = {(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text("utf-8"))}
    return {file for file in links if file.is_file() and file.suffix in LANGUAGES and not file.is_relative_to(DOCS)}


def write_source_page(file: Path, folder: Path) -> Path:
    """Write a page with the text of a file, if it has changed, and return the page's path."""
    name = file.relative_to(ROOT).as_posix()
    fence = "`" * 8
    text = f"---\norphan: true\n---\n\n# {name}\n\n{fence}{LANGUAGES[file.suffix]}\n{file.read_text('utf-8')}{fence}\n"
    page = folder / f"{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    if not page.is_file() or page.read_text("utf-8") != text:
        page.write_text(text, encoding="utf-8")
    return page


class Anchors(SphinxTransform):
    """Makes targets of ``<a id="name"></a>``, so that links to them are checked as links to headings are."""

    # Before Sphinx notes the targets of a page.
    default_priority = 840
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


class Links(SphinxTransform):
    """Finds the pages of links that hold on a web page of the repository, and shows the titles of these pages.

    A part of README.md that another page includes has links that are relative to the repository. A docstring names a
    page by its path. Where a link shows the name of a file, the site shows the title of the page.
    """

    default_priority = 871
    _file = re.compile(r"(docs/)?[\w./-]+\.md")

    def apply(self, **kwargs: Any) -> None:
        """Change the links of a page."""
        for link in list(self.document.findall(pending_xref)):
            if link["reftype"] == "myst":
                path, _, anchor = str(link["reftarget"]).partition("#")
                if not link.get("refdomain") and path and (page := self._page(path)):
                    link.update_all_atts({"refdomain": "doc", "reftarget": page, "reftargetid": anchor}, replace=True)
                if link.get("refdomain") == "doc" and self._file.fullmatch(link.astext()):
                    link["refexplicit"] = False
        for literal in list(self.document.findall(nodes.literal)):
            path = literal.astext()
            if path.startswith("docs/") and self._file.fullmatch(path) and (page := self._page(path)):
                attributes = {"refdomain": "doc", "reftype": "myst", "reftarget": page, "reftargetid": ""}
                link = pending_xref("", nodes.inline(), refdoc=self.env.docname, refexplicit=False, **attributes)
                literal.replace_self(link)

    def _page(self, path: str) -> str | None:
        return self.env.path2doc(ROOT / path) if (ROOT / path).is_file() else None


class PagesBelow(SphinxTransform):
    """Adds the navigation of :data:`BELOW`, without which these pages are plain Markdown."""

    default_priority = 872

    def apply(self, **kwargs: Any) -> None:
        """Append a hidden list of the pages below this page."""
        name = self.env.docname
        if name in BELOW:
            below = [page for page in sorted(self.env.found_docs) if fnmatchcase(page, BELOW[name]) and page != name]
            entries = [(None, page) for page in below]
            (section, *_) = self.document.findall(nodes.section)
            section += toctree(
                "", parent=name, entries=entries, includefiles=below, maxdepth=-1, caption=None, glob=False,
                hidden=True, includehidden=False, numbered=0, titlesonly=True,
            )  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.connect("builder-inited", begin, priority=100)
    for transform in (Anchors, Links, PagesBelow):
        app.add_transform(transform)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
