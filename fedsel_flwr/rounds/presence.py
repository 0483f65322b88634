"""Who takes part in a round, beyond being connected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedsel_flwr.checks import BoolArray
from fedsel_flwr.errors import RunError

Availability = Callable[[str, int, float], bool]
"""Called with client id, round and simulated seconds; False leaves the client out of the round. One with a method
``at(ids, round, seconds)`` is asked for all clients at once and returns booleans, shape (n,)."""


def available(availability: Availability, ids: Sequence[str], round: int, simulated_s: float) -> BoolArray:
    """Ask once for each client.

    Args:
        availability: Who is there.
        ids: Client ids.
        round: The round about to be chosen.
        simulated_s: Seconds since the start.

    Returns:
        Which of them take part, shape (n,).

    Raises:
        RunError: ``availability.at`` returned another shape.

    >>> available(lambda client_id, round, seconds: client_id != "1", ["0", "1"], 1, 0.0).tolist()
    [True, False]
    """
    at_once = getattr(availability, "at", None)
    if at_once is None:
        return np.array([bool(availability(client_id, round, simulated_s)) for client_id in ids], dtype=np.bool_)
    there = np.asarray(at_once(ids, round, simulated_s), dtype=np.bool_)
    if there.shape != (len(ids),):
        raise RunError(f"availability.at must return a boolean for each of {len(ids)} clients, got shape {there.shape}")
    return there
