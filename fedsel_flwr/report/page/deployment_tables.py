"""Figures of a deployment, from the journal in its folder: page, text and JSON draw from one summary.

The folder may belong to a running strategy. It is read without a lock. Only complete lines of the journal count, and a
round is in the journal after its evaluation, at the latest when the next round ends.

**Status.** The journal has no wall clock. Two times are known: that of the journal's last change, and those of the
checkpoints. From two checkpoints follow the real seconds per round, which a strategy with a virtual clock does not
measure.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedsel_flwr.callbacks.prometheus import reason_label
from fedsel_flwr.checks import FloatArray
from fedsel_flwr.errors import FedSelError, ParameterError
from fedsel_flwr.report.advice import Advice, advise, plain_values
from fedsel_flwr.report.page.comparison_tables import PARTS, PageRun, columns, failure_seconds, group_edges, took_s
from fedsel_flwr.report.page.document import Columns
from fedsel_flwr.report.page.waiting_costs import (
    PERCENTILE,
    ClientFigures,
    WaitingCost,
    client_figures,
    has_failed,
    mean,
    slowest_table,
)  # fmt: skip
from fedsel_flwr.report.run_folder import JOURNAL, SCENARIO, read_journal
from fedsel_flwr.report.summary import mean_staleness
from fedsel_flwr.rounds.checkpoints import NAME
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.records import DECODE_ERRORS, MOST_COUNT, ClientRecord, RoundRecord
from fedsel_flwr.rounds.storage import check_plain, open_file
from fedsel_flwr.rounds.untrusted import one_line

PLAN = "plan.json"
"""Name of the file that only the folder of a comparison has."""
TRANSFER, LATENCY = "transfer", "latency"
"""Parts of a round if the clients do not report all their times."""
DEPLOYMENT_PARTS = (*PARTS[:3], TRANSFER, LATENCY, *PARTS[3:])
"""Parts of a round, in the order in which a bar stacks them."""
MOST_NOTES = 5
"""Number of last rounds of which a report says what happened."""
FEWEST_ROUNDS = 8
"""Smallest number of rounds whose quarters are compared."""
GROUPS = 120
"""Largest number of groups of rounds in a chart."""
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


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Summary of a deployment.

    Attributes:
        folder: The folder.
        as_of: Time of the journal's last change, UTC.
        read: Time of the report, UTC.
        last_round: Number of the last round in the journal.
        rounds: Number of rounds in the journal.
        seconds: Duration of all rounds, seconds on the strategy's clock.
        mean_s: Mean duration of a round, seconds.
        median_s: Median duration of a round, seconds.
        counted_s: Mean seconds of a round after its slowest usable update. Failed clients count with ``max_latency``,
            so these seconds are not measured.
        quarters_s: Mean duration of a round in the first and in the last quarter of the rounds, seconds; NaN with fewer
            than :data:`FEWEST_ROUNDS` rounds.
        quarters_measured_s: The same without the seconds of ``counted_s``.
        p95_s: 95th percentile of the duration of a round, seconds.
        selections: Number of selected clients, summed over the rounds.
        updates: Number of usable updates.
        staleness: Their mean staleness in buffered rounds, in steps of the server; NaN if there are no such updates.
        spares: Number of spares.
        reasons: Reason of failure, as in the metrics for Prometheus -> number of failures, the most frequent first.
        remarks: Remark of a round, such as a column that no client reported -> number of rounds.
        late: Number of late updates that counted.
        notes: What happened in the last rounds, if rounds may end early: round -> one line.
        waiting: The cost of waiting for the slowest client.
        clients: Figures of each client that was ever selected, the costliest client first.
        checkpoint: The newest checkpoint; None if there is none.
        settings: The run's settings in this checkpoint.
        status: Whether the run is running or finished.
        accuracy: Table of the evaluated rounds: round, accuracy, loss.
        parts: Table of a mean round's parts, in seconds, in groups of rounds: round, round_end, part, seconds.
        failures: Table of the failed clients per round: round, round_end, reason, clients_per_round.
        slowest: Table of the rounds that waited for two clients or more, the newest first. Its columns: round, round_s,
            measured_s, client, outcome, beyond_median_s, problem. Several ids are separated by commas. The column
            measured_s is round_s without the seconds of ``counted_s``.
        max_latency_s: Seconds with which a failed client counts; NaN if they are unknown, or if they changed.
        advice: The advice of ``fedsel advise``; None if there is none.
        refusal: Reason for which there is no advice; empty if there is one.
    """

    folder: str
    as_of: datetime
    read: datetime
    last_round: int
    rounds: int
    seconds: float
    mean_s: float
    median_s: float
    counted_s: float
    quarters_s: tuple[float, float]
    quarters_measured_s: tuple[float, float]
    p95_s: float
    selections: int
    updates: int
    staleness: float
    spares: int
    reasons: Mapping[str, int]
    remarks: Mapping[str, int]
    late: int
    notes: Mapping[int, str]
    waiting: WaitingCost
    clients: Sequence[ClientFigures]
    checkpoint: NewestCheckpoint | None
    settings: RunSettings
    status: RunStatus
    accuracy: Columns
    parts: Columns
    failures: Columns
    slowest: Columns
    max_latency_s: float
    advice: Advice | None
    refusal: str

    def facts(self) -> dict[str, Any]:
        """Return all values as plain types; None for a value that is unknown."""
        found = asdict(self)
        for name in ("accuracy", "parts", "failures", "slowest"):
            columns = found[name]
            found[name] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return dict(plain_values(found))


