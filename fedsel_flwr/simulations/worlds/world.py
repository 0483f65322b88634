"""What a scenario's clients and server work on: examples, partitions, the model, the system."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.clients.answering import Examples
from fedsel_flwr.clients.batched.evaluation import stack_predict
from fedsel_flwr.clients.device import System
from fedsel_flwr.clients.dropout import ClientDropout
from fedsel_flwr.clients.objectives import Objective, get_arrays, set_arrays
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.clients.training import evaluate, torch_predict
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.measuring import Validation
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.selectors.columns import ON_VALIDATION
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.architectures import count_multiplications
from fedsel_flwr.simulations.worlds.data import Split
from fedsel_flwr.simulations.worlds.ingredients import Own, data_of, model_of, objective_of
from fedsel_flwr.simulations.worlds.partitions import partition_sizes, rows_of


class World:
    """The examples, the model and its objective, and the delays of a scenario; the same in every process.

    Args:
        scenario: The scenario.
        own: What the caller brings in place of what the scenario names.

    Attributes:
        sizes: How many training examples each client holds, shape (num_clients,).

    Raises:
        ParameterError: The data set cannot be found, or cannot be spread over the clients as the scenario says.
    """

    def __init__(self, scenario: Scenario, own: Own = Own()) -> None:  # noqa: B008 (frozen)
        self.scenario = scenario
        self.dataset, self.partitions = data_of(scenario, own)
        _check_augmentation(scenario, self.dataset.input_shape)
        self.model: nn.Module = model_of(scenario, self.dataset, own)
        self.objective: Objective = objective_of(self.dataset, own)
        if scenario.per_class_accuracy and np.asarray(self.dataset.train.labels).dtype.kind not in "iu":
            raise ParameterError("per_class_accuracy needs classes, but the data's labels are numbers: leave it out")
        self._initial = get_arrays(self.model)
        sizes = partition_sizes(self.partitions)
        self._test_sizes = self._num_test(sizes)
        self.sizes: npt.NDArray[np.int64] = sizes - self._test_sizes
        self.dropout = ClientDropout(
            seed=scenario.seed,
            failure_probability=scenario.clients.failure_probability,
            crash_probability=scenario.clients.crash_probability,
        )
        _check_batches(scenario, self.model, self.dataset.train, self.sizes)
        counted = 0
        if scenario.clients.reference_multiplications:
            if scenario.clients.latency_mode != "model":
                raise ParameterError(
                    "clients.reference_multiplications is of modelled times, but clients.latency_mode = 'measured' "
                    "times the training itself: leave one of them out"
                )
            counted = count_multiplications(self.model, self.dataset.train.inputs[0])
        self.system: System = scenario.system_model(self.sizes, sum(array.nbytes for array in self._initial), counted)

    def initial_arrays(self) -> Arrays:
        """The first global model."""
        return [array.copy() for array in self._initial]

    def num_examples(self) -> dict[int, int]:
        """How many training examples each client holds."""
        return dict(enumerate(self.sizes.tolist()))

    def energy_score(self, partition_id: int) -> float | None:
        """The client's energy score, drawn once; None where the scenario has none."""
        return self.energy_scores([partition_id])[0]

    def energy_scores(self, partition_ids: Sequence[int]) -> list[float | None]:
        """The energy score of several clients."""
        low = self.scenario.clients.energy_score_low
        if low >= 1.0:
            return [None] * len(partition_ids)
        return [float(own.uniform(low, 1.0)) for own in streams(self.scenario.seed, "energy", partition_ids)]

    def train_rows(self, partition_id: int) -> npt.NDArray[np.int64]:
        """The rows of the training set on which a client trains."""
        return self.train_rows_of([partition_id])[0]

    def train_rows_of(self, partition_ids: Sequence[int]) -> list[npt.NDArray[np.int64]]:
        """The rows of the training set on which each of several clients trains."""
        return [train for train, _ in self.split_of(partition_ids)]

    def split_of(self, partition_ids: Sequence[int]) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """The rows on which each client trains, and on which it tests: without rows for that, on what it trains on."""
        counts = self._test_sizes[list(partition_ids)].tolist()
        drawn = zip(rows_of(self.partitions, partition_ids), counts, strict=True)
        return [(rows[count:], rows[:count] if count else rows) for rows, count in drawn]

    def examples(self, partition_id: int) -> tuple[Examples, Examples]:
        """A client's training and test examples."""
        train, (rows, test_rows) = self.dataset.train, self.split_of([partition_id])[0]
        return (train.inputs[rows], train.labels[rows]), (train.inputs[test_rows], train.labels[test_rows])

    def _num_test(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many of so many examples are a client's own test set."""
        fraction = self.scenario.data.local_test_fraction
        return np.minimum((sizes * fraction).astype(np.int64), sizes - 1)

    def client(self, partition_id: int) -> TorchClient:
        """The client with this partition; one at a time per process, as they share the scratch model."""
        if not 0 <= partition_id < self.scenario.num_clients:
            raise ParameterError(
                f"partition-id must be below num_clients = {self.scenario.num_clients}, got {partition_id}: start "
                f"{self.scenario.num_clients} SuperNodes, or override num_clients"
            )
        (inputs, labels), (test_inputs, test_labels) = self.examples(partition_id)
        return TorchClient(
            partition_id=partition_id,
            model=self.model,
            inputs=inputs,
            labels=labels,
            test_inputs=test_inputs,
            test_labels=test_labels,
            objective=self.objective,
            energy_score=self.energy_score(partition_id),
            settings=self.scenario.training.settings(),
            system=self.system,
            latency_mode=self.scenario.clients.latency_mode,
            delay=self.scenario.clients.delay,
            dropout=self.dropout,
        )

    def under(self, scenario: Scenario) -> World:
        """This world under another scenario, which differs in nothing that the world is made of."""
        world = copy.copy(self)
        world.scenario = scenario
        return world

    def for_clients(self) -> World:
        """This world with the same arrays, but without the examples that no client sees."""
        train = self.dataset.train
        nothing = Split(train.inputs[:0], train.labels[:0])
        world = copy.copy(self)
        world.dataset = replace(self.dataset, validation=nothing, test=nothing)
        return world

    def validation(self) -> Validation | None:
        """The server's validation set, for filters and selectors that measure models.

        None of a regression, as the server measures logits and the fraction correct, and None if the clients hold every
        example. :meth:`check_measured` refuses selectors that need one.
        """
        split = self.dataset.validation
        if self.dataset.task == "regression" or not len(split):
            return None
        labels = split.labels.astype(np.int64, copy=False)
        return Validation(torch_predict(self.model), split.inputs, labels, stack_predict(self.model))

    def check_measured(self, needs: Collection[str], name: str = "the selector") -> None:
        """Refuse a selector or a filter that measures classifiers on the server if it has nothing to measure them on.

        Args:
            needs: The columns that the selector reads.
            name: What the selector is called in messages.

        Raises:
            ParameterError: The data are numbers or the server has no examples, and the selector needs a column of the
                server's validation set, or the scenario has FedCA's filter.
        """
        columns = sorted((ON_VALIDATION | {"kept"}) & set(needs))
        if not columns and not self.scenario.aggregation.filter:
            return
        what = f"{name} ({', '.join(columns)})" if columns else "FedCA's filter (aggregation.filter)"
        if self.dataset.task == "regression":
            raise ParameterError(
                f"{what} measures classifiers on the server's validation set, but data.dataset = "
                f"{self.scenario.data.dataset!r} has numbers to predict: choose another one, or a data set with classes"
            )
        if not len(self.dataset.validation):
            raise ParameterError(
                f"{what} needs a validation set on the server, but the clients' partition holds every row of train: "
                "give OwnData(validation=...), leave some rows to nobody, or choose another selector or no filter"
            )

    def test(self, arrays: Arrays) -> tuple[float, float]:
        """Loss and accuracy (of a regression: R²) of a model on the test set, which no selector ever sees."""
        set_arrays(self.model, list(arrays))
        return evaluate(self.model, self.dataset.test.inputs, self.dataset.test.labels, objective=self.objective)


def _check_augmentation(scenario: Scenario, shape: tuple[int, ...]) -> None:
    """Refuse to crop and flip what are no images."""
    if scenario.training.augmentation != "none" and len(shape) != 3:
        raise ParameterError(
            f"training.augmentation = {scenario.training.augmentation!r} is for images, but data.dataset = "
            f"{scenario.data.dataset!r} has examples of shape {shape}: set training.augmentation = 'none'"
        )


def _check_batches(scenario: Scenario, model: nn.Module, train: Split, sizes: npt.NDArray[np.int64]) -> None:
    """Refuse a client whose last batch is one example, if the model's batch normalization cannot take that."""
    mixing = {name: one for name, one in model.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)}
    settings = scenario.training.settings()
    per_pass = -(-sizes // settings.batch_size)
    reached = per_pass <= settings.local_steps if settings.local_steps else np.ones(len(sizes), dtype=np.bool_)
    alone = np.flatnonzero((sizes - (per_pass - 1) * settings.batch_size == 1) & reached)
    if not mixing or not len(alone):
        return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(model).train()(torch.tensor(train.inputs[:1]))
    except ValueError as error:  # convolutions normalize over an image's pixels, of which one example has several
        (name, one), client = next(iter(mixing.items())), int(alone[0])
        raise ParameterError(
            f"client {client} has {sizes[client]} training examples, so that with training.batch_size = "
            f"{settings.batch_size} a batch holds 1 example, which {type(one).__name__} at {name!r} cannot normalize: "
            "choose another training.batch_size, or a model with GroupNorm or LayerNorm"
        ) from error


class Kept:
    """The world that a process works in: built at most once, and kept until another scenario comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[str, World] | None = None

    @property
    def held(self) -> tuple[str, World] | None:
        """The scenario, as JSON, and its world; None before the first."""
        return self._held

    def keep(self, text: str, world: World) -> None:
        """Keep a world that another process has built."""
        self._held = (text, world)

    def of(self, text: str) -> World:
        """The world of a scenario, built if it is not the one that is kept."""
        with self._lock:
            if (held := self._held) is None or held[0] != text:
                held = self._held = (text, World(Scenario.model_validate_json(text)))
            return held[1]


KEPT = Kept()


def world_of(scenario: Scenario, own: Own = Own()) -> World:  # noqa: B008 (frozen)
    """The world of ``scenario``, built once per process and kept until another scenario comes.

    With something of the caller's own it is built anew, and kept for those who ask for it by the scenario alone.
    """
    text = scenario.model_dump_json()
    if own:
        KEPT.keep(text, World(scenario, own))
    return KEPT.of(text)
