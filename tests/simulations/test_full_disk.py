"""A disk that is really full, at every point of a run: one line, no traceback, and every round that was written."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.simulations import Comparison, load_scenario, simulate

PAGE = os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def small_disk(place: Path, pages: int) -> Iterator[Path]:
    """A file system of so many pages of memory."""
    place.mkdir()
    options = ["-o", f"size={pages * PAGE},mode=777"]
    mounted = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(autouse=True)
def may_mount() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount a small file system, and on Linux")


def journaled(folder: Path) -> dict[str, int]:
    """Rounds in each run's folder."""
    found = {}
    for place in [folder, *folder.glob("*/")]:
        with contextlib.suppress(ParameterError):
            found[place.name] = len(read_history(place).rounds)
    return found


@pytest.mark.timeout(200)
def test_wherever_the_disk_fills_up_it_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From no room for the scenario to no room for the picture."""
    whole = {
        name: simulate(load_scenario("smoke", {"rounds": 12, "engine": "vectorized", "selector": name}))
        for name in ("bsfl", "random")
    }
    seen = set()
    for pages in (1, 2, 4, 8, 12, 14, 16, 20, 64, 256):
        with small_disk(tmp_path / str(pages), pages) as disk:
            argv = ["compare", "smoke", "--rounds", "12", "--selectors", "bsfl,random", "--runs-dir"]
            status = main([*argv, str(disk / "runs")])
            err = capfd.readouterr().err
            seen.add(
                "in a round" if re.search(r"round \d+ cannot be written", err) else "elsewhere" if err else "never"
            )
            if status == 0:
                assert err == ""
                assert len(list(disk.glob("runs/*/comparison.png"))) == 1
                continue
            assert status == 2
            assert re.fullmatch(r"fedsel: error: .*No space left on device.*\n", err), err
            for folder in disk.glob("runs/*"):
                assert f"; {folder} holds " in err
                for name, count in journaled(folder).items():
                    assert f"{name}: {count} round" in err
                if "no round yet" in err:
                    continue
                loaded = Comparison.load(folder)
                for run in (*loaded.runs, *loaded.cut_off):
                    rounds = whole[run.selector].history.rounds[: len(run.history.rounds)]
                    assert repr(run.history.rounds) == repr(rounds)
    assert seen == {"in a round", "elsewhere", "never"}
