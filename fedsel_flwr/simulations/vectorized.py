"""Vectorized engine: run a scenario in this process and train all clients of a round as one batched computation.

A round has the same steps as with Flower's APIs (:mod:`fedsel_flwr.rounds`), on the virtual clock: select, train, read,
measure, aggregate, observe. Seed, purpose, partition and absolute round determine every random draw. Therefore the
choices equal those of the Ray engine. The models differ by the rounding of sums, which rectifiers may amplify over
many rounds. On a GPU, torch computes convolutions with fewer digits (TF32), and not twice in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.clients.answering import (
    answer,
    asked_columns,
    dropout_metrics,
    fit_metrics,
    local_accuracy,
    mini_batch,
    probe_costs,
    sketch,
    with_answering,
)
from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.backends import Backend
from fedsel_flwr.clients.device import REPLIED
from fedsel_flwr.clients.objectives import CLASSIFICATION, fresh_copy
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.clients.training import outputs, read_only_tensor, using_threads
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.models import Arrays, ModelStack
from fedsel_flwr.rounds.replies import CRASHED, Reply
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.simulations.diagnosis import finished_run
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.run_options import CheckpointPace
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World, run_size, threads_for
from fedsel_flwr.strategies.wrapping import bases

AVERAGES = ("FedAvg", "FedProx")
"""Flower's base strategies that average the clients' models, weighted by numbers of examples."""
BATCHED_COLUMNS = frozenset({"loss", "batch_loss", "rms_loss", "local_accuracy", "sketch"})
"""Columns that one pass evaluates for all clients: they depend on the model's outputs, or on the examples alone."""
TRAINING_LOSSES = frozenset({"loss", "rms_loss"})
"""Columns that depend on the outputs for the training examples."""
AT_ONCE = 10_000
"""Largest number of clients whose rows are in memory during a probe."""


def run_vectorized(
    world: World, strategy: Any, device: str = "cpu", backend: Backend | None = None, pace: CheckpointPace | None = None
) -> RunResult:
    """Run a scenario's rounds with a strategy of the legacy API, starting from its checkpoint if there is one.

    Args:
        world: The scenario's world.
        strategy: The strategy. Its core runs the rounds, and its base aggregates.
        device: Device on which models train.
        backend: Backend that trains. If None, :func:`~fedsel_flwr.clients.batched.backends.choose_backend` decides.
        pace: Limit on the time for checkpoints. If None, every checkpoint that is due is written.

    Returns:
        History and final model.

    Raises:
        RunError: The same errors as with Flower's legacy API.
    """
    clients = InProcessClients(world, device, backend)
    # The clients are made before this block, because their trainer reads torch's number of threads outside of it.
    with using_threads(threads_for(world) if device == "cpu" else torch.get_num_threads()), strategy.saving_on_error():
        return _run_rounds(world, strategy, clients, pace or CheckpointPace())


def _run_rounds(world: World, strategy: Any, clients: InProcessClients, pace: CheckpointPace) -> RunResult:
    scenario, core, model, done = world.scenario, strategy.core, world.initial_arrays(), 0

    def ended(number: int) -> None:
        strategy.finish_round(number, lambda: world.test(model), lambda: strategy.round_trained(number, model))

    if (resumed := strategy.resumed) is not None:
        model, done = list(resumed.model), resumed.round
    strategy.begin_metrics()
    core.collector.simulated = True
    core.begin_run()
    core.name_arrays(list(world.model.state_dict()))
    if (flights := core.parts.flights) is not None:
        # A checkpoint has the clients at work and the models that they got, so they train once more.
        for batch in flights.lost():
            clients.model = batch.model
            flights.receive(batch, *clients.train(batch.nodes, batch.step, core.asks))
    if done:
        # The run may have been interrupted between this round's checkpoint and its evaluation.
        ended(done)
    for number in range(done + 1, scenario.rounds + 1):
        if core.ended:
            break
        clients.model = model
        chosen = core.choose(clients.nodes, model, clients, number)
        if chosen or core.at_work:
            replies, stack = clients.train(chosen, core.round, core.asks)
            outcome = core.collect(replies, stack)
            mean = aggregate(strategy.base, core.round, outcome) if outcome.enough else None
            after = core.finish(mean)
            model = model if after is None else list(after)
            # Freed before the next round trains, so that memory never holds the models of two cohorts.
            del replies, stack, outcome, mean
        # Set before the checkpoint is written: if that fails, this is the run's last model.
        strategy.model_after(core.round, model)
        pace(partial(strategy.round_trained, core.round, model))
        ended(number)
    return finished_run(world, strategy, model)


