"""Figures of a deployment, from the journal in its folder: page, text and JSON draw from one summary.

The folder may belong to a running strategy. It is read without a lock. Only complete lines of the journal count, and a
round is in the journal after its evaluation, at the latest when the next round ends.

**The cost of waiting.** In round t let w_1 >= w_2 >= ... >= w_n be the seconds for which the server waited for each
client, with n at least 2. If its slowest client had been faster, the round would have been shorter by

    s_t = w_1 - w_2              (seconds beyond the second slowest client),
    m_t = w_1 - median(w)        (seconds beyond the median client).

The cost per round is the mean of s_t, or of m_t, over these rounds. The slowest client bears the cost. If several
clients are equally slow, each of them counts as slowest and bears an equal part of m_t, and s_t is 0.

Let D be the duration of the round without its probes. For a client, w is its latency, or its first time itself (source
"first"), at most D. A failed client has the latency ``max_latency``, as in the duration of the round. Spares do not
count, because the round did not wait for them. With over-selection, a round may end with its slowest usable update.
Failed clients with a longer latency then do not count either.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.errors import FedSelError, ParameterError
from fedsel_flwr.report.advice import Advice, advise, plain_values
from fedsel_flwr.report.page.comparison_tables import PARTS, PageRun, failure_seconds, group_edges, took_s
from fedsel_flwr.report.page.document import Columns
from fedsel_flwr.report.run_folder import JOURNAL, SCENARIO, read_journal
from fedsel_flwr.rounds.checkpoints import NAME
from fedsel_flwr.rounds.exporter import reason_label
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

PLAN = "plan.json"
"""Name of the file that only the folder of a comparison has."""
TRANSFER, LATENCY = "transfer", "latency"
"""Parts of a round if the clients do not report all their times."""
DEPLOYMENT_PARTS = (*PARTS[:3], TRANSFER, LATENCY, *PARTS[3:])
"""Parts of a round, in the order in which a bar stacks them."""
UNMEASURED = ("first", "max_latency")
"""Sources of a latency that is not the measured time."""
PERCENTILE = 95
GROUPS = 120
"""Largest number of groups of rounds in a chart."""


@dataclass(frozen=True, kw_only=True)
class ClientFigures:
    """Figures of one client.

    Attributes:
        client_id: The client's id, as it is in the journal.
        last_seen: Last round with a usable update from the client; None if there is none.
        last_selected: Last round in which the client was selected.
        problem_round: Round of ``problem``; None if there is no problem.
        problem: Problem of the last failure; without a failure, the last problem of a usable update.
        selections: Number of rounds in which the client was selected.
        share: ``selections`` divided by the number of rounds.
        failures: Number of rounds in which the client failed.
        mean_s: Mean of the measured latencies of usable updates, seconds; NaN if there is none.
        p95_s: Their 95th percentile (linear interpolation), seconds.
        slowest: Number of rounds in which the client was the slowest.
        beyond_second_s: Sum of s_t over these rounds, seconds.
        beyond_median_s: Sum of its parts of m_t over these rounds, seconds.
    """

    client_id: str
    last_seen: int | None
    last_selected: int
    problem_round: int | None
    problem: str
    selections: int
    share: float
    failures: int
    mean_s: float
    p95_s: float
    slowest: int
    beyond_second_s: float
    beyond_median_s: float


@dataclass(frozen=True, kw_only=True)
class WaitingCost:
    """The cost of waiting for the slowest client.

    Attributes:
        rounds: Number of rounds that waited for two clients or more.
        slowest_failed: Number of these rounds in which a failed client was the slowest.
        beyond_second_s: Mean of s_t, seconds per round; NaN if there is no such round.
        beyond_median_s: Mean of m_t, seconds per round; NaN if there is no such round.
        share: Sum of m_t divided by the duration of all rounds.
    """

    rounds: int
    slowest_failed: int
    beyond_second_s: float
    beyond_median_s: float
    share: float


@dataclass(frozen=True, kw_only=True)
class NewestCheckpoint:
    """The newest checkpoint of a folder.

    Attributes:
        round: Its round.
        written: Time of its last change, UTC.
        age_s: Seconds from this time to the time of the report.
    """

    round: int
    written: datetime
    age_s: float


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
        p95_s: 95th percentile of the duration of a round, seconds.
        selections: Number of selected clients, summed over the rounds.
        updates: Number of usable updates.
        spares: Number of spares.
        reasons: Reason of failure, as in the metrics for Prometheus -> number of failures, the most frequent first.
        waiting: The cost of waiting for the slowest client.
        clients: Figures of each client that was ever selected, the costliest client first.
        checkpoint: The newest checkpoint; None if there is none.
        accuracy: Table of the evaluated rounds: round, accuracy, loss.
        parts: Table of a mean round's parts, in seconds, in groups of rounds: round, round_end, part, seconds.
        failures: Table of the failed clients per round: round, round_end, reason, clients_per_round.
        slowest: Table of the rounds that waited for two clients or more, the newest first: round, round_s, client (ids,
            separated by commas), outcome, beyond_median_s, problem.
        max_latency_s: Seconds with which a failed client counts; NaN if no client failed, or if the seconds changed.
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
    p95_s: float
    selections: int
    updates: int
    spares: int
    reasons: Mapping[str, int]
    waiting: WaitingCost
    clients: Sequence[ClientFigures]
    checkpoint: NewestCheckpoint | None
    accuracy: Columns
    parts: Columns
    failures: Columns
    slowest: Columns
    max_latency_s: float
    advice: Advice | None
    refusal: str

    def facts(self) -> dict[str, Any]:
        """Return all values as plain types; None for a value that is unknown."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("accuracy", "parts", "failures", "slowest"):
            columns = found[name]
            found[name] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        found |= {name: found[name].isoformat() for name in ("as_of", "read")}
        found["clients"] = [asdict(one) for one in self.clients]
        found["waiting"] = asdict(self.waiting)
        if self.checkpoint:
            found["checkpoint"] = asdict(self.checkpoint) | {"written": self.checkpoint.written.isoformat()}
        found["advice"] = self.advice and self.advice.facts()
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
    found = [
        one
        for one in map(Path, folders)
        if (one / JOURNAL).is_file() and not any((one / name).exists() for name in (SCENARIO, PLAN))
    ]
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
    if (folder / JOURNAL).is_symlink():
        raise ParameterError(
            f"{str(folder / JOURNAL)!r} is a link, and runs are never read through links. Replace it with what it "
            "points to"
        )
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
    failed = Counter(reason_label(row) for row in history.clients if _has_failed(row))
    limits = {row.latency_s for row in history.clients if _has_failed(row) and row.latency_source == "max_latency"}
    advice, refusal = _advice(folder)
    return Deployment(
        folder=str(folder), as_of=as_of, read=now, last_round=rounds[-1].round, rounds=len(rounds),
        seconds=float(durations.sum()), mean_s=float(durations.mean()),
        p95_s=float(np.percentile(durations, PERCENTILE)), selections=sum(one.num_selected for one in rounds),
        updates=sum(one.num_completed for one in rounds), spares=sum(one.num_spares for one in rounds),
        reasons=dict(failed.most_common()), waiting=waiting, clients=clients,
        checkpoint=newest_checkpoint(folder, now), accuracy=_accuracy_table(rounds),
        parts=part_groups(rounds, cohorts), failures=failure_groups(rounds, cohorts),
        slowest=_slowest_table(rounds, cohorts), max_latency_s=limits.pop() if len(limits) == 1 else math.nan,
        advice=advice, refusal=refusal,
    )  # fmt: skip


