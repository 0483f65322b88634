"""Reading a reply: which updates can be used, and which numbers can be believed.

A fault in the arrays makes the client a failed one. A fault in our own metrics is replaced and named, and the update
is kept. Metrics of other strategies are not looked at. Of a vector column, all clients' vectors must have one length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.rounds.models import Arrays, cast_like, fault_in_arrays, fault_in_norm
from fedsel_flwr.rounds.roster import canonical_id
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import (
    MAX_EXAMPLES,
    MAX_METRICS,
    column_value,
    finite_number,
    max_vector_length,
    one_line,
    shown,
    to_float,
    usable_count,
)
from fedsel_flwr.selectors.columns import COLUMNS, VECTORS

# The number of examples is no metric: it comes with the update.
NUMBERS = tuple(
    name for name, row in COLUMNS.items() if row.recorded and row.source == "reply" and name != "num_examples"
)
"""Columns that are read of every reply, in addition to those that the selector needs."""
DEFAULT_SLACK = 0.1
"""Share of the observed time by which a report may undercut it, if the settings name no seconds."""
SIMULATED_FAILURE = "simulated_failure"
"""The metric by which a simulated client says that its answer never arrives; a real client simply fails."""
FAILED, CRASHED = 1, 2
"""Values of that metric: the client has trained, or it has crashed before that."""
_LOST: Mapping[float, str] = {
    FAILED: "lost: the client trained, but its answer did not arrive (clients.failure_probability)",
    CRASHED: "crashed: the client did not train (clients.crash_probability)",
}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A client's answer in plain types.

    Attributes:
        arrays: The client's model; None if it could not be decoded, or stands in a stack.
        num_examples: Training examples of the update, as reported.
        weight: The update's weight in the base strategy, if that is not the number of examples.
        metrics: Everything the client reported; vectors as arrays, or as bytes in float32.
        observed_s: Seconds the server waited for this client; None if it was not timed.
        error: Empty, or why there is no update.
        spare: Whether the round ended without it because enough others were there (over-selection).
        timed_out: Whether no answer came for as long as the server waited.
    """

    arrays: Arrays | None = None
    num_examples: object = None
    weight: object = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    observed_s: float | None = None
    error: str = ""
    spare: bool = False
    timed_out: bool = False


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """A reply after reading.

    Attributes:
        completed: Whether the update may be aggregated.
        problems: What was wrong, each with its kind before a colon.
        faulty_keys: Our metric keys whose values could not be used.
        latency_s: Seconds for the selector, at most max_latency.
        latency_source: Where they come from: "reported", "observed" (by the server), "clipped" (a report that the
            server's time bounds), "first" (the first that the server measured of this client, replaced) or
            "max_latency" (failed, or no time known).
        values: :data:`NUMBERS`; NaN if unknown.
        columns: What was reported of the columns that the selector needs; without those that cannot be used.
        num_examples: Training examples of the update, at most max_examples; 0 if unknown.
        weight: The update's weight in a mean, at most max_examples; 0 if unknown.
        converted: The arrays in the types of the global model, if they came in others; None if they can stay.
        spare: Whether it is late only because enough others were earlier (over-selection), which is no failure.
        answered: Whether a spare has answered.
        spare_s: A spare's own latency, or if it has not answered the seconds that the server waited for it.
        timed_out: Whether no answer came for as long as the server waited.
        lost: Whether its answer never arrived in the simulation: ``values`` are for the history, not for the selector.
        timed: Whether the server timed it, on the server's clock.
        first: Whether its seconds stand in place of its first time
            (:class:`~fedsel_flwr.rounds.cold_starts.ColdStarts`).
        first_s: That first time itself, seconds; NaN if there is none.
    """

    completed: bool
    problems: tuple[str, ...]
    faulty_keys: frozenset[str]
    latency_s: float
    latency_source: str
    values: Mapping[str, float]
    columns: Mapping[str, float | FloatArray]
    num_examples: int
    weight: float
    converted: Arrays | None = None
    spare: bool = False
    answered: bool = False
    spare_s: float = 0.0
    timed_out: bool = False
    lost: bool = False
    timed: bool = False
    first: bool = False
    first_s: float = math.nan


