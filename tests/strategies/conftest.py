"""What several tests of strategies share."""

from __future__ import annotations

import logging
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
def aloud(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, with the remarks of this package too."""
    caplog.set_level(logging.INFO, logger="fedsel_flwr")
    return caplog


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
