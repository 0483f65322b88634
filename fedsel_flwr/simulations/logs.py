"""Where Flower's log records and our own go during a run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

LOGGERS = ("flwr", "fedsel_flwr")


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send Flower's and our own log records to a file; the terminal belongs to the progress display."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    try:
        with only(handler):
            yield
    finally:
        handler.close()


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


@contextlib.contextmanager
def silent(quiet: bool) -> Iterator[None]:
    """Let nothing of these records through, if ``quiet``; handlers that write files keep them."""
    if not quiet:
        yield
        return
    loggers = [logging.getLogger(name) for name in LOGGERS]
    if any(isinstance(handler, logging.FileHandler) for logger in loggers for handler in logger.handlers):
        yield  # they go to a file already
        return
    with only(logging.NullHandler()):
        yield
