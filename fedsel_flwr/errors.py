"""The exceptions that fedsel-flwr raises.

Every message says what was expected, what came, and what to do about it. A client that fails is data, never an
exception: it ends up in the round's history.
"""

from __future__ import annotations


class FedSelError(Exception):
    """Base class of every error raised by this package."""


class ParameterError(FedSelError, ValueError):
    """An argument, a scenario key or a file holds a value that cannot be used."""


class StateError(FedSelError, ValueError):
    """A saved state does not fit the object it is loaded into."""


class RunError(FedSelError, RuntimeError):
    """A federated run cannot go on: too few clients, an unsuitable base strategy, a missing dependency."""
