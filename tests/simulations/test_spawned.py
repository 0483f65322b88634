"""Data, partitions, models and whole worlds are the same in another process; one process, as it takes long to start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.architectures import build_model
from fedsel_flwr.simulations.worlds.data import Dataset, load_dataset
from fedsel_flwr.simulations.worlds.partitions import partition_indices
from fedsel_flwr.simulations.worlds.world import World

pytestmark = pytest.mark.timeout(150)
LABELS = np.arange(2000) % 10
HANDED_OUT = ("iid", "dirichlet", "shards")
UNEQUAL = load_scenario(
    "smoke",
    {"partition.kind": "dirichlet", "partition.alpha": 0.3, "num_clients": 12, "model.name": "cnn", "seed": 5},
)


def fingerprint(scenario: Scenario) -> tuple[str, list[int]]:
    """A digest of the examples, partitions, first model and delays of a scenario, and the sizes."""
    world = World(scenario)
    digest = hashlib.sha256()
    for split in (world.dataset.train, world.dataset.validation, world.dataset.test):
        digest.update(split.inputs.tobytes() + split.labels.tobytes())
    for array in (*world.partitions, *world.initial_arrays()):
        digest.update(array.tobytes())
    digest.update(repr([world.system.draw(k, 3) for k in range(scenario.num_clients)]).encode())
    return digest.hexdigest(), list(world.num_examples().values())


@pytest.fixture(scope="module")
def spawned() -> Iterator[ProcessPoolExecutor]:
    """Another process, which shares nothing with this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


def test_it_builds_the_same_world(spawned: ProcessPoolExecutor) -> None:
    theirs = spawned.submit(fingerprint, UNEQUAL).result(timeout=120)
    assert theirs == fingerprint(UNEQUAL)
    assert theirs != fingerprint(UNEQUAL.model_copy(update={"seed": 6}))


def test_it_draws_the_same_partitions(spawned: ProcessPoolExecutor) -> None:
    asked = [spawned.submit(partition_indices, LABELS, 30, kind=kind, alpha=0.1, seed=2**40) for kind in HANDED_OUT]
    for kind, future in zip(HANDED_OUT, asked, strict=True):
        ours = partition_indices(LABELS, 30, kind=kind, alpha=0.1, seed=2**40)
        for part, same in zip(future.result(timeout=120), ours, strict=True):
            np.testing.assert_array_equal(part, same)


def test_it_draws_the_same_split(spawned: ProcessPoolExecutor) -> None:
    theirs: Dataset = spawned.submit(load_dataset, "digits", seed=2**40).result(timeout=120)
    ours = load_dataset("digits", seed=2**40)
    np.testing.assert_array_equal(theirs.train.inputs, ours.train.inputs)
    np.testing.assert_array_equal(theirs.validation.labels, ours.validation.labels)


def test_it_builds_the_same_model(spawned: ProcessPoolExecutor) -> None:
    model = spawned.submit(build_model, "cnn", (1, 8, 8), 10, 2**40).result(timeout=120)
    for ours, theirs in zip(get_arrays(build_model("cnn", (1, 8, 8), 10, 2**40)), get_arrays(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
