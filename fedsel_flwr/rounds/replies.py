"""Reading a reply: find out whether the update is usable, and which reported numbers count.

After a fault in the arrays the client counts as failed. After a fault in our own metrics the value is replaced, the
fault is recorded, and the update is kept. Metrics of other strategies are not read. The vectors of one column must have
the same length for all clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    is_finite,
    max_vector_length,
    one_line,
    shown,
    to_float,
    usable_count,
)
from fedsel_flwr.selectors.columns import COLUMNS, VECTORS

# The number of examples is not a metric: it comes with the update.
NUMBERS = tuple(
    name for name, row in COLUMNS.items() if row.recorded and row.source == "reply" and name != "num_examples"
)
"""Columns that are read from every reply, in addition to those that the selector needs."""
DEFAULT_SLACK = 0.1
"""Share of the observed time by which a report may be below it, if ``clock_slack`` is None."""
SIMULATED_FAILURE = "simulated_failure"
"""The metric with which a simulated client declares that its answer never arrives; a real client just fails."""
FAILED, CRASHED = 1, 2
"""Values of that metric: the reply was lost after training, or the client crashed before training."""
_LOST: Mapping[float, str] = {
    FAILED: "lost: the client trained, but its answer did not arrive (clients.failure_probability)",
    CRASHED: "crashed: the client did not train (clients.crash_probability)",
}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A client's answer in plain types.

    Attributes:
        arrays: The client's model; None if it could not be decoded, or is in a stack.
        num_examples: Number of training examples of the update, as reported.
        weight: The update's weight in the base strategy, if it is not the number of examples.
        metrics: All metrics that the client reported; vectors as arrays, or as bytes in float32.
        observed_s: Seconds that the server waited for this client; None if it was not timed.
        error: The reason why there is no update; empty if there is one.
        spare: Whether the round ended without this client because enough others had answered (over-selection).
        timed_out: Whether no answer came while the server waited.
        structure: The structure of the reply, if it is not that of numbered arrays
            (:mod:`~fedsel_flwr.rounds.reply_checks`).
        sent: Arrays with the types and shapes of those that the client received; None for those of the global model.
        misfit: Why the names of the reply are not those of the arrays that the client received; empty if they are.
    """

    arrays: Arrays | None = None
    num_examples: object = None
    weight: object = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    observed_s: float | None = None
    error: str = ""
    spare: bool = False
    timed_out: bool = False
    structure: tuple[str, ...] | None = None
    sent: Arrays | None = None
    misfit: str = ""


NO_ANSWER = Reply(error="no answer", timed_out=True)


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """The result of reading a reply.

    Attributes:
        completed: Whether the update may be aggregated.
        problems: The problems of the reply, each with its kind before a colon.
        faulty_keys: Our metric keys whose values cannot be used.
        latency_s: Latency for the selector, seconds, at most max_latency.
        latency_source: Source of the latency, one of five. The source "reported" is the client's report, and "clipped"
            a report limited by the server's time. The source "observed" is the server's time. The source "first"
            replaces the first time that the server measured of this client. The source "max_latency" means that the
            client failed, or that no time is known.
        values: The values of :data:`NUMBERS`; NaN if unknown.
        columns: The reported columns that the selector needs, without values that cannot be used.
        num_examples: Number of training examples of the update, at most max_examples; 0 if unknown.
        weight: The update's weight in a mean, at most max_examples; 0 if unknown.
        converted: The arrays in the types of the global model, if they had others; None if they need no conversion.
        spare: Whether the client is late only because enough others were earlier (over-selection), which is no failure.
        answered: Whether a spare has answered.
        spare_s: A spare's own latency, or the seconds that the server waited for it if it has not answered.
        timed_out: Whether no answer came while the server waited.
        lost: Whether the answer was lost in the simulation: ``values`` are then for the history, not for the selector.
        timed: Whether the server timed the client, on the server's clock.
        first: Whether the latency replaces the client's first time
            (:class:`~fedsel_flwr.rounds.collecting.ColdStarts`).
        first_s: The first time itself, seconds; NaN if there is none.
        beyond_s: Seconds by which an answer that is usable otherwise took longer than max_latency; NaN for any other.
        done_s: Seconds from the start of a round that may end early to an answer that is usable, or would be if it were
            not late; NaN if there is none.
    """

    completed: bool
    problems: tuple[str, ...] = ()
    faulty_keys: frozenset[str] = frozenset()
    latency_s: float
    latency_source: str
    values: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, float | FloatArray] = field(default_factory=dict)
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
    beyond_s: float = math.nan
    done_s: float = math.nan


