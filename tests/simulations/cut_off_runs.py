"""Runs of the vectorized engine and commands to be killed, in processes that a zygote forks."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.report import run_folder
from fedsel_flwr.simulations import Comparison, Scenario, load_scenario, run_options, simulate
from fedsel_flwr.simulations.results import RunResult
from tests.processes import Command
from tests.strategies.zygote import Zygote

FASTEST = '''
import numpy as np
from fedsel_flwr.selectors import Selector


class Fastest(Selector):
    """The clients of the least mean latency; those never tried first, and now and then anybody."""

    client_state = {"_plays": 0, "_total": 0.0}

    def __init__(self, *, clients_per_round, seed=None, patience=1.0):
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.patience = patience

    def _select(self, available):
        mean = self._total / np.maximum(self._plays, self.patience)
        return self._largest(self._generator.exponential(0.01, len(mean)) - mean, available)

    def _observe(self, report):
        self._plays[report.clients] += 1
        self._total[report.clients] += report.latency
'''
"""A selector of a user's file."""
BREAKING = '''
from pathlib import Path
from fedsel_flwr.selectors import Random


class Mine(Random):
    """At random; it breaks off in round 3 where a file says so."""

    def _select(self, available):
        if Path("broken").exists() and self.round == 3:
            raise ValueError("broken as asked")
        return super()._select(available)
'''
"""Another one."""


def smoke(rounds: int = 6, **keys: Any) -> Scenario:
    """A short scenario of the vectorized engine; ``a__b`` in place of the key ``a.b``."""
    other = {key.replace("__", "."): value for key, value in keys.items()}
    return load_scenario("smoke", {"rounds": rounds, "engine": "vectorized", **other})


class Stop(Exception):
    """Ends a run in the middle."""


def cut_off(scenario: Scenario, after: int = 3, **options: Any) -> None:

    def stop(record: Any) -> None:
        if record.round == after:
            raise Stop

    with pytest.raises(Stop):
        simulate(scenario, on_round=stop, **options)


def stop_after(rounds: int) -> Callable[[Any, int], None]:
    """An ``update`` that ends a comparison after so many rounds of all its runs."""
    left = iter(range(rounds - 1))

    def update(record: Any, failed: int) -> None:
        if next(left, None) is None:
            raise Stop

    return update


@dataclass(frozen=True)
class Run:
    """A run of the smoke scenario, with a checkpoint after every so many rounds."""

    base: str = "fedavg"
    selector: str = "bsfl"
    rounds: int = 30
    every: int = 1
    concurrency: int = 0

    def play(self, folder: Path | None = None, progress: Path | None = None) -> tuple[Any, ...]:
        """What comes out: history, model, and the rounds that were told; a byte a round is added to ``progress``."""
        scenario = smoke(self.rounds, aggregation__base=self.base, selector=self.selector,
                         aggregation__concurrency=self.concurrency)  # fmt: skip
        told: list[str] = []
        file = None if progress is None else os.open(progress, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def on_round(record: Any) -> None:
            told.append(repr(record))
            if file is not None:
                os.write(file, b".")

        options: dict[str, Any] = {}
        if folder is not None:
            options = {"checkpoint_dir": folder, "checkpoint_every": self.every, "resume": True}
        return *parts(simulate(scenario, on_round=on_round, **options)), told


def without_pictures(patch: pytest.MonkeyPatch) -> None:
    """Make empty files of the pictures of comparisons, which take longer than short runs."""
    for name in ("plot", "plot_rounds"):
        patch.setattr(Comparison, name, lambda self, path, *rest: Path(path).touch())


def parts(result: RunResult) -> tuple[Any, ...]:
    """What is compared of a result, bit for bit."""
    arrays = [(array.dtype.str, array.shape, array.tobytes()) for array in result.arrays]
    return [*map(repr, result.history.rounds)], [*map(repr, result.history.clients)], arrays


def command(argv: list[str], folder: Path) -> tuple[int, str, str]:
    """Run ``fedsel`` in a folder; returns its exit status and what it printed.

    A checkpoint is written after every round, whatever that costs; the pictures are empty files.
    """
    os.chdir(folder)
    run_options.CHECKPOINT_SHARE = 1.0
    without_pictures(pytest.MonkeyPatch())
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    return status, out.getvalue(), err.getvalue()


def warm() -> None:
    """Read the data, once for all processes that are forked."""
    simulate(smoke(1))


def killed(zygote: Zygote, when: Callable[[], bool], function: Callable[..., Any], *args: Any) -> bool:
    """Start a function in a process of its own and kill it at a moment; whether that came before its end."""
    pid, _ = zygote.start(function, *args)
    deadline = time.monotonic() + 100
    while not when() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    return zygote.wait(pid) == -signal.SIGKILL


def rounds_in(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("journal.jsonl"))


def after_rounds(command: Command, folder: Path, rounds: int) -> None:
    deadline = time.monotonic() + 400
    while rounds_in(folder) < rounds:
        said = command.stdout[-3000:] + command.stderr[-3000:]
        assert command.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.005)


def content(folder: Path) -> Mapping[str, Any]:
    """What the files of a run or comparison say, by their names; pictures, logs and wall times by name alone.

    An error that somebody still holds also holds the lock of the folder.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == run_folder.TIMING:
            found[name] = None
        elif path.suffix == ".parquet":
            found[name] = repr(pq.read_table(path).to_pylist())
        elif path.is_file() and path.name != ".lock":
            found[name] = None if path.suffix in (".png", ".log") else path.read_bytes()
    return found
