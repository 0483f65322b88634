"""Tracked run: sends each round of a run to a tracker once, although the tracker fails or the run is resumed.

The history is the buffer. A round that could not be sent is sent with a later one, at the end of the run, or when the
run is resumed. A small file in the run's folder, :data:`STATE`, has the tracker's run and the last round it received.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedsel_flwr.callbacks.trackers import METRICS_PER_REQUEST, Figures, Recorder, client_figures, figures
from fedsel_flwr.errors import RunError, described
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.records import RoundRecord
from fedsel_flwr.rounds.storage import read_file, write_atomically

logger = logging.getLogger("fedsel_flwr")
STATE = "tracking.json"
"""Name of the file with the state."""
PAUSE_S = 1.0
"""Seconds between two transfers of rounds: a transfer of several rounds costs little more than that of one."""
SHARE = 0.1
"""Largest share of a run's time that goes into transfers, before the last one."""
MAX_ERROR = 160
"""Longest text of a tracker's error, characters."""
Open = Callable[[str | None], Recorder]
"""Opens a run of the tracker: a new one, or the run with this identifier."""


class TrackedRun:
    """A callback for ``on_round`` that sends a run's rounds to a tracker; a context manager that closes its run.

    Whatever the tracker raises is logged once as a warning, and the run continues.

    Args:
        open_run: Opens the tracker's run.
        place: The tracker and its address. A state with another place is that of another tracker, and is ignored.
        state: The file of the state; None keeps the state in memory.
        resume: Whether to continue from that file. False begins a new run of the tracker.
        clients: Ids of the clients with per-client metrics.
    """

    def __init__(
        self,
        open_run: Open,
        place: Mapping[str, str | None],
        *,
        state: Path | None = None,
        resume: bool = False,
        clients: Collection[str] = (),
    ) -> None:
        self._open, self._place, self._file, self._clients = open_run, dict(place), state, frozenset(clients)
        found = read_state(state) if state is not None and resume else {}
        if {key: found.get(key) for key in self._place} != self._place:
            found = {}
        self._run_id: str | None = found.get("run")
        # The last round that the tracker has, and whether its run was closed after the last one.
        self._sent, self._ended = int(found.get("rounds", 0)), bool(found.get("ended", False))
        self._recorder: Recorder | None = None
        self._history: History | None = None
        self._next, self._error, self._warned = -math.inf, "", False

    def follow(self, history: History) -> Self:
        """Take the rounds from a history from now on; returns itself."""
        self._history = history
        return self

    def restart(self) -> None:
        """Begin a new run of the tracker: the run is played again, and may be another one."""
        self._run_id, self._sent, self._ended = None, 0, False

    def __call__(self, record: RoundRecord) -> None:
        """Send the rounds that the tracker lacks, unless the last transfer was too recent.

        Args:
            record: The round that has ended.
        """
        began = time.monotonic()
        if began >= self._next:
            # Without its central evaluation: that may still come, if the run turns out to end with this round.
            self._try(lambda: self._send(record.round - 1 if math.isnan(record.accuracy) else record.round))
            ended = time.monotonic()
            self._next = ended + max(PAUSE_S, (ended - began) / SHARE)

    def close(self, *, failed: bool = False) -> None:
        """Send the rounds that are left, and close the tracker's run.

        Args:
            failed: Whether an exception ended the run. If the tracker failed too, nothing more is tried then.
        """
        last = None if self._history is None else self._history.last
        rounds = 0 if last is None else last.round
        if (self._ended and self._sent >= rounds) or (failed and self._error):
            return
        self._try(lambda: self._finish(rounds, failed))
        if self._error and not failed:
            logger.warning(
                "%s has %d of %d rounds of this run. Resume the run with the same tracker to send the others",
                self._place["tracker"], min(self._sent, rounds), rounds,
            )  # fmt: skip

    def __enter__(self) -> Self:
        """Return the callback itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the tracker's run, as failed if an exception ended the block."""
        self.close(failed=error is not None)

    def _send(self, up_to: int) -> None:
        """Send each round after the last one sent, in requests of a bounded size."""
        if up_to <= self._sent:
            return
        recorder = self._opened()
        for batch in batches(self._rounds_to_send(up_to)):
            recorder.write_rounds(batch)
            self._sent = batch[-1][0]
        self._error = ""
        self._save()

    def _finish(self, rounds: int, failed: bool) -> None:
        self._send(rounds)
        recorder = self._opened()
        recorder.end(failed=failed)
        self._recorder, self._ended, self._error = None, not failed, ""
        self._save()

    def _opened(self) -> Recorder:
        if self._recorder is None:
            self._recorder = self._open(self._run_id)
            self._run_id, self._ended = self._recorder.run_id, False
            self._save()
        return self._recorder

    def _rounds_to_send(self, up_to: int) -> Iterator[tuple[int, Figures]]:
        if self._history is None:
            raise RunError("rounds come from a history. Call follow(history) before the first round")
        rounds, clients = self._history.rounds, self._history.clients
        # Rounds are numbered without a gap. Clients are counted from the end, so that old rounds are not read.
        missing = rounds[max(0, self._sent + 1 - rounds[0].round) :]
        place = len(clients) - sum(record.num_selected for record in missing)
        for record in missing:
            if record.round > up_to:
                return
            values = figures(record)
            if self._clients:
                for row in clients[place : place + record.num_selected]:
                    if row.client_id in self._clients:
                        values |= client_figures(row)
            place += record.num_selected
            yield record.round, values

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        # Any exception: a run of hours must not end because a tracking server is away.
        except Exception as error:
            self._error = shortened(error)
            if not self._warned:
                logger.warning(
                    "%s failed. The run continues, and the rounds are sent later: %s",
                    self._place["tracker"], self._error,
                )  # fmt: skip
            self._warned = True
            # A full disk ends the run itself, with its own error.
            with contextlib.suppress(OSError):
                self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        content = self._place | {
            "run": self._run_id, "rounds": self._sent, "ended": self._ended, "error": self._error
        }  # fmt: skip
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, (json.dumps(content, indent=2) + "\n").encode())