def check_vectorized(scenario: Scenario) -> None:
    """Refuse settings for which clients must train one by one.

    Raises:
        ParameterError: The scenario measures training times, or its clients sleep.
    """
    for key, wanted in (("latency_mode", "model"), ("delay", "virtual")):
        if (value := getattr(scenario.clients, key)) != wanted:
            raise ParameterError(f"clients.{key} = {value!r} is for the engine 'ray'. Use it, or set {wanted!r}")


class InProcessClients:
    """Clients of a scenario in this process. They answer the core as Flower's nodes do, and train as one batch.

    Args:
        world: The scenario's world.
        device: Device on which models train.
        backend: Backend that trains. If None, :func:`~fedsel_flwr.clients.batched.backends.choose_backend` decides.

    Attributes:
        nodes: The connections. Their names are the partition ids.
        model: The current global model.
    """

    def __init__(self, world: World, device: str = "cpu", backend: Backend | None = None) -> None:
        self._world, self._settings, train = world, world.scenario.training.settings(), world.dataset.train
        # A transfer to an accelerator would take longer than most rounds, so the examples stay there during the run.
        self._inputs, self._labels = (read_only_tensor(x, torch.device(device)) for x in (train.inputs, train.labels))
        self._trainer = BatchedTrainer(
            world.model,
            self._settings,
            device=device,
            objective=world.objective,
            backend=backend,
            size=run_size(world),
            # Read now, because torch has fewer threads during the run.
            threads=torch.get_num_threads(),
        )
        self.nodes = frozenset(str(k) for k in range(world.scenario.num_clients))
        self.model: Arrays = []

    def introduce(self, nodes: list[str]) -> tuple[dict[str, dict[str, object]], list[str]]:
        """Return the properties that each client reports at its registration, and an empty list of failures."""
        world, ids = self._world, [int(node) for node in nodes]
        facts = zip(nodes, ids, world.sizes[ids].tolist(), world.energy_scores(ids), strict=True)
        return {
            node: {"client_id": k, "num_examples": size, "energy_score": score} for node, k, size, score in facts
        }, []

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> dict[str, dict[str, object]]:
        """Return the clients' answers to a probe of the current model."""
        answers = probe_clients(self._world, self.model, [int(node) for node in nodes], config)
        return dict(zip(nodes, answers, strict=True))

    def train(self, nodes: Sequence[str], round: int, asks: str) -> tuple[dict[str, Reply], ModelStack]:
        """Train clients, starting from the current model.

        Args:
            nodes: The clients.
            round: The absolute round. Every random draw depends on it.
            asks: Columns that the selector needs from these clients, comma-separated.

        Returns:
            The reply of each client, and the stack of their models, one row per client.
        """
        world, ids = self._world, [int(node) for node in nodes]
        system, fates = world.system, world.dropout.outcomes(ids, round)
        layers, losses = self._trained(ids, round, [i for i, fate in enumerate(fates) if fate == REPLIED])
        asked = asked_columns(asks or None)
        # Any other column, such as the gradient, needs a separate pass for each client.
        batched = BatchedEvaluation(world, self.model, ids, asked) if asked and asked <= BATCHED_COLUMNS else None
        replies = {}
        for node, k, size, score, delays, shares, loss, fate in zip(
            nodes, ids, world.sizes[ids].tolist(), world.energy_scores(ids), system.draws(ids, round),
            world.shares(ids), losses.tolist(), fates, strict=True,
        ):  # fmt: skip
            delays = with_answering(delays, asked, shares)
            spent = fit_metrics(system, k, delays, train_loss=loss, energy_score=score)
            metrics: dict[str, object] = dict(spent)
            if fate != REPLIED:
                metrics = dict(dropout_metrics(k, fate, None if fate == CRASHED else spent))
            elif batched is not None:
                metrics |= batched.columns(k, asked)
            elif asked:
                metrics |= answer(
                    fresh_copy(world.model, self.model), asked, *world.examples(k), world.objective, system.seed
                )
            replies[node] = Reply(num_examples=size, metrics=metrics)
        return replies, ModelStack(layers)

    def _trained(self, ids: Sequence[int], round: int, answering: Sequence[int]) -> tuple[Arrays, FloatArray]:
        """Train the clients that answer; the rows of other clients hold the received model and a loss of NaN."""
        world, own = self._world, [ids[i] for i in answering]
        self._trainer.settings = self._settings.at(round)
        losses = np.full(len(ids), np.nan)
        layers, losses[answering] = self._trainer.train(
            list(self.model),
            Examples(self._inputs, self._labels, world.train_rows_of(own)),
            streams(world.system.seed, "data-order", own, round),
        )
        if len(own) == len(ids):
            return layers, losses
        # The core expects a row for each client asked. It never reads the rows of failed clients as updates.
        spread = [np.repeat(array[np.newaxis], len(ids), axis=0) for array in self.model]
        for whole, layer in zip(spread, layers, strict=True):
            whole[answering] = layer
        return spread, losses


