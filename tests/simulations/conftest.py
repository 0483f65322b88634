"""Fixtures of the tests of simulations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulations.cut_off_runs import without_pictures
from tests.simulations.inprocess import in_process


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Flower's simulations in this process."""
    monkeypatch.setattr("fedsel_flwr.simulations.engine.run_simulation", in_process)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what was imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a reference adds the working directory
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]
