"""What the tests of clients share."""

from __future__ import annotations

import pytest

from tests.clients.helpers import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that the test turns; clients do not really wait."""
    return Clock(monkeypatch)
