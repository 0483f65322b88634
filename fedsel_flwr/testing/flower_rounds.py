"""Rounds with the fleet in either of Flower's APIs: Flower's loop, and readers of instructions, replies and models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import Parameters, ndarrays_to_parameters, parameters_to_ndarrays

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.flower import task_identity
from fedsel_flwr.testing.fleet import Model
from fedsel_flwr.testing.in_process import (
    RUN,
    SERVER,
    TASK,
    InProcessGrid,
    arrays_of,
    config_of,
    legacy_replies,
    manager_of,
    record_of,
)
from fedsel_flwr.testing.observed_run import ObservedRun, ReceivedUpdate, watch

TIMEOUT_S = 0.3
"""Seconds that the strategy waits for clients that never answer, if the strategy times clients."""


class LegacyRounds:
    """The legacy API, with a loop of rounds as in Flower's server.

    Attributes:
        configure: Name of the strategy's method that configures training.
        aggregate: Name of the method that aggregates the replies.
    """

    configure, aggregate = "configure_fit", "aggregate_fit"

    def configs(self, instructions: Any) -> list[tuple[str, dict[str, Any]]]:
        """Return the node id and the config of each instruction."""
        return [(client.cid, dict(ins.config)) for client, ins in instructions]

    def updates(self, *replies: Any) -> tuple[list[ReceivedUpdate], int]:
        """Return the updates, and the number of failures, that ``aggregate`` was called with."""
        results, failures = replies
        received = [ReceivedUpdate(client.cid, self.model(res.parameters), res.num_examples) for client, res in results]
        return received, len(failures)

    def model(self, aggregated: Parameters) -> Model:
        """Return the arrays of the model that ``aggregate`` returned."""
        try:
            return parameters_to_ndarrays(aggregated)
        except Exception:
            # A fault may have sent anything; undecodable bytes equal no update.
            return []

    def play(self, run: ObservedRun, rounds: int) -> None:
        """Play rounds as Flower does. The run's strategy must already be watched."""
        strategy, fleet = run.strategy, run.fleet
        parameters = ndarrays_to_parameters(run.model)
        for number in range(1, rounds + 1):
            run.begin_round()
            asked = {"server_round": number, "client_manager": manager_of(fleet)}
            if number == 1:
                self._check_initial(strategy.initialize_parameters(asked["client_manager"]), fleet.arrays)
            if instructions := strategy.configure_fit(**asked, parameters=parameters):
                new, _ = strategy.aggregate_fit(number, *legacy_replies(fleet, instructions, "fit", number))
                parameters = parameters if new is None else new
            strategy.evaluate(number, parameters)
            if instructions := strategy.configure_evaluate(**asked, parameters=parameters):
                strategy.aggregate_evaluate(number, *legacy_replies(fleet, instructions, "evaluate", number))

    def _check_initial(self, parameters: Parameters, arrays: Model) -> None:
        got, wanted = [a.shape for a in self.model(parameters)], [a.shape for a in arrays]
        if got != wanted:
            raise ParameterError(
                f"arrays must be the strategy's initial model, but its base starts from shapes {got} and arrays has "
                f"shapes {wanted}. Give both the same model"
            )


class MessageRounds:
    """The Message API, with Flower's own loop of rounds. Attributes and methods are those of :class:`LegacyRounds`."""

    configure, aggregate = "configure_train", "aggregate_train"

    def configs(self, instructions: Iterable[Message]) -> list[tuple[str, dict[str, Any]]]:
        """Return the node id and the config of each instruction."""
        return [(str(message.metadata.dst_node_id), config_of(message)) for message in instructions]

    def updates(self, *replies: Any) -> tuple[list[ReceivedUpdate], int]:
        """Return the updates, and the number of failures, that ``aggregate`` was called with."""
        (messages,) = replies
        good = [message for message in messages if message.has_content()]
        return [self._update(message) for message in good], len(messages) - len(good)

    def model(self, aggregated: ArrayRecord) -> Model:
        """Return the arrays of the model that ``aggregate`` returned."""
        return arrays_of(aggregated)

    def play(self, run: ObservedRun, rounds: int) -> None:
        """Play rounds as Flower does. The run's strategy must already be watched."""
        watch(run.strategy, self.configure, before=lambda *_: run.begin_round())
        # Flower refuses to construct messages outside of a run.
        with task_identity(RUN, TASK, SERVER):
            # By name, because a base's own ``start`` may take some of these as further keywords only.
            run.strategy.start(
                grid=InProcessGrid(run.fleet),
                initial_arrays=record_of(run.model),
                num_rounds=rounds,
                timeout=TIMEOUT_S,
                train_config=ConfigRecord({"fleet-train": 1}),
                evaluate_config=ConfigRecord({"fleet-evaluate": 2}),
                evaluate_fn=lambda number, arrays: MetricRecord({"loss": 1.0 / (number + 1), "accuracy": 0.5}),
            )

    def _update(self, message: Message) -> ReceivedUpdate:
        (metrics,) = message.content.metric_records.values()
        try:
            arrays = arrays_of(next(iter(message.content.array_records.values())))
        except Exception:
            # A fault may have sent anything; undecodable bytes equal no update.
            arrays = []
        return ReceivedUpdate(str(message.metadata.src_node_id), arrays, metrics.get("num-examples", float("nan")))


FlowerRounds = LegacyRounds | MessageRounds
"""One of Flower's APIs, as the harness uses it."""
