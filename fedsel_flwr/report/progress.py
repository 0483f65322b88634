"""Progress of runs: a live display on a terminal, or plain lines in a pipe; meanwhile the logs go to a file.

A reader of standard output may end before the program does, as with ``| head``. The run then continues without output.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as LiveProgress
from rich.table import Column

from fedsel_flwr.errors import FedSelError, RunError, described
from fedsel_flwr.report.summary import decimals_of

if TYPE_CHECKING:
    from fedsel_flwr.rounds.history import RoundRecord

LINES_PER_RUN = 10
"""Approximate number of lines that a run prints outside a terminal. The same number for all runs on a cluster."""
LINE_S = 10.0
"""Seconds between two lines about the nodes of a cluster."""


@dataclass(frozen=True)
class RunsProgress:
    """Progress of runs on several machines.

    Attributes:
        finished: Number of finished runs.
        total: Number of all runs.
        nodes: Name of each node that plays runs -> number of these runs.
        rounds: Number of rounds of finished runs and of runs in progress.
        all_rounds: Number of rounds of all runs; 0 if unknown.
    """

    finished: int
    total: int
    nodes: Mapping[str, int]
    rounds: int = 0
    all_rounds: int = 0

    def describe(self) -> str:
        """Describe the progress in a few words.

        >>> RunsProgress(3, 12, {"a": 2, "b": 1}).describe()
        '3 of 12 runs finished, 3 in progress on 2 nodes, 6 waiting'
        """
        playing, count = sum(self.nodes.values()), len(self.nodes)
        where = f" on {count} node{'' if count == 1 else 's'}" if count else ""
        waiting = self.total - self.finished - playing
        return f"{self.finished} of {self.total} runs finished, {playing} in progress{where}, {waiting} waiting"


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
            text = partial(TextColumn, markup=False, table_column=Column(no_wrap=True))
            # The spinner moves during the wait for the first round, because Ray takes some seconds to start.
            columns = (
                SpinnerColumn(), text("{task.description}"), BarColumn(bar_width=None, table_column=Column(ratio=1)),
                text("{task.fields[figures]}"), TimeRemainingColumn(compact=True),
            )  # fmt: skip
            # rich removes the bar at the end, and `_end_run` then prints the run's last line, which stays.
            self._live = LiveProgress(*columns, console=self._console, expand=True, transient=True)
        # The bar of the current run, and the bar of all runs on a cluster.
        self._run_bar: TaskID | None = None
        self._runs_bar: TaskID | None = None
        # When the first run on a cluster was shown, and the share of the runs, the nodes and the time of the last line.
        self._began: tuple[float, RunsProgress] | None = None
        self._shown = (-1, -1, -math.inf)
        self._label: str | None = None
        self._rounds = 0
        # The last line of the run, until it is printed.
        self._line = ""

    def __enter__(self) -> Progress:
        """Start the display."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the display."""
        self.stop()

    def stop(self) -> None:
        """End the display. The last line of the last run stays, even after an error."""
        self._end_run()
        if self._live:
            if self._runs_bar is not None:
                self._live.remove_task(self._runs_bar)
                self._runs_bar = None
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
            self._run_bar = self._live.add_task(label, total=rounds, figures=f"0/{rounds}")

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
        if self._live and self._run_bar is not None:
            figures = f"{done}  {accuracy}  {seconds}  {joules}  {failures} failed"
            self._live.update(self._run_bar, completed=record.round, figures=figures)
            return
        period = max(1, math.ceil(self._rounds / LINES_PER_RUN))
        if record.round in (1, self._rounds) or record.round % period == 0:
            self._print_line()

    def show_runs(self, runs: RunsProgress) -> None:
        """Show the progress of runs on a cluster: a second bar, or about ten lines and one for each change of nodes.

        Args:
            runs: The progress.
        """
        if self._live:
            if self._runs_bar is None:
                self._runs_bar = self._live.add_task("", total=runs.all_rounds or runs.total, figures="")
            done, playing = runs.rounds if runs.all_rounds else runs.finished, sum(runs.nodes.values())
            rest = f"{playing} in progress, nodes: {len(runs.nodes)}, {runs.total - runs.finished - playing} waiting"
            name = f"{runs.finished} of {runs.total} runs"
            self._live.update(self._runs_bar, completed=done, description=name, figures=rest)
            return
        now, share = time.monotonic(), runs.finished * LINES_PER_RUN // max(1, runs.total)
        self._began = self._began or (now, runs)
        # Nodes begin one after the other, and one line is enough for all of them.
        if share != self._shown[0] or (len(runs.nodes) != self._shown[1] and now - self._shown[2] >= LINE_S):
            self._shown = share, len(runs.nodes), now
            self.announce(f"cluster: {runs.describe()}{self._describe_rest(runs, now)}")

    def _describe_rest(self, runs: RunsProgress, now: float) -> str:
        """Return the estimated time until all runs have finished; empty if it is unknown."""
        if self._began is None or not runs.all_rounds:
            return ""
        done, rest = runs.rounds - self._began[1].rounds, runs.all_rounds - runs.rounds
        seconds = (now - self._began[0]) * rest / done if done > 0 else 0.0
        if not seconds:
            return ""
        return f", about {seconds:.0f} s left" if seconds < 100 else f", about {seconds / 60:.0f} min left"

    def _end_run(self) -> None:
        if self._live and self._run_bar is not None:
            # Removed before the line is printed, because rich would draw the bar below it again.
            self._live.remove_task(self._run_bar)
            self._run_bar = None
            self._live.refresh()
        if self._line:
            self._print_line()
        self._label = None

    def _print_line(self) -> None:
        self._console.print(self._line, markup=False, highlight=False, soft_wrap=True)
        self._line = ""


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