def deployment_folder(folders: Sequence[str], reference: str | None = None) -> Path | None:
    """Return the folder of a deployment: a folder with a journal, and without a scenario or a comparison's plan.

    Args:
        folders: The folders that the user named.
        reference: The reference selector that the user named.

    Returns:
        The folder; None if no folder is that of a deployment.

    Raises:
        ParameterError: A deployment's folder is one of several folders, or there is a reference.
    """
    found = [one for one in map(Path, folders) if (one / JOURNAL).is_file()]
    found = [one for one in found if not any((one / name).exists() for name in (SCENARIO, PLAN))]
    if not found:
        return None
    if len(folders) > 1:
        raise ParameterError(
            f"{str(found[0])!r} is the folder of a deployment, and a report shows one deployment. Run the command for "
            "each folder"
        )
    if reference is not None:
        raise ParameterError(
            f"{str(found[0])!r} is the folder of a deployment, which has no other selectors. Leave --reference out"
        )
    return found[0]


def read_deployment(folder: Path, now: datetime | None = None) -> Deployment:
    """Read the journal of a deployment, and summarize it.

    Args:
        folder: The ``checkpoint_dir`` of a strategy.
        now: Time of the report; the current time by default.

    Returns:
        The summary.

    Raises:
        ParameterError: The journal cannot be read, or has no finished round.
    """
    now = now or datetime.now(UTC)
    check_plain(folder / JOURNAL)
    try:
        # Before the lines are read, so that the page never claims a later time than that of its last line.
        as_of = _utc((folder / JOURNAL).stat().st_mtime)
    except OSError as error:
        raise ParameterError(
            f"{str(folder / JOURNAL)!r} cannot be read: {error.strerror}. Give a deployment's folder"
        ) from error
    history = read_journal(folder)
    if not history.rounds:
        raise ParameterError(
            f"{str(folder)!r} holds no finished round. Run the command again after the second round has begun"
        )
    rounds = list(history.rounds)
    cohorts = _cohorts(history)
    durations = np.array([one.round_s for one in rounds])
    waiting, clients = client_figures(rounds, cohorts)
    failed = Counter(reason_label(row) for row in history.clients if has_failed(row))
    limits = {row.latency_s for row in history.clients if has_failed(row) and row.latency_source == "max_latency"}
    advice, refusal = _advice(folder)
    counted = failure_seconds(PageRun("", 0, history))
    checkpoint = newest_checkpoint(folder, now)
    settings = checkpoint.settings if checkpoint else RunSettings()
    median = float(np.median(durations))
    return Deployment(
        folder=str(folder), as_of=as_of, read=now, last_round=rounds[-1].round, rounds=len(rounds),
        seconds=float(durations.sum()), mean_s=float(durations.mean()),
        median_s=median, counted_s=float(counted.mean()), quarters_s=_quarters(durations),
        quarters_measured_s=_quarters(durations - counted),
        p95_s=float(np.percentile(durations, PERCENTILE)), selections=sum(one.num_selected for one in rounds),
        updates=sum(one.num_completed for one in rounds), staleness=mean_staleness(history),
        spares=sum(one.num_spares for one in rounds),
        reasons=dict(failed.most_common()), remarks=dict(history.remarks()), waiting=waiting,
        late=sum(one.num_late for one in rounds),
        notes={one.round: one.note for one in rounds[-MOST_NOTES:] if one.note}, clients=clients,
        checkpoint=checkpoint, settings=settings, accuracy=_accuracy_table(rounds),
        status=run_status((now - as_of).total_seconds(), rounds[-1].round, median, checkpoint),
        parts=part_groups(rounds, cohorts), failures=failure_groups(rounds, cohorts),
        slowest=slowest_table(rounds, cohorts, counted),
        max_latency_s=limits.pop() if len(limits) == 1 else math.nan if limits else settings.max_latency_s,
        advice=advice, refusal=refusal,
    )  # fmt: skip


