"""Table and page of the load test of a SuperLink."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np

COST = {
    "nodes": "nodes", "cohort": "clients in a round", "arrays": "arrays of the model", "finished": "rounds",
    "first_s": "round 1, s", "round_s": "a round, s", "beyond_s": "beyond the slowest, s",
    "beyond_95_s": "the same, 95 %, s", "push_s": "sending, s", "pull_s": "fetching, s", "strategy_s": "strategy, s",
}  # fmt: skip
MACHINE = {
    "nodes": "nodes", "cohort": "clients in a round", "arrays": "arrays of the model",
    "superlink_idle": "SuperLink before the run, cores", "superlink_cpu_s": "SuperLink, CPU s a round",
    "server_app_cpu_s": "ServerApp, CPU s a round", "requests_per_s": "nodes' requests a second",
    "request_cpu_ms": "SuperLink, CPU ms a request", "superlink_mb": "SuperLink, MB",
    "server_app_mb": "ServerApp, MB", "database_mb": "database, MB",
}  # fmt: skip
FATE = {
    "nodes": "nodes", "cohort": "clients in a round", "arrays": "arrays of the model", "answers": "answers",
    "failures": "errors", "left": "left", "timeouts": "too late", "lost": "lost", "wrong": "wrong",
    "ask_ms": "a node asks, ms", "ask_95_ms": "the same, 95 %, ms", "missed_heartbeats": "missed heartbeats",
    "errors": "other requests without success", "ended": "the run",
}  # fmt: skip


def page(rows: list[dict[str, Any]], parameters: int, note: str) -> str:
    """Return the page.

    Args:
        rows: The rows of the table, one for each case.
        parameters: Number of numbers in the model.
        note: What the page is to say of the measurement; may be empty.
    """
    machine = f"Machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return (
        "# A SuperLink under load\n\n"
        "Written by `python benchmarks/superlink_load.py`. A SuperLink (insecure, state in a file), and a ServerApp\n"
        f"with BSFL on the server's clock and a model of {parameters:,} numbers (float32). The nodes, in one process,\n"
        "answer after 0.5 to 2 s. 5 % of the answers are errors. In each round 2 % of the nodes leave, and they\n"
        "come back in the next one. The times are medians over rounds, without round 1.\n"
        f"{machine}{note and '; '}{note}.\n\n"
        "*Beyond the slowest*: seconds of a round minus the longest drawn delay of an answer. *Sending*, *fetching*:\n"
        "the ServerApp's requests to the SuperLink. *Strategy*: the code of this package.\n\n"
        f"{_table(COST, rows)}\n"
        "Before the run the nodes only ask for messages, each one every 3 s. Memory is the largest value.\n\n"
        f"{_table(MACHINE, rows)}\n"
        "What became of the selected clients. *Lost*: a row or an answer is missing. *Wrong*: the history contradicts\n"
        "the node. *A node asks*: how long the SuperLink needs to say whether there is a message.\n\n"
        f"{_table(FATE, rows)}"
    )


def _table(columns: dict[str, str], rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(columns.values())} |", f"|{' ---: |' * len(columns)}"]
    lines += [f"| {' | '.join(_shown(row[name]) for name in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return "-" if np.isnan(value) else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else value or "finished"
