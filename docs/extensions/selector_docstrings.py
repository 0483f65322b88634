"""What the gallery reads from the docstring and the source of a selector's class."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from docutils.utils.math.tex2unichar import mathalpha as LETTERS

from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.registry import section

SENTENCE = re.compile(r"(?<!et al)[.!?](?=\s+[A-Z`]|\s*$)")
NO_TAG = re.compile(r"noqa|type:|fmt:|pragma|\([A-Za-z](, [A-Za-z])+\)$")
"""Comments after code that name no equation: those for tools, and shapes of arrays."""
HEADING = re.compile(
    r"^(?:(?:Args|Attributes|Deviations|Example|Note|Raises|References|Returns|When not to use):(?= |$)|>>>)",
    re.MULTILINE,
)
FAILS = re.compile(r"\bfail(?:s|ed|ing|ure|ures)?\b|\bsends no (?:hash|gradient|loss)\b", re.IGNORECASE)
SYMBOL = re.compile(r"(Delta )?([A-Za-z]+)(?:-(bar|hat|tilde))?('?)(?:_([A-Za-z]+|\d))?(?:\^(\w))?(\(\w\))?")
"""A symbol in a docstring's table: mu-bar_k, tau_max, U(i), Delta t."""
TABLE_RULE = re.compile(r"=+( +=+)+")


class MissingFact(Exception):
    """A page of the gallery lacks a fact; the message names the fact and its home."""


def idea(cls: type[Selector]) -> str:
    """The first two sentences of the docstring.

    Raises:
        MissingFact: The docstring has fewer than two sentences before its table and its sections.
    """
    prose = " ".join(" ".join(explanation(cls)[0]).split())
    ends = [match.end() for match in SENTENCE.finditer(prose)]
    if len(ends) < 2:
        raise MissingFact(
            f"the docstring of {cls.__name__} needs two sentences on its idea before the table of symbols, got "
            f"{prose!r}. Write a second sentence"
        )
    return prose[: ends[1]]


def required_section(cls: type[Selector], heading: str) -> str:
    """A section of the docstring.

    Raises:
        MissingFact: The docstring has no such section.
    """
    if not (text := section(cls, heading)):
        raise MissingFact(f'the docstring of {cls.__name__} has no section "{heading}:". Write one')
    return text


def failure_items(cls: type[Selector]) -> list[str]:
    """The items of the section "Deviations" that say what the selector does if clients fail."""
    items = re.split(r"^(?=\* )", section(cls, "Deviations"), flags=re.MULTILINE)
    return [one for one in items if one.startswith("* ") and FAILS.search(one)]


def explanation(cls: type[Selector]) -> tuple[list[str], list[list[str]], list[str]]:
    """The docstring before its first section: paragraphs, rows of the table of symbols, and paragraphs after it.

    Without a table, all paragraphs come first.
    """
    text = HEADING.split(inspect.cleandoc(cls.__doc__ or ""))[0]
    before: list[str] = []
    rows: list[list[str]] = []
    after: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if TABLE_RULE.match(block):
            rows = _rows(block.splitlines())
        else:
            (after if rows else before).append(block)
    return before, rows, after


def symbols(cell: str) -> str:
    """The symbols in a cell of a docstring's table, in reStructuredText: an equation for each :data:`SYMBOL`."""
    return "".join(_symbol(part) for part in re.split(r"(, | \+ )", cell))


def _symbol(text: str) -> str:
    match = SYMBOL.fullmatch(text)
    if not match:
        return text
    delta, base, accent, prime, low, high, of = match.groups(default="")
    if len(base) > 1 and base not in LETTERS and not low:
        return text
    tex = f"\\{base}" if base in LETTERS else base if len(base) == 1 else rf"\mathrm{{{base}}}"
    if accent:
        tex = rf"\{accent}{tex}" if tex[0] == "\\" else rf"\{accent} {tex}"
    tex = (rf"\{delta}" if delta else "") + tex + prime
    if low:
        tex += f"_{low}" if len(low) == 1 else rf"_{{\mathrm{{{low}}}}}"
    if high:
        tex += f"^{high}"
    return f":math:`{tex}{of}`"


def _rows(lines: Sequence[str]) -> list[list[str]]:
    """Rows of a simple table in reStructuredText; a line without a first cell continues the row above."""
    columns = [match.start() for match in re.finditer("=+", lines[0])]
    bounds = list(zip(columns, [*columns[1:], None], strict=True))
    rows: list[list[str]] = []
    for line in lines:
        if TABLE_RULE.match(line):
            continue
        cells = [line[start:end].strip() for start, end in bounds]
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells, strict=True)]
    return rows


def tagged_lines(cls: type[Selector]) -> list[str]:
    """The statements that end in the number of an equation or a section, after the function that holds them.

    A selector without such statements has no equations; its whole ``_select`` is short.
    """
    module = inspect.getmodule(cls)
    found: list[str] = []
    for one in _homes(cls, module):
        source = inspect.cleandoc("\n" + inspect.getsource(one))
        lines, tags = source.splitlines(), _tags(source)
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef):
                continue
            statements = _statements(function, tags)
            if statements:
                place = (
                    function.name if one is function or inspect.isfunction(one) else f"{one.__name__}.{function.name}"
                )
                found += ["", f"# {place}"] if found else [f"# {place}"]
                found += [inspect.cleandoc("\n" + "\n".join(lines[a - 1 : b])) for a, b in statements]
    return found or inspect.cleandoc("\n" + inspect.getsource(cls._select)).splitlines()


def _homes(cls: type[Selector], module: ModuleType | None) -> Iterator[Any]:
    """Yield the classes and functions that implement a selector: its bases but the common one, and its helpers."""
    yield from (base for base in cls.__mro__ if issubclass(base, Selector) and base is not Selector)
    own = cls.__module__
    for one in vars(module).values():
        home = getattr(one, "__module__", "")
        helper = home == own or home.startswith(f"{own}_")
        if helper and (inspect.isfunction(one) or (inspect.isclass(one) and not issubclass(one, Selector))):
            yield one


def _tags(source: str) -> set[int]:
    """Lines with code and a comment after it."""
    tags = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("# ")
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip() and not NO_TAG.match(text):
            tags.add(token.start[0])
    return tags


def _statements(function: ast.FunctionDef, tags: set[int]) -> list[tuple[int, int]]:
    """First and last line of each tagged simple statement of a function; of a compound one, the tagged line."""
    simple = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(function)
        if isinstance(node, ast.stmt) and not hasattr(node, "body")
    ]
    lines = [tag for tag in tags if function.lineno <= tag <= (function.end_lineno or 0)]
    found = {next(((a, b) for a, b in simple if a <= tag <= b), (tag, tag)) for tag in lines}
    return sorted(found)
