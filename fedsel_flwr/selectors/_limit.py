"""A largest number of clients, for methods whose cost grows faster than the fleet."""

from __future__ import annotations

from fedsel_flwr.checks import BoolArray, IntArray
from fedsel_flwr.errors import ParameterError


def refuse_more(name: str, limit: int, registered: BoolArray, clients: IntArray, advice: str) -> None:
    """Raise where registering ``clients`` would make more than ``limit`` of them.

    Args:
        name: The selector's name.
        limit: Its ``max_clients``.
        registered: Which rows are registered, shape (K,).
        clients: Rows that are about to be, shape (n,), unique.
        advice: What to do instead.

    Raises:
        ParameterError: There would be more.
    """
    old = clients[clients < registered.size]
    count = int(registered.sum()) + clients.size - int(registered[old].sum())
    if count > limit:
        raise ParameterError(f"{name} takes at most max_clients = {limit} clients, got {count}; {advice}")
