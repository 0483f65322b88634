"""The server: trains one model after the other on the same clients, each with another selector, and compares them."""

from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

from fedsel_flwr.selectors import create
from fedsel_flwr.strategies.message import BSFL, CSUCB, CSUCBQ, SelectionStrategy

app = ServerApp()
PAPERS: dict[str, Any] = {"bsfl": BSFL, "cs-ucb": CSUCB, "cs-ucb-q": CSUCBQ}


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with each selector in each repeat, then print seconds and accuracy next to those of the first selector."""
    config = context.run_config
    selectors = [name.strip() for name in str(config["selectors"]).split(",")]
    seconds: dict[str, list[float]] = {name: [] for name in selectors}
    correct: dict[str, list[float]] = {name: [] for name in selectors}
    for repeat in range(int(config["repeats"])):
        for name in selectors if repeat % 2 == 0 else reversed(selectors):  # taking turns: the load may change
            strategy = strategy_of(name, int(config["clients-per-round"]), int(config["min-clients"]), seed=repeat)
            start = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
            result = strategy.start(
                grid=grid, initial_arrays=start, num_rounds=int(config["num-server-rounds"]), timeout=60.0
            )
            seconds[name].append(sum(record.round_s for record in strategy.history.rounds))
            correct[name].append(accuracy(result.arrays, str(config["test-data"])))
    print(f"{config['num-server-rounds']} rounds, {config['repeats']} repeats; seconds compared with {selectors[0]}")
    for name in selectors:
        ratios = [one / other for one, other in zip(seconds[name], seconds[selectors[0]], strict=True)]
        print(
            f"{name}: {np.mean(seconds[name]):.1f} s, accuracy {np.mean(correct[name]):.3f}, "
            f"{np.exp(np.mean(np.log(ratios))):.2f} times the seconds ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def strategy_of(name: str, clients_per_round: int, min_clients: int, seed: int) -> SelectionStrategy:
    """Return FedAvg with a selector of fedsel-flwr by its name; ``fedsel list`` has all names."""
    options: dict[str, Any] = {
        "clock": "server", "min_available": min_clients, "base": FedAvg(fraction_evaluate=0.0)
    }  # fmt: skip
    if name in PAPERS:
        return PAPERS[name](clients_per_round=clients_per_round, seed=seed, **options)
    return SelectionStrategy(create(name, clients_per_round=clients_per_round, seed=seed), **options)


def accuracy(arrays: ArrayRecord, path: str) -> float:
    """Measure a model on an .npz file of the server, or on the last 297 digits, which no simulated client has."""
    if path:
        with np.load(path) as file:
            inputs, labels = file["inputs"], file["labels"]
    else:
        inputs, labels = load_digits(return_X_y=True)
        inputs, labels = inputs[1500:] / 16, labels[1500:]
    weights, intercept = arrays.to_numpy_ndarrays()
    return float(np.mean(np.argmax(inputs @ weights.T + intercept, axis=1) == labels))