def read_reply(
    reply: Reply,
    settings: Settings,
    *,
    client_id: str | None,
    reference: Arrays | None = None,
    fault: str | None = None,
    measured: Sequence[int] | None = None,
    wanted: frozenset[str] = frozenset(),
    max_examples: int | None = None,
    weighted: bool = True,
) -> ClientResult:
    """Return the usable parts of a reply.

    Args:
        reply: The client's answer.
        settings: The clock, the longest wait and the names of the metrics.
        client_id: The id to which the connection is bound; None if the client's own claim does not count.
        reference: The global model that the client received; None skips the comparison of arrays.
        fault: The fault of the client's model, empty if there is none; None checks the model here.
        measured: Positions of the arrays that count for ``max_update_norm``; None for the floating-point ones.
        wanted: Columns that clients report and the selector needs.
        max_examples: Largest number of examples that a client may claim in this round; None for no limit.
        weighted: Whether a reply without a number of examples has failed (:func:`requires_weight`).

    Returns:
        The result. No content of a reply raises an error.
    """
    keys, metrics = settings.keys, reply.metrics
    faulty: set[str] = set()
    lost = _lost(reply)
    failed = reply.error or lost or _fault_in(reply, reference, fault, weighted, settings, measured)
    problems = [failed] if failed else []
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
    # Training cannot take longer than the whole round trip, whatever the client's clock reports.
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
            faulty.add(keys.of(name))
        # A missing energy score is no problem if it can be derived from joules. NaN differs from itself.
        elif said is None and not (name == "energy_score" and values["energy"] == values["energy"]):
            problems.append(f"{name}: not reported")
    claim = metrics.get(keys.client_id)
    if client_id is not None and claim is not None and canonical_id(claim) != client_id:
        problems.append(f"identity: claims to be {shown(claim)}")
        faulty.add(keys.client_id)
    latency = _latency(reply, lost, settings)
    if latency.problem:
        problems.append(latency.problem)
        # A late client's number is valid, and the base strategy may see it.
        if not latency.late:
            faulty.add(keys.latency)
    completed = not failed and not latency.late
    count, claimed = (0 if failed else usable_count(reply.num_examples)), finite_number(reply.weight)
    weight = float(count) if failed or claimed is None else claimed
    if max_examples is not None and max(count, weight) > max_examples:
        problems.append(f"max_examples: {max(count, weight):.16g} claimed, counted as {max_examples}")
        count, weight = min(count, max_examples), min(weight, max_examples)
    return ClientResult(
        completed=completed,
        # Clients write parts of these texts, so each is put on one line, and is never empty.
        problems=tuple([one_line(problem) or "failed: no reason given" for problem in problems]),
        faulty_keys=frozenset(faulty & metrics.keys()) if faulty else frozenset(),
        latency_s=_counted(latency, failed, settings),
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
        beyond_s=latency.seconds - settings.max_latency if latency.late and not failed else math.nan,
    )


def latency_until_known(
    reply: Reply, settings: Settings, *, reference: Arrays | None, fault: str | None = None
) -> float:
    """Return the latency of :func:`read_reply` in seconds: until the update, or the failure, is known."""
    lost = _lost(reply)
    failed = reply.error or lost or _fault_in(reply, reference, fault, True, settings, None)
    return _counted(_latency(reply, lost, settings), failed, settings)


def _lost(reply: Reply) -> str:
    """Return how a simulated client was lost; empty if it was not."""
    return "" if reply.error else _LOST.get(finite_number(reply.metrics.get(SIMULATED_FAILURE)) or 0, "")


def _counted(latency: Latency, failed: str, settings: Settings) -> float:
    """Return the seconds that count: at most ``max_latency``, and exactly that for a failure (Xia (4), Ben Ami (2))."""
    return settings.max_latency if failed or latency.late else min(latency.seconds, settings.max_latency)


def _fault_in(
    reply: Reply,
    reference: Arrays | None,
    fault: str | None,
    weighted: bool,
    settings: Settings,
    measured: Sequence[int] | None,
) -> str:
    """Return the first fault that makes an update unusable; empty if there is none. See :func:`read_reply`."""
    if len(reply.metrics) > MAX_METRICS:
        return f"metrics: {len(reply.metrics)} reported, more than {MAX_METRICS}"
    if weighted and not usable_count(reply.num_examples):
        return f"num_examples: expected an integer from 1 to {MAX_EXAMPLES} (2^53), got {shown(reply.num_examples)}"
    if fault is not None or reference is None:
        return fault or ""
    # Last, because the comparison of the arrays costs most.
    limit = settings.max_update_norm
    return fault_in_arrays(reply.arrays, reference) or fault_in_norm(reply.arrays or [], reference, limit, measured)


def requires_weight(read: bool, weights: Collection[object]) -> bool:
    """Return whether a reply without a usable weight has failed.

    Args:
        read: Whether the aggregation reads the weights, as Flower's own does.
        weights: The weights of all replies; None or 0 of a reply without one.

    >>> requires_weight(False, [10, -1, 0]), requires_weight(False, [10, None])
    (True, False)
    """
    return read or 2 * sum(weight is not None and to_float(weight) != 0.0 for weight in weights) > len(weights)


