"""The server: BSFL chooses two SuperNodes a round, Flower's FedAvg averages what they send."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsel_flwr.strategies.message import BSFL

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, or go on from the newest checkpoint, and say who was asked."""
    folder = str(context.run_config["checkpoint-dir"])
    strategy = BSFL(
        clients_per_round=2,
        clock="server",
        min_available=3,  # below the number of SuperNodes, so that a round starts although one is down
        checkpoint_dir=folder or None,
        resume=bool(folder),
    )
    start = ArrayRecord([np.zeros((3, 1))])
    result = strategy.start(grid, start, num_rounds=int(context.run_config["rounds"]), timeout=60.0)
    for row in strategy.history.clients:
        print(f"round {row.round}: {row.client_id} {row.latency_s:.1f} s {row.problem}")
    print("the model:", result.arrays.to_numpy_ndarrays()[0].round(2).ravel())
