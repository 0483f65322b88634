"""The API reference shows each public name once, in the module from which users import it."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

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
    shown: dict[str, str] = app.env.__dict__.setdefault("shown_names", {})
    if shown.setdefault(origin, name) == name:
        return None
    mine, theirs = MODULES.index(module), MODULES.index(shown[origin].rpartition(".")[0])
    if mine < theirs:
        raise ValueError(f"{shown[origin]} was shown before {name}")
    return True


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.connect("autoapi-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
