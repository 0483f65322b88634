"""Loads and runs files of ``benchmarks/``, which is no package."""

from __future__ import annotations

import csv
import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> Any:
    """The module of ``benchmarks/NAME.py``."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: object) -> None:
    """Run a file, or a folder's main file, in this process, as from the command line; its modules go afterwards."""
    path = FOLDER / name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        if path.is_file():
            patch.syspath_prepend(str(FOLDER))
        runpy.run_path(str(path), run_name="__main__")
    for key, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[key]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """A CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cells_of(text: str, heading: str, label: str) -> list[str]:
    """The cells of a row in the first table after a heading."""
    part = text[text.index(heading) :]
    (line,) = re.findall(rf"^\| [`*]{re.escape(label)}[`*] \|.*$", part.split("\n\n![")[0].split("\n### ")[0], re.M)[:1]
    return [cell.strip() for cell in line.strip("|").split("|")]
