"""Reading what a client sent: which updates can be used, and which numbers can be believed.

A fault in the arrays makes the client a failed one. A fault in our own metrics is replaced and named, and the update
is kept. Metrics of other strategies are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedsel_flwr.rounds.roster import canonical_id
from fedsel_flwr.rounds.untrusted import finite_number, fraction, number, one_line, shown, usable_count

NaN = float("nan")
Arrays = Sequence[npt.NDArray[Any]]
NOT_REPORTED = "latency: not reported, the server's time taken"
"""What is usual on the server's clock; counted, but said once."""
NUMBERS = ("energy", "download", "compute", "upload", "train_loss", "energy_score")
REPORTED = ("latency", "client_id", "energy_modelled", *NUMBERS)


@dataclass(frozen=True, kw_only=True)
class MetricKeys:
    """The names under which clients report; change them where a deployment has names of its own."""

    latency: str = "latency_s"
    energy: str = "energy_j"
    download: str = "download_s"
    compute: str = "compute_s"
    upload: str = "upload_s"
    train_loss: str = "train_loss"
    client_id: str = "client_id"
    num_examples: str = "num_examples"
    energy_score: str = "energy_score"
    energy_modelled: str = "energy_modelled"

    def reported(self) -> frozenset[str]:
        """The keys that clients report with an update."""
        return frozenset(getattr(self, name) for name in REPORTED)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A client's answer in plain types.

    Attributes:
        arrays: The client's model; None if it could not be decoded.
        num_examples: Examples behind the update, as reported.
        weight: What the base strategy weighs the update with, where that is not the number of examples.
        metrics: Everything the client reported.
        observed_s: Seconds the server waited for this client; None if it was not timed.
        error: Empty, or why there is no update.
    """

    arrays: Arrays | None = None
    num_examples: object = None
    weight: object = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    observed_s: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """A reply after reading.

    Attributes:
        completed: Whether the update may be aggregated.
        problems: What was wrong, each with its kind before a colon.
        faulty_keys: Our metric keys whose values could not be used.
        latency_s: Seconds for the selector, at most max_latency.
        values: energy, download, compute, upload, train_loss, energy_score; NaN where unknown.
        num_examples: Examples behind the update; 0 where unknown.
        weight: What the update weighs in a mean; 0 where unknown.
        converted: The arrays in the types of the global model, where they came in others; None if they can stay.
            Flower's averages would take the type of whoever comes first.
    """

    completed: bool
    problems: tuple[str, ...]
    faulty_keys: frozenset[str]
    latency_s: float
    values: Mapping[str, float]
    num_examples: int
    weight: float
    converted: Arrays | None = None


def read_reply(
    reply: Reply,
    *,
    reference: Arrays | None,
    client_id: str,
    max_latency: float,
    clock: Literal["virtual", "server"],
    clock_slack: float,
    keys: MetricKeys,
) -> ClientResult:
    """Decide what of a reply can be used.

    Args:
        reply: The client's answer.
        reference: The global model the client received; None skips the comparison of arrays.
        client_id: The id the connection is bound to.
        max_latency: Longest wait, seconds.
        clock: "virtual" believes the reported latency (late means failed); "server" holds it against the server's.
        clock_slack: On the server's clock, how many seconds a report may lie below the observed time.
        keys: Names of our metrics.

    Returns:
        The result; never raises for what a client sent.
    """
    problems: list[str] = []
    faulty: set[str] = set()
    failed = _fault_in_update(reply, reference)
    if failed:
        problems.append(failed)
    values: dict[str, float] = {}
    for name in NUMBERS:
        key = getattr(keys, name)
        value = (fraction if name == "energy_score" else finite_number)(reply.metrics.get(key))
        usable = value is not None and (name == "train_loss" or value >= 0)
        values[name] = value if usable and value is not None else NaN
        if not usable and key in reply.metrics:
            problems.append(f"{name}: {shown(reply.metrics[key])} cannot be used")
            faulty.add(key)
    claim = reply.metrics.get(keys.client_id)
    if claim is not None and canonical_id(claim) != client_id:
        problems.append(f"identity: claims to be {shown(claim)}")
        faulty.add(keys.client_id)
    latency, problem, late = max_latency, "", False
    if clock == "server":
        latency, problem = _server_latency(reply, clock_slack, keys.latency)
    elif not reply.error:
        latency, problem, late = _virtual_latency(reply.metrics.get(keys.latency), max_latency)
    if problem and not reply.error:
        problems.append(problem)
        if not late:
            faulty.add(keys.latency)
    completed = not failed and not late
    count = usable_count(reply.num_examples) if not failed else 0
    weight = finite_number(reply.weight)
    return ClientResult(
        completed=completed,
        problems=tuple(one_line(problem) for problem in problems),
        faulty_keys=frozenset(faulty & reply.metrics.keys()),
        latency_s=min(latency, max_latency) if completed else max_latency,  # Xia (4), Ben Ami (2)
        values=values,
        num_examples=count,
        weight=float(count) if failed or weight is None else weight,
        converted=None if failed else _converted(reply.arrays, reference),
    )


def _fault_in_update(reply: Reply, reference: Arrays | None) -> str:
    """Why the update cannot be aggregated; empty if it can."""
    if reply.error:
        return reply.error
    if not usable_count(reply.num_examples):
        return f"num_examples: expected an integer of at least 1, got {shown(reply.num_examples)}"
    if reference is None:
        return ""
    if reply.arrays is None:
        return "arrays: cannot be decoded"
    if len(reply.arrays) != len(reference):
        return f"arrays: expected {len(reference)}, got {len(reply.arrays)}"
    for i, (array, own) in enumerate(zip(reply.arrays, reference, strict=True)):
        if array.shape != own.shape:
            return f"arrays: expected shape {own.shape} at {i}, got {array.shape}"
        if array.dtype.kind not in "biuf" or not np.can_cast(array.dtype, own.dtype, "same_kind"):
            return f"arrays: expected dtype {own.dtype} at {i}, got {array.dtype}"
        with np.errstate(over="ignore"):
            held = array.astype(own.dtype, copy=False)
        if not np.isfinite(held).all():
            return f"arrays: not finite at {i}"
    return ""


def _converted(arrays: Arrays | None, reference: Arrays | None) -> Arrays | None:
    if arrays is None or reference is None or all(a.dtype == r.dtype for a, r in zip(arrays, reference, strict=True)):
        return None
    return [a.astype(r.dtype, copy=False) for a, r in zip(arrays, reference, strict=True)]


def _virtual_latency(reported: object, max_latency: float) -> tuple[float, str, bool]:
    """Latency, problem and whether the client is late, on the clock that the clients keep."""
    seconds = number(reported)
    if reported is None:
        return max_latency, "latency: not reported, max_latency taken", False
    if seconds is None or math.isnan(seconds) or seconds < 0:
        return max_latency, f"latency: {shown(reported)} cannot be used, max_latency taken", False
    if seconds >= max_latency:
        return max_latency, f"late: {seconds:.6g} s reach max_latency = {max_latency:g} s", True
    return seconds, "", False


def _server_latency(reply: Reply, slack: float, key: str) -> tuple[float, str]:
    """Latency and problem on the server's clock: reports are clipped into [observed - slack, observed]."""
    observed, reported = reply.observed_s, reply.metrics.get(key)
    if observed is None:
        return math.inf, "latency: the server has no time of its own, max_latency taken"
    seconds = number(reported)
    if reported is None:
        return observed, NOT_REPORTED
    if seconds is None or math.isnan(seconds):
        return observed, f"latency: {shown(reported)} cannot be used, the server's time taken"
    low = max(0.0, observed - slack)
    clipped = min(max(seconds, low), observed)
    problem = "" if clipped == seconds else f"latency: {seconds:.6g} s clipped to [{low:.6g}, {observed:.6g}] s"
    return clipped, problem
