"""The first time that the server measures of a client: nothing is learnt from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.replies import ClientResult

LEAST_SHARE = 0.01
"""Share of the round's shortest first time below which no reported training time counts."""


class FirstTimes:
    """Replaces the first time of each client by what is known of clients' times.

    On the server's clock a first time contains the start of the client's process, which can take fifty times as long
    as the training. A selector that learnt it would not ask the client again for many rounds. So the selector is given
    other seconds, which the history has too, with "first" as their ``latency_source``. Its ``first_s`` is the time
    itself, and the round's seconds stay those that the server waited. The play counts, and nobody trains twice.

    Every client of a round that has its first time gets the same seconds, so that they say nothing on who is faster:

    1. the median over all clients of the last time that was not their first,
    2. before there is any, the median of the training times that these clients report (``compute_s``), at least a
       hundredth of the shortest of their first times: one client cannot set a time near 0,
    3. without such reports, the shortest of their first times.

    No client gets more seconds than the server measured. A row has one first time: a reconnection changes nothing, and
    a client that failed still has its first time before it. A report that agrees with the server's time is believed,
    and a client whom nobody timed has no first time. For a spare that has not answered, the server knows no time, only
    how long it waited: this stays.

    >>> FirstTimes.of_others(np.array([12.0, 15.0]), np.array([0.2, 0.3]), np.zeros(0))
    0.25
    >>> FirstTimes.of_others(np.array([12.0, 15.0]), np.array([0.2, 0.3]), np.array([0.5, 0.7, 0.9]))
    0.7
    >>> FirstTimes.of_others(np.array([12.0, 15.0]), np.zeros(0), np.zeros(0))
    12.0
    """

    def __init__(self) -> None:
        self._timed: BoolArray = np.zeros(0, dtype=np.bool_)  # by row: whether the first time has passed
        self._last: FloatArray = np.zeros(0)  # seconds of the last time that was not the first; NaN without one

    def replaced(self, rows: IntArray, results: Mapping[str, ClientResult]) -> dict[str, ClientResult]:
        """The results of a round with the seconds that selector and history get.

        Args:
            rows: The chosen rows, ascending, shape (n,).
            results: Connection -> its reply after reading, in the order of ``rows``.
        """
        read = list(results.values())
        first = self._timed_in(read)
        if not first.any():
            return dict(results)
        self._grow(rows)
        first &= ~self._timed[rows] & np.array([result.latency_source != "reported" for result in read])
        if not first.any():
            return dict(results)
        now = [result for result, new in zip(read, first, strict=True) if new]
        claimed = np.array([result.values["compute"] for result in now])
        seconds = self.of_others(
            np.array([_seconds(result) for result in now]), claimed[claimed > 0], self._known(rows, read, first)
        )
        return {
            node: _given(result, min(seconds, _seconds(result))) if first[i] else result
            for i, (node, result) in enumerate(results.items())
        }

    @staticmethod
    def of_others(measured: FloatArray, claimed: FloatArray, known: FloatArray) -> float:
        """The seconds that stand for the first times of a round.

        Args:
            measured: The first times themselves, seconds, at least one.
            claimed: Training times that these clients report, seconds above 0.
            known: The last times of other clients that were not their first, seconds.
        """
        if known.size:
            return float(np.median(known))
        if claimed.size:
            return max(float(np.median(claimed)), LEAST_SHARE * float(measured.min()))
        return float(measured.min())

    def note(self, rows: IntArray, results: Mapping[str, ClientResult]) -> None:
        """Take in the results of a round, which :meth:`replaced` returned, when the round is finished."""
        read = list(results.values())
        timed = self._timed_in(read)
        if not timed.any():
            return
        later = timed & ~np.array([result.first for result in read], dtype=np.bool_)
        self._grow(rows)
        self._last[rows[later]] = [_seconds(result) for result, it in zip(read, later, strict=True) if it]
        self._timed[rows[timed]] = True

    def state_dict(self) -> state_dicts.State:
        """Whose first time has passed, and the last time of each that was not the first."""
        return {"timed": self._timed.copy(), "last": self._last.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        timed = state_dicts.array("timed", state["timed"], np.bool_)
        last = state_dicts.array("last", state["last"], np.float64, rows=len(timed))
        if (last < 0).any() or np.isinf(last).any():
            raise StateError(f"last must be seconds of at least 0, NaN where unknown, got {last!r:.80}")
        self._timed, self._last = timed, last

    def forget(self, rows: IntArray) -> None:
        """Newcomers have their first time before them."""
        rows = rows[rows < len(self._timed)]
        self._timed[rows], self._last[rows] = False, np.nan

    def _known(self, rows: IntArray, read: Sequence[ClientResult], first: BoolArray) -> FloatArray:
        """The last time of each client that was not its first, this round's included."""
        last, later = self._last.copy(), self._timed_in(read) & ~first
        last[rows[later]] = [_seconds(result) for result, it in zip(read, later, strict=True) if it]
        return last[np.isfinite(last)]

    @staticmethod
    def _timed_in(read: Sequence[ClientResult]) -> BoolArray:
        """Whose time the server measured from the question to a usable answer, shape (n,)."""
        return np.array(
            [result.timed and (result.completed or (result.spare and result.answered)) for result in read],
            dtype=np.bool_,
        )

    def _grow(self, rows: IntArray) -> None:
        length = int(rows.max(initial=-1)) + 1
        self._timed = state_dicts.extended(self._timed, length, False)
        self._last = state_dicts.extended(self._last, length, np.nan)


def _seconds(result: ClientResult) -> float:
    """A client's own seconds: a spare's latency is that of a failure."""
    return result.latency_s if result.completed else result.spare_s


def _given(result: ClientResult, seconds: float) -> ClientResult:
    if result.completed:
        return replace(result, latency_s=seconds, latency_source="first", first=True, first_s=result.latency_s)
    return replace(result, spare_s=seconds, first=True)
