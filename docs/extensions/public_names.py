"""The API reference shows each public name once, in the module from which users import it.

autoapi parses the modules of :data:`MODULES`, the files from which these import their names, and nothing else.
"""

from __future__ import annotations

import ast
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
        return name not in MODULES
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
    """Resolve a reference to a name where it is defined: the name is shown elsewhere."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target in ARRAYS:
        node["reftarget"] = "numpy.typing.NDArray"
        return app.emit_firstresult("missing-reference", env, node, shown)
    domain, names = env.domains.python_domain, shown_names(env)
    owner = node.get("py:module", "")
    for one in (target, f"{owner}.{target}"):
        head, _, member = one.rpartition(".")
        for name in (names.get(one), f"{names[head]}.{member}" if head in names else None):
            if name and (found := domain.objects.get(name)):
                return domain.resolve_xref(env, node["refdoc"], app.builder, found.objtype, name, node, shown)
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.connect("config-inited", leave_out)
    app.connect("autoapi-skip-member", skip)
    app.connect("missing-reference", resolve, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