def client_figures(
    rounds: Sequence[RoundRecord], cohorts: Mapping[int, Sequence[ClientRecord]]
) -> tuple[WaitingCost, list[ClientFigures]]:
    """Return what waiting cost, and the figures of each client, the costliest client first.

    Args:
        rounds: The rounds.
        cohorts: Round -> its clients.
    """
    slowest_of = defaultdict[str, list[tuple[float, float]]](list)
    found = slowest_clients(rounds, cohorts)
    for own in found.values():
        for row in own.rows:
            slowest_of[row.client_id].append((own.second_s, own.median_s / len(own.rows)))
    own_rows = defaultdict[str, list[ClientRecord]](list)
    for one in rounds:
        for row in cohorts.get(one.round, ()):
            own_rows[row.client_id].append(row)
    clients = [_figures(rows, slowest_of[client_id], len(rounds)) for client_id, rows in own_rows.items()]
    total = sum(one.round_s for one in rounds)
    waiting = WaitingCost(
        rounds=len(found), slowest_failed=sum(own.has_failed for own in found.values()),
        beyond_second_s=_mean([own.second_s for own in found.values()]),
        beyond_median_s=_mean([own.median_s for own in found.values()]),
        share=sum(own.median_s for own in found.values()) / total if total > 0 else math.nan,
    )  # fmt: skip
    # The id is last, so that equal clients have the same order in every report.
    clients.sort(key=lambda one: (-one.beyond_median_s, -one.beyond_second_s, -one.failures, one.client_id))
    return waiting, clients


