"""The app of the load test: a ServerApp that selects with BSFL on the server's clock, and writes down every round.

Each line of its file is a round: its record, its clients', and what the round cost this process and the SuperLink.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.strategies.message import BSFL

server_app, client_app = ServerApp(), ClientApp()


class Calls:
    """Counts and times the calls of a grid; changes the grid."""

    def __init__(self, grid: Any) -> None:
        self._push, self._pull = grid.push_messages, grid.pull_messages
        grid.push_messages, grid.pull_messages = self.push, self.pull
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.push_s, self.pull_s, self.pulls = 0.0, 0.0, 0

    def push(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push."""
        began = time.monotonic()
        ids = self._push(messages)
        self.push_s += time.monotonic() - began
        return ids

    def pull(self, ids: Iterable[str]) -> Iterable[Message]:
        """Pull."""
        began = time.monotonic()
        replies = self._pull(ids)
        self.pull_s, self.pulls = self.pull_s + time.monotonic() - began, self.pulls + 1
        return replies


class Writer:
    """Writes a line for each round.

    Args:
        path: The file.
        superlink: The SuperLink's process.
        calls: The grid's calls.
    """

    def __init__(self, path: str, superlink: psutil.Process, calls: Calls) -> None:
        self._path, self._superlink, self._calls, self.strategy = path, superlink, calls, None
        self._began, self._own, self._its = time.monotonic(), time.process_time(), processor_s(superlink)

    def __call__(self, record: RoundRecord) -> None:
        """Write a finished round."""
        strategy: Any = self.strategy
        now, own, its = time.monotonic(), time.process_time(), processor_s(self._superlink)
        parts = {name: float(column[-1]) for name, column in strategy.core.stopwatch.columns(record.round).items()}
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        clients = [asdict(row) for row in strategy.history.clients if row.round == record.round]
        line = {
            **asdict(record), "elapsed_s": now - self._began, "server_app_cpu_s": own - self._own,
            "superlink_cpu_s": its - self._its, "server_app_mb": peak_mb,
            "superlink_mb": self._superlink.memory_info().rss / 2**20, "push_s": self._calls.push_s,
            "pull_s": self._calls.pull_s, "pulls": self._calls.pulls,
            "parts_ms": parts, "clients": clients,
        }  # fmt: skip
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._calls.clear()
        self._began, self._own, self._its = time.monotonic(), time.process_time(), processor_s(self._superlink)


def processor_s(process: psutil.Process) -> float:
    """User and system time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config: dict[str, Any] = dict(context.run_config)
    write = Writer(config["out"], psutil.Process(config["superlink"]), Calls(grid))
    strategy = BSFL(
        FedAvg(fraction_evaluate=0.0), clients_per_round=config["cohort"], min_available=config["wait_for"],
        clock="server", min_latency=1.0, max_latency=float(config["timeout"]), on_round=write, seed=1,
    )  # fmt: skip
    write.strategy = strategy  # type: ignore[assignment]
    each = config["parameters"] // config["arrays"]
    model = ArrayRecord([np.zeros(each, np.float32) + number for number in range(config["arrays"])])
    strategy.start(grid, model, num_rounds=config["rounds"], timeout=float(config["timeout"]))
