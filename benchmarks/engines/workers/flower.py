"""Plain Flower: its FedAvg of the Message API, its simulation on Ray, and a client app that keeps model and data."""

from __future__ import annotations

import logging
import os
from typing import Any

from flower_client import app
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from turns import Task, Turns


def main() -> None:
    """Take rounds."""
    turns = Turns()
    plan, task = turns.plan, Task(turns.plan["task"])
    os.environ["ENGINES_TASK"], os.environ["ENGINES_THREADS"] = plan["task"], str(plan["threads"])
    os.environ["ENGINES_DEVICE"] = plan["device"]
    settings = task.settings
    server, results = ServerApp(), []

    class InTurns(FedAvg):
        """FedAvg that waits for its turn."""

        def configure_train(self, *args: Any, **kwargs: Any) -> Any:
            """A round begins."""
            turns.next()
            return super().configure_train(*args, **kwargs)

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        share = settings["clients_per_round"] / settings["clients"]
        strategy = InTurns(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=settings["clients"])
        first = ArrayRecord(task.model().state_dict())
        results.append(strategy.start(grid, initial_arrays=first, num_rounds=plan["rounds"]))

    gpus = 1.0 / plan["processes"] if plan["device"].startswith("cuda") else 0.0
    backend: Any = {
        "init_args": {"num_cpus": plan["processes"], "include_dashboard": False, "log_to_driver": False,
                      "logging_level": logging.ERROR},
        "client_resources": {"num_cpus": 1, "num_gpus": gpus},
    }  # fmt: skip
    run_simulation(server_app=server, client_app=app, num_supernodes=settings["clients"], backend_config=backend)
    turns.next()
    turns.end(results[0].arrays.to_torch_state_dict().values())


if __name__ == "__main__":
    main()
