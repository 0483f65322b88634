"""Ingredients of a world: examples, partition, model and objective, from the scenario's names or from the user."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError, refusing_faults
from fedsel_flwr.references import is_reference, load_reference
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_tables import PYTHON_PREFIX
from fedsel_flwr.simulations.worlds.architectures import MODELS, REGRESSORS, build_model, torch_seeded
from fedsel_flwr.simulations.worlds.data import Dataset, load_dataset
from fedsel_flwr.simulations.worlds.image_files import find_data_folder, read_writers, sent_or_read
from fedsel_flwr.simulations.worlds.own_data import OwnData, SeededData, as_own_data
from fedsel_flwr.simulations.worlds.partitions import partition_indices

Partitions = Sequence[IntArray]
"""Client -> rows of the training set."""
MakeModel = Callable[..., nn.Module]
WRITERS = "writers"
"""Name of the writers of MNIST among the inputs that a process sends to another one."""
_DATA_KEYS = {"name", "seed", "num_clients", "clients_per_round", "data", "partition"}
"""Scenario keys that determine data and partition, and keys that every scenario must have."""


@dataclass(frozen=True, eq=False)
class OwnParts:
    """Parts of a world that the user brings. They replace the parts that the scenario names.

    Args:
        model: Function that makes a torch module from inputs of shape (n, …) to logits of shape (n, C), or (n, 1) for
            numbers to predict. It receives ``input_shape`` and ``num_classes``, if it has parameters with these names.
            The scenario seeds torch's random state before the call.
        data: The examples, or a function that makes them for each seed.
        objective: Loss and quality, which replace cross-entropy and the fraction correct.
    """

    model: MakeModel | None = None
    data: OwnData | SeededData | None = None
    objective: Objective | None = None

    def __bool__(self) -> bool:
        """Return whether the user brings any part."""
        return any(part is not None for part in (self.model, self.data, self.objective))

    def named_in(self, scenario: Scenario) -> Scenario:
        """Return the scenario with names that mark the parts from Python code."""
        tables: dict[str, Any] = {}
        if self.model is not None:
            # functools.partial has no name, but its function has one.
            made = getattr(self.model, "func", self.model)
            qualname = getattr(made, "__qualname__", type(made).__qualname__)
            name = f"{PYTHON_PREFIX}{getattr(made, '__module__', '')}.{qualname}"
            tables["model"] = scenario.model.model_copy(update={"name": name})
        if self.data is not None:
            tables["data"] = scenario.data.model_copy(update={"dataset": f"{PYTHON_PREFIX}{self.data.name}"})
        return scenario.model_copy(update=tables)


def own_data_of(scenario: Scenario, own: OwnParts) -> OwnData | SeededData | None:
    """Return the user's data, from Python code or by reference; None for a data set of the package.

    Raises:
        ParameterError: The scenario needs data from Python code, which are missing now, or the data cannot be made.
    """
    name = scenario.data.dataset
    if own.data is None and name.startswith(PYTHON_PREFIX):
        raise ParameterError(
            f"data.dataset = {name!r} was passed in Python. Pass it again (data=), or refer to it as "
            "package.module:function."
        )
    return _load_data_reference(name) if own.data is None and is_reference(name) else own.data


def data_of(scenario: Scenario, own: OwnParts) -> tuple[Dataset, Partitions]:
    """Return the examples and their partition, cached for scenarios with the same data and partition.

    Args:
        scenario: The scenario.
        own: The user's parts.

    Returns:
        The data set, and the read-only partition: client -> rows of the training set.

    Raises:
        ParameterError: The data cannot be found, hold no usable examples, or cannot be partitioned as the scenario
            says.
    """
    # The key is JSON of _DATA_KEYS: a scenario is not hashable, and another selector must find the same entry.
    return _load_data(scenario.model_dump_json(include=_DATA_KEYS), own.data)


# One entry is enough, because a comparison runs all its selectors on one seed, then on the next.
@lru_cache(maxsize=1)
def _load_data(text: str, own: OwnData | SeededData | None) -> tuple[Dataset, Partitions]:
    scenario = Scenario.model_validate_json(text)
    given, data = own_data_of(scenario, OwnParts(data=own)), scenario.data
    if given is None:
        dataset = load_dataset(
            data.dataset, data_dir=data.data_dir or None, seed=scenario.seed, synthetic=data.synthetic(),
            validation_fraction=data.validation_fraction, validation_from=data.validation_from,
            test_fraction=data.test_fraction,
        ).read_only()  # fmt: skip
        return dataset, _draw_partitions(scenario, dataset)
    if data.validation_from != "train":
        raise ParameterError(
            f"data.validation_from = {data.validation_from!r} is for the data sets of this package, but {given.name!r} "
            "is your own data. Pass the server's examples as OwnData(validation=...)."
        )
    given = given.of(scenario.seed)
    dataset = given.dataset(scenario.seed, data.validation_fraction).read_only()
    if given.partition is None:
        return dataset, _draw_partitions(scenario, dataset)
    rows = given.rows(len(dataset.train))
    if len(rows) != scenario.num_clients:
        raise ParameterError(
            f"the partition of data {given.name!r} has {len(rows)} clients, but num_clients = {scenario.num_clients}. "
            "Make the two numbers equal."
        )
    return dataset, rows


def model_of(scenario: Scenario, dataset: Dataset, own: OwnParts) -> nn.Module:
    """Build the model.

    Args:
        scenario: The scenario.
        dataset: The data set that the model learns.
        own: The user's parts.

    Returns:
        The model, with parameters drawn from the scenario's seed.

    Raises:
        ParameterError: The model cannot be built, or does not fit the data.
    """
    name, make = scenario.model.name, own.model
    if make is None and name.startswith(PYTHON_PREFIX):
        raise ParameterError(
            f"model.name = {name!r} was passed in Python. Pass it again (model=), or refer to it as "
            "package.module:function."
        )
    if make is None and is_reference(name):
        make = load_reference(name, "model")
    if make is None:
        _check_named(scenario, dataset)
        return build_model(name, dataset.input_shape, dataset.num_classes, scenario.seed)
    if isinstance(make, nn.Module) or not callable(make):
        raise ParameterError(
            "model must be a function or class that makes a torch module, got "
            f"{type(make).__name__}{' itself' if isinstance(make, nn.Module) else ''}. Pass a function or class, "
            "because each seed starts from new parameters."
        )
    shapes = {"input_shape": tuple(dataset.input_shape), "num_classes": dataset.num_classes}
    given = {key: value for key, value in shapes.items() if key in _parameters(make)}
    failure = f"the model, which gets only {' and '.join(shapes)}, cannot be created"
    with torch_seeded(scenario.seed), refusing_faults(failure):
        model = make(**given)
    return _check_own_model(model, dataset, own)


def _parameters(make: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters; none for a function or class written in C without a signature."""
    try:
        return list(inspect.signature(make).parameters)
    except ValueError:
        return []


