"""A largest number of clients, for methods whose cost grows faster than the fleet."""

from __future__ import annotations

from fedsel_flwr.checks import BoolArray, IntArray
from fedsel_flwr.errors import ParameterError


def registered_with(registered: BoolArray, clients: IntArray) -> int:
    """How many clients are registered once ``clients`` are.

    Args:
        registered: Which rows are registered, shape (K,).
        clients: Rows that are about to be, shape (n,), unique.

    >>> import numpy as np
    >>> registered_with(np.array([True, False]), np.array([0, 1, 5]))
    3
    """
    old = clients[clients < registered.size]
    return int(registered.sum()) + clients.size - int(registered[old].sum())


def refuse_more(name: str, limit: int, count: int, advice: str) -> None:
    """Raise if there would be more than ``limit`` clients.

    Args:
        name: The selector's name.
        limit: Its ``max_clients``.
        count: How many there would be.
        advice: What to do instead.

    Raises:
        ParameterError: There would be more.
    """
    if count > limit:
        raise ParameterError(f"{name} takes at most max_clients = {limit} clients, got {count}; {advice}")
