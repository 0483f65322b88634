"""Training of a round's clients on a GPU: together, one by one, and on the CPU; and whole runs on both devices.

    python benchmarks/on_gpu.py [--device cuda] [--threads 8]

Random examples of the shapes of Fashion-MNIST and CIFAR-10, so nothing can be learned. The first training of each line
holds what happens once, such as the choice of cuDNN's algorithms. The number is the faster of the two that follow.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.backends import Backend
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.architectures import build_model

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
ROUNDS = [
    # model, shape, clients, batch, steps, backends
    ("mlp", GREY, 25, 10, 12, ("manual", "vmap")),
    ("mlp", GREY, 1000, 10, 12, ("manual",)),
    ("cnn5", GREY, 25, 10, 12, ("manual", "vmap", "sequential")),
    ("cnn5", GREY, 1000, 10, 12, ("manual",)),
    ("cnn3", COLOUR, 5, 50, 40, ("manual", "vmap", "sequential")),
    ("cnn3", COLOUR, 10, 50, 40, ("manual", "vmap", "sequential")),
    ("vgg11", COLOUR, 8, 50, 10, ("manual", "vmap", "sequential")),
]
RUNS = [
    ("mlp", "bsfl"), ("mlp", "divfl"), ("cnn", "gpfl"), ("cnn", "power-of-choice"), ("cnn5", "cs-ucb"),
    ("cnn", "fedcm-ucb"),
]  # fmt: skip
GPFL_ARMS = {
    "gpfl": {},
    "random": {},
    "power-of-choice": {"selectors.power-of-choice.candidates": 10},
    "fedcor": {"selectors.fedcor.warmup_rounds": 3, "selectors.fedcor.interval": 50},
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=8, help="of the runs on the CPU")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    for model, shape, clients, batch, steps, backends in ROUNDS:
        for backend in backends:
            seconds = training_seconds(model, shape, clients, batch, steps, backend, device)
            print(f"{model}, {clients} clients, {steps} steps of {batch}, {backend}: {seconds:.4f} s", flush=True)
        if shape == GREY and clients == 25:
            seconds = training_seconds(model, shape, clients, batch, steps, "manual", torch.device("cpu"))
            print(f"{model}, {clients} clients, {steps} steps of {batch}, manual, CPU: {seconds:.4f} s", flush=True)
    torch.set_num_threads(args.threads)
    for model, selector in RUNS:
        compare_devices(model, selector, args.device)
    for selector, keys in GPFL_ARMS.items():
        rounds = gpfl_rounds(selector, keys, args.device)
        print(
            f"{selector}, GPFL's setting for CIFAR-10: first round {rounds[0]:.2f} s, then {np.median(rounds[5:]):.3f}"
        )


def training_seconds(
    name: str, shape: tuple[int, ...], clients: int, batch: int, steps: int, backend: Backend, device: torch.device
) -> float:
    """Return the seconds of one training of some clients, each with 500 of 50,000 examples that lie on the device."""
    rng, model = np.random.default_rng(0), build_model(name, shape, 10, seed=1)
    inputs, labels = (torch.as_tensor(part, device=device) for part in examples_of(50_000, shape))
    settings = TrainingSettings(learning_rate=0.01, batch_size=batch, local_steps=steps)
    trainer = BatchedTrainer(model, settings, device=device, backend=backend)
    examples = Examples(inputs, labels, [rng.choice(50_000, 500, replace=False) for _ in range(clients)])
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        trainer.train(get_arrays(model), examples, [np.random.default_rng(k) for k in range(clients)])
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


@lru_cache(maxsize=1)
def examples_of(count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Return random images and their classes."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, *shape), dtype=np.float32), rng.integers(10, size=count)


def compare_devices(model: str, selector: str, device: str) -> None:
    """Print whether a run on the device chooses as on the CPU, repeats itself, and resumes exactly."""
    examples = examples_of(20_000, GREY)
    keys = {
        "model.name": model, "selector": selector, "rounds": 6, "engine": "vectorized", "num_clients": 20,
        "clients_per_round": 5, "data.validation_fraction": 0.1,
    }  # fmt: skip

    def run(place: str, folder: str | None = None, stop: int = 0) -> RunResult:
        return simulate(
            load_scenario("smoke", keys), device=place, data=(examples, examples), quiet=True, checkpoint_dir=folder,
            resume=folder is not None, should_stop=(lambda number, _: number == stop) if stop else None,
        )  # fmt: skip

    here, there, again = run("cpu"), run(device), run(device)
    with tempfile.TemporaryDirectory() as folder:
        run(device, folder, stop=3)
        resumed = run(device, folder)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(here.arrays, there.arrays, strict=True))
    print(
        f"{selector}, {model}: weights differ from the CPU's by up to {apart:.1g}; choices as on the CPU: "
        f"{chosen(here) == chosen(there)}; repeated exactly: {equal(there.arrays, again.arrays)}; resumed exactly: "
        f"{equal(there.arrays, resumed.arrays)}",
        flush=True,
    )


def chosen(result: RunResult) -> list[str]:
    """Return the chosen clients, round by round."""
    return [row.client_id for row in result.history.clients]


def equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:  # type: ignore[type-arg]
    """Return whether two models are equal to the last bit."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def gpfl_rounds(selector: str, keys: dict[str, int], device: str) -> np.ndarray:  # type: ignore[type-arg]
    """Return the seconds of 14 rounds, with evaluation, in GPFL's setting for CIFAR-10: 100 clients, 5 a round."""
    inputs, labels = examples_of(60_000, COLOUR)
    setting = {
        "engine": "vectorized", "selector": selector, "rounds": 14, "model.name": "cnn3",
        "training.learning_rate": 0.01, "training.batch_size": 50, "training.local_steps": 40,
        "training.momentum": 0.0, "training.weight_decay": 3e-4,
    }  # fmt: skip
    ends = [time.perf_counter()]
    simulate(
        load_scenario("gpfl-fashion", setting | keys), device=device,
        data=((inputs[:50_000], labels[:50_000]), (inputs[50_000:], labels[50_000:])), quiet=True,
        on_round=lambda _: ends.append(time.perf_counter()),
    )  # fmt: skip
    return np.diff(ends)


if __name__ == "__main__":
    main()