def with_finite_metrics(
    results: Mapping[str, ClientResult], replies: Mapping[str, Reply]
) -> tuple[dict[str, ClientResult], frozenset[str]]:
    """Find the metrics that cannot be averaged in this round, because a usable reply has NaN or infinity there.

    Args:
        results: Connection -> its reply after reading.
        replies: Connection -> reply.

    Returns:
        The results, in which each such metric is a problem of its client. And the keys of these metrics.
    """
    marked, left_out = dict(results), set[str]()
    for node, result in results.items():
        bad = [key for key, value in replies[node].metrics.items() if not is_finite(value)] if result.completed else []
        left_out.update(bad)
        # Our own metrics already have their problem.
        if told := [key for key in bad if key not in result.faulty_keys]:
            values = [f"{shown(key)} is {shown(replies[node].metrics[key])}" for key in told]
            problems = [one_line(f"metrics: {one}, so no client's value counts in this round") for one in values]
            marked[node] = replace(result, problems=(*result.problems, *problems))
    return marked, frozenset(left_out)


class Latency(NamedTuple):
    """The latency of a client that answered.

    Attributes:
        seconds: Its latency, not capped at max_latency.
        source: Source of the latency, as in :attr:`ClientResult.latency_source`.
        problem: The problem with the report; empty if there is none.
        late: Whether the client answered too late to count.
    """

    seconds: float
    source: str
    problem: str = ""
    late: bool = False


def _latency(reply: Reply, lost: str, settings: Settings) -> Latency:
    """Return the latency of a client, on the clock of the settings.

    On the server's clock, the report of an untimed client is believed, as on the virtual clock. Under secure
    aggregation no client is timed.

    Args:
        reply: The client's answer.
        lost: How a simulated client was lost; empty if it was not.
        settings: The clock, its slack, and the longest wait.
    """
    if reply.error or lost:
        return Latency(settings.max_latency, "max_latency")
    reported = reply.metrics.get(settings.keys.latency)
    if settings.clock == "server" and reply.observed_s is not None:
        return _on_server_clock(reply.observed_s, reported, settings.clock_slack)
    return _on_virtual_clock(reported, settings.max_latency)


def _on_virtual_clock(reported: object, max_latency: float) -> Latency:
    """Believe the client, if it reports a number of seconds below ``max_latency``."""
    seconds = to_float(reported)
    if seconds is None or math.isnan(seconds) or seconds < 0:
        problem = "not reported" if reported is None else f"{shown(reported)} cannot be used"
        return Latency(max_latency, "max_latency", f"latency: {problem}, counted as max_latency")
    # an infinite report is a late client, not a fault
    if seconds >= max_latency:
        problem = f"late: {seconds:.6g} s is not below max_latency = {max_latency:g} s"
        return Latency(seconds, "max_latency", problem, late=True)
    return Latency(seconds, "reported")


def _on_server_clock(observed: float, reported: object, slack: float | None) -> Latency:
    """Return a report in [0, observed], raised to observed - slack if it is below; else the observed time."""
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
    """Return a column of clients' reports; NaN for values that cannot be used.

    The most frequent length of the vectors counts. Vectors of another length cannot be used.

    Args:
        name: The column's name.
        values: A number or vector for each client; None if there is none.

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
    """Return the positions and faults of vectors whose length differs from the most frequent one.

    >>> length_faults([np.ones(2), None, np.ones(3), np.zeros(2)])
    {2: 'expected 2 numbers, as most have, got 3'}
    """
    usual = _usual_length(values)
    return {
        i: f"expected {usual} numbers, as most have, got {len(value)}"
        for i, value in enumerate(values)
        if isinstance(value, np.ndarray) and len(value) != usual
    }


def with_equal_lengths(results: Mapping[str, ClientResult], wanted: frozenset[str]) -> dict[str, ClientResult]:
    """Return the results of a round without vectors of an unusual length, each recorded as a problem.

    Args:
        results: Connection -> its reply after reading.
        wanted: Columns that clients report and the selector needs.
    """
    # Sorted, because the history has the problems in this order, and the order of a set differs between processes.
    equal, nodes = dict(results), list(results)
    for name in sorted(wanted & VECTORS):
        for i, fault in length_faults([result.columns.get(name) for result in results.values()]).items():
            old = equal[nodes[i]]
            columns = {key: value for key, value in old.columns.items() if key != name}
            equal[nodes[i]] = replace(old, columns=columns, problems=(*old.problems, f"{name}: {fault}"))
    return equal


def _usual_length(values: Iterable[object]) -> int:
    """Return the most frequent length of the vectors, of several the largest; 0 without vectors."""
    lengths = Counter(len(value) for value in values if isinstance(value, np.ndarray))
    return max(lengths, key=lambda n: (lengths[n], n), default=0)
