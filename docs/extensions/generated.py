"""Tables that the site takes from the code: a line ``<!-- generated: NAME -->`` of a page is replaced by a table.

No table is stored, so that none can differ from the code. The lines up to ``<!-- end -->``, if there are any, are what
readers of the repository see instead.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gallery_facts as facts
import scenario_keys
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from fedsel_flwr.arguments import build_parser
from fedsel_flwr.selectors.registry import citations, describe, selector_class

PACKAGE = Path(__file__).resolve().parents[2] / "fedsel_flwr"
PLACE = re.compile(r"^<!-- generated: (.+?) -->$(?:\n(?:(?!<!-- generated).*\n)*?<!-- end -->)?", re.MULTILINE)
Answer = Callable[[facts.Reads], tuple[str, str]]


def replace(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace each place of a page by its table.

    Raises:
        ExtensionError: No table has the name.
    """

    def table(match: re.Match[str]) -> str:
        name, _, of = match[1].partition(" of ")
        if name not in TABLES:
            raise ExtensionError(f"{page} asks for the table {name!r}. Expected one of {', '.join(TABLES)}")
        return TABLES[name](of) if of else TABLES[name]()

    source[0] = PLACE.sub(table, source[0])


# ---- selectors -----------------------------------------------------------------------------------------------------
def selectors() -> str:
    """Every selector: its idea, its paper, and what it reads."""
    rows = []
    for name in facts.ours():
        reads = ", ".join(f"`{column.name}`" for column in facts.Reads.of(selector_class(name)).columns)
        rows.append([f"`{name}`", plain(describe(name)["summary"]), paper(name), reads or "nothing"])
    return table(["selector", "idea", "paper", "reads"], rows)


def paper(name: str) -> str:
    """The first paper of a selector, such as "Xia et al. 2020"; "none" if it has none."""
    for entry in citations(name) if selector_class(name).citations else ():
        fields = dict(re.findall(r"^\s*(\w+)\s*=\s*\{+(.*?)\}+,?$", entry, re.MULTILINE | re.DOTALL))
        authors = re.split(r"\s+and\s+", fields.get("author", ""))
        last = authors[0].partition(",")[0] if "," in authors[0] else authors[0].rpartition(" ")[2]
        return f"{last}{' et al.' if len(authors) > 1 else ''} {fields.get('year', '')}".strip()
    return "none"


def cards() -> str:
    """The cards of the papers, each with its selectors and what they read."""
    rows = []
    for card, names in facts.cards().items():
        title = (facts.CARDS / f"{card}.md").read_text("utf-8").partition("\n")[0].removeprefix("# ")
        reads = {column.name: None for name in names for column in facts.Reads.of(selector_class(name)).columns}
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append([f"[{title}]({card}.md)", listed, ", ".join(f"`{column}`" for column in reads)])
    return table(["card", "selectors", "what the selectors read"], rows)


def secure_aggregation() -> str:
    """The selectors by whether they work under secure aggregation."""
    reasons = {
        "yes": "They read no client's update.",
        "not advised": "Each client sends a vector outside the encryption, which tells the server much about its data.",
        "no": "The server must read each client's update.",
    }
    return by_answer("works", facts.secure_aggregation, reasons)


def differential_privacy() -> str:
    """The selectors by what a guarantee of differential privacy covers."""
    reasons = {
        "yes": "On the server's clock, they read nothing that clients send. The guarantee is that of the wrapper.",
        "model only": "They read values that clients send without noise. The guarantee covers the model alone. Nothing "
        "is logged.",
        "not covered": "The server reads each client's update before the noise. The guarantee does not cover the "
        "choices, and the strategy logs a warning.",
    }
    return by_answer("covered", facts.differential_privacy, reasons)


def by_answer(question: str, answer: Answer, reasons: dict[str, str]) -> str:
    """A row for each answer, with its selectors and its reason."""
    names: dict[str, list[str]] = {}
    for name in facts.ours():
        names.setdefault(answer(facts.Reads.of(selector_class(name)))[0], []).append(f"`{name}`")
    rows = [[word, ", ".join(names[word]), reason] for word, reason in reasons.items() if word in names]
    return table([question, "selectors", "meaning"], rows)


# ---- the command line ----------------------------------------------------------------------------------------------
def arguments(command: str) -> str:
    """What a command takes, in the words of its help."""
    parser = build_parser()[1][command]
    rows = [argument(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return table(["argument", "meaning"], rows) if rows else "It takes no argument.\n"


def argument(action: argparse.Action) -> list[str]:
    """A row: the argument with its value, and its help."""
    named = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        value = action.metavar or (" or ".join(action.choices) if action.choices else action.dest.upper())
        named = f"{named} {value}"
    return [f"`{named}`", str(action.help) % {"default": action.default}]


# ---- the rooms of the package --------------------------------------------------------------------------------------
def rooms() -> str:
    """Every folder of the package with its files, each with the first line of its docstring."""
    parts = []
    for folder in [PACKAGE, *sorted(path for path in PACKAGE.rglob("*") if (path / "__init__.py").is_file())]:
        files = [file for file in sorted(folder.glob("*.py")) if file.stem != "__init__"]
        rows = [[f"`{file.stem}`", plain(first_line(file))] for file in files]
        if rows:
            name = folder.relative_to(PACKAGE.parent).as_posix()
            head = plain(first_line(folder / "__init__.py"))
            parts.append(f"### {name}\n\n{head}\n\n{table(['room', 'what it is'], rows)}")
    return "\n".join(parts)


def first_line(file: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]


# ---- Markdown ------------------------------------------------------------------------------------------------------
def plain(text: str) -> str:
    """A docstring's line in Markdown."""
    return re.sub(r":[a-z]+:`~?(?:[a-z_]+\.)*([A-Za-z_.]+)`", r"`\1`", text).replace("``", "`")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: dict[str, Callable[..., str]] = {
    "selectors": selectors,
    "cards": cards,
    "secure aggregation": secure_aggregation,
    "differential privacy": differential_privacy,
    "arguments": arguments,
    "scenario keys": scenario_keys.text,
    "rooms": rooms,
}
"""Name of a table -> the function that writes it."""


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.connect("source-read", replace)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
