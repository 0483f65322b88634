"""What several tests of strategies share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.strategies.zygote import Zygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process that forks another for each play."""
    process = Zygote(tmp_path_factory.mktemp("results"))
    yield process
    process.close()


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