class _Slowest(NamedTuple):
    """The slowest clients of a round, which are equally slow, and s_t and m_t."""

    rows: Sequence[ClientRecord]
    second_s: float
    median_s: float

    @property
    def has_failed(self) -> bool:
        return not all(row.completed for row in self.rows)


def slowest_clients(
    rounds: Sequence[RoundRecord], cohorts: Mapping[int, Sequence[ClientRecord]]
) -> dict[int, _Slowest]:
    """Return the slowest clients of each round that waited for two clients or more."""
    found = {}
    for one in rounds:
        waited = waited_seconds(one, cohorts.get(one.round, ()))
        if len(waited) > 1:
            seconds = np.sort([own for _, own in waited])[::-1]
            rows = [row for row, own in waited if own == seconds[0]]
            cost = float(seconds[0] - seconds[1]), float(seconds[0] - np.median(seconds))
            found[one.round] = _Slowest(rows, *cost)
    return found


def _slowest_table(rounds: Sequence[RoundRecord], cohorts: Mapping[int, Sequence[ClientRecord]]) -> Columns:
    found, durations = slowest_clients(rounds, cohorts), {one.round: one.round_s for one in rounds}
    own = sorted(found.items(), reverse=True)
    return {
        "round": [number for number, _ in own],
        "round_s": [durations[number] for number, _ in own],
        "client": [", ".join(row.client_id for row in one.rows) for _, one in own],
        "outcome": ["failed" if one.has_failed else "usable update" for _, one in own],
        "beyond_median_s": [one.median_s for _, one in own],
        "problem": ["; ".join(row.problem for row in one.rows if row.problem) for _, one in own],
    }


def waited_seconds(round: RoundRecord, cohort: Sequence[ClientRecord]) -> list[tuple[ClientRecord, float]]:
    """Return the clients for which a round waited, each with its seconds w."""
    duration = round.round_s - round.probe_s
    # Subtracting the probes may change the last digits.
    limit = duration * (1 + 1e-9)
    own = [(row, took_s(row)) for row in cohort if not row.spare]
    longest = max((seconds for row, seconds in own if row.completed), default=0.0)
    ended_early = math.isclose(duration, longest, rel_tol=1e-9)
    return [
        (row, min(seconds, duration))
        for row, seconds in own
        if seconds >= 0 and (row.completed or seconds <= limit or not ended_early)
    ]


def _figures(rows: Sequence[ClientRecord], slowest: Sequence[tuple[float, float]], rounds: int) -> ClientFigures:
    done = [row for row in rows if row.completed]
    failed = [row for row in rows if _has_failed(row)]
    # The last problem of a spare is that other clients were earlier, which is no fault.
    faulty = [row for row in failed or done if row.problem]
    latencies = [row.latency_s for row in done if row.latency_source not in UNMEASURED and row.latency_s > 0]
    return ClientFigures(
        client_id=rows[0].client_id,
        last_seen=done[-1].round if done else None,
        last_selected=rows[-1].round,
        problem_round=faulty[-1].round if faulty else None,
        problem=faulty[-1].problem if faulty else "",
        selections=len(rows),
        share=len(rows) / rounds,
        failures=len(failed),
        mean_s=_mean(latencies),
        p95_s=float(np.percentile(latencies, PERCENTILE)) if latencies else math.nan,
        slowest=len(slowest),
        beyond_second_s=sum(own for own, _ in slowest),
        beyond_median_s=sum(own for _, own in slowest),
    )


