"""The vectorized engine: a scenario in this process, the round's clients trained as one batched computation.

It drives the same course of a round as Flower's APIs (:mod:`fedsel_flwr.rounds`), on the virtual clock: select, train,
read, measure, aggregate, observe. Seed, purpose, partition and absolute round determine every random draw. So its
choices equal those of the Ray engine. Its models differ by the rounding of sums, which rectifiers may amplify over many
rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.answering import answer, asked_columns, local_accuracy, mini_batch, sketch, with_answering
from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.backends import Backend
from fedsel_flwr.clients.dropout import REPLIED
from fedsel_flwr.clients.metrics import dropout_metrics, fit_metrics, probe_costs
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.clients.threads import using_threads
from fedsel_flwr.clients.training import outputs, read_only_tensor
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.models import Arrays, ModelStack
from fedsel_flwr.rounds.replies import CRASHED, Reply
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.rounds.untrusted import log_simulated_faults
from fedsel_flwr.simulations.divergence import diagnose
from fedsel_flwr.simulations.existing_runs import CheckpointPace
from fedsel_flwr.simulations.parallelism import run_size, threads_for
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.strategies.wrapping import bases

AVERAGES = ("FedAvg", "FedProx")
"""Base strategies of Flower whose model is the mean of the clients', weighted by numbers of examples."""
BATCHED_COLUMNS = frozenset({"loss", "batch_loss", "rms_loss", "local_accuracy", "sketch"})
"""Columns that follow from the model's outputs, or from the examples alone: one pass evaluates them for all clients."""
TRAINING_LOSSES = frozenset({"loss", "rms_loss"})
"""Those of the outputs on the training examples."""


def run_vectorized(
    world: World,
    strategy: Any,
    device: str = "cpu",
    backend: Backend | None = None,
    pace: CheckpointPace | None = None,
) -> RunResult:
    """Run a scenario's rounds with a strategy of the legacy API, from its checkpoint on if it has one.

    Args:
        world: The scenario's world.
        strategy: The strategy; its core is driven, its base aggregates.
        device: Device on which models train.
        backend: What trains; None: the first that can and pays.
        pace: Limits the time that goes into checkpoints; None: one whenever the strategy has one due.

    Returns:
        History and final model.

    Raises:
        RunError: As the strategy of Flower's legacy API raises them.
    """
    clients = InProcessClients(world, device, backend)
    # The clients come first: their trainer asks how many threads torch has outside this block.
    with using_threads(threads_for(world) if device == "cpu" else torch.get_num_threads()), strategy.saving_on_error():
        return _run_rounds(world, strategy, clients, pace or CheckpointPace())


def _run_rounds(world: World, strategy: Any, clients: InProcessClients, pace: CheckpointPace) -> RunResult:
    scenario, core, model, done = world.scenario, strategy.core, world.initial_arrays(), 0

    def ended(number: int) -> None:
        strategy.finish_round(number, lambda: world.test(model), lambda: strategy.round_trained(number, model))

    if (resumed := strategy.resumed) is not None:
        model, done = list(resumed.model), resumed.round
    core.in_simulation()
    core.begin_run()
    if done:
        # The run may have been cut off between this round's checkpoint and its evaluation.
        ended(done)
    for number in range(done + 1, scenario.rounds + 1):
        if core.ended:
            break
        clients.model = model
        chosen = core.choose(clients.nodes, model, clients, number)
        if chosen:
            replies, stack = clients.train(chosen, core.round, core.asks)
            outcome = core.collect(replies, stack)
            mean = aggregate(strategy.base, core.round, outcome) if outcome.enough else None
            after = core.finish(mean)
            model = model if after is None else list(after)
            # Before the next round trains: otherwise two stacks of a whole cohort would be in memory at a time.
            del replies, stack, outcome, mean
        # Before the checkpoint: if writing that fails, the run's last model is this one.
        strategy.model_after(core.round, model)
        pace(partial(strategy.round_trained, core.round, model))
        ended(number)
    log_simulated_faults(strategy.history, bool(core.settings.over_selection))
    return RunResult(history=strategy.history, arrays=model, diagnosis=diagnose(world, strategy.history))


