"""The scenarios and selectors that can be named: the package's TOML files, and ``fedsel list``.

Loads neither pydantic nor torch nor Flower, so that the list works in a core installation.
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
"""Columns of the narrowest terminal to which lines are wrapped."""
LONGEST_NAME = 20
"""Characters of the longest name that its description follows on the same line."""


def scenario_names() -> tuple[str, ...]:
    """Return the names of the scenarios inside the package, sorted."""
    folder = resources.files("fedsel_flwr.simulations") / "scenarios"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def packaged_text(name: str) -> str:
    """Return the TOML text of a scenario inside the package.

    Args:
        name: One of :func:`scenario_names`.
    """
    return (resources.files("fedsel_flwr.simulations") / "scenarios" / f"{name}.toml").read_text("utf-8")


def list_facts() -> dict[str, list[dict[str, Any]]]:
    """Return the scenarios and the selectors, a dictionary each, for ``fedsel list --json``."""
    return {
        "scenarios": [{"name": name, "description": _about(name)} for name in scenario_names()],
        "selectors": [_finite(describe(name)) for name in names()],
    }


def list_lines(width: int) -> Iterator[str]:
    """Yield the lines of ``fedsel list``.

    Args:
        width: Columns of the terminal. Only a word longer than a line passes them.
    """
    yield "scenarios"
    yield from _rows({name: [_about(name)] for name in scenario_names()}, width)
    yield "selectors"
    yield from _rows({name: description(name) for name in names()}, width)


def _finite(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with infinite and undefined defaults as text: JSON has no such numbers."""
    for one in facts.get("parameters", ()):
        if isinstance(one.get("default"), float) and not math.isfinite(one["default"]):
            one["default"] = repr(one["default"])
    return facts


def _about(name: str) -> str:
    return str(tomllib.loads(packaged_text(name)).get("description", ""))


def _rows(entries: dict[str, list[str]], width: int) -> Iterator[str]:
    """Yield the entries: a name with its first line, then its other lines."""
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
        first: Beginning of the first line.
        further: Beginning of the other lines.
    """
    # Names have hyphens: a line never ends within a word.
    return textwrap.wrap(
        text, max(width, NARROWEST), initial_indent=first, subsequent_indent=further, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
