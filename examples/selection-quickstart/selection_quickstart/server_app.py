"""The server: BSFL selects the clients of each round, and FedAvg averages their models."""

from collections import Counter

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

from fedsel_flwr.strategies.message import BSFL

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, then print how often each client was selected and how long it took."""
    config = context.run_config
    strategy = BSFL(
        clients_per_round=int(config["clients-per-round"]),
        min_available=int(config["min-clients"]),
        clock="server",  # the server times the clients
        base=FedAvg(fraction_evaluate=0.0),  # any strategy of flwr.serverapp.strategy
    )
    start = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    strategy.start(
        grid=grid, initial_arrays=start, num_rounds=int(config["num-server-rounds"]), timeout=60.0, evaluate_fn=accuracy
    )
    rows = strategy.history.clients
    for client, times in sorted(Counter(row.client_id for row in rows).items()):
        seconds = np.mean([row.latency_s for row in rows if row.client_id == client])
        print(f"client {client}: selected {times} times, {seconds:.1f} s on average")


def accuracy(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Measure a model on the last 297 digits of scikit-learn, which no simulated client has."""
    inputs, labels = load_digits(return_X_y=True)
    weights, intercept = arrays.to_numpy_ndarrays()
    predicted = np.argmax(inputs[1500:] / 16 @ weights.T + intercept, axis=1)
    return MetricRecord({"accuracy": float(np.mean(predicted == labels[1500:]))})
