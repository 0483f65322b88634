"""Runs strategies of both APIs on Flower's simulation, for a look at another version of flwr than the pinned one.

``python tools/oldest_flower.py`` needs flwr[simulation], NumPy and safetensors only; ``tools/flower_matrix.py`` runs it
with several versions. It prints each strategy's choices, which must be the same with every version and in both APIs
(BSFL is on the server's clock, whose times differ from run to run: of it the cohorts), and ends with an error where
an update was lost.
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
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

import fedsel_flwr.strategies as legacy
from fedsel_flwr.strategies import Validation, message

NUM_CLIENTS, ROUNDS = 5, 4
message_client, message_server = ClientApp(), ServerApp()


def _who(context: Context) -> int:
    return int(context.node_config["partition-id"])


@message_client.train()
def train(message: Message, context: Context) -> Message:
    k = _who(context)
    arrays: Any = message.content["arrays"]
    trained = ArrayRecord([array + 0.1 * (k + 1) for array in arrays.to_numpy_ndarrays()])
    metrics = {"num-examples": 10 + k, "latency_s": 0.1 * (k + 1), "energy_j": 0.5, "client_id": k}
    return Message(content=RecordDict({"arrays": trained, "metrics": MetricRecord(metrics)}), reply_to=message)


@message_client.query()
def query(message: Message, context: Context) -> Message:
    facts = MetricRecord({"client_id": _who(context), "num_examples": 10})
    return Message(content=RecordDict({"who": facts}), reply_to=message)


class Legacy(NumPyClient):
    """The same client in the legacy API."""

    def __init__(self, k: int) -> None:
        self.k = k

    def get_parameters(self, config: Any) -> Any:
        return [np.zeros((2, 2), dtype=np.float32)]

    def get_properties(self, config: Any) -> dict[str, Any]:
        return {"client_id": self.k, "num_examples": 10}

    def fit(self, parameters: Any, config: Any) -> tuple[Any, int, dict[str, Any]]:
        metrics = {"latency_s": 0.1 * (self.k + 1), "energy_j": 0.5, "client_id": self.k}
        return [array + 0.1 * (self.k + 1) for array in parameters], 10 + self.k, metrics


def strategies(api: Any) -> list[Any]:
    """One of each kind, of an API: timed by the clients, timed by the server, with measurements on the server."""
    validation = Validation(lambda arrays, inputs: inputs @ arrays[0], np.eye(2), np.array([0, 1]))
    common = {"clients_per_round": 2, "seed": 1, "min_available": NUM_CLIENTS, "roll_call_timeout": 600.0}
    return [
        api.CSUCB(max_latency=5.0, **common),
        api.BSFL(min_latency=0.1, clock="server", **common),
        api.GPFL(total_rounds=ROUNDS, learning_rate=0.1, validation=validation, **common),
    ]


def tell(api: str, strategy: Any) -> None:
    """Print what a strategy chose."""
    rounds, rows = strategy.history.rounds, strategy.history.clients
    if len(rounds) != ROUNDS or not all(record.num_selected == record.num_completed > 0 for record in rounds):
        raise SystemExit(f"{api} {type(strategy).__name__}: {[(row.round, row.problem) for row in rows]}")
    chosen = [row.client_id for row in rows] if type(strategy).__name__ != "BSFL" else len(rows)
    print(flwr.__version__, api, type(strategy).__name__, chosen, flush=True)


@message_server.main()
def main(grid: Grid, context: Context) -> None:
    for strategy in strategies(message):
        initial = ArrayRecord([np.zeros((2, 2), dtype=np.float32)])
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=ROUNDS, timeout=60)
        tell("message", strategy)


def legacy_server(strategy: Any) -> ServerApp:
    config = ServerConfig(num_rounds=ROUNDS)
    return ServerApp(server_fn=lambda context: ServerAppComponents(strategy=strategy, config=config))


def run(server_app: ServerApp, client_app: ClientApp) -> None:
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=NUM_CLIENTS,
        backend_config={
            "init_args": {"num_cpus": 2, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    run(message_server, message_client)
    for strategy in strategies(legacy):
        run(legacy_server(strategy), ClientApp(client_fn=lambda context: Legacy(_who(context)).to_client()))
        tell("legacy", strategy)
