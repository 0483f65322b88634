"""Local training of a round's clients together and one by one: seconds a round, side by side.

    python benchmarks/batched_training.py [--clients 25] [--examples 120] [--rounds 7] [--threads 1 2] [--chunks …]

Random images of Fashion-MNIST's shape, batches of 10, one epoch. The backends take turns within each round of the
measurement, so that whatever else the machine does hits all of them; figures are medians, and the ratio is the median
of the ratios to the loop of the same turn.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.simulations.worlds.architectures import build_model


def cnn5() -> nn.Module:
    """Two 5x5 convolutions of 16 and 32 channels, each with pooling; no dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


MODELS = {
    "logistic 784-10": lambda: build_model("logistic", (1, 28, 28), 10, 0),
    "mlp 784-64-30-10": lambda: build_model("mlp", (1, 28, 28), 10, 0),
    "cnn 16-32 3x3, dropout": lambda: build_model("cnn", (1, 28, 28), 10, 0),
    "cnn 16-32 5x5": cnn5,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=25)
    parser.add_argument("--examples", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="sizes of chunks beside the one by rule")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(10_000, 1, 28, 28)).astype(np.float32)
    rows = [rng.choice(10_000, size=args.examples, replace=False) for _ in range(args.clients)]
    clients = Examples(inputs, rng.integers(10, size=10_000), rows)
    settings = TrainingSettings(learning_rate=0.05, batch_size=10)
    print(
        f"torch {torch.__version__}, {args.clients} clients of {args.examples}; s a round (times faster than the loop)"
    )
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name in args.models:
            model = MODELS[name]()
            start = get_arrays(model)
            backends = {
                backend: BatchedTrainer(model, settings, backend=backend)
                for backend in ("sequential", "manual", "vmap")
            }
            backends |= {f"chunk {n}": BatchedTrainer(model, settings, backend="manual", chunk=n) for n in args.chunks}
            seconds: dict[str, list[float]] = {backend: [] for backend in backends}
            for turn in range(args.rounds + 1):
                for backend, trainer in backends.items():
                    generators = [np.random.default_rng([turn, client]) for client in range(args.clients)]
                    begin = time.perf_counter()
                    trainer.train(start, clients, generators)
                    seconds[backend].append(time.perf_counter() - begin)
            sequential = np.array(seconds["sequential"][1:])  # the first turn warms up
            figures = [
                f"{backend} {np.median(own[1:]):.4f} ({np.median(sequential / np.array(own[1:])):.1f}x)"
                for backend, own in seconds.items()
            ]
            print(f"{threads} thread(s), {name}: " + ", ".join(figures), flush=True)


if __name__ == "__main__":
    main()
