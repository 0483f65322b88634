"""A server that is killed and goes on: choices, history and model are bit for bit those of the run that was not."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.records import RoundEntry, encode_entry
from tests.strategies.either_api import APIS
from tests.strategies.flower_world import Run, Seen
from tests.strategies.zygote import Failpoints, Zygote, in_memory

pytestmark = pytest.mark.timeout(280)
SLOW = pytest.mark.slow, pytest.mark.timeout(1200)
RUNS = [
    Run(api, base, selector)
    for api in APIS
    for base, selector in (("FedAvg", "bsfl"), ("FedAdam", "bsfl"), ("FedAdam", "fedcm-ts"))
]
BUFFERED = Run("message", "FedAvg", "bsfl", options={"concurrency": 6})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as place:
        yield place


def played(run: Run, folder: Path, progress: Path | None = None) -> Seen:
    """A run that goes on where it was; a byte is added to ``progress`` at each step."""
    if progress is None:
        return run.play(folder)
    file = os.open(progress, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return run.play(folder, step=lambda kind: os.write(file, kind.encode()))


def killed(zygote: Zygote, run: Run, folder: Path, steps: int, seconds: float) -> bool:
    """Play a run and kill it so many steps and seconds after its beginning; whether that came before its end."""
    progress = folder.with_name(f"{folder.name}-progress")
    progress.write_bytes(b"")
    pid, _ = zygote.start(played, run, folder, progress)
    while progress.stat().st_size < steps and os.path.exists(f"/proc/{pid}") and not _ended(pid):
        time.sleep(0.0005)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return zygote.wait(pid) == -signal.SIGKILL


def _ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def journal(run: Seen) -> str:
    """What the file of finished rounds holds after a run."""
    return "".join(encode_entry(RoundEntry(*one)).decode() for one in run.finished)


@pytest.mark.parametrize(
    ("run", "moments"),
    [
        *[(replace(run, rounds=12), 2) for run in (*RUNS[2:5:2], BUFFERED)],
        *[pytest.param(run, 20, marks=SLOW) for run in (*RUNS, BUFFERED)],
    ],
    ids=str,
)
def test_killed_at_random_moments(zygote: Zygote, run: Run, moments: int, folder: Path) -> None:
    straight = run.play()
    steps = len(straight.evaluated) + len(straight.trained)
    generator = np.random.default_rng(len(run.api + run.base + run.selector))
    cut_off = 0
    for trial in range(moments):
        place = folder / str(trial)
        moment = int(generator.integers(0, steps)), float(generator.uniform(0.0, 0.01))
        cut_off += killed(zygote, run, place, *moment)
        begun = place.with_name(f"{place.name}-progress").read_bytes().count(b"e")  # evaluations, of round 0 the first
        rest = zygote.call(played, run, place)
        assert rest.evaluated[0] in (max(0, begun - 1), begun), "it goes on where it was, and does not begin anew"
        assert rest.result() == straight.result(), f"killed {moment[1]:.4f} s after step {moment[0]}"
        assert rest.journal == journal(straight)
        assert straight.told[-len(rest.told) :] == rest.told
    assert 2 * cut_off >= moments


def dying(run: Run, folder: Path, die_at: int | None, torn: bool) -> list[str]:
    """Play a run until it dies; returns what was done to the disk, where it does not."""
    points = Failpoints(folder, die_at, torn)
    run.play(folder)
    return points.points


SHORT: dict[str, Any] = {"rounds": 2, "options": {"keep_checkpoints": 1}}
LONG = [replace(run, rounds=5) for run in (RUNS[1], RUNS[5])]
SELDOM = [{"checkpoint_every": every, "keep_checkpoints": 2} for every in (1, 2)]


@pytest.mark.parametrize(
    ("run", "share", "of"),
    [
        *[(Run(api, "FedAdam", "fedcm-ts", **SHORT), number, 2) for number, api in enumerate(APIS)],
        *[pytest.param(replace(run, options=options), 0, 1, marks=SLOW) for run in LONG for options in SELDOM],
    ],
    ids=str,
)
def test_dying_at_every_point(zygote: Zygote, run: Run, share: int, of: int, folder: Path) -> None:
    """Each write (also halfway), sync, rename and removal; of a short run, each API has half."""
    straight, points = run.play(), zygote.call(dying, run, folder / "none", None, False)
    assert {"write", "pwrite", "fsync", "replace", "unlink"} <= {point.split()[0] for point in points}
    deaths = [(number, False) for number in range(1, len(points) + 1)]
    deaths += [(number, True) for number in range(1, len(points) + 1) if "write" in points[number - 1].split()[0]]
    for number, torn in deaths[share::of]:
        place = folder / f"{number}-{torn}"
        assert zygote.call(dying, run, place, number, torn) is None, "the process lived on"
        rest = zygote.call(played, run, place)
        valid = re.findall(r"replace round-(\d+)\.safetensors\.tmp", "\n".join(points[: number - 1]))
        done = int(valid[-1]) if valid else 0
        where = f"died at point {number}, {points[number - 1]}{', torn' if torn else ''}"
        assert rest.evaluated[0] == done, where
        assert rest.journal == journal(straight), where
        assert rest.result() == straight.result(), where
