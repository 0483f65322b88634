"""What the tests of clients share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.helpers import Clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    """A clock that the test turns; clients do not really wait."""
    with pytest.MonkeyPatch.context() as patch:
        yield Clock(patch)
