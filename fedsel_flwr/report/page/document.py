"""Document: a self-contained HTML page with charts, tables, menus and downloads.

The page loads nothing from elsewhere. Its Content-Security-Policy allows two scripts, by their hashes: the bundle of
Vega, Vega-Lite and vega-embed that vl-convert makes, and ``page.js``. Vega interprets its expressions instead of
compiling them (``ast: true``), so that no text can become code. Jinja escapes every text of the page, and the data are
packed.

Every chart has a table of rows. A menu shows the rows whose column has the menu's value. All charts with the same menu
therefore show the same selector or seed. The menus' values are also in the address, after the ``#``.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.run_folder import atomic_write, load_optional

PACKAGES = ("altair", "jinja2", "vl_convert")
"""Packages of the extra ``report``."""
INSTALL = "pip install 'fedsel-flwr[report]'"
LONG_CELL = 30
"""Number of characters up to which a cell of a grid is one line."""
DIGITS = 6
"""Significant digits of the numbers in a page."""
POLICY = (
    "default-src 'none'", "script-src {scripts}", "style-src 'unsafe-inline'", "img-src data: blob:", "base-uri 'none'",
    "form-action 'none'",
)  # fmt: skip
CHILD = (
    "import json, sys, vl_convert; made = getattr(vl_convert, sys.argv[1])(**json.load(sys.stdin)); "
    "sys.stdout.buffer.write(made if isinstance(made, bytes) else made.encode())"
)
"""Program that calls a function of vl-convert, and writes its result."""
Columns = Mapping[str, Sequence[Any] | np.ndarray[Any, Any]]
"""Table of a chart: column -> values."""

# Ids of this process, and of processes from which it was forked, that have called vl-convert.
_callers: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class Menu:
    """A menu of the page.

    Attributes:
        label: Label for readers.
        options: Value -> text. The first value is the default.
    """

    label: str
    options: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with its rows. Its title and its text are in the document's template.

    Attributes:
        name: Name of the chart, part of its downloads' names.
        rows: Table of the chart.
        spec: Vega-Lite specification. Its data have the name ``rows``.
        menus: Column of the table -> name of the menu that selects the rows.
        series: Column whose values are the names of the series; empty if there is none. The rows get their number, and
            the specification gets the names as ``labels``.
        shown: Column with the labels of the selectors that the reader can hide; empty if there is none.
        words: Menu -> value -> text in the specification -> replacement, for titles of axes.
    """

    name: str
    rows: Columns
    spec: Mapping[str, Any]
    menus: Mapping[str, str] = field(default_factory=dict)
    series: str = "selector"
    shown: str = ""
    words: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A page.

    Attributes:
        title: Title.
        lead: Lines below the title.
        template: File of the sections.
        sections: Name in the address of a link -> heading, in the order of the template.
        charts: The charts, in the order of the template.
        facts: Values of the template's names.
        menus: Name of a menu, also in the address -> the menu.
        selectors: Selectors that the reader can hide -> colour and dashes of their lines.
    """

    title: str
    lead: Sequence[str]
    template: str
    sections: Mapping[str, str]
    charts: Sequence[Chart]
    facts: Mapping[str, Any]
    menus: Mapping[str, Menu] = field(default_factory=dict)
    selectors: Mapping[str, tuple[str, Sequence[int]]] = field(default_factory=dict)


def missing_packages() -> list[str]:
    """Return the packages of :data:`PACKAGES` that are not installed."""
    return [name for name in PACKAGES if not importlib.util.find_spec(name)]


def write_page(document: Document | Mapping[str, Document], path: Path) -> Path:
    """Write a page.

    Args:
        document: The page; or the name of each scenario -> its page, for one page with a menu of the scenarios.
        path: Path of the file, which is replaced if it exists.

    Returns:
        ``path``.

    Raises:
        RunError: A package of the extra ``report`` is not installed.
    """
    text = render(document)
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def render(document: Document | Mapping[str, Document]) -> str:
    """Return a page as HTML.

    Args:
        document: The page, or the pages of several scenarios, as for :func:`write_page`.

    Raises:
        RunError: A package of the extra ``report`` is not installed.
    """
    if missing := missing_packages():
        raise RunError(f"the page needs {', '.join(missing)}. Install the missing packages with {INSTALL}")
    jinja = load_optional("jinja2")
    environment = jinja.Environment(
        loader=jinja.FunctionLoader(_file), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja.StrictUndefined,
    )  # fmt: skip
    environment.globals["long_columns"] = long_columns
    scripts = [vega_bundle(), _file("page.js")]
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in scripts)
    documents = {"": document} if isinstance(document, Document) else document
    page = environment.get_template("page.html").render(
        documents=documents, policy="; ".join(POLICY).format(scripts=hashes), style=_file("page.css"), scripts=scripts,
        data=_packed([{"scenario": name, **_data(one)} for name, one in documents.items()]),
    )  # fmt: skip
    return str(page)


def long_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return whether each column of a table has long texts, which start at the left and have several lines.

    >>> long_columns(["first", "second"], [["a", "b" * 31], ["c", "d"]])
    [False, True]
    """
    return [any(len(row[i]) > LONG_CELL for row in rows) for i in range(len(head))]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) else short


def _data(document: Document) -> dict[str, Any]:
    """Return what ``page.js`` reads."""
    return {
        "title": document.title,
        "menus": [{"name": name, "values": list(menu.options)} for name, menu in document.menus.items()],
        "selectors": list(document.selectors),
        "charts": [{name: value for name, value in vars(one).items() if name != "rows"} for one in document.charts],
        "tables": {one.name: {column: _plain(own) for column, own in one.rows.items()} for one in document.charts},
    }


def _plain(values: Sequence[Any] | np.ndarray[Any, Any]) -> list[Any]:
    return [one if isinstance(one, str) else _number(one) for one in np.asarray(values).tolist()]


def _packed(value: Any) -> str:
    """Return JSON as gzip in base64, in which no text can end the script element."""
    return base64.b64encode(gzip.compress(json.dumps(value, allow_nan=False).encode(), mtime=0)).decode()


def convert(function: str, **arguments: Any) -> bytes:
    """Call a function of vl-convert, such as ``vegalite_to_png``.

    vl-convert works in a thread. After a fork, the child does not have this thread, and a call would never return. A
    forked process therefore calls vl-convert in a new process.

    Args:
        function: Name of the function.
        **arguments: Its arguments, as values of JSON.

    Raises:
        RunError: vl-convert is not installed.
    """
    module = load_optional("vl_convert")
    _callers.add(os.getpid())
    if len(_callers) == 1:
        made = getattr(module, function)(**arguments)
        return made if isinstance(made, bytes) else str(made).encode()
    given = json.dumps(arguments).encode()
    # With -P, the working directory is no place to import from.
    return subprocess.run(
        [sys.executable, "-P", "-c", CHILD, function], input=given, capture_output=True, check=True
    ).stdout


@functools.cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script; vl-convert takes seconds to make it."""
    return convert("javascript_bundle").decode()


def _file(name: str) -> str:
    return (resources.files("fedsel_flwr.report.page") / name).read_text("utf-8")


def _digest(text: str) -> str:
    """Return the SHA-256 of a script as a Content-Security-Policy writes it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
