"""Errors: the exceptions that fedsel-flwr raises.

Every message names the problem, then the cure. A failed client is not an exception but data in the round's history.
"""

from __future__ import annotations

import contextlib
import errno
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

# Paths of code that is not the user's: this package, Python's standard library, and installed packages.
_NOT_THE_USERS = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "site-packages", "<frozen")


class FedSelError(Exception):
    """Base class of all errors of this package."""


class ParameterError(FedSelError, ValueError):
    """Error for an argument, a scenario key or a file with a value that cannot be used."""


class StateError(FedSelError, ValueError):
    """Error for a saved state that does not fit the object that loads it."""


class RunError(FedSelError, RuntimeError):
    """Error for a run that cannot continue: too few clients, an unsuitable base strategy, a missing dependency."""


def described(error: BaseException) -> str:
    """Describe an exception of the user's code in one line: class, message, and the last line of that code.

    >>> described(KeyError("speed"))
    "KeyError: 'speed'"
    """
    message = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not any(part in one.filename for part in _NOT_THE_USERS)]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{place}"


def write_cure(error: OSError) -> str:
    """Return what to do after a failed write, as the beginning of a sentence.

    >>> write_cure(OSError(errno.EMFILE, "Too many open files"))
    'Raise the limit of open files (ulimit -n)'
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Raise the limit of open files (ulimit -n)"
    return "Free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Make the folder writable"


@contextlib.contextmanager
def disk_errors(place: object, then: str = "") -> Iterator[None]:
    """Convert the system's errors within the block to :class:`RunError`, with the place and the cure.

    Args:
        place: The file or folder that is written.
        then: Continuation of the cure.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{str(place)!r} cannot be written: {error.strerror or error}. {write_cure(error)}{then}"
        ) from error


@contextlib.contextmanager
def refusing_faults(problem: str) -> Iterator[None]:
    """Convert exceptions of the user's code within the block to :class:`ParameterError`; our errors pass unchanged.

    Args:
        problem: The message; the exception is added to it.

    >>> with refusing_faults("the model cannot be created"):
    ...     {}["speed"]
    Traceback (most recent call last):
    ...
    fedsel_flwr.errors.ParameterError: the model cannot be created: KeyError: 'speed'...
    """
    try:
        yield
    except FedSelError:
        raise
    except Exception as error:
        raise ParameterError(f"{problem}: {described(error)}") from error
