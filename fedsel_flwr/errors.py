"""The exceptions that fedsel-flwr raises.

Every message says what was expected, what came, and what to do about it. A client that fails is data, never an
exception: it ends up in the round's history.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_NOT_THE_USERS = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "site-packages", "<frozen")


def described(error: BaseException) -> str:
    """An exception of somebody's own code in one line: its class, what it says, and the last line of that code.

    >>> described(KeyError("speed"))
    "KeyError: 'speed'"
    """
    said = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not any(part in one.filename for part in _NOT_THE_USERS)]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{': ' if said else ''}{said}{place}"


class FedSelError(Exception):
    """Base class of every error raised by this package."""


class ParameterError(FedSelError, ValueError):
    """An argument, a scenario key or a file holds a value that cannot be used."""


class StateError(FedSelError, ValueError):
    """A saved state does not fit the object it is loaded into."""


class RunError(FedSelError, RuntimeError):
    """A federated run cannot go on: too few clients, an unsuitable base strategy, a missing dependency."""
