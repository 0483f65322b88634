"""Several callbacks in place of one."""

from __future__ import annotations

from collections.abc import Callable

from fedsel_flwr.rounds.records import RoundRecord

OnRound = Callable[[RoundRecord], None]


def together(*callbacks: OnRound) -> OnRound:
    """A callback that calls others, in the order given.

    >>> seen = []
    >>> together(seen.append, lambda record: seen.append(2 * record))(1)
    >>> seen
    [1, 2]
    """

    def on_round(record: RoundRecord) -> None:
        for callback in callbacks:
            callback(record)

    return on_round
