"""Files that lie outside ``docs/`` in the site: links to them work there as on a web page of the repository.

A Markdown file of :data:`PAGES` becomes a page. Sphinx reads it in its place, so that nothing is copied, and warnings
name the file. :func:`add_pages` gives other extensions the same: pages that they write under ``docs/_build``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.project import Project
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = {
    "readme": "README.md",
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
HOME = "docs/README.md"
"""The file whose table the home page includes; links to it lead there."""


class Pages(Project):
    """The pages of a site, with those that lie outside its source folder.

    Attributes:
        elsewhere: Page -> absolute path of its file.
    """

    elsewhere: dict[str, Path]

    def discover(self, *args: Any, **kwargs: Any) -> set[str]:
        """Return the pages, those elsewhere included."""
        super().discover(*args, **kwargs)
        for name, path in self.elsewhere.items():
            self.docnames.add(name)
            self._path_to_docname[path] = name
            self._docname_to_path[name] = path
        self._path_to_docname[ROOT / HOME] = "index"
        return self.docnames


def add_pages(app: Sphinx, pages: dict[str, Path]) -> None:
    """Add pages whose files lie outside the source folder, or in a folder that Sphinx leaves out.

    Call it when Sphinx emits ``builder-inited``, with a priority above 100.

    Args:
        app: Sphinx.
        pages: Page, such as "gallery/bsfl" -> its Markdown file.
    """
    assert isinstance(app.project, Pages)
    app.project.elsewhere.update({name: path.resolve() for name, path in pages.items()})


def begin(app: Sphinx) -> None:
    """Let Sphinx find the pages that lie elsewhere."""
    pages = Pages(app.project.srcdir, app.project.source_suffix)
    pages.restore(app.project)
    pages.elsewhere = {}
    app.project = app.env.project = pages
    add_pages(app, {name: ROOT / file for name, file in PAGES.items()})


class Anchors(SphinxTransform):
    """Makes targets of ``<a id="name"></a>``, so that links to them are checked as links to headings are."""

    default_priority = 870
    _anchor = re.compile(r'\s*<a id="([^"]+)">\s*(?:</a>)?\s*')

    def apply(self, **kwargs: Any) -> None:
        """Replace each anchor, and note its name."""
        for raw in list(self.document.findall(nodes.raw)):
            if match := self._anchor.fullmatch(raw.astext()):
                name = match[1]
                target = nodes.target("", "", names=[name])
                self.document.note_explicit_target(target)
                raw.replace_self(
                    target if isinstance(raw.parent, nodes.TextElement) else nodes.paragraph("", "", target)
                )
                slugs = self.env.metadata[self.env.docname].setdefault("myst_slugs", {})
                slugs[name] = (0, name, name)
            elif raw.astext().strip() == "</a>":
                raw.parent.remove(raw)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.connect("builder-inited", begin, priority=100)
    app.add_transform(Anchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
