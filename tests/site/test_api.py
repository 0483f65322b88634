"""The API reference of the built site: an entry for each public name, in each module from which users import it."""

from __future__ import annotations

import ast
import json
import re
import zlib
from collections import Counter
from pathlib import Path

import pytest

from tests.pages import ROOT

pytestmark = pytest.mark.browser
PACKAGES = {
    file.parent: ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "fedsel_flwr").rglob("__init__.py")
}


def exported(file: Path) -> list[str]:
    """The names that users import from a file: those of ``__all__``, or those that it imports with "as"."""
    tree = ast.parse(file.read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            names += exported(ROOT.joinpath(*str(node.module).split(".")).with_suffix(".py"))
        elif isinstance(node, ast.ImportFrom):
            names += [str(alias.asname) for alias in node.names if alias.asname]
    return names


PUBLIC = {
    f"{module}.{name}" for folder, module in PACKAGES.items() if (folder / "__init__.py").is_file()
    for name in exported(folder / "__init__.py")
    if module in (
        "fedsel_flwr", "fedsel_flwr.selectors", "fedsel_flwr.strategies", "fedsel_flwr.strategies.message",
        "fedsel_flwr.aggregation", "fedsel_flwr.wireless", "fedsel_flwr.report", "fedsel_flwr.rounds",
        "fedsel_flwr.callbacks", "fedsel_flwr.theory", "fedsel_flwr.testing", "fedsel_flwr.simulations",
        "fedsel_flwr.clients",
    )
}  # fmt: skip


def test_every_public_name_has_one_entry_where_users_import_it(site: Path) -> None:
    assert {"fedsel_flwr.simulations.compare", "fedsel_flwr.selectors.BSFL", "fedsel_flwr.report.advise"} <= PUBLIC
    pages = [file.read_text("utf-8") for file in (site / "api").rglob("*.html")]
    entries = Counter(anchor for text in pages for anchor in re.findall(r'<dt [^>]*id="([\w.]+)"', text))
    assert {name: entries[name] for name in PUBLIC if entries[name] != 1} == {}
    assert {name for name, count in entries.items() if count > 1} == set()


def page_of(site: Path, name: str) -> str:
    """The entry of a name on the page of its module; empty if it is not there."""
    page = site / "api" / name.rpartition(".")[0].replace(".", "/") / "index.html"
    return page.read_text("utf-8").partition(f'id="{name}"')[2].partition("<dt ")[0]


def test_every_public_name_can_be_linked_and_searched(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    linked = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines() if " py:" in line}
    assert PUBLIC - linked == set()
    index = json.loads((site / "searchindex.js").read_text("utf-8").removeprefix("Search.setIndex(").rstrip(";")[:-1])
    searched = {f"{module}.{row[-1]}" for module, rows in index["objects"].items() for row in rows}
    # An object that several modules have is one result of a search.
    elsewhere = {name for name in PUBLIC - searched if "The same as" in page_of(site, name)}
    assert PUBLIC - searched - elsewhere == set()
    assert {name.rpartition(".")[2] for name in elsewhere} <= {name.rpartition(".")[2] for name in searched}
