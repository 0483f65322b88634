"""The deployments of a module's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.fleet import Fleet

NODES = ("n0", "n1", "n2")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A SuperLink, for all tests of a module; at the end nothing runs and its port is free."""
    fleet = Fleet(tmp_path_factory.mktemp("deployment"))
    try:
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture
def fleet(deployed: Fleet) -> Iterator[Fleet]:
    """The SuperLink with three SuperNodes that behave well."""
    deployed.restore(*NODES)
    yield deployed
    for name in set(deployed.nodes) - set(NODES):
        deployed.end(name)
