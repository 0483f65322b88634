"""Paragraphs, tables and numbers of the page of ``when.py``."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from when_cells import Estimate
from when_fleet import Fleet

NOTHING = "-"
"""Mark of an empty cell."""
SPAN = "…"
"""Mark between the smallest and the largest value in a table, so that they are not read as an interval."""


def wrapped(text: str) -> str:
    """Return the text with lines of at most 120 characters, except headings, pictures and tables."""
    blocks = []
    for block in text.split("\n\n"):
        if not block.lstrip().startswith(("#", "|", "!")):
            items = block.split("\n- ")
            filled = [_filled(" ".join(item.split())) for item in items]
            block = "\n- ".join(textwrap.indent(one, "  ").strip() for one in filled) if len(items) > 1 else filled[0]
        blocks.append(block.strip("\n"))
    return "\n\n".join(blocks) + "\n"


def _filled(text: str) -> str:
    """Break a paragraph into lines. None begins with a percent sign, which would make it a comment on the site."""
    kept = text.replace(" %", "\N{NO-BREAK SPACE}%")
    return textwrap.fill(kept, 118, break_long_words=False, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}%", " %")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [" | ".join(("", *head, "")).strip(), "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def cohort(fleet: Fleet) -> str:
    """Return the words for a fleet's cohort."""
    return f"{fleet.per_round} of {fleet.clients} clients a round"


def label_of(selector: str) -> str:
    """Return the name of a selector in a table, with a mark on Oort, whose clients report equal losses here."""
    return f"{selector}, equal losses" if selector == "oort" else selector


def plays_of(count: int) -> str:
    """Return a number of plays in words."""
    return f"{count} play" + "s" * (count > 1)


def listed(values: Sequence[object]) -> str:
    """Return a list in words."""
    said = [str(value) for value in values]
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"


def points(value: float) -> str:
    """Return a part in whole percent."""
    return str(round(100 * value))


def range_of(values: Iterable[float], mark: str = " to ") -> str:
    """Return the smallest and the largest of some parts, in whole percent, with a mark between them."""
    found = [points(value) for value in sorted(values)]
    if not found:
        return NOTHING
    return found[0] if found[0] == found[-1] else f"{found[0]}{mark}{found[-1]}"


def span_of(values: Iterable[float]) -> str:
    """Return the smallest and the largest of some indices."""
    found = sorted(values)
    return f"{found[0]:.2f}{SPAN}{found[-1]:.2f}" if found else NOTHING


def percent(found: Estimate) -> str:
    """Return an estimated part in percent, with half its interval."""
    value = f"{100 * found.value:.1f}".replace("-0.0", "0.0")
    return value if math.isnan(found.half) else f"{value} ± {100 * found.half:.1f}"
