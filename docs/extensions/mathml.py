"""Equations as MathML, which browsers show themselves: no script, no font, and the text can be searched and printed."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

ACCENTED = re.compile(r"(\\(?:bar|hat|tilde)(?:\\[a-zA-Z]+| [a-zA-Z]))(?=[_^])")
BY_LOGARITHM = re.compile(r"(?<=[\w)]) (?=\\(?:ln|log)\b)|(?:(?<=\\ln)|(?<=\\log)) (?=\w)")


def mathml(tex: str, as_block: bool = False) -> str:
    """Return an equation as MathML.

    Raises:
        MathError: The equation has a command that docutils does not know.
    """
    # docutils would write the subscript of an accented letter below the letter, and "2 ln t" without spaces.
    return str(tex2mathml(BY_LOGARITHM.sub(r"\\thinspace ", ACCENTED.sub(r"{{}\1}", tex)), as_block))


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write an equation within a line."""
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write an equation on lines of its own, with a link where it has a label."""
    named = f' id="{node["ids"][0]}"' if node["ids"] else ""
    translator.body.append(f'<div class="math"{named}>{mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