LOGGERS = ("flwr", "fedsel_flwr")
"""Names of the loggers of Flower and of this package."""


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send all records of :data:`LOGGERS` to a file, because the terminal shows the progress display.

    Raises:
        RunError: The file cannot be opened.
    """
    try:
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"{str(path)!r} cannot be opened: {error.strerror or error}. Choose a folder that can be written to"
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    try:
        with _only_handler(handler):
            yield
    finally:
        # Closing writes the rest of the buffer, and the disk may have no room for it.
        with contextlib.suppress(OSError):
            handler.close()


@contextlib.contextmanager
def errors_in_one_line(log: Path) -> Iterator[None]:
    """Report errors of the user's code during a run in one line; the traceback goes to the log.

    Raises:
        RunError: The user's code raised another error than ours.
    """
    try:
        yield
    except (FedSelError, BrokenPipeError):
        # Our errors already name their cure. A broken pipe means that the reader of the output is gone.
        raise
    except Exception as error:
        logging.getLogger("fedsel_flwr").exception("the run failed")
        raise RunError(f"the run failed: {described(error)}. The traceback is in {log}") from error


class _LogFile(logging.FileHandler):
    """File of log records. It drops records that it cannot write, because a full disk must not end the run here."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record. The disk is full, and the files of the run report this error."""


@contextlib.contextmanager
def _only_handler(handler: logging.Handler) -> Iterator[None]:
    """Send the records of :data:`LOGGERS` to this handler only."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    # A copy of each list, because the assignment below replaces the content of the list itself.
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate


def log_file() -> Path | None:
    """Return the file that receives the records; None if there is no such file."""
    handlers = (handler for name in LOGGERS for handler in logging.getLogger(name).handlers)
    return next((Path(each.baseFilename) for each in handlers if isinstance(each, logging.FileHandler)), None)


@contextlib.contextmanager
def silent(quiet: bool) -> Iterator[None]:
    """Drop the records of :data:`LOGGERS` if ``quiet``, unless a file receives them."""
    if not quiet or log_file():
        yield
        return
    with _only_handler(logging.NullHandler()):
        yield
