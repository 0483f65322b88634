"""Loads a file of ``benchmarks/``, which is no package, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> Any:
    """The module of ``benchmarks/NAME.py``."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module
