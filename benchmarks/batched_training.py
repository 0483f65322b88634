"""Local training of a round's clients together and one by one: seconds a round, side by side.

    python benchmarks/batched_training.py [--clients 25] [--examples 120] [--rounds 7] [--threads 1 2] [--chunks …]
    nice -n 5 python benchmarks/batched_training.py --clients 12 --examples 40 --rounds 4 --threads 1 --models others

Random images of Fashion-MNIST's shape, one epoch. The backends take turns within each round of the measurement, in an
order that turns round, so that whatever else the machine does hits all of them. Figures are medians, and the ratio is
the median of the ratios to the loop of the same turn. "others" are the models that are not written out by hand, which
only "vmap" can train together; "together" is the number of clients that it trains at once.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from engines.networks import SmallResNet
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.trainer import default_chunk
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


def tanh(width: int) -> nn.Module:
    """A perceptron that manual backprop does not know."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Tanh(), nn.Linear(width, 10))


class Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.cell, self.head = width, nn.Linear(28 + width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, 1, 28, 28) to logits (n, 10)."""
        state = x.new_zeros(len(x), self.width)
        for row in x[:, 0].unbind(1):
            state = torch.tanh(self.cell(torch.cat([row, state], 1)))
        out: torch.Tensor = self.head(state)
        return out


WRITTEN = {
    "logistic 784-10": lambda: build_model("logistic", (1, 28, 28), 10, 0),
    "mlp 784-64-30-10": lambda: build_model("mlp", (1, 28, 28), 10, 0),
    "cnn 16-32 3x3, dropout": lambda: build_model("cnn", (1, 28, 28), 10, 0),
    "cnn 16-32 5x5": cnn5,
}
OTHERS = {
    "resnet 8-32": lambda: SmallResNet(1, 10),
    "resnet 16-64": lambda: SmallResNet(1, 10, width=16),
    "resnet 32-128": lambda: SmallResNet(1, 10, width=32),
    "tanh 784-64-10": lambda: tanh(64),
    "tanh 784-1000-10": lambda: tanh(1000),
    "recurrent 64": lambda: Recurrent(64),
    "recurrent 512": lambda: Recurrent(512),
}
MODELS = WRITTEN | OTHERS


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=25)
    parser.add_argument("--examples", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="sizes of chunks beside the one by rule")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--models", nargs="*", default=["written"], choices=["written", "others", *MODELS])
    args = parser.parse_args()
    groups = {"written": list(WRITTEN), "others": list(OTHERS)}
    names = [name for given in args.models for name in groups.get(given, [given])]
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(10_000, 1, 28, 28)).astype(np.float32)
    rows = [rng.choice(10_000, size=args.examples, replace=False) for _ in range(args.clients)]
    clients = Examples(inputs, rng.integers(10, size=10_000), rows)
    settings = TrainingSettings(learning_rate=0.05, batch_size=args.batch)
    print(
        f"torch {torch.__version__}, {args.clients} clients of {args.examples}, batches of {args.batch}; s a round "
        "(times faster than the loop)"
    )
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name in names:
            model = MODELS[name]()
            start = get_arrays(model)
            backends = {
                backend: BatchedTrainer(model, settings, backend=backend)
                for backend in (("sequential", "manual", "vmap") if name in WRITTEN else ("sequential", "vmap"))
            }
            backends |= {f"chunk {n}": BatchedTrainer(model, settings, backend="manual", chunk=n) for n in args.chunks}
            seconds: dict[str, list[float]] = {backend: [] for backend in backends}
            for turn in range(args.rounds + 1):
                for backend, trainer in list(backends.items())[:: 1 if turn % 2 else -1]:
                    generators = [np.random.default_rng([turn, client]) for client in range(args.clients)]
                    begin = time.perf_counter()
                    trainer.train(start, clients, generators)
                    seconds[backend].append(time.perf_counter() - begin)
            sequential = np.array(seconds["sequential"][1:])  # the first turn warms up
            figures = [
                f"{backend} {np.median(own[1:]):.4f} ({np.median(sequential / np.array(own[1:])):.1f}x)"
                for backend, own in seconds.items()
            ]
            sample, size = torch.from_numpy(inputs[:1]), min(args.batch, args.examples)
            together = min(args.clients, default_chunk(model, sample, size, torch.device("cpu")))
            print(f"{threads} thread(s), {name}, {together} together: " + ", ".join(figures), flush=True)


if __name__ == "__main__":
    main()
