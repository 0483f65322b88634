"""Who takes part in a round, beyond being connected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from fedsel_flwr.checks import BoolArray
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.identity import canonical_id

Availability = Callable[[str, int, float], bool]
"""Called with client id, round and simulated seconds; False leaves the client out of the round. One with a method
``at(ids, round, seconds)`` is asked for all clients at once and returns booleans, shape (n,)."""


class Only:
    """Lets given clients take part, in every round, and nobody else.

    Args:
        ids: Their ids, as the roster has them: names of SuperNodes, node ids, or what simulated clients say.

    Raises:
        ParameterError: ``ids`` is empty or no collection, or one of them cannot be an id.

    >>> Only(["clinic-a", 7]).at(["7", "8", "clinic-a"], 1, 0.0).tolist()
    [True, False, True]
    """

    def __init__(self, ids: Collection[str | int]) -> None:
        example = "availability must be a function or client ids, such as ['clinic-a', 'clinic-c']"
        if isinstance(ids, str | bytes) or not isinstance(ids, Collection):
            raise ParameterError(f"{example}, got {ids!r}")
        if not len(ids):
            raise ParameterError(f"{example}, got none: leave it out to let everybody take part")
        names = {one: canonical_id(one) for one in ids}
        if wrong := [one for one, name in names.items() if name is None]:
            raise ParameterError(f"{example}, but {wrong[0]!r} cannot be an id")
        self.ids = frozenset(name for name in names.values() if name is not None)

    def __call__(self, client_id: str, round: int, seconds: float) -> bool:
        """Whether a client takes part."""
        return client_id in self.ids

    def at(self, ids: Sequence[str], round: int, seconds: float) -> BoolArray:
        """Which of ``ids`` take part, shape (n,)."""
        return np.array([one in self.ids for one in ids], dtype=np.bool_)


def as_availability(given: Availability | Collection[str | int] | None) -> Availability | None:
    """A function as it is, client ids as :class:`Only` these."""
    return given if given is None or callable(given) else Only(given)


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
