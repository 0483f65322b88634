"""The API reference shows each public name once, in the module from which users import it.

autoapi parses the modules of :data:`MODULES`, the files from which these import their names, and nothing else.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = (
    "fedsel_flwr",
    "fedsel_flwr.strategies",
    "fedsel_flwr.strategies.message",
    "fedsel_flwr.rounds.settings",
    "fedsel_flwr.selectors",
    "fedsel_flwr.selectors.bsfl_solvers",
    "fedsel_flwr.selectors.columns",
    "fedsel_flwr.aggregation",
    "fedsel_flwr.simulations",
    "fedsel_flwr.simulations.worlds.own_data",
    "fedsel_flwr.report",
    "fedsel_flwr.callbacks",
    "fedsel_flwr.clients.telemetry",
    "fedsel_flwr.clients.training",
    "fedsel_flwr.clients.objectives",
    "fedsel_flwr.testing",
    "fedsel_flwr.theory",
    "fedsel_flwr.wireless",
)
"""The modules with a page. The first that has a name shows it."""
ROOMS = re.compile(r"^(=+  =+)\nroom .*?\n\1\n.*?\n\1\n?", re.MULTILINE | re.DOTALL)
ARRAYS = ("fedsel_flwr.checks.BoolArray", "fedsel_flwr.checks.FloatArray", "fedsel_flwr.checks.IntArray")
"""Our names of NumPy's type of arrays, which signatures show."""


def file_of(module: str) -> Path:
    """Return the file of a module."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def sources() -> set[Path]:
    """Return the files that have the public names."""
    files = {file_of(module) for module in MODULES}
    lists = [file for file in files if file.name == "__init__.py"]
    while lists:
        for node in ast.walk(ast.parse(lists.pop().read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fedsel_flwr"):
                file = file_of(str(node.module))
                files.add(file)
                if any(alias.name == "*" for alias in node.names):
                    lists.append(file)
    return files


def leave_out(app: Sphinx, config: Config) -> None:
    """Let autoapi parse the files that have the public names only: parsing takes most of its time."""
    needed = sources()
    every = (ROOT / "fedsel_flwr").rglob("*.py")
    config.autoapi_ignore = [str(file) for file in every if file not in needed]


def skip(app: Sphinx, what: str, name: str, found: Any, skipped: bool, options: list[str]) -> bool | None:
    """Return whether autoapi leaves an object out; None leaves this to autoapi."""
    if what in ("module", "package"):
        # The table of rooms is for readers of the code.
        found.docstring = ROOMS.sub("", found.docstring)
        return name not in MODULES
    if what in ("class", "exception"):
        # Bases are shown without their modules.
        found.bases = [base if base.startswith("~") else f"~{base}" for base in found.bases]
    module = name.rpartition(".")[0]
    if module not in MODULES:
        # An object that has a page of its own gets one even if its module has none.
        return True if what in ("class", "exception") else None
    if skipped:
        return None
    origin = found.obj.get("original_path", name)
    shown = shown_names(app.env)
    if shown.setdefault(origin, name) == name:
        return None
    if MODULES.index(module) < MODULES.index(shown[origin].rpartition(".")[0]):
        raise ValueError(f"{shown[origin]} was shown before {name}")
    return True


def shown_names(env: BuildEnvironment) -> dict[str, str]:
    """Return where each object is defined -> the name under which it is shown."""
    names: dict[str, str] = env.__dict__.setdefault("shown_names", {})
    return names


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element) -> nodes.Element | None:
    """Resolve a reference to a name that is shown elsewhere than where it is defined.

    A name of the package that is not public stays plain text. A name that the package does not define stays unresolved,
    so that Sphinx warns.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target in ARRAYS:
        node["reftarget"] = "numpy.typing.NDArray"
        return app.emit_firstresult("missing-reference", env, node, shown)
    domain, names = env.domains.python_domain, aliases(app)
    for one in (target, f"{node.get('py:module', '')}.{target}", f"{node.get('py:class', '')}.{target}"):
        head, _, member = one.rpartition(".")
        for name in (names.get(one), f"{names[head]}.{member}" if head in names else None):
            if name and (found := domain.objects.get(name)):
                return domain.resolve_xref(env, node["refdoc"], app.builder, found.objtype, name, node, shown)
    return shown if target.rpartition(".")[2] in defined() else None


def aliases(app: Sphinx) -> dict[str, str]:
    """Return each name of a shown object -> the name under which it is shown.

    An object has a name in its module, one in each module that imports it, and its bare name if no other object has it.
    """
    names: dict[str, str] = getattr(app, "public_aliases", {})
    if not names:
        every, bare = app.env.__dict__["autoapi_all_objects"], dict[str, set[str]]()
        for origin, name in shown_names(app.env).items():
            bare.setdefault(name.rpartition(".")[2], set()).add(name)
            while origin:
                names[origin] = name
                origin = every[origin].obj.get("original_path", "") if origin in every else ""
        names |= {short: full.pop() for short, full in bare.items() if len(full) == 1}
        app.__dict__["public_aliases"] = names
    return names


@cache
def defined() -> frozenset[str]:
    """Return the bare names that the package defines, and those of Flower that ``flower.py`` imports."""
    names = set[str]()
    for file in (ROOT / "fedsel_flwr").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.alias) and file.name == "flower.py":
                names.add(node.name)
    return frozenset(names)


def prepare(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Prepare a docstring for Napoleon and docutils, which would misread two kinds of lines.

    Napoleon takes the first words of an attribute's text for a type, up to a colon. docutils takes a description such
    as "m." for the number of a list's item.
    """
    lines[:] = [re.sub(r"^(\s+\w+: )([A-Za-z]\.)$", r"\1\\\2", line) for line in lines]
    if what in ("attribute", "data", "property"):
        # An empty comment, without a colon.
        lines[0:0] = ["..", ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.connect("config-inited", leave_out)
    app.connect("autoapi-skip-member", skip)
    app.connect("autodoc-process-docstring", prepare, priority=100)
    app.connect("missing-reference", resolve, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
