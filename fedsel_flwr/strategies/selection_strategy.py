"""Client selection around any strategy of Flower's legacy API: the round that all papers share.

``configure_fit`` lets the selector choose the clients that train, and ``aggregate_fit`` reads their results. The base
strategy configures and averages. :class:`~fedsel_flwr.rounds.core.SelectionCore` plays the round. This room translates
between it and Flower's types.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
from flwr.common import Code, EvaluateIns, FitIns, GetParametersIns, Parameters, Scalar, ndarrays_to_parameters
from flwr.server import ClientManager
from flwr.server.strategy import FedAvg, Strategy

from fedsel_flwr.errors import RunError, described
from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.rounds.untrusted import usable_count
from fedsel_flwr.selectors.columns import VECTORS
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping import legacy_transport as legacy
from fedsel_flwr.strategies.wrapping.adapter import Adapter, Evaluation
from fedsel_flwr.strategies.wrapping.legacy_transport import BoundedManager, ChosenCohort, TimedProxy, wait_for_clients
from fedsel_flwr.strategies.wrapping.round_end import saves_on_error

logger = logging.getLogger("fedsel_flwr")


class SelectionStrategy(Adapter, Strategy):
    """Wraps a Flower strategy: the selector chooses the clients that train, ``base`` aggregates their updates.

    Make this the outermost wrapper, with differential-privacy wrappers inside. The options are those of
    :class:`fedsel_flwr.rounds.settings.Options`. The attributes are those of
    :class:`fedsel_flwr.strategies.wrapping.adapter.Adapter`: ``selector``, ``base``, ``roster``, ``history``,
    ``last_model``.

    A round:
        1. ``configure_fit`` waits a bounded time for clients, and registers new clients (``get_properties``).
        2. The selector chooses clients. Before that it may probe clients.
        3. ``base`` configures the instructions, which go to exactly the chosen clients.
        4. ``aggregate_fit`` drops updates that cannot be used. ``base`` aggregates the others in a fixed order.
        5. The selector observes the round, and the history gets its record.

    References:
        Flower 1.22 or newer, ``flwr.server.strategy.Strategy``.

    >>> import numpy as np
    >>> from flwr.server.strategy import FedAvgM
    >>> from fedsel_flwr.selectors import RoundRobin
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> strategy = SelectionStrategy(RoundRobin(clients_per_round=2), FedAvgM(fraction_evaluate=0.0))
    >>> play_round(strategy, clients, [np.zeros(2)])
    [array([0.5, 0.5])]
    >>> [(row.client_id, row.latency_s) for row in strategy.history.clients]
    [('0', 0.5), ('1', 1.5)]
    """

    strategy_type: ClassVar[type] = Strategy
    default_base = partial(FedAvg, fraction_evaluate=0.0)
    waits_for_everybody: ClassVar[bool] = True

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Return the checkpoint's model, else the base's initial model, else that of the first client that answers.

        Raises:
            RunError: No client returned a model. Or there are checkpoints, but none can be used.
        """
        checkpoint = self._begin_run(legacy.named_arrays(bases.outermost(self.base, "initial_parameters")))
        logger.info("strategy: %s", self.core.summary(self.base))
        if checkpoint is not None and self._resuming.total_rounds is None:
            logger.warning(
                "the server adds its rounds to the %d rounds that are already done. To end the run at a fixed round, "
                "set total_rounds in the strategy", checkpoint.round,
            )  # fmt: skip
        # Of a resumed run too, because the base may prepare itself there.
        parameters: Parameters | None = self.base.initialize_parameters(self._bounded_manager(client_manager))
        if checkpoint is not None:
            return legacy.from_checkpoint(checkpoint)
        if parameters is not None:
            return parameters
        clients = wait_for_clients(client_manager, 1, self.wait_timeout, "for the initial model")
        for client in clients.values():
            try:
                answer = client.get_parameters(GetParametersIns(config={}), self.core.settings.roll_call_timeout, None)
            except Exception:
                # A client may raise any error, and the model of any other client works as well.
                continue
            if answer.status.code == Code.OK:
                return answer.parameters
        raise RunError("no client returned an initial model. Give the base strategy initial_parameters.")

    @saves_on_error
    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Choose clients and return the base's instructions for exactly these.

        Raises:
            RunError: Too few clients were connected at the end of the wait, the base chooses the clients itself, or
                Flower's round does not follow the selector's.
        """
        if self.core.parts.flights is not None:
            raise RunError(
                "the legacy API has no concurrency. Use fedsel_flwr.strategies.message, or api = 'message' in scenarios"
            )
        if not self._begin_round(parameters):
            return []
        clients = self._wait_for_free(wait_for_clients, client_manager)
        transport = legacy.LegacyTransport(clients, parameters, **self._asking)
        # An empty model, as that of trees before round 1, cannot be decoded, but is known to have no numbers.
        empty = isinstance(parameters, Parameters) and not any(parameters.tensors)
        model = [] if empty else legacy.decode(parameters)
        chosen = {cid: clients[cid] for cid in self.core.choose(clients, model, transport, server_round)}
        if not chosen:
            return []
        cohort = ChosenCohort(chosen, len(clients))
        try:
            instructions = self.base.configure_fit(
                server_round=self.core.round, parameters=parameters, client_manager=cohort
            )
        # The errors of a base that requires its own client manager, or looks for other clients.
        except (AssertionError, AttributeError, LookupError, TypeError) as error:
            raise RunError(
                f"{type(self.base).__name__}.configure_fit raised {described(error)}. Its client manager has only the "
                "chosen clients. Let it take these, or use another base"
            ) from error
        # Sorted lists, not sets, so that a base that sends a client two instructions is refused too.
        dispatched = sorted(client.cid for client, _ in instructions)
        if not dispatched:
            self.core.skip()
        elif dispatched != sorted(chosen):
            raise RunError(
                f"{type(self.base).__name__} dispatched {len(dispatched)} instructions, but the selector chose "
                f"{len(chosen)} clients. A base that chooses clients itself cannot have a selector. Wrap another base."
            )
        self._dispatched = {
            client.cid: TimedProxy(client, round=self.core.round, late=self._late) for client, _ in instructions
        }
        return [(self._dispatched[client.cid], self._with_needs(ins)) for client, ins in instructions]

    @saves_on_error
    def aggregate_fit(
        self, server_round: int, results: list[legacy.FitResult], failures: list[legacy.FitResult | BaseException]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Read the results, let the base aggregate the usable ones, and report the round to the selector.

        Raises:
            RunError: The base needs more models, the selector needs updates that secure aggregation hides, or Flower's
                simulation has lost its actors.
        """
        if not self._dispatched:
            # No client was chosen, and ``choose`` already wrote the round to the history.
            return None, {}
        parameters, metrics = self._aggregate(legacy.Arrived.of(results, failures))
        return parameters, metrics or {}

    @saves_on_error
    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return the base's evaluation instructions, after a bounded wait for clients."""
        if self._resuming.is_over and self.core.numbering.absolute(server_round) > self.core.round:
            # The run has ended, but Flower counts its remaining rounds.
            return []
        instructions: list[tuple[ClientProxy, EvaluateIns]] = self.base.configure_evaluate(
            server_round=self.core.numbering.absolute(server_round),
            parameters=parameters,
            client_manager=self._bounded_manager(client_manager),
        )
        return [(TimedProxy(client, late=self._late), ins) for client, ins in instructions]

    @saves_on_error
    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[legacy.EvaluateResult],
        failures: list[legacy.EvaluateResult | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Let the base aggregate the results that can be averaged, in id order."""
        loss, metrics = self._aggregate_evaluation(server_round, legacy.Arrived.of(results, failures))
        return loss, metrics

    @saves_on_error
    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """Let the base evaluate the global model, and record loss and accuracy in the history.

        The round's checkpoint is written first, so that a failed evaluation loses no training.

        Raises:
            RunError: The checkpoint cannot be written.
        """
        if self.core.numbering.absolute(server_round) == self.core.round:
            self._keep(self.core.round, parameters)
        result: tuple[float, dict[str, Scalar]] | None = self._evaluate_and_finish(
            server_round, parameters, lambda number: self.base.evaluate(number, parameters), _loss_and_accuracy
        )
        return result

    def _with_needs(self, ins: FitIns) -> FitIns:
        """Return the instruction with the names of the columns that the selector needs."""
        # A copy of the config, because base strategies send one config to all clients, and may keep it.
        return replace(ins, config={**ins.config, "needs": self.core.asks}) if self.core.asks else ins

    def _bounded_manager(self, manager: ClientManager) -> BoundedManager:
        """Return Flower's client manager with a bounded wait, for the base's own sampling."""
        # The round is the seed: the global generator is not used, and a resumed run draws the same clients.
        generator = np.random.default_rng(self.core.round)
        return BoundedManager(manager, self.wait_timeout, generator, self.roster.name, self.core.parts.busy)

    def _errors(self, arrived: legacy.Arrived) -> list[str]:
        return [str(failure) for failure in arrived.failures if isinstance(failure, BaseException)]

    def _models(self, arrived: legacy.Arrived) -> list[object]:
        return [res.parameters for _, res in arrived.results.values()]

    def _read(self, arrived: legacy.Arrived) -> dict[str, Reply]:
        refused = {failure[0].cid: failure[1] for failure in arrived.failures if isinstance(failure, tuple)}
        replies = {
            cid: legacy.reply_of(self.base, proxy, arrived.results.get(cid), refused.get(cid), self._model)
            for cid, proxy in self._dispatched.items()
        }
        self._timeout = next((proxy.timeout_s for proxy in self._dispatched.values()), None)
        # If a client has a grid, the grid's own wait has marked it as busy. The other clients are marked here.
        without_grid = [cid for cid, proxy in self._dispatched.items() if getattr(proxy.proxy, "grid", None) is None]
        self.core.parts.busy.owe(cid for cid in without_grid if replies[cid].timed_out)
        return replies

    def _base_result(
        self, arrived: legacy.Arrived, outcome: Outcome, faults: Mapping[str, str]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        keys = self.core.settings.keys
        dropped = outcome.left_out | {keys.of(name) for name in VECTORS.intersection(self.core.asks.split(","))}
        results = arrived.results | {key: bases.late_result(one) for key, one in outcome.late.items()}
        kept = [legacy.cleaned(results[cid], outcome.results[cid], keys.own_keys(), dropped) for cid in outcome.kept]
        if outcome.averaging is not None:
            counts = bases.as_counts(outcome.weights)
            kept = [(c, replace(res, num_examples=n)) for (c, res), n in zip(kept, counts, strict=True)]
        failures = arrived.failures_with(fault for cid, fault in faults.items() if cid in arrived.results)
        number = bases.aggregation_round(self.base, self.core.round)
        return self.base.aggregate_fit(number, kept, failures)  # type: ignore[no-any-return]

    _decode, _named = staticmethod(legacy.decode), staticmethod(legacy.to_checkpoint)

    def _encode(self, arrays: Arrays) -> Parameters:
        return ndarrays_to_parameters(list(arrays))

    def _weight_key(self) -> str:
        return "num_examples"

    def _read_evaluations(self, arrived: legacy.Arrived) -> dict[str, Evaluation]:
        return {
            cid: Evaluation(res.num_examples, [("loss", res.loss), *(res.metrics or {}).items()])
            for cid, (_, res) in arrived.results.items()
        }

    def _base_evaluation(
        self, arrived: legacy.Arrived, number: int, usable: list[str], faults: Mapping[str, str]
    ) -> tuple[float | None, dict[str, Scalar]]:
        most, limited = self.core.parts.registrar.max_examples(), []
        for client, res in map(arrived.results.__getitem__, usable):
            too_many = most and usable_count(res.num_examples) > most
            limited.append((legacy.unwrapped(client), replace(res, num_examples=most) if too_many else res))
        failures = arrived.failures_with(faults.values())
        return self.base.aggregate_evaluate(number, limited, failures)  # type: ignore[no-any-return]


def _loss_and_accuracy(result: tuple[float, dict[str, Scalar]]) -> tuple[object, ...]:
    return result[0], result[1].get("accuracy")
