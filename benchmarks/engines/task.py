"""What is trained: 500 clients of 120 images of Fashion-MNIST's shape, written to a folder that all workers read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import SmallResNet

from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.clients.training import evaluate
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World, world_of

MODELS = {"mlp": "MLP 784-64-30-10", "cnn5": "CNN 16-32, 5x5", "resnet": "small ResNet"}
"""The models of the comparison, by the name on the command line."""
LEARNING_RATES = {"mlp": 0.05, "cnn5": 0.05, "resnet": 0.1}


def write_task(folder: Path, model: str, data_dir: str | None, **overrides: Any) -> World:
    """Write the tensors, the shares, the first model and the settings.

    Args:
        folder: Where; it exists.
        model: One of `MODELS`.
        data_dir: Holds Fashion-MNIST; None: random images of its shape are made in the folder.
        overrides: Of the scenario, dotted keys with "__" for the dot.

    Returns:
        The world of the scenario, for measuring at the end.
    """
    if data_dir is None:
        data_dir = str(folder / "random")
        _write_random_images(Path(data_dir) / "FashionMNIST" / "raw")
    scenario = load_scenario(
        "fashion-500",
        {
            "selector": "random",
            "evaluation_every": 10**6,
            "data.data_dir": str(Path(data_dir).resolve()),
            "partition.kind": "sampled",
            "model.name": "mlp" if model == "resnet" else model,
            "training.learning_rate": LEARNING_RATES[model],
            "training.batch_size": 10,
            "training.local_epochs": 1,
        }
        | {key.replace("__", "."): value for key, value in overrides.items()},
    )
    world = world_of(scenario)
    if model == "resnet":
        torch.manual_seed(scenario.seed)
        world.model = SmallResNet(world.dataset.input_shape[0], world.dataset.num_classes)
    torch.save(world.model, folder / "model.pt")
    np.save(folder / "inputs.npy", world.dataset.train.inputs)
    np.save(folder / "labels.npy", world.dataset.train.labels)
    np.save(folder / "rows.npy", np.stack([world.train_rows(k) for k in range(scenario.num_clients)]))
    training = scenario.training
    settings = {
        "clients": scenario.num_clients,
        "clients_per_round": scenario.clients_per_round,
        "batch_size": training.batch_size,
        "local_epochs": training.local_epochs,
        "learning_rate": training.learning_rate,
        "own_model": model == "resnet",
        "scenario": scenario.model_dump(mode="json"),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    return world


def measure(world: World, trained: Path) -> tuple[float, float]:
    """Loss and accuracy on the test set of a model that a worker wrote."""
    with np.load(trained) as arrays:
        set_arrays(world.model, [arrays[name] for name in sorted(arrays.files)])
    test = world.dataset.test
    return evaluate(world.model, test.inputs, test.labels)


def _write_random_images(folder: Path) -> None:
    """60,000 and 10,000 random images in the files of Fashion-MNIST; the same each time."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, count in (("train", 60_000), ("t10k", 10_000)):
        images = rng.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = rng.integers(10, size=count, dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + array.tobytes())