def newest_checkpoint(folder: Path, now: datetime) -> NewestCheckpoint | None:
    """Return the newest checkpoint of a folder; None if there is none."""
    times = dict[int, tuple[float, Path]]()
    for path in folder.iterdir():
        if match := NAME.fullmatch(path.name):
            # The running strategy removes old checkpoints.
            with suppress(OSError):
                times[int(match[1])] = path.lstat().st_mtime, path
    if not times:
        return None
    first, last = min(times), max(times)
    (began, _), (ended, path) = times[first], times[last]
    written = _utc(ended)
    return NewestCheckpoint(
        round=last, written=written, age_s=max(0.0, (now - written).total_seconds()), settings=read_settings(path),
        round_s=(ended - began) / (last - first) if ended > began and last > first else math.nan,
    )  # fmt: skip


def read_settings(path: Path) -> RunSettings:
    """Return the settings in the header of a checkpoint; without any if it cannot be read."""
    try:
        with open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            said = json.loads(json.loads(file.read(min(length, LONGEST_HEADER)))["__metadata__"]["checkpoint"])
        made_for = {key: one_line(str(value)) for key, value in said["made_for"].items()}
    except (OSError, AttributeError, *DECODE_ERRORS):
        return RunSettings()
    clients, total = _number(made_for.get("selector.clients_per_round")), _number(said.get("total_rounds"))
    return RunSettings(
        selector=made_for.get("selector", ""), clock=made_for.get("clock", "").strip("'\""),
        clients_per_round=int(clients) if math.isfinite(clients) else None,
        total_rounds=int(total) if math.isfinite(total) else None, max_latency_s=_number(made_for.get("max_latency")),
    )  # fmt: skip


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