def read_reply(
    reply: Reply,
    settings: Settings,
    *,
    client_id: str | None,
    reference: Arrays | None = None,
    fault: str | None = None,
    wanted: frozenset[str] = frozenset(),
    max_examples: int | None = None,
) -> ClientResult:
    """Return what of a reply can be used.

    Args:
        reply: The client's answer.
        settings: Clock, longest wait, names of the metrics.
        client_id: The id the connection is bound to; None if the client's own claim does not count.
        reference: The global model the client received; None skips the comparison of arrays.
        fault: What is wrong with the client's model, empty if nothing; None if it must be found out here.
        wanted: Columns that clients report and the selector needs.
        max_examples: Most examples that a client may claim in this round; None for no limit.

    Returns:
        The result; never raises for what a client sent.
    """
    keys, metrics = settings.keys, reply.metrics
    problems: list[str] = []
    faulty: set[str] = set()
    lost = "" if reply.error else _LOST.get(finite_number(metrics.get(SIMULATED_FAILURE)) or 0, "")
    # the first fault counts; the arrays come last, since comparing them costs most
    failed = reply.error or lost or _fault_in_metrics(metrics) or _fault_in_count(reply.num_examples)
    if not failed:
        failed = _fault_in_model(reply.arrays, reference, settings.max_update_norm) if fault is None else fault
    if failed:
        problems.append(failed)
    values = dict.fromkeys(NUMBERS, math.nan)
    for name in NUMBERS:
        if (said := metrics.get(key := keys.of(name))) is None and key not in metrics:
            continue
        value, row = finite_number(said), COLUMNS[name]
        if value is None or not row.low <= value <= row.high:
            problems.append(f"{name}: {shown(said)} cannot be used")
            faulty.add(key)
        else:
            values[name] = value
    # training cannot take longer than the whole round trip, whatever the client's clock says
    waited = reply.observed_s if settings.clock == "server" else None
    if waited is not None and values["compute"] > waited:
        problems.append(f"compute: {values['compute']:.6g} s cannot be used, the server only waited {waited:.6g} s")
        faulty.add(keys.compute)
        values["compute"] = math.nan
    columns: dict[str, float | FloatArray] = {}
    for name in sorted(wanted - {"num_examples"}) if not failed else ():
        said = metrics.get(keys.of(name))
        usable = column_value(COLUMNS[name], said, max_vector_length(name, reference))
        if usable is not None:
            columns[name] = usable
        elif name not in NUMBERS and said is not None:
            problems.append(f"{name}: {shown(said)} cannot be used")
        # a missing energy score is no problem if it can be derived from joules; NaN differs from itself
        elif said is None and not (name == "energy_score" and values["energy"] == values["energy"]):
            problems.append(f"{name}: not reported")
    claim = metrics.get(keys.client_id)
    if client_id is not None and claim is not None and canonical_id(claim) != client_id:
        problems.append(f"identity: claims to be {shown(claim)}")
        faulty.add(keys.client_id)
    latency = Latency(settings.max_latency, "max_latency")
    if not reply.error and not lost:
        latency = read_latency(metrics.get(keys.latency), reply.observed_s, settings)
    if latency.problem:
        problems.append(latency.problem)
        # a late client's number is fine, and the base strategy may see it
        if not latency.late:
            faulty.add(keys.latency)
    completed = not failed and not latency.late
    seconds = latency.seconds if completed else math.inf
    latency_s = min(seconds, settings.max_latency)  # Xia (4), Ben Ami (2)
    count, claimed = (0 if failed else usable_count(reply.num_examples)), finite_number(reply.weight)
    weight = float(count) if failed or claimed is None else claimed
    if max_examples is not None and max(count, weight) > max_examples:
        problems.append(f"max_examples: {max(count, weight):.16g} claimed, counted as {max_examples}")
        count, weight = min(count, max_examples), min(weight, max_examples)
    return ClientResult(
        completed=completed,
        # a client writes parts of these texts: on one line, and never empty
        problems=tuple([one_line(problem) or "failed: no reason given" for problem in problems]),
        faulty_keys=frozenset(faulty & metrics.keys()) if faulty else frozenset(),
        latency_s=latency_s,
        latency_source=latency.source if completed else "max_latency",
        values=values,
        columns=columns,
        num_examples=count,
        weight=weight,
        converted=None if failed or reference is None or reply.arrays is None else cast_like(reference, reply.arrays),
        spare=reply.spare,
        spare_s=min(reply.observed_s or 0.0, settings.max_latency) if reply.spare else 0.0,
        timed_out=reply.timed_out,
        lost=bool(lost),
        timed=waited is not None,
    )


def _fault_in_metrics(metrics: Mapping[str, object]) -> str:
    """Return what is wrong with the number of metrics; empty if nothing."""
    return "" if len(metrics) <= MAX_METRICS else f"metrics: {len(metrics)} reported, more than {MAX_METRICS}"


def _fault_in_model(arrays: Arrays | None, reference: Arrays | None, max_update_norm: float | None) -> str:
    """Return what is wrong with a client's arrays; empty if nothing."""
    if reference is None:
        return ""
    return fault_in_arrays(arrays, reference) or fault_in_norm(arrays or [], reference, max_update_norm)


def _fault_in_count(num_examples: object) -> str:
    """Return what is wrong with a number of examples; empty if nothing."""
    if usable_count(num_examples):
        return ""
    return f"num_examples: expected an integer from 1 to {MAX_EXAMPLES} (2^53), got {shown(num_examples)}"