def check_vectorized(scenario: Scenario) -> None:
    """Refuse settings that need clients that train one by one.

    Raises:
        ParameterError: The scenario measures training times, or sleeps.
    """
    for key, wanted in (("latency_mode", "model"), ("delay", "virtual")):
        if (value := getattr(scenario.clients, key)) != wanted:
            raise ParameterError(
                f"clients.{key} = {value!r} is for clients that train one by one, but the vectorized engine trains a "
                f"round's clients together. Set clients.{key} = {wanted!r}, or use the engine 'ray'"
            )


class InProcessClients:
    """A scenario's clients in this process: they answer the core as Flower's nodes do, and train as one batch.

    Args:
        world: The scenario's world.
        device: Device on which models train.
        backend: What trains; None: the first that can and pays.

    Attributes:
        nodes: The connections, which are the partition ids.
        model: The current global model.
    """

    def __init__(self, world: World, device: str = "cpu", backend: Backend | None = None) -> None:
        self._world, self._settings = world, world.scenario.training.settings()
        self._trainer = BatchedTrainer(
            world.model,
            self._settings,
            device=device,
            objective=world.objective,
            backend=backend,
            size=run_size(world),
            # Read now: during the run torch has fewer threads.
            threads=torch.get_num_threads(),
        )
        self.nodes = frozenset(str(k) for k in range(world.scenario.num_clients))
        self.model: Arrays = []

    def introduce(self, nodes: list[str]) -> tuple[dict[str, dict[str, object]], list[str]]:
        """Return what each client reports when it registers, and that none failed to."""
        world, ids = self._world, [int(node) for node in nodes]
        facts = zip(nodes, ids, world.sizes[ids].tolist(), world.energy_scores(ids), strict=True)
        return {
            node: {"client_id": k, "num_examples": size, "energy_score": score} for node, k, size, score in facts
        }, []

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> dict[str, dict[str, object]]:
        """Return what clients answer to a probe of the current model."""
        answers = probe_clients(self._world, self.model, [int(node) for node in nodes], config)
        return dict(zip(nodes, answers, strict=True))

    def train(self, nodes: Sequence[str], round: int, asks: str) -> tuple[dict[str, Reply], ModelStack]:
        """Train clients from the current model.

        Args:
            nodes: The clients.
            round: The absolute round, on which every draw depends.
            asks: Columns that the selector needs of them, comma-separated.

        Returns:
            The reply of each, and their models, a row for each.
        """
        world, ids = self._world, [int(node) for node in nodes]
        system, fates = world.system, world.dropout.outcomes(ids, round)
        layers, losses = self._trained(ids, round, [i for i, fate in enumerate(fates) if fate == REPLIED])
        asked = asked_columns(asks or None)
        # A column outside, such as the gradient, needs a separate pass for each client.
        batched = BatchedEvaluation(world, self.model, ids, asked) if asked and asked <= BATCHED_COLUMNS else None
        replies = {}
        for node, k, size, score, delays, loss, fate in zip(
            nodes, ids, world.sizes[ids].tolist(), world.energy_scores(ids), system.draws(ids, round), losses.tolist(),
            fates, strict=True,
        ):  # fmt: skip
            delays = with_answering(delays, asked)
            spent = fit_metrics(system, k, delays, train_loss=loss, energy_score=score)
            metrics: dict[str, object] = dict(spent)
            if fate != REPLIED:
                metrics = dict(dropout_metrics(k, fate, None if fate == CRASHED else spent))
            elif batched is not None:
                metrics |= batched.columns(k, asked)
            elif asked:
                # The module is shared: other clients and the server's evaluation leave their parameters in it.
                set_arrays(world.model, list(self.model))
                metrics |= answer(world.model, asked, *world.examples(k), world.objective, system.seed)
            replies[node] = Reply(num_examples=size, metrics=metrics)
        return replies, ModelStack(layers)

    def _trained(self, ids: Sequence[int], round: int, answering: Sequence[int]) -> tuple[Arrays, FloatArray]:
        """Train the clients that answer; the rows of the others hold the received model, and a loss of NaN."""
        world, own = self._world, [ids[i] for i in answering]
        self._trainer.settings = self._settings.at(round)
        train, losses = world.dataset.train, np.full(len(ids), np.nan)
        layers: Arrays = []
        if own:
            layers, losses[answering] = self._trainer.train(
                list(self.model),
                Examples(train.inputs, train.labels, world.train_rows_of(own)),
                streams(world.system.seed, "data-order", own, round),
            )
        if len(own) == len(ids):
            return layers, losses
        # The core expects a row for each client asked; those of clients that failed are never read as updates.
        spread = [np.repeat(array[np.newaxis], len(ids), axis=0) for array in self.model]
        for whole, layer in zip(spread, layers, strict=False):
            whole[answering] = layer
        return spread, losses


def probe_clients(
    world: World, arrays: Arrays, partition_ids: Sequence[int], config: Mapping[str, str | int]
) -> list[dict[str, object]]:
    """Return what clients answer to a probe and what it costs them, equal to single evaluations up to rounding.

    Args:
        world: The scenario's world.
        arrays: The current global model.
        partition_ids: The probed clients.
        config: The probe's: ``probe``, the columns, and ``round``.

    Returns:
        The metrics of each.
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
    size = world.scenario.training.settings().batch_size
    for k, delays in zip(partition_ids, world.system.draws(partition_ids, round), strict=True):
        loss, quality = evaluation.test_metrics(k)
        columns: dict[str, float | bytes] = {}
        # From the quality at hand: evaluating the column would go over the test examples a second time.
        if "local_accuracy" in asked:
            columns["local_accuracy"] = local_accuracy(quality)
        columns |= evaluation.columns(k, asked - {"local_accuracy"})
        costs = probe_costs(world.system, delays, asked, batch_share=min(1.0, size / int(world.sizes[k])))
        # The column "loss", if asked for, replaces the test loss, as in a client's own answer.
        answers.append({"loss": loss, "accuracy": quality, "client_id": k, **columns, **costs})
    return answers


class BatchedEvaluation:
    """One model evaluated for several clients in one pass, equal to single evaluations up to rounding.

    Args:
        world: The examples and their partition.
        arrays: The model.
        partition_ids: The clients.
        asked: The columns that will be read: the model sees no other examples.
        tested: Whether :meth:`test_metrics` will be read too.
        round: The absolute round, on which the mini-batches depend.
    """

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
        self._objective, data = world.objective, world.dataset.train
        self._inputs, self._seed = data.inputs, world.system.seed
        self._split = dict(zip(partition_ids, world.train_test_rows(partition_ids), strict=True))
        self._batches: dict[int, npt.NDArray[np.int64]] = {}
        if "batch_loss" in asked:
            size = world.scenario.training.settings().batch_size
            self._batches = {
                k: train[mini_batch(self._seed, k, round, len(train), size)] for k, (train, _) in self._split.items()
            }
        # Whether training examples are needed, and whether test examples are.
        seen = [not TRAINING_LOSSES.isdisjoint(asked), tested or "local_accuracy" in asked]
        parts = [part for split in self._split.values() for part, needed in zip(split, seen, strict=True) if needed]
        parts.extend(self._batches.values())
        # Clients may share examples: each goes through the model once.
        rows = np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
        # If more than half of the examples are needed, all are evaluated, so that none is copied.
        everything = 2 * len(rows) > len(data)
        # Row of an example -> row of its output. Of an example that was not needed the place means nothing.
        self._place = np.arange(len(data)) if everything else np.searchsorted(rows, np.arange(len(data)))
        self._labels = read_only_tensor(data.labels)
        if parts:
            set_arrays(world.model, list(arrays))
            self._outputs = outputs(world.model, data.inputs if everything else data.inputs[rows])

    def test_metrics(self, partition_id: int) -> tuple[float, float]:
        """Return loss and quality on the client's test examples."""
        rows = self._split[partition_id][1]
        own, labels = self._outputs[self._place[rows]], self._labels[rows]
        return self._objective.loss(own, labels, reduction="sum").item() / len(rows), self._objective.quality(
            own, labels
        )

    def columns(self, partition_id: int, asked: Collection[str]) -> dict[str, float | bytes]:
        """Return the client's values of columns of :data:`BATCHED_COLUMNS`."""
        found: dict[str, float | bytes] = {}
        if not TRAINING_LOSSES.isdisjoint(asked):
            losses = self._losses(self._split[partition_id][0])
            found = {"loss": float(losses.mean()), "rms_loss": float(np.sqrt(np.mean(losses**2)))}
        if "batch_loss" in asked:
            found["batch_loss"] = float(self._losses(self._batches[partition_id]).mean())
        if "local_accuracy" in asked:
            found["local_accuracy"] = local_accuracy(self.test_metrics(partition_id)[1])
        if "sketch" in asked:
            found["sketch"] = sketch(self._inputs[self._split[partition_id][0]], self._seed).tobytes()
        # Both losses come from one pass; only one may have been asked for.
        return {name: value for name, value in found.items() if name in asked}

    def _losses(self, rows: npt.NDArray[np.int64]) -> FloatArray:
        """Return the model's loss on each of some examples."""
        own, labels = self._outputs[self._place[rows]], self._labels[rows]
        return np.asarray(self._objective.loss(own, labels, reduction="none").numpy(), dtype=np.float64)


def aggregate(base: Any, round: int, outcome: Outcome) -> Arrays | None:
    """Aggregate the kept models with a base strategy of the legacy API.

    Flower's FedAvg and FedProx are weighted means, which are one product over the stack. Any other base gets Flower's
    types.

    Args:
        base: The base strategy.
        round: The absolute round.
        outcome: The replies of the round, with the models that the filter kept.

    Returns:
        The new model; None if the base keeps the old one.
    """
    bases.check_survivors(base, len(outcome.kept), round)
    kept, weights = outcome.models.take(outcome.positions), outcome.weights
    # By the exact type: a subclass may aggregate in another way.
    if type(base).__name__ in AVERAGES and type(base).__module__.startswith("flwr.") and isinstance(kept, ModelStack):
        return stack_mean(kept, weights)
    ok = Status(Code.OK, "")
    results = [
        (NamedClient(node), FitRes(ok, ndarrays_to_parameters(list(arrays)), int(weight), {}))
        for node, arrays, weight in zip(outcome.kept, kept.as_list(), weights, strict=True)
    ]
    parameters, _ = base.aggregate_fit(bases.aggregation_round(base, round), results, [])
    return None if parameters is None else parameters_to_ndarrays(parameters)


def stack_mean(stack: ModelStack, weights: FloatArray) -> Arrays:
    """Return the weighted mean of a stack's models, in the types of its layers."""
    total = float(weights.sum())
    means = []
    for layer in stack.layers:
        # The mean of integers, such as a counter of batches, is no integer.
        values = layer if layer.dtype.kind == "f" else layer.astype(np.float64)
        flat = values.reshape(len(values), -1)
        # Weights in the layer's type: otherwise NumPy would copy the whole stack to float64.
        mean = (weights.astype(values.dtype) @ flat) / total
        means.append(mean.reshape(layer.shape[1:]).astype(values.dtype, copy=False))
    return means


class NamedClient(ClientProxy):
    """A client that a base strategy knows by its name; it trains in this process and cannot be called.

    Args:
        cid: Its name.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(
            f"client {self.cid} trains in this process, so a base strategy cannot call it. Use the engine 'ray'"
        )

    fit = evaluate = get_properties = get_parameters = reconnect = _refuse
