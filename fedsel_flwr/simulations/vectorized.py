"""The vectorized engine: a scenario in this process, the round's clients trained as one batched computation.

It drives the same course of a round as Flower's APIs (:mod:`fedsel_flwr.rounds`), on the virtual clock: select, train,
clean, measure, aggregate, observe. Every random draw is named by seed, purpose, partition and absolute round, so that
the choices are those of the Ray engine, and the models too but for the rounding of sums (which rectifiers may amplify
over many rounds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.answering import answer, asked_columns, with_answers
from fedsel_flwr.clients.batched import Examples
from fedsel_flwr.clients.batched.threads import using_threads
from fedsel_flwr.clients.dropout import ANSWERS
from fedsel_flwr.clients.metrics import fit_metrics, lost_metrics
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.models import Arrays, ModelStack
from fedsel_flwr.rounds.replies import CRASHED, Reply
from fedsel_flwr.rounds.untrusted import log_modelled
from fedsel_flwr.simulations.aggregating import aggregated
from fedsel_flwr.simulations.diverging import trouble
from fedsel_flwr.simulations.keeping import Pace
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.staffing import Staff, threads_for
from fedsel_flwr.simulations.together import TOGETHER, Answers, probed
from fedsel_flwr.simulations.world import World


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
        system, fates = world.system, world.failing.fates(ids, round)
        layers, losses = self._trained(ids, round, [i for i, fate in enumerate(fates) if fate == ANSWERS])
        asked = asked_columns(asks or None)
        together = Answers(world, self.model, ids, asked) if asked and asked <= TOGETHER else None
        replies = {}
        for node, k, size, score, delays, loss, fate in zip(
            nodes, ids, world.sizes[ids].tolist(), world.energy_scores(ids), system.draws(ids, round), losses.tolist(),
            fates, strict=True,
        ):  # fmt: skip
            delays = with_answers(delays, asked)
            spent = fit_metrics(system, k, delays, train_loss=loss, energy_score=score)
            metrics: dict[str, object] = dict(spent)
            if fate != ANSWERS:
                metrics = dict(lost_metrics(k, fate, None if fate == CRASHED else spent))
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
