"""Where Flower's log records and our own go during a run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from fedsel_flwr.errors import FedSelError, RunError, described

LOGGERS = ("flwr", "fedsel_flwr")


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send Flower's and our own log records to a file; the terminal belongs to the progress display."""
    try:
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{str(path)!r} cannot be begun: {error.strerror or error}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    try:
        with only(handler):
            yield
    finally:
        with contextlib.suppress(OSError):  # what could not be written
            handler.close()


@contextlib.contextmanager
def in_one_line(log: Path) -> Iterator[None]:
    """Say in one line what somebody's own code raised during a run; the traceback goes to the log."""
    try:
        yield
    except (FedSelError, BrokenPipeError):
        raise
    except Exception as error:
        logging.getLogger("fedsel_flwr").exception("the run broke off")
        raise RunError(f"the run broke off: {described(error)}; {log} holds the traceback") from error


class _LogFile(logging.FileHandler):
    """A file of log records; without room for one it goes on, as the log is not worth the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: the disk is full, and what matters of the run says so."""


@contextlib.contextmanager
def only(handler: logging.Handler) -> Iterator[None]:
    """Send Flower's and our own log records to one handler, and to nothing else."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate


def log_file() -> Path | None:
    """The file that these records go to; None where they go to none."""
    handlers = (handler for name in LOGGERS for handler in logging.getLogger(name).handlers)
    return next((Path(each.baseFilename) for each in handlers if isinstance(each, logging.FileHandler)), None)


@contextlib.contextmanager
def silent(quiet: bool) -> Iterator[None]:
    """Let nothing of these records through, if ``quiet``; handlers that write files keep them."""
    if not quiet:
        yield
        return
    if log_file():
        yield  # they go to a file already
        return
    with only(logging.NullHandler()):
        yield
