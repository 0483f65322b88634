"""Logs of a run: send Flower's records and our own to a file, or nowhere, and report an error in one line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from fedsel_flwr.errors import FedSelError, RunError, described

LOGGERS = ("flwr", "fedsel_flwr")
"""Names of Flower's logger and of ours."""


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send Flower's and our own log records to a file; the terminal belongs to the progress display.

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
        # Closing writes what the buffer still holds, for which the disk may have no room.
        with contextlib.suppress(OSError):
            handler.close()


@contextlib.contextmanager
def errors_in_one_line(log: Path) -> Iterator[None]:
    """Report in one line what the user's own code raised during a run; the traceback goes to the log.

    Raises:
        RunError: In place of whatever is no error of ours.
    """
    try:
        yield
    except (FedSelError, BrokenPipeError):
        # Ours name their cure already; a broken pipe means that the reader of the output is gone.
        raise
    except Exception as error:
        logging.getLogger("fedsel_flwr").exception("the run failed")
        raise RunError(f"the run failed: {described(error)}. The traceback is in {log}") from error


class _LogFile(logging.FileHandler):
    """A file of log records that drops what it cannot write: a log is not worth ending the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record: the disk is full, and the files of the run report that."""


@contextlib.contextmanager
def _only_handler(handler: logging.Handler) -> Iterator[None]:
    """Send Flower's and our own log records to one handler, and to nothing else."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    # A copy: the assignment below replaces the content of the list itself.
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate


def log_file() -> Path | None:
    """Return the file that these records go to; None if they go to none."""
    handlers = (handler for name in LOGGERS for handler in logging.getLogger(name).handlers)
    return next((Path(each.baseFilename) for each in handlers if isinstance(each, logging.FileHandler)), None)


@contextlib.contextmanager
def silent(quiet: bool) -> Iterator[None]:
    """Drop these records if ``quiet``, unless they go to a file."""
    if not quiet or log_file():
        yield
        return
    with _only_handler(logging.NullHandler()):
        yield
