"""What stands at the end of a Flower run that failed: the message of an error that explains itself, no traceback."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from fedsel_flwr.errors import FedSelError

FLOWER = "flwr"
"""The name of Flower's logger."""


@contextlib.contextmanager
def message_alone() -> Iterator[None]:
    """Have Flower's log show an error of this package as its message alone.

    The error is raised all the same, so that the run counts as failed. Flower logs it with its traceback, which buries
    the message; the traceback goes to the log's debug level (``FLWR_LOG_LEVEL=DEBUG``). Any other exception is a fault
    of a program and keeps its traceback.

    Raises:
        FedSelError: What the block raised.
    """
    try:
        yield
    except FedSelError as error:
        logger = logging.getLogger(FLOWER)
        logger.debug("where the error was raised:", exc_info=error)
        logger.addFilter(_MessageAlone(error))
        raise


class _MessageAlone(logging.Filter):
    """Replaces the first record that carries the error by its message; then it has done its work.

    Args:
        error: The error.
    """

    def __init__(self, error: FedSelError) -> None:
        super().__init__()
        self._error = error

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, that of the error as its message."""
        if record.exc_info and record.exc_info[1] is self._error:
            record.msg, record.args, record.exc_info, record.exc_text = "%s", (str(self._error),), None, None
            logging.getLogger(FLOWER).removeFilter(self)
        return True
