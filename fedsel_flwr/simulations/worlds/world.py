"""World of a scenario: examples, partition, model, objective and system model, the same in every process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.answering import Examples, Shares
from fedsel_flwr.clients.batched.backends import RunSize, convolves, step_operations
from fedsel_flwr.clients.batched.evaluation import stack_predict
from fedsel_flwr.clients.device import ClientDropout, System
from fedsel_flwr.clients.objectives import OBJECTIVES, Objective, fresh_copy, get_arrays
from fedsel_flwr.clients.streams import first_uniforms
from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.clients.training import evaluate, read_only_tensor, torch_predict
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.models import Arrays, Validation
from fedsel_flwr.selectors.columns import ON_VALIDATION
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.architectures import count_multiplications
from fedsel_flwr.simulations.worlds.availability import devices_of
from fedsel_flwr.simulations.worlds.data import Split
from fedsel_flwr.simulations.worlds.ingredients import OwnParts, data_of, model_of
from fedsel_flwr.simulations.worlds.partitions import partition_sizes, rows_of


class World:
    """World of a scenario: the data, model and system model of its clients and server.

    Args:
        scenario: The scenario.
        own: The user's parts, which replace those that the scenario names.

    Attributes:
        sizes: Number of training examples of each client, shape (num_clients,).

    Raises:
        ParameterError: The data set cannot be found, or cannot be partitioned as the scenario says.
    """

    # The test set on another device than the CPU.
    _test_set: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, scenario: Scenario, own: OwnParts = OwnParts()) -> None:  # noqa: B008 (frozen)
        self.scenario = scenario
        self.dataset, self.partitions = data_of(scenario, own)
        _check_augmentation(scenario, self.dataset.input_shape)
        self.model: nn.Module = model_of(scenario, self.dataset, own)
        self.objective: Objective = own.objective or OBJECTIVES[self.dataset.task]
        if scenario.per_class_accuracy and np.asarray(self.dataset.train.labels).dtype.kind not in "iu":
            raise ParameterError("per_class_accuracy needs classes, but the data's labels are numbers. Leave it out.")
        self._initial = get_arrays(self.model)
        sizes = partition_sizes(self.partitions)
        # At least one example of each client stays for training.
        self._test_sizes = np.minimum((sizes * scenario.data.local_test_fraction).astype(np.int64), sizes - 1)
        self.sizes: IntArray = sizes - self._test_sizes
        clients = scenario.clients
        self.dropout = ClientDropout(
            seed=scenario.seed, failure_probability=clients.failure_probability,
            crash_probability=clients.crash_probability,
        )  # fmt: skip
        _check_batches(scenario, self.model, self.dataset.train, self.sizes)
        counted = 0
        if clients.reference_multiplications:
            if clients.latency_mode != "model":
                raise ParameterError(
                    "clients.reference_multiplications is for modelled times, but clients.latency_mode = 'measured' "
                    "times the training itself. Leave one of them out."
                )
            counted = count_multiplications(self.model, self.dataset.train.inputs[0])
        nbytes = sum(array.nbytes for array in self._initial)
        self.system: System = scenario.system_model(self.sizes, nbytes, counted, devices_of(scenario))

    def initial_arrays(self) -> Arrays:
        """Return a copy of the initial global model."""
        return [array.copy() for array in self._initial]

    def num_examples(self) -> dict[int, int]:
        """Return the number of training examples of each client."""
        return dict(enumerate(self.sizes.tolist()))

    def energy_scores(self, partition_ids: Sequence[int]) -> list[float | None]:
        """Return the energy scores of clients, constant over the run; None if the scenario has no energy scores."""
        low = self.scenario.clients.energy_score_low
        if low >= 1.0:
            return [None] * len(partition_ids)
        # The same numbers as ``uniform(low, 1.0)`` of each client's stream.
        scores = low + (1.0 - low) * first_uniforms(self.scenario.seed, "energy", partition_ids)
        return [*scores.tolist()]

    def train_rows(self, partition_id: int) -> IntArray:
        """Return the rows of the training set that a client trains on."""
        return self.train_rows_of([partition_id])[0]

    def train_rows_of(self, partition_ids: Sequence[int]) -> list[IntArray]:
        """Return, for each of several clients, the rows of the training set that it trains on."""
        return [train for train, _ in self.train_test_rows(partition_ids)]

    def train_test_rows(self, partition_ids: Sequence[int]) -> list[tuple[IntArray, IntArray]]:
        """Return, for each client, its training rows and its test rows.

        A client without a local test set tests on its training rows.
        """
        # The first rows are the test set. Without a random draw it is the same in every process and for every selector.
        counts = self._test_sizes[list(partition_ids)].tolist()
        drawn = zip(rows_of(self.partitions, partition_ids), counts, strict=True)
        return [(rows[count:], rows[:count] if count else rows) for rows, count in drawn]

    def examples(self, partition_id: int) -> tuple[Examples, Examples]:
        """Return a client's training and test examples."""
        train, (rows, test_rows) = self.dataset.train, self.train_test_rows([partition_id])[0]
        return (train.inputs[rows], train.labels[rows]), (train.inputs[test_rows], train.labels[test_rows])

    def shares(self, partition_ids: Sequence[int]) -> list[Shares]:
        """Return the examples of several clients, relative to those that they train on in a round."""
        train, test = self.sizes[list(partition_ids)], self._test_sizes[list(partition_ids)]
        # A client without a local test set tests on its training examples.
        return Shares.of(self.scenario.training.settings(), train, np.where(test > 0, test, train))

    def client(self, partition_id: int) -> TorchClient:
        """Return the client with this partition."""
        if not 0 <= partition_id < self.scenario.num_clients:
            raise ParameterError(
                f"partition-id must be below num_clients = {self.scenario.num_clients}, got {partition_id}. Start "
                f"{self.scenario.num_clients} SuperNodes, or override num_clients."
            )
        (inputs, labels), (test_inputs, test_labels) = self.examples(partition_id)
        (energy_score,) = self.energy_scores([partition_id])
        return TorchClient(
            partition_id=partition_id, model=self.model, inputs=inputs, labels=labels, test_inputs=test_inputs,
            test_labels=test_labels, objective=self.objective, energy_score=energy_score,
            settings=self.scenario.training.settings(), system=self.system, dropout=self.dropout,
            latency_mode=self.scenario.clients.latency_mode, delay=self.scenario.clients.delay,
        )  # fmt: skip

    def with_scenario(self, scenario: Scenario) -> World:
        """Return this world with another scenario, which must have the same data, partition, model and system."""
        world = copy.copy(self)
        world.scenario = scenario
        return world

    def on(self, device: str) -> World:
        """Return this world with its model, and the test set that measures it after each round, on a device."""
        if device == "cpu":
            return self
        world, place, test = copy.copy(self), torch.device(device), self.dataset.test
        world.model = copy.deepcopy(self.model).to(place)
        world._test_set = (read_only_tensor(test.inputs, place), read_only_tensor(test.labels, place))
        return world

    def for_clients(self) -> World:
        """Return this world for clients: with the same arrays, but without validation and test examples."""
        # Ray copies a world to each actor, so the server's examples would take memory on every machine.
        train = self.dataset.train
        nothing = Split(train.inputs[:0], train.labels[:0])
        world = copy.copy(self)
        world.dataset = replace(self.dataset, validation=nothing, test=nothing)
        return world

    def validation(self) -> Validation | None:
        """Return the server's validation set, for filters and selectors that measure models.

        None for a regression, because the server measures logits and the fraction correct. Also None if the clients
        hold all examples. :meth:`check_validation_set` refuses selectors that need a validation set.
        """
        split = self.dataset.validation
        if self.dataset.task == "regression" or not len(split):
            return None
        labels = split.labels.astype(np.int64, copy=False)
        return Validation(torch_predict(self.model), split.inputs, labels, stack_predict(self.model))

    def check_validation_set(self, needs: Collection[str], name: str = "the selector") -> None:
        """Refuse a selector or filter that measures models on the server if the server has no validation set.

        Args:
            needs: Columns that the selector reads.
            name: The selector's name in messages.

        Raises:
            ParameterError: The selector or FedCA's filter needs the server's validation set. But the server has no
                examples, or the labels are numbers.
        """
        columns = sorted((ON_VALIDATION | {"kept"}) & set(needs))
        if not columns and not self.scenario.aggregation.filter:
            return
        what = f"{name} ({', '.join(columns)})" if columns else "FedCA's filter (aggregation.filter)"
        if self.dataset.task == "regression":
            raise ParameterError(
                f"{what} measures classifiers on the server's validation set, but data.dataset = "
                f"{self.scenario.data.dataset!r} has numbers to predict. Choose another selector or filter, or a "
                "data set with classes."
            )
        if not len(self.dataset.validation):
            raise ParameterError(
                f"{what} needs a validation set on the server, but the clients' partition holds every row of train. "
                "Give OwnData(validation=...), leave some rows out of the partition, or choose another selector or no "
                "filter."
            )

    def test(self, arrays: Arrays) -> tuple[float, float]:
        """Return the loss and accuracy (R² for a regression) of a model on the test set, which no selector sees."""
        inputs, labels = self._test_set or (self.dataset.test.inputs, self.dataset.test.labels)
        return evaluate(fresh_copy(self.model, arrays), inputs, labels, objective=self.objective)


