"""Client selection around any strategy of Flower's Message API: the round that all papers share.

``configure_train`` lets the selector choose the nodes that train, and ``aggregate_train`` reads their replies. The base
strategy configures and averages. :class:`~fedsel_flwr.rounds.core.SelectionCore` plays the round. This room translates
between it and Flower's messages.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.aggregating import Evaluation
from fedsel_flwr.strategies.wrapping.failure_reasons import NOT_REACHED, no_answer
from fedsel_flwr.strategies.wrapping.grids import EarlyEnd, SnapshotGrid, wait_for_nodes
from fedsel_flwr.strategies.wrapping.message_records import (
    Cleaner,
    names_and_arrays,
    reply_of,
    set_weights,
)
from fedsel_flwr.strategies.wrapping.message_run import MessageRun
from fedsel_flwr.strategies.wrapping.message_transport import (
    MessageTransport,
    addressed,
    by_node,
    configured,
    error_reply,
    sanitized,
    taking_all,
)

logger = logging.getLogger("fedsel_flwr")


class SelectionStrategy(MessageRun):
    """Wraps a Message API strategy: the selector chooses the clients that train, ``base`` aggregates their updates.

    Make this the outermost wrapper, with differential-privacy wrappers inside. The options are those of
    :class:`fedsel_flwr.rounds.settings.Options`, described below. The attributes are those of
    :class:`fedsel_flwr.strategies.wrapping.adapter.Adapter`.

    A round:
        1. ``configure_train`` waits a bounded time for nodes, and registers new nodes with QUERY messages.
        2. The selector chooses nodes. Before that it may probe nodes with EVALUATE messages.
        3. ``base`` configures messages. It sees exactly the chosen nodes, and each of them gets its own message.
        4. ``aggregate_train`` drops updates that cannot be used. ``base`` aggregates copies of the others in a fixed
           order. The copies have the same keys, so that one deviating reply cannot end the run.
        5. The selector observes the round, and the history gets its record.

    References:
        Flower 1.22 to 1.43, ``flwr.serverapp.strategy.Strategy``.

    >>> import numpy as np
    >>> from flwr.serverapp.strategy import FedAvgM
    >>> from fedsel_flwr.selectors import RoundRobin
    >>> from fedsel_flwr.testing.in_process import play_round
    >>> clients = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
    >>> strategy = SelectionStrategy(RoundRobin(clients_per_round=2), FedAvgM(fraction_evaluate=0.0))
    >>> play_round(strategy, clients, [np.zeros(2)])
    [array([0.5, 0.5])]
    >>> [(row.client_id, row.latency_s) for row in strategy.history.clients]
    [('0', 0.5), ('1', 1.5)]
    """

    default_base = partial(FedAvg, fraction_evaluate=0.0)
    _names: tuple[str, ...] = ()
    # Whether the base has configured nobody in this round.
    _skipped = False
    _evaluating: tuple[Message, ...] = ()

    def summary(self) -> None:
        """Log the base's configuration, and which selector chooses."""
        self.base.summary()
        logger.info("strategy: %s", self.core.summary(self.base))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Choose nodes and return the base's message for each of them.

        Raises:
            RunError: Too few nodes were connected at the end of the wait, or the base chooses the nodes itself.
        """
        # Questions are no business of a grid that the base puts around Flower's.
        grid = self._grid or grid
        if self._loops == 0:
            self._check_own_loop()
        self._close_open_round()
        self._model, self._dispatched, self._skipped = arrays, {}, False
        self._open, self._evaluated = server_round, ()
        # Before anything can fail, so that an error of this round can name the place of the model.
        self._keeper.keep(self.core.round, partial(names_and_arrays, arrays))
        if self._resuming.is_over:
            return []
        if not self.core.round:
            bases.check_trains(self.base)
        self.begin_metrics()
        self._late.grid = grid
        connected = partial(wait_for_nodes, grid, self.min_available, self.wait_timeout, "min_available")
        nodes = self._wait_for_free(connected)
        names, reference = names_and_arrays(arrays)
        self._names = tuple(names)
        transport = MessageTransport(grid, arrays, evaluate_config=self._evaluate_config, **self._asking)
        chosen = self.core.choose(nodes, reference, transport, server_round)
        if not chosen:
            return []
        shown = SnapshotGrid(grid, chosen, self.wait_timeout)
        messages = configured(self.base, self.core.round - self._shown_from, arrays, config, shown, chosen)
        self._skipped = not messages
        if not messages:
            self.core.skip()
        self._dispatched = {node: addressed(message, node, self.core.asks) for node, message in messages.items()}
        if self._timed is not None and self.core.settings.ends_early:
            self._timed.early_end = EarlyEnd(self.core.waits_for(len(chosen)), self.core.settings.round_deadline_s)
        return list(self._dispatched.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Read the replies, let the base aggregate them, and report the round to the selector.

        Raises:
            RunError: The base needs more models, or Flower's simulation has lost its actors.
        """
        arrived = by_node(self._dispatched, replies)
        if not self._dispatched:
            # The round is in the history already. Flower calls a base that has configured nobody too.
            return self.base.aggregate_train(self.core.round - self._shown_from, []) if self._skipped else (None, None)
        self._note_unanswered(self._dispatched, arrived)
        arrays, metrics = self._aggregate(_Replies(self, arrived))
        self._dispatched = {}
        self._record_metrics("train_metrics_clientapp", self.core.round, metrics)
        if self._result_so_far is not None and arrays is not None:
            self._result_so_far.arrays = arrays
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the base's evaluation messages, after a bounded wait for nodes."""
        self._evaluating = ()
        if not bases.evaluates(self.base):
            return []
        if self._resuming.is_over and self.core.numbering.absolute(server_round) > self.core.round:
            # The run has ended, but Flower counts its remaining rounds.
            return []
        needed = max(self.min_available, bases.min_evaluation_nodes(self.base))
        nodes = wait_for_nodes(grid, needed, self.wait_timeout, "evaluation by the base strategy")
        free = self.core.parts.busy.free(sorted(nodes, key=lambda node: id_order(self.roster.name(node))))
        shown = SnapshotGrid(grid, free, self.wait_timeout)
        with taking_all(self.base, dict.fromkeys(("min_evaluate_nodes", "min_available_nodes"), len(free))):
            number = self.core.numbering.absolute(server_round) - self._shown_from
            messages = self.base.configure_evaluate(number, arrays, config, shown)
            self._evaluating = tuple(messages)
        return list(self._evaluating)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the base aggregate the replies with common metrics, in id order."""
        sent = {str(message.metadata.dst_node_id): message for message in self._evaluating}
        arrived = by_node(sent, replies)
        self._note_unanswered(sent, arrived)
        aggregated: MetricRecord | None = self._aggregate_evaluation(server_round, _Evaluations(self, sent, arrived))
        absolute = self.core.numbering.absolute(server_round)
        self._record_metrics("evaluate_metrics_clientapp", absolute, aggregated)
        if not self._evaluates and self._loops is None:
            # Flower calls this even if no client evaluates: without a central evaluation it is the round's last call.
            self._close_open_round()
        return aggregated

    @property
    def _rejected(self) -> frozenset[str]:
        """Return the nodes whose last message the SuperLink did not accept; known only on the server's clock."""
        return frozenset() if self._timed is None else self._timed.rejected

    def _note_unanswered(self, sent: Mapping[str, Message], arrived: Collection[str]) -> None:
        """Mark nodes that were reached and have not answered as busy until their answer comes."""
        settled = {*arrived, *self._rejected}
        self._late.owe(message for node, message in sent.items() if node not in settled)

    def _cleaner(self) -> Cleaner:
        # A new one in each round, because under "auto" max_examples follows the clients' last claims.
        return Cleaner(self.base, self.core.settings.keys, self.core.max_examples)


