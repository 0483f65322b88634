"""Fixtures of the tests of simulations."""

from __future__ import annotations

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