def probe_clients(
    world: World, arrays: Arrays, partition_ids: Sequence[int], config: Mapping[str, str | int]
) -> list[dict[str, object]]:
    """Return the clients' answers to a probe and the probe's costs, equal to single evaluations up to rounding.

    Args:
        world: The scenario's world.
        arrays: The current global model.
        partition_ids: The probed clients.
        config: Config of the probe: ``probe`` (the columns) and ``round``.

    Returns:
        The metrics of each client.
    """
    asked = asked_columns(config["probe"])
    answers: list[dict[str, object]] = []
    if not asked <= BATCHED_COLUMNS:
        for k in partition_ids:
            loss, _, metrics = world.client(k).evaluate(list(arrays), dict(config))
            answers.append({"loss": loss, **metrics})
        return answers
    round = int(config["round"])
    evaluation = BatchedEvaluation(world, arrays, partition_ids, asked, tested=True, round=round)
    for block in evaluation.blocks:
        for k, delays, shares in zip(block, world.system.draws(block, round), world.shares(block), strict=True):
            loss, quality = evaluation.test_metrics(k)
            columns: dict[str, float | bytes] = {}
            # Taken from the quality above, because evaluating the column would read the test examples a second time.
            if "local_accuracy" in asked:
                columns["local_accuracy"] = local_accuracy(quality)
            columns |= evaluation.columns(k, asked - {"local_accuracy"})
            costs = probe_costs(world.system, delays, asked, shares)
            # If the column "loss" was asked for, it replaces the test loss, as in the answer of a Flower client.
            answers.append({"loss": loss, "accuracy": quality, "client_id": k, **columns, **costs})
    return answers


class BatchedEvaluation:
    """Evaluation of one model for several clients in one pass, equal to single evaluations up to rounding.

    At most :data:`AT_ONCE` clients have their rows in memory. Read the values of more clients in the order of
    ``partition_ids``, because each change of the block draws the rows of its clients again.

    Args:
        world: The examples and their partition.
        arrays: The model.
        partition_ids: The clients.
        asked: The columns that will be read. The model evaluates only the examples that they need.
        tested: Whether :meth:`test_metrics` will be called too.
        round: The absolute round. The mini-batches depend on it.

    Attributes:
        blocks: The clients in blocks of at most :data:`AT_ONCE`.
    """

    # Whether each evaluated example is classified correctly; None if the objective is not that of classes.
    _correct: BoolArray | None = None

    def __init__(
        self,
        world: World,
        arrays: Arrays,
        partition_ids: Sequence[int],
        asked: Collection[str],
        *,
        tested: bool = False,
        round: int = 0,
    ) -> None:
        self._world, self._objective, data = world, world.objective, world.dataset.train
        self._inputs, self._seed, self._round = data.inputs, world.system.seed, round
        self._batched = "batch_loss" in asked
        self.blocks = [partition_ids[i : i + AT_ONCE] for i in range(0, len(partition_ids), AT_ONCE)]
        # Two flags: training examples are needed, test examples are needed.
        seen = [not TRAINING_LOSSES.isdisjoint(asked), tested or "local_accuracy" in asked]
        # Clients may share examples, but the model evaluates each example once.
        needed, everything = np.zeros(len(data), dtype=np.bool_), False
        for block in self.blocks:
            self._hold(block)
            parts = [part for split in self._split.values() for part, reads in zip(split, seen, strict=True) if reads]
            for rows in (*parts, *self._batches.values()):
                needed[rows] = True
            # If more than half of the examples are needed, all are evaluated, which avoids a copy.
            if everything := bool(2 * np.count_nonzero(needed) > len(data)):
                break
        rows = np.flatnonzero(needed)
        # Row of an example -> row of its output; meaningless for examples that were not evaluated.
        self._place = np.arange(len(data)) if everything else np.searchsorted(rows, np.arange(len(data)))
        self._labels = read_only_tensor(data.labels)
        if len(rows):
            self._outputs = outputs(fresh_copy(world.model, arrays), data.inputs if everything else data.inputs[rows])
            self._measure_examples(self._labels if everything else self._labels[rows])

    def test_metrics(self, partition_id: int) -> tuple[float, float]:
        """Return the loss and the quality on the client's test examples."""
        rows = self._rows(partition_id)[1]
        if self._correct is not None:
            return float(self._losses(rows).mean()), int(np.count_nonzero(self._correct[self._place[rows]])) / len(rows)
        own, labels = self._outputs[self._place[rows]], self._labels[rows]
        return self._objective.loss(own, labels, reduction="sum").item() / len(rows), self._objective.quality(
            own, labels
        )

    def columns(self, partition_id: int, asked: Collection[str]) -> dict[str, float | bytes]:
        """Return the client's values of those :data:`BATCHED_COLUMNS` that were asked for."""
        found: dict[str, float | bytes] = {}
        if not TRAINING_LOSSES.isdisjoint(asked):
            losses = self._losses(self._rows(partition_id)[0])
            found = {"loss": float(losses.mean()), "rms_loss": float(np.sqrt(np.mean(losses**2)))}
        if "batch_loss" in asked:
            self._rows(partition_id)
            found["batch_loss"] = float(self._losses(self._batches[partition_id]).mean())
        if "local_accuracy" in asked:
            found["local_accuracy"] = local_accuracy(self.test_metrics(partition_id)[1])
        if "sketch" in asked:
            found["sketch"] = sketch(self._inputs[self._rows(partition_id)[0]], self._seed).tobytes()
        # One pass computes both losses, but perhaps only one was asked for.
        return {name: value for name, value in found.items() if name in asked}

    def _rows(self, partition_id: int) -> tuple[IntArray, IntArray]:
        """Return the client's training rows and test rows; its block replaces the block in memory if necessary."""
        if partition_id not in self._split:
            self._hold(next(block for block in self.blocks if partition_id in block))
        return self._split[partition_id]

    def _hold(self, block: Sequence[int]) -> None:
        """Draw the rows of some clients, and drop those of others."""
        self._split = dict(zip(block, self._world.train_test_rows(block), strict=True))
        self._batches: dict[int, npt.NDArray[np.int64]] = {}
        if self._batched:
            size = self._world.scenario.training.settings().batch_size
            self._batches = {
                k: train[mini_batch(self._seed, k, self._round, len(train), size)]
                for k, (train, _) in self._split.items()
            }

    def _measure_examples(self, labels: torch.Tensor) -> None:
        """Measure every evaluated example at once, because a call of torch takes longer than a client's 100 examples.

        Only for classes. The numbers of other objectives may depend on a client's examples together.
        """
        if self._objective is CLASSIFICATION:
            losses = self._objective.loss(self._outputs, labels, reduction="none")
            self._example_losses = np.asarray(losses.numpy(), dtype=np.float64)
            self._correct = (self._outputs.argmax(dim=1) == labels).numpy()

    def _losses(self, rows: npt.NDArray[np.int64]) -> FloatArray:
        """Return the model's loss on each of these examples."""
        if self._correct is not None:
            return np.asarray(self._example_losses[self._place[rows]])
        own, labels = self._outputs[self._place[rows]], self._labels[rows]
        return np.asarray(self._objective.loss(own, labels, reduction="none").numpy(), dtype=np.float64)


