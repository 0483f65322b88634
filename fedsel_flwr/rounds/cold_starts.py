"""Cold starts: the first time that the server measures for a client is replaced, so that selectors do not learn it."""

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
"""Smallest usable training time that a client reports, as a share of the round's shortest first time."""


class ColdStarts(ClientArrays):
    """Replaces the first measured time of each client by an estimate from other times.

    On the server's clock, the first time of a client includes the start of its process. That start can take fifty times
    as long as the training. A selector that learned this time would avoid the client for many rounds. The selector
    therefore gets an estimate in seconds. The history has the estimate as the latency, with "first" as
    ``latency_source``, and the measured time as ``first_s``. The duration of the round does not change. The play
    counts, and no client trains twice.

    All clients with a first time in the same round get the same estimate, so that it favours none of them:

    1. the median over all clients of their last time after the first,
    2. without such times, the median of the training times that these clients report (``compute_s``), but at least a
       hundredth of their shortest first time: one client cannot set a time near 0,
    3. without such reports, the shortest of their first times.

    The estimate of a client is at most its measured time. A row has one cold start, which a reconnection does not
    repeat. After a failure the first time is still to come. A report that agrees with the server's time is used as it
    is. A client without a measured time has no cold start. For a spare that has not answered, the server knows only its
    own wait, and that time stays.

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
    """Seconds of the last time after the first; NaN without one."""

    def replace_times(self, rows: IntArray, results: Mapping[str, ClientResult]) -> dict[str, ClientResult]:
        """Return the results of a round with the seconds for the selector and the history.

        Nothing is stored before :meth:`note`, so a round that never finishes leaves no times.

        Args:
            rows: The chosen rows, ascending, shape (n,).
            results: Connection -> its reply after reading, in the order of ``rows``.
        """
        read = list(results.values())
        timed = self._timed_in(read)
        # Early returns: simulations time no client, and after the first rounds no client is new.
        if not timed.any():
            return dict(results)
        self._grow(rows)
        first = timed & ~self._timed[rows] & np.array([result.latency_source != "reported" for result in read])
        if not first.any():
            return dict(results)
        cold = [result for result, new in zip(read, first, strict=True) if new]
        claimed = np.array([result.values["compute"] for result in cold])
        measured = np.array([_own_seconds(result) for result in cold])
        # NaN, from clients without a reported training time, fails the comparison too.
        last = self._last_with(rows, read, timed & ~first)
        seconds = self.substitute(measured, claimed[claimed > 0], last[np.isfinite(last)])
        return {
            node: _with_seconds(result, min(seconds, _own_seconds(result))) if first[i] else result
            for i, (node, result) in enumerate(results.items())
        }

    def note(self, rows: IntArray, results: Mapping[str, ClientResult]) -> None:
        """Store the times of a finished round, from the results of :meth:`replace_times`."""
        read = list(results.values())
        timed = self._timed_in(read)
        if not timed.any():
            return
        later = timed & ~np.array([result.first for result in read], dtype=np.bool_)
        self._grow(rows)
        self._last = self._last_with(rows, read, later)
        self._timed[rows[timed]] = True

    @staticmethod
    def substitute(measured: FloatArray, claimed: FloatArray, known: FloatArray) -> float:
        """Return the estimate that replaces the first times of a round, seconds.

        Args:
            measured: The first times themselves, seconds, at least one.
            claimed: Training times that these clients report, seconds above 0.
            known: The last time after the first of other clients, seconds.
        """
        if known.size:
            return float(np.median(known))
        if claimed.size:
            return max(float(np.median(claimed)), LEAST_SHARE * float(measured.min()))
        return float(measured.min())

    def _last_with(self, rows: IntArray, read: Sequence[ClientResult], later: BoolArray) -> FloatArray:
        """Return each client's last time after the first, this round's ``later`` times included, as a copy."""
        # A copy, because the round may still fail. Only ``note`` stores times.
        last = self._last.copy()
        last[rows[later]] = [_own_seconds(result) for result, it in zip(read, later, strict=True) if it]
        return last

    @staticmethod
    def _timed_in(read: Sequence[ClientResult]) -> BoolArray:
        """Return whether the server measured each client's time from question to usable answer, shape (n,)."""
        answered = [result.timed and (result.completed or (result.spare and result.answered)) for result in read]
        return np.array(answered, dtype=np.bool_)

    def _check_loaded(self, loaded: Mapping[str, Any]) -> None:
        last = loaded["_last"]
        if (last < 0).any() or np.isinf(last).any():
            raise StateError(f"last must be seconds of at least 0, NaN if unknown, got {last!r:.80}")


def _own_seconds(result: ClientResult) -> float:
    """Return the time of a client itself; the latency of a spare is that of a failure, max_latency."""
    return result.latency_s if result.completed else result.spare_s


def _with_seconds(result: ClientResult, seconds: float) -> ClientResult:
    if result.completed:
        return replace(result, latency_s=seconds, latency_source="first", first=True, first_s=result.latency_s)
    return replace(result, spare_s=seconds, first=True)
