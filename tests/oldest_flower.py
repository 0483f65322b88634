"""Runs the Message API strategies on Flower's simulation, for a look at another version of flwr than the pinned one.

By hand, in an environment with ``flwr[simulation]==1.22.0``, numpy and safetensors: ``python tests/oldest_flower.py``.
It prints each strategy's cohorts and choices. Seen on 2026-11-21 with flwr 1.22.0 and 1.41.0: all rounds complete, and
the choices of CSUCB and GPFL the same (BSFL is on the server's clock, whose times differ from run to run).
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flwr
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedsel_flwr.strategies import Validation
from fedsel_flwr.strategies.message import BSFL, CSUCB, GPFL

NUM_CLIENTS = 5
client_app = ClientApp()
server_app = ServerApp()


def _who(context: Context) -> int:
    return int(context.node_config["partition-id"])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    k = _who(context)
    arrays: Any = message.content["arrays"]
    trained = ArrayRecord([array + 0.1 * (k + 1) for array in arrays.to_numpy_ndarrays()])
    metrics = {"num-examples": 10 + k, "latency_s": 0.1 * (k + 1), "energy_j": 0.5, "client_id": k}
    return Message(content=RecordDict({"arrays": trained, "metrics": MetricRecord(metrics)}), reply_to=message)


@client_app.query()
def query(message: Message, context: Context) -> Message:
    facts = MetricRecord({"client_id": _who(context), "num_examples": 10})
    return Message(content=RecordDict({"who": facts}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    validation = Validation(lambda arrays, inputs: inputs @ arrays[0], np.eye(2), np.array([0, 1]))
    common = {"clients_per_round": 2, "seed": 1, "min_available": NUM_CLIENTS}
    for strategy in (
        CSUCB(max_latency=5.0, **common),
        BSFL(min_latency=0.1, clock="server", **common),
        GPFL(total_rounds=4, learning_rate=0.1, validation=validation, **common),
    ):
        initial = ArrayRecord([np.zeros((2, 2), dtype=np.float32)])
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=4, timeout=60)
        cohorts = [(record.num_selected, record.num_completed) for record in strategy.history.rounds]
        choices = [row.client_id for row in strategy.history.clients]
        print(flwr.__version__, type(strategy).__name__, cohorts, choices, flush=True)


if __name__ == "__main__":
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=NUM_CLIENTS,
        backend_config={
            "init_args": {"num_cpus": 2, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