class Latency(NamedTuple):
    """The latency of a client that answered.

    Attributes:
        seconds: Its seconds, not capped.
        source: Where they come from, as in :attr:`ClientResult.latency_source`.
        problem: What was wrong; empty if nothing.
        late: Whether the client came too late to count.
    """

    seconds: float
    source: str
    problem: str = ""
    late: bool = False


def read_latency(reported: object, observed_s: float | None, settings: Settings) -> Latency:
    """Return the latency of a client that answered, on the clock of the settings.

    On the server's clock, a client that was not timed is believed, as on the virtual clock. Under secure aggregation
    no client is timed.

    Args:
        reported: The seconds that the client reports; None if it reports none.
        observed_s: Seconds the server waited for it; None if it was not timed.
        settings: The clock, its slack, and the longest wait.
    """
    if settings.clock == "server" and observed_s is not None:
        return _on_server_clock(observed_s, reported, settings.clock_slack)
    return _on_virtual_clock(reported, settings.max_latency)


def _on_virtual_clock(reported: object, max_latency: float) -> Latency:
    """Believe the client, if it reports a number of seconds below ``max_latency``."""
    seconds = to_float(reported)
    if reported is None:
        return Latency(max_latency, "max_latency", "latency: not reported, counted as max_latency")
    if seconds is None or math.isnan(seconds) or seconds < 0:
        return Latency(max_latency, "max_latency", f"latency: {shown(reported)} cannot be used, counted as max_latency")
    # an infinite report is a late client, not a fault
    if seconds >= max_latency:
        problem = f"late: {seconds:.6g} s is not below max_latency = {max_latency:g} s"
        return Latency(max_latency, "max_latency", problem, late=True)
    return Latency(seconds, "reported")


def _on_server_clock(observed: float, reported: object, slack: float | None) -> Latency:
    """Count a report within [0, observed], at least as observed - slack."""
    if reported is None:
        return Latency(observed, "observed")
    seconds = to_float(reported)
    if seconds is None or not 0.0 <= seconds <= observed:
        problem = f"latency: {shown(reported)} cannot be used, counted as the server's {observed:.6g} s"
        return Latency(observed, "observed", problem)
    low = max(0.0, observed - (DEFAULT_SLACK * observed if slack is None else slack))
    if seconds >= low:
        return Latency(seconds, "reported")
    return Latency(low, "clipped", f"latency: {seconds:.6g} s clipped to [{low:.6g}, {observed:.6g}] s")


def column_of(name: str, values: Sequence[float | FloatArray | None]) -> FloatArray | None:
    """Return a column of what clients reported, NaN for values that cannot be used.

    Vectors are of the length that most have; others cannot be used.

    Args:
        name: The column's name.
        values: A number or vector for each client, None if there is none.

    Returns:
        Shape (n,), or (n, d) for vectors; None if no client has a vector.

    >>> column_of("gradient", [np.ones(2), None, np.ones(3), np.zeros(2)]).tolist()
    [[1.0, 1.0], [nan, nan], [nan, nan], [0.0, 0.0]]
    """
    if COLUMNS[name].shape != "vector":
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    if not (length := _usual_length(values)):
        return None
    column = np.full((len(values), length), np.nan)
    for row, value in enumerate(values):
        if isinstance(value, np.ndarray) and len(value) == length:
            column[row] = value
    return column


def length_faults(values: Sequence[object]) -> dict[int, str]:
    """Return the positions of vectors with another length than most, each with its fault.

    >>> length_faults([np.ones(2), None, np.ones(3), np.zeros(2)])
    {2: 'expected 2 numbers, as most have, got 3'}
    """
    usual = _usual_length(values)
    return {
        i: f"expected {usual} numbers, as most have, got {len(value)}"
        for i, value in enumerate(values)
        if isinstance(value, np.ndarray) and len(value) != usual
    }


def with_equal_lengths(results: dict[str, ClientResult], wanted: frozenset[str]) -> dict[str, ClientResult]:
    """Return the results of a round without the vectors of another length than most, each named as a problem.

    Args:
        results: Connection -> its reply after reading.
        wanted: Columns that clients report and the selector needs.
    """
    # sorted: problems stand in the history in this order, and the order of a set differs between processes
    for name in sorted(wanted & VECTORS):
        nodes = list(results)
        for i, fault in length_faults([results[node].columns.get(name) for node in nodes]).items():
            old = results[nodes[i]]
            columns = {key: value for key, value in old.columns.items() if key != name}
            new = replace(old, columns=columns, problems=(*old.problems, f"{name}: {fault}"))
            results = {**results, nodes[i]: new}
    return results


def _usual_length(values: Iterable[object]) -> int:
    """Return the length that most vectors have, of equally frequent ones the longest; 0 without vectors."""
    lengths = Counter(len(value) for value in values if isinstance(value, np.ndarray))
    return max(lengths, key=lambda n: (lengths[n], n), default=0)