def _check_augmentation(scenario: Scenario, shape: tuple[int, ...]) -> None:
    """Refuse augmentation if the examples are not images, because it crops and flips."""
    if scenario.training.augmentation != "none" and len(shape) != 3:
        raise ParameterError(
            f"training.augmentation = {scenario.training.augmentation!r} is for images, but data.dataset = "
            f"{scenario.data.dataset!r} has examples of shape {shape}. Set training.augmentation = 'none'."
        )


def _check_batches(scenario: Scenario, model: nn.Module, train: Split, sizes: IntArray) -> None:
    """Refuse a client whose last batch has one example, if the model's batch normalization cannot process it."""
    # Checked here, because torch would raise in the middle of a run, when such a client is selected first.
    norms = {name: one for name, one in model.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)}
    settings = scenario.training.settings()
    per_pass = -(-sizes // settings.batch_size)
    # With a fixed number of local steps, a client with many examples may never reach its last batch.
    reached = per_pass <= settings.local_steps if settings.local_steps else np.ones(len(sizes), dtype=np.bool_)
    alone = np.flatnonzero((sizes - (per_pass - 1) * settings.batch_size == 1) & reached)
    if not norms or not len(alone):
        return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copy.deepcopy(model).train()(torch.tensor(train.inputs[:1]))
    # Tried out, because not every such layer fails. After a convolution it normalizes over the pixels of an image.
    except ValueError as error:
        (name, one), client = next(iter(norms.items())), int(alone[0])
        raise ParameterError(
            f"client {client} has {sizes[client]} training examples. With training.batch_size = "
            f"{settings.batch_size} a batch holds 1 example, which {type(one).__name__} at {name!r} cannot "
            "normalize. Choose another training.batch_size, or a model with GroupNorm or LayerNorm"
        ) from error


class WorldCache:
    """Cache of one world, which is built once per process, and replaced when another scenario is asked for."""

    def __init__(self) -> None:
        # Several threads may ask at the same time. One of them builds the world, and the others wait.
        self._lock = threading.Lock()
        # The latest scenario, as JSON, and its world.
        self.latest: tuple[str, World] | None = None

    def put(self, text: str, world: World) -> None:
        """Store a world that another process has built."""
        self.latest = (text, world)

    def get(self, text: str) -> World:
        """Return the world of a scenario; build it if another one is cached."""
        with self._lock:
            if (latest := self.latest) is None or latest[0] != text:
                latest = self.latest = (text, World(Scenario.model_validate_json(text)))
            return latest[1]


WORLD_CACHE = WorldCache()


def world_of(scenario: Scenario, own: OwnParts = OwnParts()) -> World:  # noqa: B008 (frozen)
    """Return the world of a scenario, built once per process and cached until another scenario is asked for.

    If the user brings parts, a new world is always built. It is cached too, for callers that know only the scenario.
    """
    text = scenario.model_dump_json()
    if own:
        WORLD_CACHE.put(text, World(scenario, own))
    return WORLD_CACHE.get(text)


THREADED_OPERATIONS = 2e9
"""Arithmetic of one step of the whole round below which one thread is faster than several."""


def threads_for(world: World) -> int:
    """Return the number of torch threads for the vectorized engine on the CPU: all of them, or one for small products.

    A step on small stacks consists of about sixty operations of a few microseconds each. Threads synchronize after
    each operation, so they wait longer than they work. On a busy machine they wait many times longer. The rule depends
    on sizes only.
    """
    operations = step_operations(world.model, world.scenario.training.settings(), world.scenario.clients_per_round)
    return torch.get_num_threads() if convolves(world.model) or operations >= THREADED_OPERATIONS else 1


def run_size(world: World) -> RunSize:
    """Return the size of a world's run, which decides its backend."""
    scenario, settings = world.scenario, world.scenario.training.settings()
    # Rounded up, because the last batch of an epoch may be smaller.
    steps = settings.local_steps or settings.local_epochs * -(-world.sizes // settings.batch_size)
    return RunSize(scenario.rounds, scenario.clients_per_round, float(np.mean(steps)), int(world.sizes.max()))
