"""Errors: the exceptions that fedsel-flwr raises.

Every message says the problem, then the cure. A client that fails is data, never an exception: the round's history
holds it.
"""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

# Paths of code that is not the user's: this package, Python's own library, and installed packages.
_NOT_THE_USERS = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "site-packages", "<frozen")


class FedSelError(Exception):
    """Base class of every error raised by this package."""


class ParameterError(FedSelError, ValueError):
    """An argument, a scenario key or a file holds a value that cannot be used."""


class StateError(FedSelError, ValueError):
    """A saved state does not fit the object it is loaded into."""


class RunError(FedSelError, RuntimeError):
    """A federated run cannot continue: too few clients, an unsuitable base strategy, a missing dependency."""


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


@contextlib.contextmanager
def refusing_faults(problem: str) -> Iterator[None]:
    """Turn whatever the user's code raises within the block into a :class:`ParameterError`; our own errors pass.

    Args:
        problem: The message, to which the exception is added.

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
