"""Who is left in peace after failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, IntArray
from fedsel_flwr.rounds import saving

LONGEST = 30
"""Doublings after which the time out stays as it is."""


class Cooldown:
    """Counts failures in a row, and leaves a client out for 2^n rounds after the n-th.

    Args:
        active: Whether anybody is left out.

    >>> import numpy as np
    >>> cooldown = Cooldown(active=True)
    >>> cooldown.note(np.array([0, 1]), np.array([True, False]), round=1)
    >>> [cooldown.ready(np.arange(2), round).tolist() for round in (2, 3, 4)]
    [[True, False], [True, False], [True, True]]
    """

    def __init__(self, active: bool) -> None:
        self._active = active
        self._failures: IntArray = np.zeros(0, dtype=np.int64)  # in a row, by row of the selector
        self._out_until: IntArray = np.zeros(0, dtype=np.int64)  # the last round without the client

    def ready(self, rows: IntArray, round: int) -> BoolArray:
        """Which of ``rows`` may be chosen in ``round``."""
        self._grow(rows)
        return np.asarray(self._out_until[rows] < round)

    def note(self, rows: IntArray, completed: BoolArray, round: int) -> None:
        """Take in how the clients chosen in ``round`` did."""
        self._grow(rows)
        self._failures[rows] = np.where(completed, 0, self._failures[rows] + 1)
        if self._active:
            failed = rows[~completed]
            self._out_until[failed] = round + 2 ** np.minimum(self._failures[failed], LONGEST)

    def state_dict(self) -> saving.State:
        """Failures in a row, and the last round without each client."""
        return {"failures": self._failures.copy(), "out_until": self._out_until.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        saving.expect_keys(state, self.state_dict())
        failures = saving.array("failures", state["failures"], np.int64)
        out_until = saving.array("out_until", state["out_until"], np.int64, rows=len(failures))
        self._failures, self._out_until = failures, out_until

    def forget(self, rows: IntArray) -> None:
        """Let newcomers start without failures."""
        self._grow(rows)
        self._failures[rows] = self._out_until[rows] = 0

    def _grow(self, rows: IntArray) -> None:
        length = int(rows.max(initial=-1)) + 1
        self._failures = saving.long_enough(self._failures, length, 0)
        self._out_until = saving.long_enough(self._out_until, length, 0)
