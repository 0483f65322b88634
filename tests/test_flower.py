"""Flower's versions: one bound, one matrix, and pages that agree."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests import flower_matrix

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/your-flower-project.md"


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
    assert Requirement(f"flwr{bounds}").specifier.contains(flower_matrix.pinned())


def test_the_bounds_are_those_of_what_the_matrix_tried() -> None:
    """The page has what ``make flower-matrix`` printed; the bound is the series after the newest that was tried."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    lines = re.findall(r"^flwr (\S+) \((.*?)\): (.*)$", page, re.MULTILINE)
    versions = [Version(version) for version, _, _ in lines]
    assert len(lines) == 4, lines
    assert [str(versions[0]), str(versions[1])] == [flower_matrix.OLDEST, flower_matrix.pinned()]
    assert versions == sorted(versions)
    assert versions[3].is_devrelease
    newest = versions[3]
    bounds = next(iter(_requirements()["pyproject.toml"])).specifier
    oldest = f"{versions[0].major}.{versions[0].minor}"
    assert {str(one) for one in bounds} == {f">={oldest}", f"<{newest.major}.{newest.minor + 1}"}
    for name in ("README.md", PAGE):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert f"{oldest} to {newest.major}.{newest.minor}" in text, name
    for _, _, said in lines:
        assert all(f"{check}: " in said for check in flower_matrix.CHECKS), said


# ---- the matrix itself ----------------------------------------------------------------------------------------------


def test_a_step_is_bounded_though_its_children_hold_on() -> None:
    """What Ray starts would keep a pipe open."""
    child = "import time; print('child', flush=True); time.sleep(60)"
    program = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        flower_matrix.run(sys.executable, "-c", program, longest_s=0.5)
    assert time.monotonic() - start < 10.0
    ended = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); print('done')"
    assert flower_matrix.run(sys.executable, "-c", ended, longest_s=30.0).stdout.splitlines()[0] == "done"
    assert time.monotonic() - start < 20.0


def test_a_version_that_cannot_be_had_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*argv: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found for flwr==9.9.9\n")

    monkeypatch.setattr(flower_matrix, "run", no)
    monkeypatch.setattr(flower_matrix.venv, "create", lambda folder, with_pip: _empty(Path(folder)))
    said = "flwr 9.9.9: cannot be had: ERROR: No matching distribution found for flwr==9.9.9"
    assert flower_matrix.tried("9.9.9", ["both APIs"]) == (False, said)


def _empty(folder: Path) -> None:
    (folder / "lib" / "python3" / "site-packages").mkdir(parents=True)


@pytest.mark.parametrize(
    ("status", "printed", "said"),
    [
        (0, "..\n12 passed, 3 warnings in 4.00s", "passed 12"),
        (1, "12 passed, 2 errors in 4.00s", "passed 12, 2 files cannot be imported"),
        (1, "FAILED tests/a.py::b\n1 failed, 11 passed in 4.00s", "1 failed (tests/a.py::b), 11 passed"),
        (2, "", "0 failed (), 0 passed"),
    ],
)
def test_a_check_says_what_passed(status: int, printed: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], status, printed, "")
    monkeypatch.setattr(flower_matrix, "run", lambda *argv: done)
    assert flower_matrix.checked(Path("python"), ("-m", "pytest"), Path("runs")) == said
