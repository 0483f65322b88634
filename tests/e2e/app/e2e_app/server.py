"""A server that wraps FedAvg in a selection strategy of either API and writes each finished round to a file."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.common import ndarrays_to_parameters
from flwr.server import Server, ServerConfig, SimpleClientManager
from flwr.server.compat import start_grid
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid, ServerApp

from fedsel_flwr import strategies
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.selectors import create
from fedsel_flwr.strategies import message

MODEL = [np.zeros(3)]
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds in the API that the run config names."""
    config = context.run_config
    folder, rounds, timeout = Path(str(config["folder"])), int(config["rounds"]), float(config["timeout_s"])
    folder.mkdir(parents=True, exist_ok=True)
    write = Writer(folder / "rounds.jsonl")
    options: dict[str, Any] = {"clock": "server", "on_round": write, **json.loads(str(config["options"]))}
    if config["api"] == "legacy":
        base = FedAvg(
            initial_parameters=ndarrays_to_parameters(MODEL), fraction_evaluate=0.0,
            on_fit_config_fn=lambda round: {"round": round},
        )  # fmt: skip
        strategy = write.strategy = getattr(strategies, config["strategy"])(base=base, total_rounds=rounds, **options)
        server = Server(client_manager=SimpleClientManager(), strategy=strategy)
        server.set_max_workers(32)
        start_grid(grid=grid, server=server, config=ServerConfig(num_rounds=rounds, round_timeout=timeout))
    else:
        made = getattr(message, str(config["strategy"]))
        if "selector" in options:
            made = partial(message.SelectionStrategy, create(options.pop("selector")))
        strategy = write.strategy = made(**options)
        strategy.start(grid, ArrayRecord(MODEL), num_rounds=rounds, timeout=timeout)


class Writer:
    """Writes a line of JSON for each finished round: its record, its clients', who is who, what the selector has
    learned, and when.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.strategy: Any = None

    def __call__(self, record: RoundRecord) -> None:
        strategy = self.strategy
        clients = [asdict(row) for row in strategy.history.clients if row.round == record.round]
        state = {key: np.asarray(value).tolist() for key, value in strategy.state_dict()["selector"].items()}
        told = {"clients": clients, "ids": list(strategy.roster.ids), "selector": state, "at": time.time()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record) | told) + "\n")
