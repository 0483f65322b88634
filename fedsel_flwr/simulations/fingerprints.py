"""Fingerprints of what a run is made of: equal in every process and on every machine for the same code and data.

No id, address or path goes into one, so that runs of two machines can be compared.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.references import is_reference, load_reference
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.registry import label_of, selector_class
from fedsel_flwr.simulations.dataset import Dataset, Split
from fedsel_flwr.simulations.given_partitions import SampledPartition
from fedsel_flwr.simulations.ingredients import Own, given_data
from fedsel_flwr.simulations.own_data import OwnData, SeededData
from fedsel_flwr.simulations.scenario import Scenario, in_words
from fedsel_flwr.simulations.sources import LENGTH, fingerprint
from fedsel_flwr.simulations.world import World

Fingerprints = Mapping[str, str]
"""What a run is made of -> its fingerprint."""
NAMES = ("selector", "model", "objective", "scenario", "data", "partition")
"""What there are fingerprints of."""
REFERENCES = ("model.name", "data.dataset")
"""Keys of a scenario that may name a file of the user's by its path."""
OF_SEED, DRAWN = "of seed", "drawn for seed"
"""Stand in the fingerprint of what a function makes for each seed, and of what the scenario draws for each."""


def code_of(scenario: Scenario, selector: Selector | None, own: Own) -> dict[str, str]:
    """The code that makes a run what it is.

    Args:
        scenario: Of the run.
        selector: The caller's, before its first round; None: the scenario's.
        own: What the caller brings.

    Returns:
        ``selector`` with its parameters; ``model`` and ``objective``, if they are the user's.
    """
    if selector is None:
        params: Mapping[str, Any] = scenario.selectors.get(label_of(scenario.selector), {})
        said = {"selector": fingerprint(selector_class(scenario.selector), params)}
    else:
        names = inspect.signature(type(selector)).parameters.keys() - {"seed", "total_rounds"}
        held = {name: getattr(selector, name) for name in names if hasattr(selector, name)}
        said = {"selector": fingerprint(type(selector), held)}
    name = scenario.model.name
    make = load_reference(name, "model") if own.model is None and is_reference(name) else own.model
    if make is not None:
        said["model"] = fingerprint(make)
    if own.objective is not None:
        said["objective"] = fingerprint(own.objective)
    return said


def of_scenario(scenario: Scenario) -> str:
    """The fingerprint of a scenario with its defaults, without selector, seed, engine and folders."""
    said = {key: text for key, text in in_words(scenario).items() if key not in ("selector", "seed", "engine")}
    said |= {key: text.rpartition("/")[2] for key, text in said.items() if key in REFERENCES}
    return fingerprint({key: text for key, text in said.items() if not key.startswith("selectors.")})


def fingerprints(world: World, own: Own, code: Fingerprints) -> dict[str, str]:
    """What a run is made of.

    Args:
        world: Of the run.
        own: What the caller brings.
        code: As :func:`code_of` says.

    Returns:
        ``code``, and ``scenario``, ``data`` and ``partition``; of the user's model its parts count too.
    """
    scenario, given = world.scenario, given_data(world.scenario, own)
    data, partition = of_data(world.dataset, content=given is not None), of_partition(world.partitions)
    fixed = isinstance(given, OwnData) and given.partition is not None and not callable(given.partition)
    if isinstance(given, SeededData):
        data += f" {OF_SEED} {scenario.seed}"
    elif not fixed and (given is None or given.validation is None):
        data += f" {DRAWN} {scenario.seed}"
    if not fixed:
        partition += f" {DRAWN} {scenario.seed}"
    said = {**code, "scenario": of_scenario(scenario), "data": data, "partition": partition}
    if "model" in code:
        parts = sorted({type(part) for part in world.model.modules()}, key=lambda cls: cls.__qualname__)
        said["model"] = fingerprint(code["model"], parts)
    return said


def of_plan(codes: Mapping[str, Fingerprints], world: World, own: Own) -> dict[str, Any]:
    """What a comparison is made of.

    Args:
        codes: Label of each selector -> what :func:`code_of` says of it.
        world: Of the first seed.
        own: What the caller brings.

    Returns:
        ``selectors``: label -> fingerprint; ``seed``, and the others of its first run.
    """
    first = fingerprints(world, own, next(iter(codes.values())))
    selectors = {label: code["selector"] for label, code in codes.items()}
    return {"selectors": selectors, "seed": world.scenario.seed} | {
        key: first[key] for key in NAMES if key in first and key != "selector"
    }


def differing_plans(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What is not the same in two plans' fingerprints, by name; selectors may be added, and other seeds come first.

    Of scenarios each run says by which key they differ.
    """
    before, now = there.get("selectors"), here["selectors"]
    known = before if isinstance(before, Mapping) else {}
    told = [f"selector {label!r}" for label in now if label in known and known[label] != now[label]]
    left_out = ("scenario",) if there.get("seed") == here["seed"] else ("scenario", "data", "partition")
    return told + [key for key in NAMES[1:] if key not in left_out and there.get(key) != here.get(key)]


def differing(there: Fingerprints, here: Fingerprints) -> list[str]:
    """What two runs have that is not the same, by name."""
    return [key for key in NAMES if there.get(key) != here.get(key)]


def check_alike(runs: Sequence[tuple[str, int, Fingerprints, str]]) -> None:
    """Refuse to pool runs that were made of different things.

    Args:
        runs: Label, seed, fingerprints and folder of each.

    Raises:
        ParameterError: Names the first thing and two folders.
    """
    seen: dict[tuple[Any, ...], tuple[str, str]] = {}
    for label, seed, prints, place in runs:
        for key in NAMES if prints else ():
            own = prints.get(key, "none")
            of_one_seed = f" {DRAWN} " in own or f" {OF_SEED} " in own
            what: tuple[Any, ...] = (key, label) if key == "selector" else (key, seed if of_one_seed else None)
            other, where = seen.setdefault(what, (own, place))
            if own != other:
                who = f"selector {label!r}" if key == "selector" else key
                on = f" on seed {seed}" if of_one_seed else ""
                raise ParameterError(
                    f"the runs in {where!r} and {place!r} cannot be compared: {who} is not the same in both{on}. "
                    "Leave one out, or play it again with --resume and --replay"
                )


def shared(by_seed: Mapping[int, Fingerprints]) -> str:
    """What runs on the same seeds share, in words.

    Args:
        by_seed: Seed -> the fingerprints of one of its runs.
    """
    own = any(f" {OF_SEED} " in one.get("data", "") for one in by_seed.values())
    partitions = {one["partition"].partition(" ")[0] if "partition" in one else None for one in by_seed.values()}
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
