"""Fingerprints of what a run is made of: equal in every process and on every machine for the same code and data.

No id, address or path goes into one, so that runs of two machines can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.simulations.dataset import Dataset, Split
from fedsel_flwr.simulations.given_partitions import SampledPartition
from fedsel_flwr.simulations.ingredients import Own, made_by_seed, of_the_user
from fedsel_flwr.simulations.world import World

Fingerprints = Mapping[str, str]
"""What a run is made of -> its fingerprint."""
OF_SEED = "of seed"
"""Stands in the fingerprint of data that a function makes for each seed."""
LENGTH = 32
"""Characters of a fingerprint."""


def fingerprints(world: World, own: Own) -> dict[str, str]:
    """What a run is made of.

    Args:
        world: Of the run.
        own: What the caller brings.

    Returns:
        ``data`` and ``partition``.
    """
    scenario = world.scenario
    data = of_data(world.dataset, content=of_the_user(scenario, own))
    if made_by_seed(scenario, own):
        data += f" {OF_SEED} {scenario.seed}"
    return {"data": data, "partition": of_partition(world.partitions)}


def shared(by_seed: Mapping[int, Fingerprints]) -> str:
    """What runs on the same seeds share, in words.

    Args:
        by_seed: Seed -> the fingerprints of one of its runs.
    """
    own = any(OF_SEED in one.get("data", "") for one in by_seed.values())
    partitions = {one.get("partition") for one in by_seed.values()}
    if len(by_seed) > 1 and len(partitions) == 1 and None not in partitions:
        return " and data sets, with one partition for all of them" if own else " and one partition for all of them"
    return ", data sets and partitions" if own else " and partitions"


def of_partition(partitions: Sequence[npt.NDArray[np.int64]]) -> str:
    """The fingerprint of who holds which rows.

    >>> of_partition([np.array([0, 2]), np.array([1])]) == of_partition([np.array([0]), np.array([1, 2])])
    False
    """
    found = hashlib.sha256()
    if isinstance(partitions, SampledPartition):  # nothing of it is in memory
        found.update(repr(sorted(vars(partitions).items())).encode())
        return found.hexdigest()[:LENGTH]
    for rows in partitions:
        found.update(f"{len(rows)};".encode())
        found.update(np.ascontiguousarray(rows, dtype="<i8").tobytes())
    return found.hexdigest()[:LENGTH]


@lru_cache(maxsize=2)
def of_data(dataset: Dataset, *, content: bool) -> str:
    """The fingerprint of the examples.

    Args:
        dataset: They are never changed.
        content: Whether the inputs count, as for data of the user's; those known by name are told by their labels.
    """
    found = hashlib.sha256()
    for split in (dataset.train, dataset.validation, dataset.test):
        for array in _arrays(split, content=content):
            found.update(f"{array.dtype.str}{array.shape};".encode())
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:LENGTH]


def _arrays(split: Split, *, content: bool) -> list[npt.NDArray[Any]]:
    return [split.inputs, split.labels] if content else [split.labels]
