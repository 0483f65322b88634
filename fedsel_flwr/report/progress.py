"""The progress of runs: a live display on a terminal, single plain lines elsewhere.

Printing with rich to a reader that may go, as ``| head`` does.

A reader of standard output that has gone, as ``| head`` does.

Saying what is waited for, with the seconds: only where it takes time.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as LiveProgress
from rich.table import Column

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.summary import decimals_of

if TYPE_CHECKING:
    from fedsel_flwr.rounds.history import RoundRecord


def fall_silent() -> None:
    """Send standard output to nowhere, so that flushing it at the end raises nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class PipedConsole(Console):
    """rich's console, which ends the program where its reader has gone; this one falls silent, and the run goes on."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True
        fall_silent()


LINES_PER_RUN = 10


class Progress:
    """Show how one run after another proceeds.

    On a terminal the current run has a bar, and its last line stays when the next run starts. Elsewhere about ten
    plain lines per run are printed, the first and the last round always among them.

    Args:
        console: Where to print; standard output by default.

    Example::

        with Progress() as progress:
            progress.start_run("bsfl, seed 0", rounds=100)
            progress.update(record, failures=2)
    """

    def __init__(self, console: Console | None = None) -> None:
        """Prepare the display; nothing is printed yet."""
        self._console = console or PipedConsole()
        self._live: LiveProgress | None = None
        if self._console.is_interactive:
            self._live = LiveProgress(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True)),
                TimeRemainingColumn(compact=True),
                console=self._console,
                expand=True,
                transient=True,
            )
        self._label: str | None = None
        self._rounds = 0
        self._line = ""
        self._printed = True

    def __enter__(self) -> Progress:
        """Start the display."""
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the display."""
        self.stop()

    def stop(self) -> None:
        """End the display; the last line of the last run stays, whether it ended well or not."""
        self._end_run()
        if self._live:
            self._live.stop()

    def start_run(self, label: str, rounds: int) -> None:
        """Begin the next run.

        Args:
            label: What to call it, for example ``"bsfl, seed 0"``.
            rounds: Number of rounds that are planned.
        """
        self._end_run()
        self._label, self._rounds = label, rounds
        if self._live:
            self._live.add_task(label, total=rounds, figures=f"0/{rounds}")

    @property
    def on_wait(self) -> Callable[[str], None] | None:
        """Takes what is waited for, on a terminal; None elsewhere, where no line is free for it."""
        return self._wait if self._live else None

    def update(self, record: RoundRecord, failures: int) -> None:
        """Show that a round has ended.

        Args:
            record: The round.
            failures: Failed clients since the run began.

        Raises:
            RunError: If no run was started.
        """
        if self._label is None:
            raise RunError("Progress.update was called before start_run. Start the run first.")
        done = f"{record.round:{len(str(self._rounds))}d}/{self._rounds}"
        accuracy = f"{100 * record.accuracy:4.1f} %" if math.isfinite(record.accuracy) else "-"
        seconds, joules = _number(record.simulated_s, "s"), _number(record.total_energy_j, "J")
        self._line = (
            f"{self._label}: round {done}  accuracy {accuracy}  simulated {seconds}  energy {joules}  failed {failures}"
        )
        self._printed = False
        if self._live:
            figures = f"{done}  {accuracy}  {seconds}  {joules}  {failures} failed"
            self._live.update(self._live.task_ids[-1], completed=record.round, figures=figures)
        elif record.round in (1, self._rounds) or record.round % max(1, math.ceil(self._rounds / LINES_PER_RUN)) == 0:
            self._print_line()

    def _wait(self, text: str) -> None:
        if self._live and self._live.task_ids:
            self._live.update(self._live.task_ids[-1], figures=text)

    def _end_run(self) -> None:
        if self._live:
            for task in self._live.task_ids:
                self._live.remove_task(task)
            self._live.refresh()
        if not self._printed:
            self._print_line()
        self._label = None

    def _print_line(self) -> None:
        self._console.print(self._line, markup=False, highlight=False, soft_wrap=True)
        self._printed = True


def _number(value: float, unit: str) -> str:
    return f"{value:.{decimals_of(value)}f} {unit}" if math.isfinite(value) else f"- {unit}"


AFTER_S = 1.0
"""What takes less is not told."""


class Waiting:
    """Tell that something starts, and how long it took.

    On a terminal the seconds run in one line. Elsewhere there are two lines, one at the start and one at the end.

    Args:
        what: What is waited for, for example "Starting Ray".
        there: What is said at the end, before the seconds.
        tell: Takes the running text in place of standard error, once a second ("Starting Ray, 3 s"), and nothing at
            the end.
        quiet: Say nothing.

    Example::

        with Waiting("Starting Ray", "Ray started"):
            ray.init()
    """

    def __init__(
        self, what: str, there: str, *, tell: Callable[[str], None] | None = None, quiet: bool = False
    ) -> None:
        self._what, self._there, self._tell, self._quiet = what, there, tell, quiet
        self._over, self._turn = threading.Event(), threading.Lock()
        self._told, self._began = False, 0.0

    def __enter__(self) -> Waiting:
        """Begin."""
        self._began = time.monotonic()
        if not self._quiet:
            threading.Thread(target=self._run, name="waiting", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, if :meth:`done` has not; after an error only the line is closed."""
        self._end("" if kind else self._there)

    def done(self) -> None:
        """It is there."""
        self._end(self._there)

    def _run(self) -> None:
        while not self._over.wait(AFTER_S):
            with self._turn:
                if not self._over.is_set():
                    self._say(int(time.monotonic() - self._began))

    def _say(self, seconds: int) -> None:
        if self._tell:
            self._tell(f"{self._what}, {seconds} s")
        elif _terminal():
            self._write(f"\r{self._what} ... {seconds} s")
        elif not self._told:
            self._write(f"{self._what} ...\n")
        self._told = True

    def _end(self, there: str) -> None:
        with self._turn:
            if self._over.is_set():
                return
            self._over.set()
            if not self._told or self._tell:
                return
            begin = "\r\x1b[K" if _terminal() else ""
            said = f"{there} in {time.monotonic() - self._began:.1f} s\n" if there else ""
            self._write(begin + said)

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it
            return


def _terminal() -> bool:
    return bool(sys.stderr and sys.stderr.isatty())
