"""What the rounds of a run say, and what must hold of every run."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

Rounds = list[dict[str, Any]]


def client(round: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in round["clients"] if row["client_id"] == name]
    return dict(row)


def asked(rounds: Rounds, name: str) -> list[int]:
    """The rounds in which a client was asked to train."""
    return [one["round"] for one in rounds if any(row["client_id"] == name for row in one["clients"])]


def problems(round: dict[str, Any]) -> dict[str, str]:
    """Client -> what was wrong, of those whose update could not be used."""
    return {row["client_id"]: row["problem"] for row in round["clients"] if not row["completed"]}


def check_kept(rounds: Rounds, before: Rounds) -> None:
    """A run that was cut off and went on has the rounds that had finished before as they were."""
    assert before
    written = [[json.dumps(one["clients"]) for one in some] for some in (before, rounds)]  # NaN is no equal of itself
    assert written[1][: len(before)] == written[0]


def check_statistics(rounds: Rounds, min_latency: float | None = None) -> None:
    """What BSFL has learned is what the history says, client by client, over the whole run.

    It keeps the mean of tau_min / latency, and a play counts as at least tau_min, which is ``min_latency``. Without a
    number ("auto") it keeps the mean of 1 / latency. Then tau_min is the lower tenth percentile of the clients' mean
    latencies after the play's round, over the plays that completed.
    """
    assert [one["round"] for one in rounds] == list(range(1, len(rounds) + 1))
    completed: dict[int, list[float]] = {}
    counted: dict[int, list[float]] = {}
    for one in rounds:
        for c in one["clients"]:
            completed.setdefault(c["client"], []).extend([c["latency_s"]] * c["completed"])
        means = sorted(np.mean(each) for each in completed.values() if each)
        shortest = min_latency or (means[math.floor(0.1 * (len(means) - 1))] if means else 0.0)
        for c in one["clients"]:
            counted.setdefault(c["client"], []).append(max(c["latency_s"], shortest))
    last = rounds[-1]
    for row in range(len(last["ids"])):
        seen = counted.get(row, [])
        assert last["selector"]["plays"][row] == len(seen)
        if seen:
            expected = np.mean((min_latency or 1.0) / np.array(seen))
            np.testing.assert_allclose(last["selector"]["mean"][row], expected, rtol=1e-9)
