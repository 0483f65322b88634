"""Fixtures of the tests of simulations."""

from __future__ import annotations

import pytest

from tests.simulations.cut_off_runs import without_pictures


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures empty."""
    without_pictures(monkeypatch)
