"""Keys of a scenario are objects of the site: search leads to a key, and a link to a key is checked.

The tables that :mod:`scenario_keys` writes have an anchor for each key.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

PAGE = "scenario-reference"


class Keys(SphinxTransform):
    """Makes an object of the type "confval" of each anchor, with the key as its name and its id."""

    # Before the anchors of other pages.
    default_priority = 830
    _anchor = re.compile(r'<a id="([^"]+)">')

    def apply(self, **kwargs: Any) -> None:
        """Replace each anchor, note its key, and let a long key break after its table."""
        if self.env.docname != PAGE:
            return
        slugs = self.env.metadata[PAGE].setdefault("myst_slugs", {})
        domain = self.env.domains.standard_domain
        for raw in list(self.document.findall(nodes.raw)):
            if match := self._anchor.fullmatch(raw.astext()):
                key = match[1]
                slugs[key] = (0, key, key)
                domain.note_object("confval", key, key, location=raw)
                raw.replace_self(nodes.target(ids=[key]))
        for table in self.document.findall(nodes.table):
            table["classes"].append("scenario-keys")
        for literal in list(self.document.findall(nodes.literal)):
            start, dot, name = literal.astext().rpartition(".")
            if dot and isinstance(literal.parent.parent, nodes.entry) and literal.astext() in slugs:
                literal.children = []
                literal += [nodes.Text(start + dot), nodes.raw("", "<wbr>", format="html"), nodes.Text(name)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.add_transform(Keys)
    app.add_css_file("keys.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
