"""Logs of a run: send the records of Flower and of this package to a file, or drop them; report errors in one line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from fedsel_flwr.errors import FedSelError, RunError, described
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.untrusted import SIMULATED_FAULTS

logger = logging.getLogger("fedsel_flwr")
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
        logger.exception("the run failed")
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


def log_simulated_faults(history: History, spares: bool = False) -> None:
    """Log one warning after a simulation, with the number of stragglers and lost replies.

    Args:
        history: The run's history.
        spares: Whether rounds asked more clients than they waited for. The history counts the other clients as late.
    """
    counts = history.problem_counts()
    told = [f"{counts[kind]:,} {kind}" for kind in SIMULATED_FAULTS if counts[kind]]
    if told:
        asked = sum(record.num_selected for record in history.rounds)
        more = ", including replies that no round waited for" if spares else ""
        logger.warning("%s of %s expected replies in %s rounds%s. The history lists the clients", ", ".join(told),
                       f"{asked:,}", f"{len(history.rounds):,}", more)  # fmt: skip
