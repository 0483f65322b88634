"""Fixtures of the worlds: downloads that fail."""

from __future__ import annotations

from urllib.error import URLError

import pytest
from torchvision import datasets as torchvision_datasets


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every download fail as it does without a network; return the sets that were asked for."""
    asked: list[str] = []

    def fail(self: object) -> None:
        asked.append(type(self).__name__)
        raise URLError("no network in this test")

    for name in ("MNIST", "EMNIST", "CIFAR10"):
        monkeypatch.setattr(getattr(torchvision_datasets, name), "download", fail)
    monkeypatch.delenv("FEDSEL_DATA", raising=False)
    return asked
