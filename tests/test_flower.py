"""Flower's versions: one bound everywhere."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tools.flower_matrix import pinned

ROOT = Path(__file__).resolve().parents[1]


def _requirements() -> dict[str, list[Requirement]]:
    """File -> what it says of flwr."""
    found = {}
    for path in (ROOT / "pyproject.toml", *sorted((ROOT / "examples").rglob("pyproject.toml"))):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        parsed = [Requirement(one) for one in [*project["dependencies"], *itertools.chain.from_iterable(extras)]]
        found[path.relative_to(ROOT).as_posix()] = [one for one in parsed if one.name == "flwr"]
    return found


def test_the_bounds_of_flwr_are_the_same_everywhere() -> None:
    said = {file: {str(one.specifier) for one in given} for file, given in _requirements().items()}
    (bounds,) = said["pyproject.toml"]
    assert said == {file: {bounds} for file in said}
    assert len(said) >= 4
    assert Requirement(f"flwr{bounds}").specifier.contains(pinned())