def _check_own_model(model: Any, dataset: Dataset, own: OwnParts) -> nn.Module:
    """Return the user's model; refuse an object that is not a module, or inputs or outputs that do not fit the data."""
    if not isinstance(model, nn.Module):
        raise ParameterError(f"model must make a torch module, got {type(model).__name__}")
    if not any(one.requires_grad for one in model.parameters()):
        raise ParameterError(f"model must have parameters to train, but {type(model).__name__} has none")
    state = model.state_dict(keep_vars=True)
    if imaginary := [name for name, one in state.items() if torch.is_tensor(one) and one.dtype.is_complex]:
        raise ParameterError(
            f"the model must have real parameters, got {state[imaginary[0]].dtype} at {imaginary[0]!r}. Hold the real "
            "and the imaginary parts as two parameters."
        )
    # Two examples, because one example would hide a model that drops the batch axis. A restored random state keeps the
    # check from changing later draws.
    expected = (2, dataset.num_classes)
    examples = torch.tensor(dataset.train.inputs[:1]).repeat_interleave(2, dim=0)
    with refusing_faults("the model cannot be copied, but each client trains a copy"):
        # A forward pass may change what a model holds. A lazy model needs one to have its parameters.
        tried = model if any(map(is_lazy, state.values())) else copy.deepcopy(model)
    was = model.training
    with (
        refusing_faults(f"the model cannot read examples of shape {tuple(dataset.input_shape)}"),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        outputs = tried.eval()(examples)
    model.train(was)
    # The user's objective may read outputs of any shape.
    came = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if own.objective is None and came != expected:
        what = f"{dataset.num_classes} classes" if dataset.task == "classification" else "one number each"
        raise ParameterError(
            f"the model must return outputs of shape {expected} for two examples and {what}, got {came}"
        )
    return model


def _check_named(scenario: Scenario, dataset: Dataset) -> None:
    """Refuse a classifier for a regression, and the reverse."""
    if (scenario.model.name in REGRESSORS) != (dataset.task == "regression"):
        fitting = REGRESSORS if dataset.task == "regression" else tuple(n for n in MODELS if n not in REGRESSORS)
        what = "numbers to predict" if dataset.task == "regression" else "classes"
        raise ParameterError(
            f"model.name = {scenario.model.name!r} does not fit data.dataset = {scenario.data.dataset!r}, which has "
            f"{what}. Use {' or '.join(fitting)}."
        )


@lru_cache(maxsize=2)
def _load_data_reference(name: str) -> OwnData | SeededData:
    """Import data by the reference ``package.module:name`` to the data, or to a function that makes them.

    The first parameter of the function may be ``seed``.
    """

    def imported() -> OwnData | SeededData:
        found = load_reference(name, "data set")
        if not callable(found):
            return as_own_data(found)
        if _parameters(found)[:1] == ["seed"]:
            return SeededData(found, name)
        with refusing_faults(f"data set {name!r} cannot be created"):
            return as_own_data(found())

    return sent_or_read(name, imported)


def _draw_partitions(scenario: Scenario, dataset: Dataset) -> Partitions:
    writers = _writers_of(scenario, dataset) if scenario.partition.kind == "writers" else None
    labels, kind = _partition_labels(scenario, dataset), scenario.partition.model_dump()
    partitions = partition_indices(labels, scenario.num_clients, **kind, writers=writers, seed=scenario.seed)
    # A sampled partition is not a tuple, because it draws new arrays at each access.
    for rows in partitions if isinstance(partitions, tuple) else ():
        rows.flags.writeable = False
    return partitions


def _writers_of(scenario: Scenario, dataset: Dataset) -> IntArray:
    """Return the writer of each training example; refuse data sets whose writers are unknown."""
    if dataset.name != "mnist" or dataset.file_rows is None:
        raise ParameterError(
            f"partition.kind = 'writers' needs data.dataset = 'mnist', got {dataset.name!r}, whose writers are "
            "unknown. Choose 'mnist', or another kind of partition."
        )
    digits, writers = sent_or_read(WRITERS, lambda: find_writers(scenario))
    rows = dataset.file_rows
    if rows.max() >= len(digits) or (digits[rows] != dataset.train.labels).any():
        raise ParameterError(
            "the digits in QMNIST/raw in the data folder are not the labels in MNIST/raw, so the writers of the images "
            "are unknown. Replace the files of both data sets by the originals."
        )
    return writers[rows]


def find_writers(scenario: Scenario) -> tuple[IntArray, IntArray]:
    """Read the digit and the writer of each training image of MNIST from the data folder of a scenario."""
    return read_writers(find_data_folder(scenario.data.data_dir or None))


def _partition_labels(scenario: Scenario, dataset: Dataset) -> IntArray:
    """Return the class of each training example; one class for all examples of a regression."""
    if dataset.task == "classification":
        return dataset.train.labels.astype(np.int64, copy=False)
    if scenario.partition.kind not in (usable := ("iid", "sizes", "sampled")):
        raise ParameterError(
            f"partition.kind = {scenario.partition.kind!r} partitions by class, but data.dataset = "
            f"{scenario.data.dataset!r} has numbers to predict. Use {', '.join(usable)}."
        )
    return np.zeros(len(dataset.train), dtype=np.int64)
