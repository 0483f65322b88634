"""Runs on Ray for the tests of engines: ``python -m tests.simulations.ray_runs NAME FILE ...`` pickles what came out.

In a process of their own, as Ray leaves threads, signal handlers and warnings behind.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.client import Client, ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid

from fedsel_flwr.selectors import create
from fedsel_flwr.simulations import engine
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.on_flower.driving import run_rounds, wait_for_nodes
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.on_flower.ray_session import RaySession
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import world_of
from fedsel_flwr.strategies import RoundRecord, SelectionStrategy
from tests.processes import ROOT, Command
from tests.simulations.agreement import Course, recorded

SMOKE = load_scenario(
    "smoke", {"training.local_epochs": 5, "rounds": 4, "partition.kind": "dirichlet", "partition.alpha": 0.3}
)
KINDS = (
    "honest", "honest", "honest", "nan", "shape", "latency-negative", "latency-text", "latency-infinite", "nothing",
    "raises", "late",
)  # fmt: skip
ROUNDS, ROUND_TIMEOUT_S, MAX_LATENCY_S = 3, 2.0, 4.0


def outcome(name: str, folder: Path, *args: str) -> Any:
    """Call a function of this file in a process of its own; returns what it returned."""
    result = folder / "result"
    command = Command(sys.executable, "-m", __name__, name, str(result), *args, folder=folder, cwd=ROOT)
    try:
        assert command.wait(600) == 0, command.stderr[-5000:]
        return pickle.loads(result.read_bytes())
    finally:
        command.kill()


def with_one_actor() -> RunResult:
    """The smoke scenario on a single core."""
    return simulate(SMOKE, num_cpus=1)


def once() -> tuple[RunResult, list[RoundRecord]]:
    """The smoke scenario, and what ``on_round`` was told."""
    told: list[RoundRecord] = []
    return simulate(SMOKE, on_round=told.append), told


def played(text: str) -> RunResult:
    """A scenario, given as JSON."""
    return simulate(Scenario.model_validate_json(text), engine="ray")


def agreeing(text: str) -> Course:
    """The course of a scenario, given as JSON."""
    scenario = Scenario.model_validate_json(text)
    strategy = make_strategy(world_of(scenario))
    course = recorded(strategy)
    result = simulate(scenario, engine="ray", strategy=strategy)
    course.ended = [*course.received[1:], result.arrays]
    return course


def hostile() -> dict[str, Any]:
    """Clients that lie, break, stay away, through Flower's own simulation."""
    scenario = load_scenario(
        "smoke",
        {
            "num_clients": len(KINDS), "clients_per_round": len(KINDS), "rounds": ROUNDS,
            "aggregation.round_timeout_s": ROUND_TIMEOUT_S,
        },
    )  # fmt: skip
    base = FedAvg(
        fraction_evaluate=0.0, min_available_clients=len(KINDS),
        initial_parameters=ndarrays_to_parameters([np.zeros((3, 2), np.float32), np.zeros(2, np.float32)]),
        evaluate_fn=lambda round, arrays, config: (0.0, {"accuracy": float(arrays[0].mean())}),
    )  # fmt: skip
    selector = create("cs-ucb", clients_per_round=len(KINDS), max_latency=MAX_LATENCY_S, seed=1)
    strategy = SelectionStrategy(selector, base, max_latency=MAX_LATENCY_S, wait_timeout=60.0)
    results: list[RunResult] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        wait_for_nodes(grid, scenario)
        results.append(run_rounds(grid, world_of(scenario), strategy))

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fedsel_flwr").addHandler(handler)
    # More actors than cores: each of the three late answers keeps one asleep.
    session = RaySession(RayResources(num_cpus=5))
    app = ClientApp(client_fn=_client_fn)
    engine.run_simulation(session=session, server_app=server_app, client_app=app, num_supernodes=len(KINDS))
    return {
        "history": strategy.history, "arrays": results[0].arrays, "state": selector.state_dict(),
        "ids": strategy.roster.ids, "messages": messages,
    }  # fmt: skip


def _client_fn(context: Context) -> Client:
    return _Hostile(int(context.node_config["partition-id"])).to_client()


class _Hostile(NumPyClient):
    """Adds one to every number of the model, and takes 0.5 + 0.25 k seconds to say so; but for its fault."""

    def __init__(self, partition_id: int) -> None:
        self.k = partition_id

    def get_properties(self, config: Any) -> dict[str, Any]:
        return {"client_id": self.k, "num_examples": 10}

    def fit(self, parameters: Any, config: Any) -> tuple[Any, int, dict[str, Any]]:
        kind = KINDS[self.k]
        arrays = [array + np.float32(1) for array in parameters]
        metrics = {"latency_s": 0.5 + 0.25 * self.k, "energy_j": 0.25, "client_id": self.k}
        if kind == "nan":
            arrays[0][1, 1] = np.nan
        elif kind == "shape":
            arrays[0] = arrays[0].T
        elif kind.startswith("latency"):
            metrics["latency_s"] = {"negative": -1.0, "text": "fast", "infinite": float("inf")}[kind[8:]]
        elif kind == "nothing":
            return [], 10, {}
        elif kind == "raises":
            raise ValueError("I break")
        elif kind == "late":
            time.sleep(3 * ROUND_TIMEOUT_S)
        return arrays, 10, metrics


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*sys.argv[3:])
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))
