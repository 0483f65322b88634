"""Progress of runs: a live display on a terminal, or plain lines in a pipe.

A reader of standard output may end before the program does, as with ``| head``. The run then continues without output.
"""

from __future__ import annotations

import math
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as LiveProgress
from rich.table import Column

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.summary import decimals_of

if TYPE_CHECKING:
    from fedsel_flwr.rounds.history import RoundRecord


LINES_PER_RUN = 10
"""Approximate number of lines that a run prints outside a terminal."""


class Progress:
    """Progress display of runs, one after another.

    On a terminal the current run has a bar, and its last line stays when the next run starts. Otherwise each run prints
    about ten plain lines, always including the first and the last round.

    Args:
        console: Console to print on; standard output by default.

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
                # Moves during the wait for the first round, because Ray takes some seconds to start.
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=None, table_column=Column(ratio=1)),
                TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True)),
                TimeRemainingColumn(compact=True),
                console=self._console,
                expand=True,
                # rich removes the bar at the end, and `_end_run` then prints the run's last line, which stays.
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
        """End the display. The last line of the last run stays, even after an error."""
        self._end_run()
        if self._live:
            self._live.stop()

    def start_run(self, label: str, rounds: int) -> None:
        """Begin the next run.

        Args:
            label: Name of the run, for example ``"bsfl, seed 0"``.
            rounds: Planned number of rounds.
        """
        self._end_run()
        self._label, self._rounds = label, rounds
        if self._live:
            self._live.add_task(label, total=rounds, figures=f"0/{rounds}")

    def announce(self, line: str) -> None:
        """Print a line above the runs."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @property
    def is_live(self) -> bool:
        """Whether there is a live display. A terminal can have only one."""
        return self._live is not None

    def update(self, record: RoundRecord, failures: int) -> None:
        """Show that a round has ended.

        Args:
            record: The round.
            failures: Number of failed clients since the run began.

        Raises:
            RunError: No run was started.
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

    def _end_run(self) -> None:
        if self._live:
            # Removed before the line is printed, because rich would draw the bar below it again.
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


def discard_stdout() -> None:
    """Send standard output to the null device.

    Python flushes standard output when it exits. Without a reader, this would raise another error after all error
    handling.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


class PipeSafeConsole(Console):
    """Console that stops printing if its reader is gone. The console of rich would end the program."""

    def on_broken_pipe(self) -> None:
        """Stop printing and let the run continue."""
        self.quiet = True
        if not self.stderr:
            discard_stdout()