def part_groups(rounds: Sequence[RoundRecord], cohorts: Mapping[int, Sequence[ClientRecord]]) -> Columns:
    """Return the parts of a mean round, in seconds, in groups of rounds.

    The parts are those of :func:`~fedsel_flwr.report.page.comparison_tables.round_parts`, if the clients report
    download, compute and upload. If the clients report only ``compute_s``, the rest of the latency that the server
    measured is the part "transfer". Otherwise the whole latency is one part. Failures and waiting are the rest of the
    round. Times that add up to more than the client's latency are left out.
    """
    columns: dict[str, list[Any]] = {"round": [], "round_end": [], "part": [], "seconds": []}
    done = [row for cohort in cohorts.values() for row in cohort if row.completed]
    read = next(own for own in _READERS if any(map(own.is_usable, done)) or own is _READERS[-1])
    for own in _groups(rounds):
        usable = [row for one in own for row in cohorts.get(one.round, ()) if row.completed and read.is_usable(row)]
        everyone = [row for one in own for row in cohorts.get(one.round, ())]
        parts = {name: _mean([of(row) for row in usable]) if usable else 0.0 for name, of in read.parts.items()}
        probes = _mean([one.probe_s for one in own])
        failures = _mean(failure_seconds(PageRun("", 0, History.from_records(own, everyone))))
        rest = _mean([one.round_s for one in own]) - probes - sum(parts.values()) - failures
        parts |= {"waiting": rest, "failures": failures, "probes": probes}
        for part, seconds in parts.items():
            values = (own[0].round, own[-1].round + 1, part, seconds)
            for name, value in zip(columns, values, strict=True):
                columns[name].append(value)
    return columns


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
        {"compute": attrgetter("compute_s"), TRANSFER: attrgetter("transfer_s")},
        lambda row: math.isfinite(row.transfer_s),
    ),
    _Reader({LATENCY: took_s}, lambda row: row.latency_source != "max_latency"),
)
"""The first reader that can read the row of any client reads all rows."""


def failure_groups(rounds: Sequence[RoundRecord], cohorts: Mapping[int, Sequence[ClientRecord]]) -> Columns:
    """Return the failed clients per round, by reason, in groups of rounds.

    The reasons are those of the metrics for Prometheus (:func:`~fedsel_flwr.rounds.exporter.reason_label`).
    """
    columns: dict[str, list[Any]] = {"round": [], "round_end": [], "reason": [], "clients_per_round": []}
    for own in _groups(rounds):
        failed = Counter(reason_label(row) for one in own for row in cohorts.get(one.round, ()) if _has_failed(row))
        for reason, count in sorted(failed.items()):
            values = (own[0].round, own[-1].round + 1, reason, count / len(own))
            for name, value in zip(columns, values, strict=True):
                columns[name].append(value)
    return columns


def _groups(rounds: Sequence[RoundRecord]) -> list[Sequence[RoundRecord]]:
    """Return groups of consecutive rounds, of equal length; only the last group may be shorter."""
    edges = group_edges(len(rounds), GROUPS).tolist()
    return [rounds[low:high] for low, high in pairwise(edges)]


def _has_failed(row: ClientRecord) -> bool:
    return not row.completed and not row.spare


def _accuracy_table(rounds: Sequence[RoundRecord]) -> Columns:
    known = [one for one in rounds if math.isfinite(one.accuracy) or math.isfinite(one.loss)]
    return {name: [getattr(one, name) for one in known] for name in ("round", "accuracy", "loss")}


def _cohorts(history: History) -> dict[int, list[ClientRecord]]:
    found = defaultdict[int, list[ClientRecord]](list)
    for row in history.clients:
        found[row.round].append(row)
    return found


def newest_checkpoint(folder: Path, now: datetime) -> NewestCheckpoint | None:
    """Return the newest checkpoint of a folder; None if there is none."""
    found = ((int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name)))
    for number, path in sorted(found, reverse=True):
        try:
            written = _utc(path.lstat().st_mtime)
        except OSError:
            # The running strategy removes old checkpoints.
            continue
        return NewestCheckpoint(round=number, written=written, age_s=max(0.0, (now - written).total_seconds()))
    return None


def _advice(folder: Path) -> tuple[Advice | None, str]:
    try:
        return advise(folder), ""
    except FedSelError as error:
        return None, str(error)


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _mean(values: Sequence[float] | FloatArray) -> float:
    return float(np.mean(values)) if len(values) else math.nan
