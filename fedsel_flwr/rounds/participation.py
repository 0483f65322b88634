"""A cap on the share of the rounds in which one client is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.rounds import saving

WINDOW = 20
"""Rounds of a client that its share is counted over: the last ones in which it was available."""
FIRST = 5
"""Rounds in which a client must have been available before its share counts."""


class Participation:
    """Does not offer the selector clients that were asked in too large a share of their last rounds.

    A share is counted over the last 20 rounds in which the client was available, from its fifth on. Rounds in which
    everybody available was asked do not count: no client was preferred there. A client above the cap stays available,
    so its share falls in each round without it.

    Args:
        cap: Largest share, in (0, 1]; None sets no cap.

    >>> import numpy as np
    >>> cap, everybody = Participation(0.5), np.arange(3)
    >>> for _ in range(5):
    ...     cap.note(everybody, np.array([2]))
    >>> cap.offered(everybody, at_least=1).tolist(), cap.offered(everybody, at_least=3).tolist()
    ([True, True, False], [True, True, True])
    """

    def __init__(self, cap: float | None) -> None:
        self._cap = cap
        self._asked: IntArray = np.zeros(0, dtype=np.int64)  # by row: a bit for each round, the last one lowest
        self._rounds: IntArray = np.zeros(0, dtype=np.int64)  # by row: how many of these bits count, at most 20

    def offered(self, rows: IntArray, at_least: int) -> BoolArray:
        """Which of ``rows`` may be chosen in the round to come.

        Args:
            rows: Clients that are available, shape (n,).
            at_least: So many are offered: of those above the cap, the least asked fill the places.
        """
        if self._cap is None:
            return np.ones(rows.size, dtype=np.bool_)
        self._grow(rows)
        share = self._share(rows)
        offered = (self._rounds[rows] < FIRST) | (share <= self._cap)
        if (lacking := at_least - np.count_nonzero(offered)) > 0:
            capped = np.flatnonzero(~offered)
            offered[capped[np.argsort(share[capped], kind="stable")[:lacking]]] = True
        return offered

    def note(self, rows: IntArray, chosen: IntArray) -> None:
        """Take in whom of the available ``rows`` the round asked."""
        if self._cap is None or chosen.size == rows.size:
            return
        self._grow(rows)
        self._asked[rows] = (self._asked[rows] << 1 | np.isin(rows, chosen)) & (1 << WINDOW) - 1
        self._rounds[rows] = np.minimum(self._rounds[rows] + 1, WINDOW)

    def state_dict(self) -> saving.State:
        """In which of its last rounds each client was asked, as bits, and how many rounds these are."""
        return {"asked": self._asked.copy(), "rounds": self._rounds.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        saving.expect_keys(state, self.state_dict())
        asked = saving.array("asked", state["asked"], np.int64)
        self._rounds = saving.array("rounds", state["rounds"], np.int64, rows=len(asked))
        self._asked = asked

    def forget(self, rows: IntArray) -> None:
        """Let newcomers start without rounds."""
        rows = rows[rows < len(self._rounds)]
        self._asked[rows] = self._rounds[rows] = 0

    def _share(self, rows: IntArray) -> FloatArray:
        asked = (self._asked[rows, None] >> np.arange(WINDOW) & 1).sum(axis=1)
        return np.asarray(asked / np.maximum(self._rounds[rows], 1))

    def _grow(self, rows: IntArray) -> None:
        length = int(rows.max(initial=-1)) + 1
        self._asked = saving.long_enough(self._asked, length, 0)
        self._rounds = saving.long_enough(self._rounds, length, 0)
