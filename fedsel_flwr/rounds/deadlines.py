"""The automatic deadline of a round: as long as its clients usually take, and a margin.

A client's usual time is median + 3 max(MAD, 10 % of the median, 3 s) of its last round trips. MAD is the median
absolute deviation. A round ends at the latest after the largest usual time of the clients that it asks. So a client
that is always three times slower is waited for, and a client that never answers is not. Late answers count with their
true time, once it is known.

If too few of the asked clients have a round trip, as in round 1, the times of the round itself count too. Once k
clients have answered, their usual time is a deadline, which further answers change. k is ``wait_for``, else more than
half of the asked clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.replies import ClientResult
from fedsel_flwr.rounds.settings import Settings

LAST_TRIPS = 20
"""Number of round trips of a client that count."""
DEVIATIONS, LEAST_SHARE, LEAST_S = 3.0, 0.1, 3.0
"""Margin in deviations, and the smallest deviation: as a share of the median, and in seconds."""


def usual_time(seconds: npt.ArrayLike) -> FloatArray:
    """Return median + 3 max(MAD, 10 % of the median, 3 s) of times, in seconds.

    Args:
        seconds: The times along the last axis, shape (..., n). NaN is no time; without a time the result is NaN.

    >>> usual_time([[10.0, 12.0, 30.0], [60.0, 60.0, np.nan]])
    array([21., 78.])
    """
    times = np.asarray(seconds, dtype=np.float64)
    timed = np.isfinite(times).any(axis=-1)
    known, result = times[timed], np.full(times.shape[:-1], np.nan)
    median = np.nanmedian(known, axis=-1)
    deviation = np.nanmedian(np.abs(known - median[..., np.newaxis]), axis=-1)
    least = np.maximum(LEAST_SHARE * median, LEAST_S)
    result[timed] = median + DEVIATIONS * np.maximum(deviation, least)
    return result


@dataclass(frozen=True)
class Deadline:
    """Seconds after which a round ends.

    Args:
        seconds: The seconds from the start of the round; infinity without a deadline.
        answers: Number of answers from which on their own times count too; None if only ``seconds`` count.
    """

    seconds: float = math.inf
    answers: int | None = None

    @classmethod
    def of(cls, rows: IntArray, settings: Settings, trips: Deadlines | None) -> Deadline:
        """Return the deadline of a round.

        Args:
            rows: The asked clients, shape (n,).
            settings: ``round_deadline_s`` and ``wait_for``.
            trips: The clients' round trips, for an automatic deadline.
        """
        if trips is None:
            return cls() if settings.round_deadline_s is None else cls(float(settings.round_deadline_s))
        usual = trips.usual(rows)
        known = usual[np.isfinite(usual)]
        answers = min(settings.wait_for or len(rows) // 2 + 1, len(rows))
        return cls(float(known.max()) if known.size else math.inf, None if known.size >= answers else answers)

    def after(self, times: Sequence[float]) -> float:
        """Return the deadline once answers have come.

        Args:
            times: Seconds until each answer, ascending.

        >>> deadline = Deadline(20.0, answers=2)
        >>> deadline.after([5.0]), deadline.after([5.0, 6.0]), deadline.after([5.0, 60.0])
        (inf, 20.0, 115.0)
        """
        if self.answers is None:
            return self.seconds
        if len(times) < self.answers:
            return math.inf
        return max(0.0 if math.isinf(self.seconds) else self.seconds, times[-1], float(usual_time([times])[0]))

    def settled(self, times: Sequence[float]) -> float:
        """Return the deadline of a round in which answers would come after ``times`` seconds, ascending."""
        first = len(times) if self.answers is None else self.answers
        # Before the first of these numbers of answers there is no deadline, so all of them come in time.
        for number in range(min(first, len(times)), len(times)):
            if times[number] > (limit := self.after(times[:number])):
                return limit
        return self.after(times)


def _table(name: str, value: object, width: int) -> FloatArray:
    """Return a copy of a state's table of numbers."""
    if not isinstance(value, np.ndarray) or value.dtype != np.float64 or value.shape[1:] != (width,):
        raise StateError(f"{name} must be an array of float64 with {width} columns, got {value!r:.80}")
    return value.copy()


class Deadlines(state_dicts.SavedFields):
    """The round trips of each client, from which the automatic deadline follows."""

    saved: ClassVar = {"_trips": partial(_table, width=LAST_TRIPS), "_coming": partial(_table, width=3)}

    def __init__(self) -> None:
        # The last round trips of each client, seconds, shape (n, LAST_TRIPS), the newest first; NaN before.
        self._trips = np.full((0, LAST_TRIPS), np.nan)
        # Late answers whose time is not known yet: row, seconds, and when it will be known in simulated seconds.
        self._coming = np.zeros((0, 3))

    def usual(self, rows: IntArray) -> FloatArray:
        """Return the usual time of each client, seconds, shape (n,); NaN without a round trip."""
        self._grow(rows)
        return usual_time(self._trips[rows])

    def note_round(self, rows: IntArray, results: Iterable[ClientResult], sent_s: float, end_s: float) -> None:
        """Note the round trips of a round; late ones become known when they arrive.

        Args:
            rows: Its clients, shape (n,).
            results: Their replies after reading.
            sent_s: Simulated seconds at which they got the model.
            end_s: Simulated seconds at the end of the round.
        """
        read = list(results)
        done = np.array([result.done_s for result in read], dtype=np.float64)
        known = np.array([end_s if result.completed else sent_s + result.done_s for result in read])
        answered = np.isfinite(done)
        self.note(rows[answered], done[answered], known[answered], end_s)

    def note(self, rows: IntArray, seconds: FloatArray, known_s: FloatArray, now_s: float) -> None:
        """Note round trips, in the order in which they become known.

        Args:
            rows: The clients, shape (n,).
            seconds: The seconds of their round trips, shape (n,).
            known_s: Simulated seconds at which the server knows each of them, shape (n,).
            now_s: Simulated seconds now. What becomes known later counts from then on.
        """
        coming = np.concatenate([self._coming, np.stack([rows, seconds, known_s], axis=1)])
        known = coming[:, 2] <= now_s
        self._coming = coming[~known]
        self._grow(coming[known, 0].astype(np.int64))
        for row, took, _ in coming[known][np.argsort(coming[known, 2], kind="stable")]:
            self._trips[int(row)] = [took, *self._trips[int(row), :-1]]

    def forget(self, rows: IntArray) -> None:
        """Drop the round trips of evicted clients."""
        self._trips[rows[rows < len(self._trips)]] = np.nan
        self._coming = self._coming[~np.isin(self._coming[:, 0], rows)]

    def _grow(self, rows: IntArray) -> None:
        self._trips = state_dicts.extended(self._trips, int(rows.max(initial=-1)) + 1, np.nan)
