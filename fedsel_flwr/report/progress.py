"""Progress of runs on the terminal: a live display, plain lines in a pipe, a notice while something starts.

A reader of standard output may leave before the program ends, as ``| head`` does. The run then continues without
output.
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


LINES_PER_RUN = 10
"""Lines that a run prints outside a terminal, about."""


class Progress:
    """Display of the progress of one run after another.

    On a terminal the current run has a bar, and its last line stays when the next run starts. Elsewhere each run prints
    about ten plain lines, among them always those of the first and the last round.

    Args:
        console: Where to print; standard output by default.

    Example::

        with Progress() as progress:
            progress.start_run("bsfl, seed 0", rounds=100)
            progress.update(record, failures=2)
    """

    def __init__(self, console: Console | None = None) -> None:
        """Prepare the display, without printing."""
        self._console = console or PipeSafeConsole()
        self._live: LiveProgress | None = None
        if self._console.is_interactive:
            self._live = LiveProgress(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True)),
                TimeRemainingColumn(compact=True),
                console=self._console,
                expand=True,
                # rich removes the bar at the end: `_end_run` prints the run's last line in its place, which stays.
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
        """End the display; the last line of the last run stays, even after an error."""
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
        """Function that shows what the run waits for; None outside a terminal, which has no line to overwrite."""
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
            raise RunError("Progress.update was called before start_run. Call start_run first.")
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
            return
        period = max(1, math.ceil(self._rounds / LINES_PER_RUN))
        if record.round in (1, self._rounds) or record.round % period == 0:
            self._print_line()

    def _wait(self, text: str) -> None:
        if self._live and self._live.task_ids:
            self._live.update(self._live.task_ids[-1], figures=text)

    def _end_run(self) -> None:
        if self._live:
            # Before the line is printed: rich would draw the bar below it once more.
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


NOTICE_AFTER_S = 1.0
"""A wait shorter than this is not announced."""


class WaitNotice:
    """Notice on standard error that something starts, and how long it took.

    On a terminal one line counts the seconds. Elsewhere there are two lines, one at the start and one at the end.

    Args:
        what: What the program waits for, for example "Starting Ray".
        there: The text at the end, before the seconds.
        tell: Takes the running text in place of standard error, once a second ("Starting Ray, 3 s"), and nothing at
            the end.
        quiet: Write nothing.

    Example::

        with WaitNotice("Starting Ray", "Ray started"):
            ray.init()
    """

    def __init__(
        self, what: str, there: str, *, tell: Callable[[str], None] | None = None, quiet: bool = False
    ) -> None:
        self._what, self._there, self._tell, self._quiet = what, there, tell, quiet
        self._over = threading.Event()
        # Both threads write: without the lock a last "3 s" could follow the line that closes the notice.
        self._lock = threading.Lock()
        self._shown, self._began = False, 0.0

    def __enter__(self) -> WaitNotice:
        """Begin to count."""
        self._began = time.monotonic()
        if not self._quiet:
            threading.Thread(target=self._run, name="waiting", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the notice unless :meth:`done` has; after an error only close the line."""
        self._end("" if kind else self._there)

    def done(self) -> None:
        """Announce that the wait is over."""
        self._end(self._there)

    def _run(self) -> None:
        while not self._over.wait(NOTICE_AFTER_S):
            with self._lock:
                if not self._over.is_set():
                    self._show(int(time.monotonic() - self._began))

    def _show(self, seconds: int) -> None:
        if self._tell:
            self._tell(f"{self._what}, {seconds} s")
        elif _stderr_is_terminal():
            self._write(f"\r{self._what} ... {seconds} s")
        elif not self._shown:
            self._write(f"{self._what} ...\n")
        self._shown = True

    def _end(self, there: str) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            if not self._shown or self._tell:
                return
            # Carriage return and "erase to the end of the line": the notice takes the place of the running seconds.
            erase = "\r\x1b[K" if _stderr_is_terminal() else ""
            text = f"{there} in {time.monotonic() - self._began:.1f} s\n" if there else ""
            self._write(erase + text)

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            # The reader of standard error is gone, or the stream is closed: a notice is not worth the run.
            return


def _stderr_is_terminal() -> bool:
    # pythonw and some services have no standard error: sys.stderr is None there.
    return bool(sys.stderr and sys.stderr.isatty())


def discard_stdout() -> None:
    """Send standard output to the null device.

    Python flushes standard output when it exits. Without a reader that would raise once more, after all error handling.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


class PipeSafeConsole(Console):
    """Console that stops printing when its reader is gone; rich's own ends the program then."""

    def on_broken_pipe(self) -> None:
        """Stop printing and let the run continue."""
        self.quiet = True
        discard_stdout()
