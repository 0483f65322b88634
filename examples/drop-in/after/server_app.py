"""The server: two of ten clients train in a round, and FedAvg averages what they send."""

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

from fedsel_flwr.strategies.message import BSFL

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and measure the model after each round on digits that no client has."""
    strategy = FedAvg(fraction_train=0.2, min_available_nodes=10, fraction_evaluate=0.0)
    strategy = BSFL(clients_per_round=2, clock="server", identity="node", base=strategy)
    start = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    rounds = int(context.run_config["num-server-rounds"])
    strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds, evaluate_fn=accuracy)


def accuracy(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """The share of the last 297 digits that a model gets right."""
    inputs, labels = load_digits(return_X_y=True)
    weights, intercept = arrays.to_numpy_ndarrays()
    predicted = np.argmax(inputs[1500:] / 16 @ weights.T + intercept, axis=1)
    return MetricRecord({"accuracy": float(np.mean(predicted == labels[1500:]))})
