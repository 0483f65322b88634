"""Every class that the package exports can be read: inspect and editors find its source."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import fedsel_flwr

PACKAGES = [
    "fedsel_flwr",
    *sorted(found.name for found in pkgutil.walk_packages(fedsel_flwr.__path__, "fedsel_flwr.") if found.ispkg),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_source_of_every_exported_class_is_the_class(package: str) -> None:
    home = importlib.import_module(package)
    public = [name for name in vars(home) if not name.startswith("_")]
    for name in getattr(home, "__all__", public):
        exported = getattr(home, name)
        if inspect.isclass(exported):
            assert f"class {exported.__name__}" in inspect.getsource(exported), name
            assert getattr(importlib.import_module(exported.__module__), exported.__qualname__) is exported
