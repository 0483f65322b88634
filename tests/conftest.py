"""What every test shares: a quiet, offline environment of its own, and the folder of real image data."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before flwr, ray, datasets or torch are imported: they read these at import.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",  # torch's threads: sums in one order, and no contention on two cores
    MPLBACKEND="Agg",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (``-n 2``) a file's tests stay with one of them."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of pages in a browser, before pytest selects by marks; rounds that hang fail after a minute."""
    for item in items:
        if item.nodeid.startswith(("tests/strategies", "tests/rounds")) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(60))
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")


def pytest_collection_finish() -> None:
    """Keep what imports and collection made out of every garbage collection: Flower collects after each message."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """Keep what the files before made and imported (torch) out of them as well: each such collection takes 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def flower_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Flower's folder of this test session, in place of the one in the user's home."""
    home = tmp_path_factory.mktemp("flower-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_HOME", str(home))
        yield home


@pytest.fixture
def fedsel(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``fedsel`` in this process; returns what it prints. Standard error stays empty, except for status 2."""
    from fedsel_flwr.cli import main

    def run(*argv: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main([str(word) for word in argv]) == status
        out, err = capsys.readouterr()
        assert status == 2 or err == ""
        return out + err

    return run


@pytest.fixture
def refused(fedsel: Callable[..., str]) -> Callable[..., str]:
    """The one line with which ``fedsel`` refuses its arguments before it prints anything."""

    def run(*argv: object) -> str:
        said = fedsel(*argv, status=2)
        assert said.startswith("fedsel: error: ")
        assert said.count("\n") == 1, said
        return said.strip()

    return run


@pytest.fixture(params=["legacy", "message"])
def api(request: pytest.FixtureRequest) -> str:
    """Either of Flower's APIs: a test that takes it runs in both."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with FashionMNIST/raw and MNIST/raw: $FEDSEL_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("FEDSEL_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no image data: FEDSEL_DATA is {os.environ.get('FEDSEL_DATA', 'not set')}, no ../shared/data")
    return folder
