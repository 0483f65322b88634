"""What a world is made of: examples, their partition, a model. A scenario names them, or a caller brings his own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.clients.objectives import OBJECTIVES, Objective
from fedsel_flwr.errors import FedSelError, ParameterError, described
from fedsel_flwr.references import is_reference, load_reference
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_tables import PYTHON_PREFIX
from fedsel_flwr.simulations.worlds.architectures import MODELS, REGRESSORS, build_model, seeded
from fedsel_flwr.simulations.worlds.data import Dataset, cached_dataset
from fedsel_flwr.simulations.worlds.own_data import OwnData, SeededData, as_own_data
from fedsel_flwr.simulations.worlds.partitions import partition_indices

Partitions = Sequence[npt.NDArray[np.int64]]
MakeModel = Callable[..., nn.Module]


@dataclass(frozen=True, eq=False)
class Own:
    """What a caller brings in place of what the scenario names.

    Args:
        model: Makes a torch module from inputs of shape (n, …) to logits of shape (n, C), for numbers to predict of
            shape (n, 1); called with ``input_shape`` and ``num_classes``, as far as it takes them, and with torch's
            random state seeded by the scenario.
        data: The examples, or what makes them for each seed.
        objective: Loss and quality, in place of cross-entropy and the fraction correct.
    """

    model: MakeModel | None = None
    data: OwnData | SeededData | None = None
    objective: Objective | None = None

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return any(part is not None for part in (self.model, self.data, self.objective))

    def named_in(self, scenario: Scenario) -> Scenario:
        """The scenario, which says that something was given in Python."""
        tables: dict[str, Any] = {}
        if self.model is not None:
            made = getattr(self.model, "func", self.model)
            qualname = getattr(made, "__qualname__", type(made).__qualname__)
            name = f"{PYTHON_PREFIX}{getattr(made, '__module__', '')}.{qualname}"
            tables["model"] = scenario.model.model_copy(update={"name": name})
        if self.data is not None:
            tables["data"] = scenario.data.model_copy(update={"dataset": f"{PYTHON_PREFIX}{self.data.name}"})
        return scenario.model_copy(update=tables)


def given_data(scenario: Scenario, own: Own) -> OwnData | SeededData | None:
    """The data of the user, brought or named by reference; None for those that the scenario knows by name.

    Raises:
        ParameterError: They were given in Python before and are lacking now, or cannot be made.
    """
    name = scenario.data.dataset
    if own.data is None and name.startswith(PYTHON_PREFIX):
        raise ParameterError(
            f"data.dataset = {name!r} was given in Python: give it again (data=), or name it package.module:function"
        )
    return _referred(name) if own.data is None and is_reference(name) else own.data


def data_of(scenario: Scenario, own: Own) -> tuple[Dataset, Partitions]:
    """The examples and who holds which; read and drawn once for scenarios that differ in nothing that they depend on.

    Args:
        scenario: The scenario.
        own: What the caller brings.

    Returns:
        The data set; client -> rows of its training set, which nobody may write to.

    Raises:
        ParameterError: The data cannot be found, are no examples, or cannot be spread as the scenario says.
    """
    given = given_data(scenario, own)
    if given is None:
        return dataset_of(scenario), _partitions(scenario.model_dump_json(include=_DECIDING))
    given = _of_seed(given, scenario.seed)
    dataset = _read(given, scenario.seed, scenario.data.validation_fraction)
    if given.partition is None:
        return dataset, _drawn(scenario, dataset)
    rows = given.rows(len(dataset.train))
    if len(rows) != scenario.num_clients:
        raise ParameterError(
            f"the partition of data {given.name!r} has {len(rows)} clients, but num_clients = {scenario.num_clients}: "
            "make them equal"
        )
    return dataset, rows


def dataset_of(scenario: Scenario) -> Dataset:
    """The examples that a scenario knows by name, loaded once per process."""
    data = scenario.data
    return cached_dataset(
        data.dataset,
        data_dir=data.data_dir or None,
        seed=scenario.seed,
        validation_fraction=data.validation_fraction,
        test_fraction=data.test_fraction,
        synthetic=data.synthetic(),
    )


def objective_of(dataset: Dataset, own: Own) -> Objective:
    """Loss and quality: the caller's, or those of the data's task."""
    return own.objective or OBJECTIVES[dataset.task]


def model_of(scenario: Scenario, dataset: Dataset, own: Own) -> nn.Module:
    """Make the model.

    Args:
        scenario: The scenario.
        dataset: What it is to learn.
        own: What the caller brings.

    Returns:
        The model, with parameters drawn from the scenario's seed.

    Raises:
        ParameterError: It cannot be made, or does not fit the data; says what was expected and what came.
    """
    name = scenario.model.name
    make = own.model
    if make is None and name.startswith(PYTHON_PREFIX):
        raise ParameterError(
            f"model.name = {name!r} was given in Python: give it again (model=), or name it package.module:function"
        )
    if make is None and is_reference(name):
        make = load_reference(name, "model")
    if make is None:
        _check_named(scenario, dataset)
        return build_model(name, dataset.input_shape, dataset.num_classes, scenario.seed)
    if isinstance(make, nn.Module) or not callable(make):
        raise ParameterError(
            "model must be a function or class that makes a torch module, as each seed starts from its own parameters; "
            f"got {type(make).__name__}{' itself' if isinstance(make, nn.Module) else ''}"
        )
    shapes = {"input_shape": tuple(dataset.input_shape), "num_classes": dataset.num_classes}
    with seeded(scenario.seed):
        model = _made(make, shapes)
    return _check_made(model, dataset, own)


def _made(make: Callable[..., Any], shapes: Mapping[str, Any]) -> Any:
    """What the caller's function or class makes, given those of ``shapes`` that it takes."""
    try:
        accepted = inspect.signature(make).parameters
    except ValueError:  # some classes written in C have no signature
        accepted = MappingProxyType({})
    lacking = [
        key
        for key, one in accepted.items()
        if key not in shapes and one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if lacking:
        raise ParameterError(
            f"model must need no arguments but {' and '.join(shapes)}, got one that needs {', '.join(lacking)}: give "
            "functools.partial of it"
        )
    try:
        return make(**{key: value for key, value in shapes.items() if key in accepted})
    except FedSelError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise ParameterError(f"the model cannot be made: {described(error)}") from error


def _check_made(model: Any, dataset: Dataset, own: Own) -> nn.Module:
    """Return the model, or refuse what is no module, or does not read and say what the data ask for."""
    if not isinstance(model, nn.Module):
        raise ParameterError(f"model must make a torch module, got {type(model).__name__}")
    if not any(one.requires_grad for one in model.parameters()):
        raise ParameterError(f"model must have parameters to train, but {type(model).__name__} has none")
    expected = (2, dataset.num_classes)
    examples = torch.tensor(dataset.train.inputs[:1]).repeat_interleave(2, dim=0)
    was = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = model.eval()(examples)
    except Exception as error:  # whatever the user's own code raises
        raise ParameterError(
            f"the model cannot read examples of shape {tuple(dataset.input_shape)}: {described(error)}"
        ) from error
    model.train(was)
    if own.objective is None and (not isinstance(outputs, torch.Tensor) or tuple(outputs.shape) != expected):
        came = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        what = f"{dataset.num_classes} classes" if dataset.task == "classification" else "a number each"
        raise ParameterError(f"two examples must give outputs of shape {expected}, for {what}; the model gave {came}")
    return model


def _check_named(scenario: Scenario, dataset: Dataset) -> None:
    """Refuse a model that does not predict what the data set holds."""
    if (scenario.model.name in REGRESSORS) != (dataset.task == "regression"):
        fitting = REGRESSORS if dataset.task == "regression" else tuple(n for n in MODELS if n not in REGRESSORS)
        what = "numbers to predict" if dataset.task == "regression" else "classes"
        raise ParameterError(
            f"model.name = {scenario.model.name!r} does not fit data.dataset = {scenario.data.dataset!r}, which has "
            f"{what}: use {' or '.join(fitting)}"
        )


def as_data(given: Any) -> OwnData | SeededData:
    """Read what a caller gives as data: examples, or a function of the seed that returns them."""
    if isinstance(given, SeededData):
        return given
    return SeededData.by(given) if callable(given) and not isinstance(given, OwnData) else as_own_data(given)


@lru_cache(maxsize=2)
def _referred(name: str) -> OwnData | SeededData:
    found = load_reference(name, "data set")
    if not callable(found):
        return as_own_data(found)
    if _takes_seed(found):
        return SeededData(found, name)
    try:
        return as_own_data(found())
    except FedSelError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise ParameterError(f"data set {name!r} cannot be made: {described(error)}") from error


def _takes_seed(make: Callable[..., Any]) -> bool:
    """Whether the first parameter of a function is the seed."""
    try:
        return next(iter(inspect.signature(make).parameters), None) == "seed"
    except ValueError:  # some functions written in C have no signature
        return False


@lru_cache(maxsize=2)
def _of_seed(given: OwnData | SeededData, seed: int) -> OwnData:
    """The data of a seed, made once for the selectors that share it."""
    return given.of(seed)


@lru_cache(maxsize=2)
def _read(given: OwnData, seed: int, validation_fraction: float) -> Dataset:
    dataset = given.dataset(seed, validation_fraction)
    for split in (dataset.train, dataset.validation, dataset.test):
        split.inputs.flags.writeable = split.labels.flags.writeable = False
    return dataset


_DECIDING = {"name", "seed", "num_clients", "clients_per_round", "data", "partition"}
"""Keys of a scenario that a partition depends on, and those without which there is no scenario."""


@lru_cache(maxsize=1)
def _partitions(text: str) -> Partitions:
    scenario = Scenario.model_validate_json(text)
    return _drawn(scenario, dataset_of(scenario))


def _drawn(scenario: Scenario, dataset: Dataset) -> Partitions:
    partitions = partition_indices(
        _classes(scenario, dataset), scenario.num_clients, **scenario.partition.model_dump(), seed=scenario.seed
    )
    if isinstance(partitions, tuple):
        for rows in partitions:
            rows.flags.writeable = False
    return partitions


def _classes(scenario: Scenario, dataset: Dataset) -> npt.NDArray[np.int64]:
    """The class of each training example; one class for all examples of a regression."""
    if dataset.task == "classification":
        return dataset.train.labels.astype(np.int64, copy=False)
    if scenario.partition.kind not in (usable := ("iid", "sizes", "sampled")):
        raise ParameterError(
            f"partition.kind = {scenario.partition.kind!r} spreads classes, but data.dataset = "
            f"{scenario.data.dataset!r} has numbers to predict: use {', '.join(usable)}"
        )
    return np.zeros(len(dataset.train), dtype=np.int64)
