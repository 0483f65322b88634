"""Cost of waiting: the figures of a deployment's clients, and the seconds that the slowest client costs.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedsel_flwr.callbacks.prometheus import TIMEOUT, reason_label
from fedsel_flwr.checks import FloatArray
from fedsel_flwr.report.page.comparison_tables import columns, took_s
from fedsel_flwr.report.page.document import Columns
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

UNMEASURED = ("first", "max_latency")
"""Sources of a latency that is not the measured time."""
PERCENTILE = 95
SILENT = (TIMEOUT, "unavailable", "dropout")
"""Reasons of failure without a reply."""
Cohorts = Mapping[int, Sequence[ClientRecord]]
"""Round -> its clients."""


@dataclass(frozen=True, kw_only=True)
class ClientFigures:
    """Figures of one client.

    Attributes:
        client_id: The client's id, as it is in the journal.
        last_seen: Last round with a usable update from the client; None if there is none.
        last_reply: Last round with any reply, also a late or an unusable one; None if there is none.
        last_selected: Last round in which the client was selected.
        problem_round: Round of ``problem``; None if there is no problem.
        problem: Problem of the last failure; without a failure, the last problem of a usable update.
        problem_reason: Reason of the last failure, as in ``reasons``; empty without a failure.
        selections: Number of rounds in which the client was selected.
        share: ``selections`` divided by the number of rounds.
        failures: Number of rounds in which the client failed.
        reasons: Reason of failure, as in the metrics for Prometheus -> number of failures, the most frequent first.
        mean_s: Mean of the measured latencies of usable updates, seconds; NaN if there is none.
        p95_s: Their 95th percentile (linear interpolation), seconds.
        slowest: Number of rounds in which the client was the slowest.
        beyond_second_s: Sum of s_t over these rounds, seconds.
        beyond_median_s: Sum of its parts of m_t over these rounds, seconds.
    """

    client_id: str
    last_seen: int | None
    last_reply: int | None
    last_selected: int
    problem_round: int | None
    problem: str
    problem_reason: str
    selections: int
    share: float
    failures: int
    reasons: Mapping[str, int]
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


def client_figures(rounds: Sequence[RoundRecord], cohorts: Cohorts) -> tuple[WaitingCost, list[ClientFigures]]:
    """Return what waiting cost, and the figures of each client, the costliest client first.

    Args:
        rounds: The rounds.
        cohorts: Round -> its clients.
    """
    found = slowest_clients(rounds, cohorts)
    slowest_of, own_rows = defaultdict[str, list[tuple[float, float]]](list), defaultdict[str, list[ClientRecord]](list)
    for one in rounds:
        for row in cohorts.get(one.round, ()):
            own_rows[row.client_id].append(row)
        if own := found.get(one.round):
            for row in own.rows:
                slowest_of[row.client_id].append((own.second_s, own.median_s / len(own.rows)))
    clients = [_figures(rows, slowest_of[client_id], len(rounds)) for client_id, rows in own_rows.items()]
    total = sum(one.round_s for one in rounds)
    waiting = WaitingCost(
        rounds=len(found), slowest_failed=sum(own.has_failed for own in found.values()),
        beyond_second_s=mean([own.second_s for own in found.values()]),
        beyond_median_s=mean([own.median_s for own in found.values()]),
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


def slowest_clients(rounds: Sequence[RoundRecord], cohorts: Cohorts) -> dict[int, _Slowest]:
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


def slowest_table(rounds: Sequence[RoundRecord], cohorts: Cohorts, counted: Sequence[float] | FloatArray) -> Columns:
    """Return a table of the rounds that waited for two clients or more, the newest first.

    Args:
        rounds: The rounds.
        cohorts: Round -> its clients.
        counted: Seconds of each round that only failed clients took, shape (rounds,).
    """
    found, durations = slowest_clients(rounds, cohorts), {one.round: one.round_s for one in rounds}
    measured = {one.round: one.round_s - float(own) for one, own in zip(rounds, counted, strict=True)}
    own = sorted(found.items(), reverse=True)
    rows = [
        (number, durations[number], measured[number], ", ".join(row.client_id for row in one.rows),
         "failed" if one.has_failed else "usable update", one.median_s,
         "; ".join(row.problem for row in one.rows if row.problem))
        for number, one in own
    ]  # fmt: skip
    return columns("round round_s measured_s client outcome beyond_median_s problem", rows)


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
    failed = [row for row in rows if has_failed(row)]
    replied = [row for row in rows if row.completed or (has_failed(row) and reason_label(row) not in SILENT)]
    # The last problem of a spare is that other clients were earlier, which is no fault.
    faulty = [row for row in failed or done if row.problem]
    latencies = [row.latency_s for row in done if row.latency_source not in UNMEASURED and row.latency_s > 0]
    return ClientFigures(
        client_id=rows[0].client_id, last_seen=done[-1].round if done else None,
        last_reply=replied[-1].round if replied else None, last_selected=rows[-1].round,
        problem_round=faulty[-1].round if faulty else None, problem=faulty[-1].problem if faulty else "",
        problem_reason=reason_label(failed[-1]) if failed else "", selections=len(rows), share=len(rows) / rounds,
        failures=len(failed), reasons=dict(Counter(map(reason_label, failed)).most_common()), mean_s=mean(latencies),
        p95_s=float(np.percentile(latencies, PERCENTILE)) if latencies else math.nan, slowest=len(slowest),
        beyond_second_s=sum(own for own, _ in slowest), beyond_median_s=sum(own for _, own in slowest),
    )  # fmt: skip


def has_failed(row: ClientRecord) -> bool:
    """Return whether a client failed; a spare has not failed."""
    return not row.completed and not row.spare


def mean(values: Sequence[float] | FloatArray) -> float:
    """Return the mean; NaN without values."""
    return float(np.mean(values)) if len(values) else math.nan