def aggregate(base: Any, round: int, outcome: Outcome) -> Arrays | None:
    """Aggregate the kept models with a base strategy of the legacy API.

    Flower's FedAvg and FedProx are weighted means, which one matrix product computes over the stack. Any other base
    receives Flower's types.

    Args:
        base: The base strategy.
        round: The absolute round.
        outcome: Replies of the round, with the models that the filter kept.

    Returns:
        The new model; None if the base keeps the old model.
    """
    bases.check_survivors(base, len(outcome.kept), round)
    kept, weights = outcome.models.take(outcome.positions), outcome.weights
    # The exact type is compared, because a subclass may aggregate in another way.
    if type(base).__name__ in AVERAGES and type(base).__module__.startswith("flwr.") and isinstance(kept, ModelStack):
        return stack_mean(kept, weights)
    ok = Status(Code.OK, "")
    results = [
        (bases.NamedClient(node), FitRes(ok, ndarrays_to_parameters(list(arrays)), weight, {}))
        for node, arrays, weight in zip(outcome.kept, kept.as_list(), bases.as_counts(weights), strict=True)
    ]
    parameters, _ = base.aggregate_fit(bases.aggregation_round(base, round), results, [])
    return None if parameters is None else parameters_to_ndarrays(parameters)


def stack_mean(stack: ModelStack, weights: FloatArray) -> Arrays:
    """Return the weighted mean of a stack's models; each layer keeps its type."""
    total = float(weights.sum())
    means = []
    for layer in stack.layers:
        # The mean of integers, such as counters of batches, may not be an integer.
        values = layer if layer.dtype.kind == "f" else layer.astype(np.float64)
        flat = values.reshape(len(values), -1)
        # The weights get the layer's type, because NumPy would otherwise copy the whole stack to float64.
        mean = (weights.astype(values.dtype) @ flat) / total
        means.append(mean.reshape(layer.shape[1:]).astype(values.dtype, copy=False))
    return means
