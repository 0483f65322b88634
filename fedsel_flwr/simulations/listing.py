"""Names of scenarios and selectors: the package's TOML files, and ``fedsel list``.

This module loads neither pydantic nor torch nor Flower, so that the list works in a core installation.
"""

from __future__ import annotations

import math
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any

from fedsel_flwr.selectors.registry import describe, description, names

NARROWEST = 40
"""Smallest width of a terminal to which lines are wrapped, in columns."""
LONGEST_NAME = 20
"""Largest length of a name that has its description on the same line, in characters."""


def scenario_names() -> tuple[str, ...]:
    """Return the sorted names of the scenarios inside the package."""
    folder = resources.files("fedsel_flwr.simulations") / "scenarios"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def packaged_text(name: str) -> str:
    """Return the TOML text of a scenario inside the package.

    Args:
        name: A name from :func:`scenario_names`.
    """
    return (resources.files("fedsel_flwr.simulations") / "scenarios" / f"{name}.toml").read_text("utf-8")


def list_facts() -> dict[str, list[dict[str, Any]]]:
    """Return a dictionary for each scenario and each selector, for ``fedsel list --json``."""
    return {
        "scenarios": [{"name": name, "description": _about(name)} for name in scenario_names()],
        "selectors": [_finite(describe(name)) for name in names()],
    }


def list_lines(width: int) -> Iterator[str]:
    """Yield the lines of ``fedsel list``.

    Args:
        width: Columns of the terminal. Only a word that is longer than a line exceeds this width.
    """
    yield "scenarios"
    yield from _rows({name: [_about(name)] for name in scenario_names()}, width)
    yield "selectors"
    yield from _rows({name: description(name) for name in names()}, width)


def _finite(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with infinite and undefined defaults as text, because JSON has no such numbers."""
    for one in facts.get("parameters", ()):
        if isinstance(one.get("default"), float) and not math.isfinite(one["default"]):
            one["default"] = repr(one["default"])
    return facts


def _about(name: str) -> str:
    return str(tomllib.loads(packaged_text(name)).get("description", ""))


def _rows(entries: dict[str, list[str]], width: int) -> Iterator[str]:
    """Yield the lines of the entries: the name with its first line, then its other lines."""
    column = 4 + max(len(name) for name in entries if len(name) <= LONGEST_NAME)
    for name, (first, *more) in entries.items():
        label = f"  {name:<{column - 2}}"
        if len(name) > LONGEST_NAME:
            yield f"  {name}"
            label = " " * column
        yield from wrapped(first, width, label, " " * column)
        for line in more:
            yield from wrapped(line, width, " " * 6, " " * 8)


def wrapped(text: str, width: int, first: str, further: str) -> list[str]:
    """Return a text as lines that fit a terminal.

    Args:
        text: The text, one paragraph.
        width: Columns of the terminal.
        first: Prefix of the first line.
        further: Prefix of the other lines.
    """
    # Lines never break within a word, because names have hyphens.
    return textwrap.wrap(
        text, max(width, NARROWEST), initial_indent=first, subsequent_indent=further, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