def part_groups(rounds: Sequence[RoundRecord], cohorts: Mapping[int, Sequence[ClientRecord]]) -> Columns:
    """Return the parts of a mean round, in seconds, in groups of rounds.

    The parts are those of :func:`~fedsel_flwr.report.page.comparison_tables.round_parts`, if the clients report
    download, compute and upload. If the clients report only ``compute_s``, the rest of the latency that the server
    measured is the part "transfer". Otherwise the whole latency is one part. Failures and waiting are the rest of the
    round. Times that add up to more than the client's latency are left out.
    """
    rows = list[Sequence[Any]]()
    done = [row for cohort in cohorts.values() for row in cohort if row.completed]
    read = next(own for own in _READERS if any(map(own.is_usable, done)) or own is _READERS[-1])
    for own in _groups(rounds):
        everyone = [row for one in own for row in cohorts.get(one.round, ())]
        # A buffered round waits for arrivals. The times of its clients began in earlier rounds, and are no part of it.
        usable = [row for row in everyone if row.completed and not row.buffered and read.is_usable(row)]
        parts = {name: mean([of(row) for row in usable]) if usable else 0.0 for name, of in read.parts.items()}
        probes = mean([one.probe_s for one in own])
        failures = mean(failure_seconds(PageRun("", 0, History.from_records(own, everyone))))
        rest = mean([one.round_s for one in own]) - probes - sum(parts.values()) - failures
        parts |= {"waiting": rest, "failures": failures, "probes": probes}
        rows += [(own[0].round, own[-1].round + 1, part, seconds) for part, seconds in parts.items()]
    return columns("round round_end part seconds", rows)


def _is_reported(row: ClientRecord) -> bool:
    """Return whether a client reported the parts of its latency."""
    total = row.download_s + row.compute_s + row.upload_s
    return math.isfinite(total) and total <= row.latency_s * (1 + 1e-6)


class _Reader(NamedTuple):
    """Parts that can be read from the row of a client, and whether a row has them."""

    parts: Mapping[str, Callable[[ClientRecord], float]]
    is_usable: Callable[[ClientRecord], bool]


_READERS = (
    _Reader({name: attrgetter(f"{name}_s") for name in PARTS[:3]}, _is_reported),
    _Reader(
        {name: attrgetter(f"{name}_s") for name in ("compute", TRANSFER)}, lambda row: math.isfinite(row.transfer_s)
    ),
    _Reader({LATENCY: took_s}, lambda row: row.latency_source != "max_latency"),
)
"""The first reader that can read the row of any client reads all rows."""


def failure_groups(rounds: Sequence[RoundRecord], cohorts: Mapping[int, Sequence[ClientRecord]]) -> Columns:
    """Return the failed clients per round, by reason, in groups of rounds.

    The reasons are those of the metrics for Prometheus (:func:`~fedsel_flwr.callbacks.prometheus.reason_label`).
    """
    rows = list[Sequence[Any]]()
    for own in _groups(rounds):
        failed = Counter(reason_label(row) for one in own for row in cohorts.get(one.round, ()) if has_failed(row))
        rows += [(own[0].round, own[-1].round + 1, reason, n / len(own)) for reason, n in sorted(failed.items())]
    return columns("round round_end reason clients_per_round", rows)


def _groups(rounds: Sequence[RoundRecord]) -> list[Sequence[RoundRecord]]:
    """Return groups of consecutive rounds, of equal length; only the last group may be shorter."""
    return [rounds[low:high] for low, high in pairwise(group_edges(len(rounds), GROUPS).tolist())]


def _accuracy_table(rounds: Sequence[RoundRecord]) -> Columns:
    known = [one for one in rounds if math.isfinite(one.accuracy) or math.isfinite(one.loss)]
    return columns("round accuracy loss", [(one.round, one.accuracy, one.loss) for one in known])


def _cohorts(history: History) -> dict[int, list[ClientRecord]]:
    found = defaultdict[int, list[ClientRecord]](list)
    for row in history.clients:
        found[row.round].append(row)
    return found


def _quarters(seconds: FloatArray) -> tuple[float, float]:
    """Return the means of the first and of the last quarter."""
    quarter = len(seconds) // 4
    if len(seconds) < FEWEST_ROUNDS:
        return math.nan, math.nan
    return float(seconds[:quarter].mean()), float(seconds[-quarter:].mean())


def _advice(folder: Path) -> tuple[Advice | None, str]:
    try:
        return advise(folder), ""
    except FedSelError as error:
        return None, str(error)


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