def shortened(error: Exception) -> str:
    """Describe a tracker's error in one line of at most :data:`MAX_ERROR` characters: MLflow's errors are long.

    >>> line = shortened(OSError("gone " * 100))
    >>> line.endswith("..."), len(line) <= MAX_ERROR + 3
    (True, True)
    """
    text = described(error)
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR].rstrip()}..."


def batches(rounds: Iterator[tuple[int, Figures]]) -> Iterator[Sequence[tuple[int, Figures]]]:
    """Group rounds so that a group has at most :data:`METRICS_PER_REQUEST` figures, or is one round.

    >>> [[number for number, _ in batch] for batch in batches(iter([(1, {"a": 0.0}), (2, {"a": 1.0})]))]
    [[1, 2]]
    """
    group: list[tuple[int, Figures]] = []
    size = 0
    for number, values in rounds:
        if group and size + len(values) > METRICS_PER_REQUEST:
            yield group
            group, size = [], 0
        group.append((number, values))
        size += len(values)
    if group:
        yield group


def read_state(path: Path) -> dict[str, Any]:
    """Read the state of a tracked run; empty if there is none, or it cannot be used.

    The folder may come from another person: the identifier of the run must be harmless in a path.
    """
    try:
        found = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    run, rounds = found.get("run"), found.get("rounds")
    harmless = run is None or (
        isinstance(run, str) and 0 < len(run) <= 250 and run.isprintable()
        and not {"/", "\\"} & set(run) and run.strip(". ") == run
    )  # fmt: skip
    if not harmless or type(rounds) is not int or rounds < 0:
        return {}
    return found