class _Replies:
    """The replies to a round's training (:class:`~fedsel_flwr.strategies.wrapping.aggregating.Replies`)."""

    def __init__(self, strategy: SelectionStrategy, arrived: Mapping[str, Message]) -> None:
        self._strategy, self._arrived = strategy, arrived
        self._cleaner = strategy._cleaner()
        # Empty if replies are held against the global model.
        sent = strategy._dispatched if strategy.core.settings.checks_structure else {}
        self._sent: dict[str, RecordDict] = {node: message.content for node, message in sent.items()}

    def errors(self) -> list[str]:
        return [message.error.reason or "" for message in self._arrived.values() if message.has_error()]

    def models(self) -> list[object]:
        return [message.content.array_records for message in self._arrived.values() if message.has_content()]

    def read(self) -> dict[str, Reply]:
        faults = self._cleaner.faults(self._arrived)
        return {node: self._reply(node, self._arrived.get(node), faults) for node in self._strategy._dispatched}

    def _reply(self, node: str, message: Message | None, faults: Mapping[str, str]) -> Reply:
        """Return a node's reply, or the reason why it is missing, in plain types."""
        strategy, timed = self._strategy, self._strategy._timed
        observed = timed.elapsed_s.get(node) if timed is not None else None
        if message is None and node in strategy._rejected:
            return Reply(error=NOT_REACHED)
        if message is None and timed is not None and timed.straggler_reply is not None:
            return timed.straggler_reply
        if message is None:
            return Reply(error=no_answer(strategy._timeout), timed_out=True)
        if node in faults:
            return Reply(error=faults[node], observed_s=observed)
        reply = reply_of(
            message,
            strategy._model,
            self._cleaner.weight_key,
            observed,
            strategy.core.settings.keys,
            self._sent.get(node),
        )
        fault = bases.fault_in_model(strategy.base, (array.tobytes() for array in reply.arrays or ()))
        return replace(reply, error=fault) if fault and not reply.error else reply

    def base_result(
        self, outcome: Outcome, faults: Mapping[str, str]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        usable = {node: self._arrived[node] for node in outcome.usable}
        kept = self._cleaner.cleaned(usable, outcome, self._strategy._model, self._sent)
        if outcome.averaging is not None:
            set_weights(kept, self._cleaner.weight_key, outcome.weights.tolist())
        failures = failures_of(self._strategy._dispatched, self._arrived, faults)
        result: tuple[ArrayRecord | None, MetricRecord | None]
        strategy = self._strategy
        result = strategy.base.aggregate_train(strategy.core.round - strategy._shown_from, [*kept, *failures])
        return result

    def decode(self, model: ArrayRecord) -> Arrays:
        return [model[name].numpy() for name in self._strategy._names]

    def encode(self, arrays: Arrays) -> ArrayRecord:
        named = zip(self._strategy._names, arrays, strict=True)
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in named})

    def named(self, model: ArrayRecord) -> tuple[list[str], Arrays]:
        return names_and_arrays(model)


