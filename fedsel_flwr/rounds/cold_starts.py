"""Cold starts: the first time that the server measures of a client is replaced, so that nothing is learnt from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds.eligibility import ClientArrays
from fedsel_flwr.rounds.replies import ClientResult

LEAST_SHARE = 0.01
"""Share of the round's shortest first time below which no reported training time counts."""


class ColdStarts(ClientArrays):
    """Replaces the first time of each client by what is known of clients' times.

    On the server's clock a first time contains the start of the client's process, which can take fifty times as long
    as the training. A selector that learnt it would not ask the client again for many rounds. So the selector is given
    other seconds, which the history has too, with "first" as their ``latency_source``. Its ``first_s`` is the time
    itself, and the round's seconds stay those that the server waited. The play counts, and no client trains twice.

    Every client of a round that has its first time gets the same seconds, so that they say nothing on who is faster:

    1. the median over all clients of the last time that was not their first,
    2. before there is any, the median of the training times that these clients report (``compute_s``), at least a
       hundredth of the shortest of their first times: one client cannot set a time near 0,
    3. without such reports, the shortest of their first times.

    No client gets more seconds than the server measured. A row has one cold start: a reconnection changes nothing, and
    a client that failed still has its first time before it. A report that agrees with the server's time is believed,
    and a client that the server did not time has no cold start. For a spare that has not answered, the server knows
    only how long it waited; that time stays.

    >>> ColdStarts.substitute(np.array([12.0, 15.0]), np.array([0.2, 0.3]), np.zeros(0))
    0.25
    >>> ColdStarts.substitute(np.array([12.0, 15.0]), np.array([0.2, 0.3]), np.array([0.5, 0.7, 0.9]))
    0.7
    >>> ColdStarts.substitute(np.array([12.0, 15.0]), np.zeros(0), np.zeros(0))
    12.0
    """

    newcomer: ClassVar = {"_timed": np.bool_(False), "_last": np.float64(np.nan)}
    _timed: BoolArray
    """Whether the cold start has passed."""
    _last: FloatArray
    """Seconds of the last time that was not the first; NaN without one."""

    def replace_times(self, rows: IntArray, results: Mapping[str, ClientResult]) -> dict[str, ClientResult]:
        """Return the results of a round with the seconds that selector and history get.

        Nothing is remembered before :meth:`note`: a round that is never finished has measured nothing.

        Args:
            rows: The chosen rows, ascending, shape (n,).
            results: Connection -> its reply after reading, in the order of ``rows``.
        """
        read = list(results.values())
        timed = self._timed_in(read)
        # early returns: simulations time no client, and after the first rounds nobody is new
        if not timed.any():
            return dict(results)
        self._grow(rows)
        first = timed & ~self._timed[rows] & np.array([result.latency_source != "reported" for result in read])
        if not first.any():
            return dict(results)
        cold = [result for result, new in zip(read, first, strict=True) if new]
        claimed = np.array([result.values["compute"] for result in cold])
        measured = np.array([_own_seconds(result) for result in cold])
        # NaN, for clients that report no training time, fails the comparison too
        seconds = self.substitute(measured, claimed[claimed > 0], self._known(rows, read, timed & ~first))
        return {
            node: _with_seconds(result, min(seconds, _own_seconds(result))) if first[i] else result
            for i, (node, result) in enumerate(results.items())
        }

    def note(self, rows: IntArray, results: Mapping[str, ClientResult]) -> None:
        """Remember the times of a finished round, whose results :meth:`replace_times` returned."""
        read = list(results.values())
        timed = self._timed_in(read)
        if not timed.any():
            return
        later = timed & ~np.array([result.first for result in read], dtype=np.bool_)
        self._grow(rows)
        self._last[rows[later]] = [_own_seconds(result) for result, it in zip(read, later, strict=True) if it]
        self._timed[rows[timed]] = True

    @staticmethod
    def substitute(measured: FloatArray, claimed: FloatArray, known: FloatArray) -> float:
        """Return the seconds that stand for the first times of a round.

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

    def _known(self, rows: IntArray, read: Sequence[ClientResult], later: BoolArray) -> FloatArray:
        """Return the last time of each client that was not its first, this round's ``later`` ones included."""
        # a copy: the round may still fail, and only ``note`` remembers it
        last = self._last.copy()
        last[rows[later]] = [_own_seconds(result) for result, it in zip(read, later, strict=True) if it]
        return last[np.isfinite(last)]

    @staticmethod
    def _timed_in(read: Sequence[ClientResult]) -> BoolArray:
        """Return whose time the server measured from the question to a usable answer, shape (n,)."""
        return np.array(
            [result.timed and (result.completed or (result.spare and result.answered)) for result in read],
            dtype=np.bool_,
        )

    def _check_loaded(self, loaded: Mapping[str, Any]) -> None:
        last = loaded["_last"]
        if (last < 0).any() or np.isinf(last).any():
            raise StateError(f"last must be seconds of at least 0, NaN if unknown, got {last!r:.80}")


def _own_seconds(result: ClientResult) -> float:
    """Return the time that a client took; the latency of a spare is that of a failure, max_latency."""
    return result.latency_s if result.completed else result.spare_s


def _with_seconds(result: ClientResult, seconds: float) -> ClientResult:
    if result.completed:
        return replace(result, latency_s=seconds, latency_source="first", first=True, first_s=result.latency_s)
    return replace(result, spare_s=seconds, first=True)
