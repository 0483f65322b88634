"""Selection for Flower's legacy strategy API."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    Parameters,
    Scalar,
    ndarrays_to_parameters,
)
from flwr.server import ClientManager
from flwr.server.strategy import FedAvg, Strategy

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.selectors.columns import VECTORS
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.adapter import Adapter
from fedsel_flwr.strategies.wrapping.client_manager import BoundedManager, ChosenCohort, TimedProxy, wait_for_clients
from fedsel_flwr.strategies.wrapping.legacy_results import (
    cleaned,
    decode,
    evaluations,
    named,
    original,
    parameters_of,
    reply_of,
    saved_model,
)
from fedsel_flwr.strategies.wrapping.legacy_transport import Asking, grid_of
from fedsel_flwr.strategies.wrapping.round_end import rescued

logger = logging.getLogger("fedsel_flwr")
FitFailure = tuple[ClientProxy, FitRes] | BaseException
EvaluateFailure = tuple[ClientProxy, EvaluateRes] | BaseException


class SelectionStrategy(Adapter, Strategy):
    """Wraps a Flower strategy: a selector decides who trains, ``base`` decides how their updates are aggregated.

    It is the outermost wrapper (differential-privacy wrappers go inside). Each round it waits a bounded time for
    clients, asks new ones who they are (``get_properties``), dispatches what ``base`` configures to exactly the
    chosen clients, drops updates that cannot be used, lets ``base`` aggregate the rest in a fixed order, and tells
    the selector what came back. Options and attributes are those of
    :class:`fedsel_flwr.strategies.wrapping.adapter.Adapter`.

    References:
        Flower 1.22 to 1.43, ``flwr.server.strategy.Strategy``.
    """

    strategy_type: ClassVar[type] = Strategy
    default_base = partial(FedAvg, fraction_evaluate=0.0)
    waits_for_everybody: ClassVar[bool] = True

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Return the base's initial model, else that of the first client that answers; or the checkpoint's."""
        known = (getattr(layer, "initial_parameters", None) for layer in bases.layers(self.base))
        checkpoint = self._begin_run(named(next((one for one in known if one is not None), None)))
        if checkpoint is not None:
            if self._resuming.total_rounds is None:
                logger.warning(
                    "the server's rounds come on top of the %d that were done: give the strategy total_rounds to end "
                    "where the run would have ended", checkpoint.round,
                )  # fmt: skip
            return parameters_of(checkpoint)
        parameters: Parameters | None = self.base.initialize_parameters(self._bounded(client_manager))
        if parameters is not None:
            return parameters
        clients = wait_for_clients(client_manager, 1, self.wait_timeout, "one to get the initial model from")
        for client in clients.values():
            try:
                answer = client.get_parameters(GetParametersIns(config={}), self._question_timeout, None)
            except Exception:  # the next client may do better
                continue
            if answer.status.code == Code.OK:
                return answer.parameters
        raise RunError("no client returned an initial model: give the base strategy initial_parameters")

    @rescued
    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Choose clients and return the base's instructions for exactly these.

        Raises:
            RunError: Too few clients were connected when the time was over, the base decides itself who trains, or
                Flower's round does not follow the selector's.
        """
        self._dispatched = {}
        if self._resuming.over:
            return []
        self._keeper.keep(self.core.round, partial(saved_model, parameters))
        connected = partial(wait_for_clients, client_manager, self.min_available, self.wait_timeout, "min_available")
        clients = self._wait_for_free(connected)
        transport = Asking(clients, parameters, self._question_timeout, self._late)
        chosen = {cid: clients[cid] for cid in self.core.choose(clients, decode(parameters), transport, server_round)}
        if not chosen:
            return []
        instructions = self.base.configure_fit(
            server_round=self.core.round,
            parameters=parameters,
            client_manager=ChosenCohort(chosen, len(clients)),
        )
        dispatched = sorted(client.cid for client, _ in instructions)
        if dispatched != sorted(chosen):
            raise RunError(
                f"{type(self.base).__name__} dispatched {len(dispatched)} instructions, but the selector chose "
                f"{len(chosen)} clients: this base decides itself who trains and cannot be combined with a selector"
            )
        self._dispatched = {
            client.cid: TimedProxy(client, round=self.core.round, late=self._late) for client, _ in instructions
        }
        return [(self._dispatched[client.cid], self._asking(ins)) for client, ins in instructions]

    @rescued
    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: list[FitFailure]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Clean the results, let the base aggregate them, and tell the selector what came back.

        Raises:
            RunError: The base needs more models, updates must be read that are not there (secure aggregation), or
                Flower's simulation has lost its actors.
        """
        if not self._dispatched:
            return None, {}  # nobody was chosen: the round is in the history already
        self._check_actors(str(failure) for failure in failures if isinstance(failure, BaseException))
        if reader := self.core.update_reader:
            bases.check_not_aggregated([res.parameters for _, res in results], reader)
        arrived = {result[0].cid: result for result in results}
        refused = {failure[0].cid: failure[1] for failure in failures if isinstance(failure, tuple)}
        replies = {
            cid: reply_of(self.base, proxy, arrived.get(cid), refused.get(cid))
            for cid, proxy in self._dispatched.items()
        }
        self._timeout = next((proxy.timeout_s for proxy in self._dispatched.values()), None)
        deaf = {cid: proxy for cid, proxy in self._dispatched.items() if grid_of([proxy.proxy]) is None}
        self.core.parts.busy.owe(cid for cid in deaf if replies[cid].timed_out)  # of the others it is known
        outcome = self.core.collect(replies)
        parameters: Parameters | None = None
        metrics: dict[str, Scalar] = {}
        if outcome.enough:
            bases.check_survivors(self.base, len(outcome.kept), self.core.round)
            ours = self.core.settings.keys.own_keys()
            vectors = VECTORS.intersection(self.core.asks.split(","))
            kept = [cleaned(arrived[cid], outcome.results[cid], ours, vectors) for cid in outcome.kept]
            if outcome.averaging is not None:
                kept = [
                    (c, replace(res, num_examples=int(w))) for (c, res), w in zip(kept, outcome.weights, strict=True)
                ]
            garbage = [
                RunError(self._fault(cid, result.problems))
                for cid, result in outcome.results.items()
                if cid in arrived and not result.completed and not result.spare
            ]
            passed = [(original(f[0]), f[1]) if isinstance(f, tuple) else f for f in failures]
            number = bases.aggregation_round(self.base, self.core.round)
            parameters, metrics = self.base.aggregate_fit(number, kept, [*passed, *garbage])
        after = decode(parameters) if parameters is not None and self.core.reads_global(outcome) else None
        model = self.core.finish(after)
        if model is not None and model is not after:
            parameters = ndarrays_to_parameters(list(model))
        if parameters is not None:
            self._keeper.keep(self.core.round, partial(saved_model, parameters))
        return parameters, metrics

    @rescued
    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return the base's evaluation instructions; waits a bounded time."""
        if self._resuming.over and self.core.numbering.absolute(server_round) > self.core.round:
            return []  # the run has ended, and Flower counts on
        instructions: list[tuple[ClientProxy, EvaluateIns]] = self.base.configure_evaluate(
            server_round=self.core.numbering.absolute(server_round),
            parameters=parameters,
            client_manager=self._bounded(client_manager),
        )
        return [(TimedProxy(client, late=self._late), ins) for client, ins in instructions]

    @rescued
    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[ClientProxy, EvaluateRes]], failures: list[EvaluateFailure]
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Let the base aggregate what can be averaged, in id order."""
        absolute = self.core.numbering.absolute(server_round)
        ordered = sorted(results, key=lambda result: id_order(self.roster.name(result[0].cid)))
        usable, faults = evaluations(ordered, self.core.max_examples)
        for cid, fault in faults.items():
            logger.warning("round %d, client %s: evaluation: %s", absolute, self.roster.name(cid), fault)
        garbage = [RunError(self._fault(cid, (fault,))) for cid, fault in faults.items()]
        passed = [(original(f[0]), f[1]) if isinstance(f, tuple) else f for f in failures]
        aggregated: tuple[float | None, dict[str, Scalar]] = self.base.aggregate_evaluate(
            absolute, usable, [*passed, *garbage]
        )
        return aggregated

    @rescued
    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """Let the base evaluate the global model, and enter loss and accuracy into the history.

        The round's checkpoint is written before that.

        Raises:
            RunError: The checkpoint cannot be written.
        """
        number = self.core.numbering.absolute(server_round)
        self._save(number, parameters)
        if number == self.core.round:
            self._keeper.keep(number, partial(saved_model, parameters))
            self._resuming.hold(number)
        result: tuple[float, dict[str, Scalar]] | None = None

        def evaluate() -> tuple[object, ...]:
            nonlocal result
            result = self.base.evaluate(number, parameters)
            return () if result is None else (result[0], result[1].get("accuracy"))

        self.finish_round(server_round, evaluate, partial(self._save, number, parameters))
        return result

    def _save(self, number: int, parameters: Parameters) -> None:
        """Write the round's checkpoint, if one is due."""
        if self._resuming.wants(number):
            names, model = saved_model(parameters)
            self.round_trained(number, model, names)

    def _asking(self, ins: FitIns) -> FitIns:
        """The instruction with the columns that the selector needs in a config of its own."""
        return replace(ins, config={**ins.config, "needs": self.core.asks}) if self.core.asks else ins

    def _bounded(self, manager: ClientManager) -> BoundedManager:
        generator = np.random.default_rng(self.core.round)  # not global, and the same where a run is resumed
        return BoundedManager(manager, self.wait_timeout, generator, self.roster.name, self.core.parts.busy)
