"""What the rounds of a run say, and what must hold of every run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

Rounds = list[dict[str, Any]]


def client(round: dict[str, Any], name: str) -> dict[str, Any]:
    """A client's row in a round."""
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


def check_statistics(rounds: Rounds, min_latency: float) -> None:
    """What BSFL has learned is what the history says, client by client, over the whole run.

    With ``min_latency="auto"`` it keeps the mean of 1 / latency: 1.0 stands for that here, where nobody needs less.
    """
    assert [one["round"] for one in rounds] == list(range(1, len(rounds) + 1))
    last = rounds[-1]
    for row in range(len(last["ids"])):
        seen = [c["latency_s"] for one in rounds for c in one["clients"] if c["client"] == row]
        assert last["selector"]["plays"][row] == len(seen)
        if seen:
            speed = np.mean(min_latency / np.maximum(seen, min_latency))
            np.testing.assert_allclose(last["selector"]["mean"][row], speed, rtol=1e-9)
