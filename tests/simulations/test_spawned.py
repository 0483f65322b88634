"""Data, partitions, models and whole worlds are the same in another process, which shares nothing with this one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.architectures import build_model
from fedsel_flwr.simulations.worlds.data import Dataset, load_dataset
from fedsel_flwr.simulations.worlds.partitions import partition_indices
from fedsel_flwr.simulations.worlds.world import World

UNEQUAL = {"partition.kind": "dirichlet", "partition.alpha": 0.3, "num_clients": 12, "model.name": "cnn"}


def digest(arrays: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def examples(dataset: Dataset) -> list[Any]:
    splits = (dataset.train, dataset.validation, dataset.test)
    return [array for split in splits for array in (split.inputs, split.labels)]


def made(seed: int) -> dict[str, str]:
    """Digests of all that is drawn from a seed."""
    world, labels = World(load_scenario("smoke", {**UNEQUAL, "seed": seed})), np.arange(2000) % 10
    delays = [repr(world.system.draw(k, 3)).encode() for k in range(12)]
    partitions = {
        kind: digest(partition_indices(labels, 30, kind=kind, alpha=0.1, seed=seed))
        for kind in ("iid", "dirichlet", "shards")
    }
    return partitions | {
        "world": digest([*examples(world.dataset), *world.partitions, *world.initial_arrays()]),
        "delays": hashlib.sha256(b"".join(delays)).hexdigest(),
        "split": digest(examples(load_dataset("digits", seed=seed))),
        "model": digest(get_arrays(build_model("cnn", (1, 8, 8), 10, seed))),
    }


@pytest.mark.timeout(150)
def test_another_process_makes_the_same_of_a_seed_and_another_seed_makes_others() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        theirs = pool.submit(made, 2**40).result(timeout=120)
    assert theirs == made(2**40)
    other = made(6)
    assert [name for name in other if other[name] == theirs[name]] == []
