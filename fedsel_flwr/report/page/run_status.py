"""Run status: whether a deployment is running or finished, and the settings in its newest checkpoint.

The journal has no wall clock. Two times are known: that of the journal's last change, and those of the checkpoints.
From two checkpoints follow the real seconds per round, which a strategy with a virtual clock does not measure.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedsel_flwr.rounds.checkpoints import NAME
from fedsel_flwr.rounds.records import DECODE_ERRORS, MOST_COUNT
from fedsel_flwr.rounds.storage import open_file
from fedsel_flwr.rounds.untrusted import one_line

StatusWord = Literal["finished", "running", "no new round", "unknown"]
STALLED = 3.0
"""Multiple of the usual duration of a round after which a new round is missing.

A round is in the journal at the latest when the next round ends, so two durations are normal.
"""
SHORTEST_S = 10.0
"""Seconds below which no new round is missing."""
LONGEST_HEADER = 64_000_000
"""Largest number of bytes that are read of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run, read from its newest checkpoint.

    Attributes:
        selector: Name of the selector; empty if it is unknown.
        clients_per_round: Number of clients that a round selects; None if it is unknown.
        max_latency_s: Seconds after which an update is late; NaN if it is unknown.
        clock: "server" if the strategy measures durations, "virtual" if the clients report them; empty if unknown.
        total_rounds: Number of the last round; None if the run has none, or if it is unknown.
    """

    selector: str = ""
    clients_per_round: int | None = None
    max_latency_s: float = math.nan
    clock: str = ""
    total_rounds: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Status of a run at the time of the report.

    Attributes:
        word: "finished" if the last round is in the journal. Otherwise the time since the journal's last change decides
            between "running" and "no new round". It is "unknown" if the usual duration of a round is unknown.
        since_s: Seconds from the journal's last change to the report.
        usual_s: Usual duration of a round on a real clock, seconds; NaN if it is unknown.
    """

    word: StatusWord
    since_s: float
    usual_s: float


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The newest checkpoint of a folder.

    Attributes:
        round: Its round.
        written: Time of its last change, UTC.
        age_s: Seconds from this time to the time of the report.
        settings: The run's settings in it.
        round_s: Real seconds per round since the oldest checkpoint of the folder; NaN with one checkpoint.
    """

    round: int
    written: datetime
    age_s: float
    settings: RunSettings
    round_s: float


def newest_checkpoint(folder: Path, now: datetime) -> NewestCheckpoint | None:
    """Return the newest checkpoint of a folder; None if there is none."""
    times: dict[int, tuple[float, Path]] = {}
    for path in folder.iterdir():
        if match := NAME.fullmatch(path.name):
            try:
                times[int(match[1])] = path.lstat().st_mtime, path
            except OSError:
                # The running strategy removes old checkpoints.
                continue
    if not times:
        return None
    first, last = min(times), max(times)
    (began, _), (ended, path) = times[first], times[last]
    written = datetime.fromtimestamp(ended, UTC)
    return NewestCheckpoint(
        round=last,
        written=written,
        age_s=max(0.0, (now - written).total_seconds()),
        settings=read_settings(path),
        round_s=(ended - began) / (last - first) if ended > began and last > first else math.nan,
    )


def read_settings(path: Path) -> RunSettings:
    """Return the settings in the header of a checkpoint; without any if it cannot be read."""
    try:
        with open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            said = json.loads(json.loads(file.read(min(length, LONGEST_HEADER)))["__metadata__"]["checkpoint"])
        made_for = {key: one_line(str(value)) for key, value in said["made_for"].items()}
    except (OSError, AttributeError, *DECODE_ERRORS):
        return RunSettings()
    clients, total = (_number(value) for value in (made_for.get("selector.clients_per_round"), said.get(TOTAL)))
    return RunSettings(
        selector=made_for.get("selector", ""),
        clients_per_round=int(clients) if math.isfinite(clients) else None,
        max_latency_s=_number(made_for.get("max_latency")),
        clock=made_for.get("clock", "").strip("'\""),
        total_rounds=int(total) if math.isfinite(total) else None,
    )


TOTAL = "total_rounds"
"""Key of the number of the last round in a checkpoint's header."""


def run_status(since_s: float, last_round: int, median_s: float, checkpoint: NewestCheckpoint | None) -> RunStatus:
    """Return the status of a run.

    Args:
        since_s: Seconds since the journal's last change.
        last_round: Number of the last round in the journal.
        median_s: Median duration of a round on the strategy's clock, seconds.
        checkpoint: The newest checkpoint.
    """
    settings = checkpoint.settings if checkpoint else RunSettings()
    usual = median_s if settings.clock == "server" else checkpoint.round_s if checkpoint else math.nan
    word: StatusWord = "unknown"
    if settings.total_rounds is not None and last_round >= settings.total_rounds:
        word = "finished"
    elif math.isfinite(usual):
        word = "running" if since_s <= max(SHORTEST_S, STALLED * usual) else "no new round"
    return RunStatus(word=word, since_s=since_s, usual_s=usual)


def _number(value: Any) -> float:
    """Return a number from a text or a number; NaN if it is none, or out of range."""
    try:
        return float(value) if 0 <= float(value) <= MOST_COUNT else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan
