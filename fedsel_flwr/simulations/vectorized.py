"""The vectorized engine: a scenario in this process, the round's clients trained as one batched computation.

It drives the same course of a round as Flower's APIs (:mod:`fedsel_flwr.rounds`), on the virtual clock: select, train,
clean, measure, aggregate, observe. Every random draw is named by seed, purpose, partition and absolute round, so that
the choices are those of the Ray engine, and the models too but for the rounding of sums (which rectifiers may amplify
over many rounds).

The aggregation of the vectorized engine: the mean of a stack, or what a base strategy of Flower makes of it.

What clients answer about the same model, from one pass over the examples of all of them.
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
from fedsel_flwr.clients.batched import Examples
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
from fedsel_flwr.rounds.untrusted import log_modelled
from fedsel_flwr.simulations.divergence import trouble
from fedsel_flwr.simulations.existing_runs import Pace
from fedsel_flwr.simulations.parallelism import Staff, threads_for
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.strategies.wrapping import bases

AVERAGES = ("FedAvg", "FedProx")
"""Base strategies of Flower whose model is the mean of the clients', weighted by numbers of examples."""


class Named(ClientProxy):
    """A client that a base strategy knows by name only; it trains in this process and cannot be asked.

    Args:
        cid: Its name.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(f"client {self.cid} trains in this process: a base strategy cannot ask it; use the engine 'ray'")

    fit = evaluate = get_properties = get_parameters = reconnect = _refuse


def aggregated(base: Any, round: int, outcome: Outcome) -> Arrays | None:
    """What a base strategy of the legacy API makes of the kept models.

    Flower's FedAvg and FedProx are weighted means, which a stack has at once; any other base gets Flower's types.

    Args:
        base: The base strategy.
        round: The absolute round.
        outcome: What came back.

    Returns:
        The new model; None if the base keeps the old one.
    """
    bases.check_survivors(base, len(outcome.kept), round)
    kept, weights = outcome.models.take(outcome.positions), outcome.weights
    if type(base).__name__ in AVERAGES and type(base).__module__.startswith("flwr.") and isinstance(kept, ModelStack):
        return stack_mean(kept, weights)
    ok = Status(Code.OK, "")
    results = [
        (Named(node), FitRes(ok, ndarrays_to_parameters(list(arrays)), int(weight), {}))
        for node, arrays, weight in zip(outcome.kept, kept.listed(), weights, strict=True)
    ]
    parameters, _ = base.aggregate_fit(bases.aggregation_round(base, round), results, [])
    return None if parameters is None else parameters_to_ndarrays(parameters)


def stack_mean(stack: ModelStack, weights: FloatArray) -> Arrays:
    """The weighted mean of a stack's models, in the types of its layers."""
    total = float(weights.sum())
    means = []
    for layer in stack.layers:
        held = layer if layer.dtype.kind == "f" else layer.astype(np.float64)
        flat = held.reshape(len(held), -1)
        mean = (weights.astype(held.dtype) @ flat) / total
        means.append(mean.reshape(layer.shape[1:]).astype(held.dtype, copy=False))
    return means


TOGETHER = frozenset({"loss", "batch_loss", "rms_loss", "local_accuracy", "sketch"})
"""The columns that follow from the model's outputs, or from the examples alone."""
LOSSES = frozenset({"loss", "rms_loss"})
"""Those of the outputs on the training examples."""


class Answers:
    """The answers of several clients for a model: what each would say alone, but for rounding.

    Args:
        world: The examples, and who holds them.
        arrays: The model.
        partition_ids: Who is asked.
        asked: The columns that will be asked for: the model sees no other examples.
        tested: Whether :meth:`tested` will be asked too.
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
        self._split = dict(zip(partition_ids, world.split_of(partition_ids), strict=True))
        self._batches: dict[int, npt.NDArray[np.int64]] = {}
        if "batch_loss" in asked:
            size = world.scenario.training.settings().batch_size
            self._batches = {
                k: train[mini_batch(self._seed, k, round, len(train), size)] for k, (train, _) in self._split.items()
            }
        seen = [not LOSSES.isdisjoint(asked), tested or "local_accuracy" in asked]  # of training, of test examples
        parts = [part for split in self._split.values() for part, needed in zip(split, seen, strict=True) if needed]
        parts.extend(self._batches.values())
        rows = np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
        everything = 2 * len(rows) > len(data)  # then nothing is copied
        self._place = np.arange(len(data)) if everything else np.searchsorted(rows, np.arange(len(data)))
        self._labels = read_only_tensor(data.labels)
        if parts:
            set_arrays(world.model, list(arrays))
            self._outputs = outputs(world.model, data.inputs if everything else data.inputs[rows])

    def tested(self, partition_id: int) -> tuple[float, float]:
        """Loss and quality on the client's test examples."""
        rows = self._split[partition_id][1]
        own, labels = self._outputs[self._place[rows]], self._labels[rows]
        return self._objective.loss(own, labels, reduction="sum").item() / len(rows), self._objective.quality(
            own, labels
        )

    def answer(self, partition_id: int, asked: Collection[str]) -> dict[str, float | bytes]:
        """The client's answers to columns of :data:`TOGETHER`."""
        said: dict[str, float | bytes] = {}
        if not LOSSES.isdisjoint(asked):
            losses = self._losses(self._split[partition_id][0])
            said = {"loss": float(losses.mean()), "rms_loss": float(np.sqrt(np.mean(losses**2)))}
        if "batch_loss" in asked:
            said["batch_loss"] = float(self._losses(self._batches[partition_id]).mean())
        if "local_accuracy" in asked:
            said["local_accuracy"] = local_accuracy(self.tested(partition_id)[1])
        if "sketch" in asked:
            said["sketch"] = sketch(self._inputs[self._split[partition_id][0]], self._seed).tobytes()
        return {name: value for name, value in said.items() if name in asked}

    def _losses(self, rows: npt.NDArray[np.int64]) -> FloatArray:
        """The model's loss on each of some examples."""
        own, labels = self._outputs[self._place[rows]], self._labels[rows]
        return np.asarray(self._objective.loss(own, labels, reduction="none").numpy(), dtype=np.float64)


def probed(
    world: World, arrays: Arrays, partition_ids: Sequence[int], config: Mapping[str, str | int]
) -> list[dict[str, object]]:
    """What clients say to a probe, and what it costs them: what each would say alone, but for rounding.

    Args:
        world: The scenario's world.
        arrays: The current global model.
        partition_ids: Who is asked.
        config: The probe's: ``probe``, the columns, and ``round``.

    Returns:
        The metrics of each.
    """
    asked = asked_columns(config["probe"])
    said: list[dict[str, object]] = []
    if not asked <= TOGETHER:
        for k in partition_ids:
            loss, _, metrics = world.client(k).evaluate(list(arrays), dict(config))
            said.append({"loss": loss, **metrics})
        return said
    round = int(config["round"])
    answers = Answers(world, arrays, partition_ids, asked, tested=True, round=round)
    size = world.scenario.training.settings().batch_size
    for k, delays in zip(partition_ids, world.system.draws(partition_ids, round), strict=True):
        loss, quality = answers.tested(k)
        own: dict[str, float | bytes] = {}
        if "local_accuracy" in asked:
            own["local_accuracy"] = local_accuracy(quality)
        own |= answers.answer(k, asked - {"local_accuracy"})
        costs = probe_costs(world.system, delays, asked, batch_share=min(1.0, size / int(world.sizes[k])))
        said.append({"loss": loss, "accuracy": quality, "client_id": k, **own, **costs})
    return said


def check_vectorized(scenario: Scenario) -> None:
    """Refuse what only clients that train one by one can do.

    Raises:
        ParameterError: The scenario measures training times, or sleeps.
    """
    for key, wanted in (("latency_mode", "model"), ("delay", "virtual")):
        if (value := getattr(scenario.clients, key)) != wanted:
            raise ParameterError(
                f"clients.{key} = {value!r} is of clients that train one by one, but the vectorized engine trains a "
                f"round's clients together: set clients.{key} = {wanted!r}, or use the engine 'ray'"
            )


def run_vectorized(
    world: World, strategy: Any, device: str = "cpu", staff: Staff | None = None, pace: Pace | None = None
) -> RunResult:
    """Run a scenario's rounds with a strategy of the legacy API; those that its checkpoint has are not run again.

    Args:
        world: The scenario's world.
        strategy: The strategy; its core is driven, its base aggregates.
        device: Where models train.
        staff: The processes that train; None: this one.
        pace: How often a checkpoint is worth its time; None: whenever the strategy has one due.

    Returns:
        History and final model.

    Raises:
        RunError: As the strategy of Flower's legacy API raises them.
    """
    clients = InProcess(world, device, staff)
    with using_threads(threads_for(world) if device == "cpu" else torch.get_num_threads()), strategy.rescuing():
        return _rounds(world, strategy, clients, pace or Pace())


def _rounds(world: World, strategy: Any, clients: InProcess, pace: Pace) -> RunResult:
    scenario, core, model, done = world.scenario, strategy.core, world.initial_arrays(), 0

    def ended(number: int) -> None:
        strategy.finish_round(number, lambda: world.test(model), lambda: strategy.round_trained(number, model))

    if (resumed := strategy.resumed) is not None:
        model, done = list(resumed.model), resumed.round
    core.in_simulation()
    core.begin_run()
    if done:
        ended(done)  # its evaluation may have been cut off
    for number in range(done + 1, scenario.rounds + 1):
        if core.ended:
            break
        clients.model = model
        chosen = core.choose(clients.nodes, model, clients, number)
        if chosen:
            replies, stack = clients.train(chosen, core.round, core.asks)
            outcome = core.collect(replies, stack)
            mean = aggregated(strategy.base, core.round, outcome) if outcome.enough else None
            after = core.finish(mean)
            model = model if after is None else list(after)
            del replies, stack, outcome, mean  # the memory of the stack is used again
        strategy.model_after(core.round, model)
        pace(partial(strategy.round_trained, core.round, model))
        ended(number)
    log_modelled(strategy.history, bool(scenario.aggregation.over_selection))
    return RunResult(history=strategy.history, arrays=model, trouble=trouble(world, strategy.history))


class InProcess:
    """A scenario's clients in this process: the core's transport, and their training.

    Args:
        world: The scenario's world.
        device: Where models train.
        staff: The processes that train; None: this one.

    Attributes:
        nodes: The connections, which are the partition ids.
        model: The current global model.
    """

    def __init__(self, world: World, device: str = "cpu", staff: Staff | None = None) -> None:
        self._world, self._settings = world, world.scenario.training.settings()
        self._trainer = (staff or Staff(1)).trainer(world, device)
        self.nodes = frozenset(str(k) for k in range(world.scenario.num_clients))
        self.model: Arrays = []

    def introduce(self, nodes: list[str]) -> tuple[dict[str, dict[str, object]], list[str]]:
        """What each client says of itself."""
        world, ids = self._world, [int(node) for node in nodes]
        facts = zip(nodes, ids, world.sizes[ids].tolist(), world.energy_scores(ids), strict=True)
        return {
            node: {"client_id": k, "num_examples": size, "energy_score": score} for node, k, size, score in facts
        }, []

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> dict[str, dict[str, object]]:
        """What clients answer about the current model."""
        return dict(zip(nodes, probed(self._world, self.model, [int(node) for node in nodes], config), strict=True))

    def train(self, nodes: Sequence[str], round: int, asks: str) -> tuple[dict[str, Reply], ModelStack]:
        """Train clients from the current model.

        Args:
            nodes: Whom.
            round: The absolute round, on which every draw depends.
            asks: Columns that the selector needs of them, comma-separated.

        Returns:
            What each reports, and their models, a row for each.
        """
        world, ids = self._world, [int(node) for node in nodes]
        system, fates = world.system, world.dropout.outcomes(ids, round)
        layers, losses = self._trained(ids, round, [i for i, fate in enumerate(fates) if fate == REPLIED])
        asked = asked_columns(asks or None)
        together = Answers(world, self.model, ids, asked) if asked and asked <= TOGETHER else None
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
            elif together is not None:
                metrics |= together.answer(k, asked)
            elif asked:
                set_arrays(world.model, list(self.model))
                metrics |= answer(world.model, asked, *world.examples(k), world.objective, system.seed)
            replies[node] = Reply(num_examples=size, metrics=metrics)
        return replies, ModelStack(layers)

    def _trained(self, ids: Sequence[int], round: int, answering: Sequence[int]) -> tuple[Arrays, FloatArray]:
        """Train those of some clients that answer; the rows of the others hold the received model, and no loss."""
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
        spread = [np.repeat(array[np.newaxis], len(ids), axis=0) for array in self.model]
        for whole, layer in zip(spread, layers, strict=False):
            whole[answering] = layer
        return spread, losses