class _Evaluations:
    """The replies to an evaluation (:class:`~fedsel_flwr.strategies.wrapping.aggregating.Evaluations`)."""

    def __init__(
        self, strategy: SelectionStrategy, sent: Mapping[str, Message], arrived: Mapping[str, Message]
    ) -> None:
        self._strategy, self._sent, self._arrived = strategy, sent, arrived
        self._cleaner = strategy._cleaner()
        self.weight_key = self._cleaner.weight_key

    def read(self) -> dict[str, Evaluation]:
        return self._cleaner.read_evaluations({n: one for n, one in self._arrived.items() if one.has_content()})

    def base_result(self, number: int, usable: list[str], faults: Mapping[str, str]) -> MetricRecord | None:
        cleaned = self._cleaner.evaluations({node: self._arrived[node] for node in usable})
        failures = failures_of(self._sent, self._arrived, faults)
        number -= self._strategy._shown_from
        result: MetricRecord | None = self._strategy.base.aggregate_evaluate(number, [*cleaned, *failures])
        return result


def failures_of(
    sent: Mapping[str, Message], arrived: Mapping[str, Message], faults: Mapping[str, str]
) -> list[Message]:
    """Return the failures that a base expects: the clients' own errors, and one in place of each unusable reply."""
    return [
        sanitized(message) if message.has_error() else error_reply(sent[node], faults[node])
        for node, message in arrived.items()
        if message.has_error() or node in faults
    ]
