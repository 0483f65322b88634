"""Flower's versions: one bound everywhere, a warning past the newest tested, and what a changed Flower lacks."""

from __future__ import annotations

import itertools
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from fedsel_flwr.flower_entries import NEWEST_TESTED, missing, release, warn_if_newer
from fedsel_flwr.simulations import doctor
from fedsel_flwr.simulations.doctor import check_flower
from tests.processes import run_python
from tools.flower_matrix import pinned

ROOT = Path(__file__).resolve().parents[1]
NEWER = f"flwr 99.1.0 is newer than the newest tested, {NEWEST_TESTED}"


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
    assert Requirement(f"flwr{bounds}").specifier.contains("99.0")
    assert release(pinned()) == release(NEWEST_TESTED)


def test_a_newer_flower_gives_one_warning_when_strategies_are_imported(tmp_path: Path) -> None:
    program = """
import importlib.metadata, warnings, flwr
real = importlib.metadata.version
importlib.metadata.version = lambda name: "99.1.0" if name == "flwr" else real(name)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fedsel_flwr.strategies
    import fedsel_flwr.strategies.message
ours = [one for one in caught if "newest tested" in str(one.message)]
print(*((str(one.message), one.filename) for one in ours), sep="\\n")
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    done = run_python(script)
    text = f"{NEWER}; `fedsel doctor` checks what this package uses"
    assert done.stdout.splitlines() == [str((text, str(script)))], done.stderr


@pytest.mark.parametrize("version", ["1.22.0", NEWEST_TESTED, f"{NEWEST_TESTED}.9", "unknown"])
def test_a_tested_flower_gives_no_warning(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_newer(version)


def problems() -> list[str]:
    """What ``fedsel doctor`` finds wrong with this Flower."""
    return [one.text for one in check_flower() if one.status == "problem"]


def test_doctor_names_what_a_changed_flower_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    import flwr.common.constant
    import flwr.server.compat
    import flwr.server.criterion

    assert problems() == []
    with monkeypatch.context() as patch:
        patch.delattr(flwr.server.compat, "start_grid")
        patch.setattr(flwr.server.criterion.Criterion, "select", lambda self, proxy: True)
        patch.delattr(flwr.common.constant.ErrorCode, "NODE_UNAVAILABLE")
        expected = (
            "flwr.server.compat.start_grid is missing: scenarios do not run on Ray in the legacy API",
            "flwr.server.criterion.Criterion.select has no parameter client: ",
            "flwr.common.constant.ErrorCode.NODE_UNAVAILABLE is missing: ",
        )
        assert [one.startswith(words) for one, words in zip(problems(), expected, strict=True)] == [True] * 3
    monkeypatch.setattr(flwr.server.compat, "start_grid", lambda *, grid, server: None)
    assert problems()[0].startswith("flwr.server.compat.start_grid has no parameter config: ")


def test_doctor_names_a_module_that_is_gone_but_not_an_extra_that_is_not_installed(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "flwr.supercore.task_identity", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "flwr.simulation.ray_transport.ray_actor", raising=False)
    (problem,) = problems()
    assert problem.startswith("flwr.supercore.task_identity.TaskIdentity cannot be imported (")
    assert problem.endswith("): fedsel_flwr.testing.check_strategy makes no messages")
    # Flower did not have it then.
    assert list(missing("1.22.0")) == []


def test_doctor_notes_an_untested_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda: "99.1.0")
    assert [(one.status, one.text) for one in check_flower()] == [
        ("note", NEWER),
        ("ok", "99.1.0 has each private or deprecated name that this package uses"),
    ]
