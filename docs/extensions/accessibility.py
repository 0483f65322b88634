"""Mends the markup of furo and Sphinx that screen readers misread. axe finds each of these faults in a browser."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

SIGNATURE = re.compile(r'(?<=<span class="sig-paren">\(</span>)\s*<dl>(.*?)</dl>\s*', re.DOTALL)
"""A signature with a line for each parameter."""


def mend(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Give the headings of the navigation their level, and make no list of descriptions of a signature."""
    navigation = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = navigation.replace('role="heading"', 'role="heading" aria-level="2"')
    if "body" in context:
        context["body"] = SIGNATURE.sub(_lines, context["body"])


def _lines(match: re.Match[str]) -> str:
    lines = match[1].replace("<dd>", '<span class="sig-line">').replace("</dd>", "</span>")
    return f'<span class="sig-lines">{lines}</span>'


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    # After furo, which makes the navigation.
    app.connect("html-page-context", mend, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
