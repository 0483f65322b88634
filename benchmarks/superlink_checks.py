"""Compares a run's history with what the nodes of the load test did: nothing may be lost, and nothing told twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from superlink_nodes import FAILURE, Work

UNAVAILABLE = "node unavailable"
KINDS = ("answers", "failures", "left", "timeouts", "lost", "wrong")
"""What became of the selected clients; the last two kinds must not occur."""


def compared(
    rounds: Iterable[Mapping[str, Any]], works: Iterable[Work], left: Collection[tuple[int, int]]
) -> tuple[Counter[str], list[str]]:
    """Compare each selected client of a history with what its node did.

    Args:
        rounds: The rounds of the history, with ``round`` and ``clients``.
        works: What each node did with each message.
        left: Round and node id of nodes that were away in the round, or in a part of it.

    Returns:
        Number of selected clients by kind, see :data:`KINDS`. A timeout is a client whose node answered too late, or
        never received its message. "lost": a row or a node's answer is missing. "wrong": the row contradicts the node.
        And a line for each of the last two kinds.
    """
    found, lines = Counter[str](), list[str]()
    did = Counter[tuple[int, int]]()
    outcomes: dict[tuple[int, int], Work] = {}
    for work in works:
        did[work.round, work.node] += 1
        outcomes[work.round, work.node] = work
    told = Counter[tuple[int, int]]()
    for record in rounds:
        for row in record["clients"]:
            key = (record["round"], int(row["client_id"]))
            told[key] += 1
            kind = _kind(row, outcomes.get(key), key in left)
            found[kind] += 1
            if kind in ("lost", "wrong"):
                what = outcomes[key].outcome if key in outcomes else "received nothing"
                said = row["problem"] or "completed"
                lines.append(f"round {key[0]}, node {key[1]}: the node {what}, the history says {said!r}")
    last = max((round for round, _ in told), default=0)
    for key, number in did.items():
        if key not in told and key[0] <= last:
            found["lost"] += 1
            lines.append(f"round {key[0]}, node {key[1]}: the node {outcomes[key].outcome}, the history has no row")
        if number > 1:
            found["wrong"] += 1
            lines.append(f"round {key[0]}, node {key[1]}: the node received the message {number} times")
    for key, number in told.items():
        if number > 1:
            found["wrong"] += 1
            lines.append(f"round {key[0]}, node {key[1]}: {number} rows")
    return found, lines


def _kind(row: Mapping[str, Any], work: Work | None, left: bool) -> str:
    """Return the kind of a selected client."""
    problem, outcome = row["problem"], work.outcome if work else "nothing"
    cut = outcome == "left while sending"  # the answer may have arrived all the same, whole or in part
    if row["timed_out"]:
        return "left" if cut else "timeouts"
    if row["completed"]:
        return "answers" if outcome == "answered" or cut else "wrong"
    if FAILURE in problem:
        return "failures" if outcome == "failed" or cut else "wrong"
    if cut and "objects are unavailable" in problem:
        return "left"
    if problem.startswith(UNAVAILABLE):
        # The SuperLink answers for a node that is away when the ServerApp asks. So a node that answered just before it
        # left loses its answer, and one that has come back may answer in vain.
        return "left" if left else "lost"
    return "wrong"
