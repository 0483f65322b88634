"""How many of those who joined later and have delivered nothing yet may be chosen in a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, IntArray
from fedsel_flwr.rounds import saving
from fedsel_flwr.rounds.roster import Roster


class Trial:
    """Offers the selector few clients on trial, so that ids made up in thousands cannot take every round.

    Selectors that prefer the unknown come back to it until its bound has fallen, so that it is not enough to admit few
    at a time. Who is there in the first round has nothing to prove; who joins later is on trial until one of its
    updates can be used. Of those on trial a round offers as many as the roster admits, whoever was tried least first.

    Args:
        roster: Its ``max_new_per_round`` is the number; None for no limit.

    >>> trial = Trial(Roster(max_new_per_round=1))
    >>> trial.offered(np.arange(2)).tolist(), trial.offered(np.arange(4)).tolist()
    ([True, True], [True, True, True, False])
    >>> trial.note(np.array([0, 2]), np.array([True, False]))
    >>> trial.offered(np.arange(4)).tolist()
    [True, True, False, True]
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._trusted: BoolArray = np.zeros(0, dtype=np.bool_)  # by row: there at first, or has delivered
        self._tries: IntArray = np.zeros(0, dtype=np.int64)

    def offered(self, rows: IntArray) -> BoolArray:
        """Which of ``rows``, shape (n,), may be chosen in the round to come."""
        limit = self._roster.max_new_per_round
        if limit is None or not rows.size:
            return np.ones(rows.size, dtype=np.bool_)
        self._grow(rows)
        if not self._trusted.any():
            self._trusted[rows] = True
        offered = self._trusted[rows]
        places = np.flatnonzero(~offered)
        offered[places[np.argsort(self._tries[rows[places]], kind="stable")[:limit]]] = True
        return offered

    def note(self, rows: IntArray, completed: BoolArray) -> None:
        """Take in how the clients chosen in a round did."""
        if self._roster.max_new_per_round is None:
            return
        self._grow(rows)
        self._tries[rows] += 1
        self._trusted[rows[completed]] = True

    def state_dict(self) -> saving.State:
        """Who has nothing to prove, and how often each was tried."""
        return {"trusted": self._trusted.copy(), "tries": self._tries.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        saving.expect_keys(state, self.state_dict())
        trusted = saving.array("trusted", state["trusted"], np.bool_)
        self._tries = saving.array("tries", state["tries"], np.int64, rows=len(trusted))
        self._trusted = trusted

    def forget(self, rows: IntArray) -> None:
        """Put newcomers on trial."""
        rows = rows[rows < len(self._trusted)]
        self._trusted[rows], self._tries[rows] = False, 0

    def _grow(self, rows: IntArray) -> None:
        length = int(rows.max(initial=-1)) + 1
        self._trusted = saving.long_enough(self._trusted, length, False)
        self._tries = saving.long_enough(self._tries, length, 0)
