"""Federated-learning client selection as Flower strategies.

The algorithms live in :mod:`fedsel_flwr.selectors` (NumPy only), the Flower strategies that carry them in
:mod:`fedsel_flwr.strategies`. Importing this package loads neither Flower nor torch nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsel_flwr.errors import FedSelError, ParameterError, RunError, StateError

__version__: str
"""The version of this package, read from its metadata when it is first used."""

__all__ = ["FedSelError", "ParameterError", "RunError", "StateError", "__version__"]


def _read_version() -> str:
    """Return the version in ``pyproject.toml``, the only place that states it, or in the metadata made from it.

    A clone and a Flower app have the file next to the package. An installed package has the metadata.
    """
    import importlib.metadata
    import tomllib
    from pathlib import Path

    file = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text("utf-8")).get("project", {})
        # The file of another project, into which this package was copied.
        if project.get("name") == "fedsel-flwr":
            return str(project["version"])
    try:
        return importlib.metadata.version("fedsel-flwr")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# Hidden from type checkers, which would otherwise accept any name of this package.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = _read_version()
        return found
