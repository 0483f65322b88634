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
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedsel_flwr.rounds.deadlines import Deadline
from fedsel_flwr.rounds.flights import Flights
from fedsel_flwr.rounds.late import SentModel
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.adapter import Evaluation
from fedsel_flwr.strategies.wrapping.arrivals import Arrivals, ProbeAnswers, Recalled
from fedsel_flwr.strategies.wrapping.failure_reasons import NOT_REACHED, no_answer
from fedsel_flwr.strategies.wrapping.grids import EarlyEnd, SnapshotGrid, wait_for_nodes
from fedsel_flwr.strategies.wrapping.message_records import Cleaner, late_message, reply_of, set_weights
from fedsel_flwr.strategies.wrapping.message_run import MessageRun
from fedsel_flwr.strategies.wrapping.message_transport import (
    MessageTransport,
    addressed,
    by_node,
    configured,
    failures_of,
    taking_all,
)

logger = logging.getLogger("fedsel_flwr")


class SelectionStrategy(MessageRun):
    """Wraps a Message API strategy: the selector chooses the clients that train, ``base`` aggregates their updates.

    Make this the outermost wrapper, with differential-privacy wrappers inside. The options are those of
    :class:`fedsel_flwr.rounds.settings.Options`. The attributes are those of
    :class:`fedsel_flwr.strategies.wrapping.adapter.Adapter`: ``selector``, ``base``, ``roster``, ``history``,
    ``last_model``.

    A round:
        1. ``configure_train`` waits a bounded time for nodes, and registers new nodes with QUERY messages.
        2. The selector chooses nodes. Before that it may probe nodes with EVALUATE messages.
        3. ``base`` configures messages. It sees exactly the chosen nodes, and each of them gets its own message.
        4. ``aggregate_train`` drops updates that cannot be used. ``base`` aggregates copies of the others in a fixed
           order. The copies have the same keys, so that one deviating reply cannot end the run.
        5. The selector observes the round, and the history gets its record.

    References:
        Flower 1.22 or newer, ``flwr.serverapp.strategy.Strategy``.

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
    # The names of the round's arrays, in the order of the arrays that the clients received.
    _names: tuple[str, ...] = ()
    # Whether the base has configured nobody in this round.
    _skipped = False
    _evaluating: Mapping[str, Message] = {}
    # In a round that a server before this one has begun: node -> its reply to that one, and the seconds until it came.
    # And the nodes that are not asked, because their reply is there, or because enough are.
    _recalled: Mapping[str, tuple[RecordDict, float]] = {}
    _unsent: frozenset[str] = frozenset()

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
        self._open, self._evaluated, self._skipped = server_round, (), False
        self._resuming.follow("train", config)
        if not self._begin_round(arrays):
            return []
        if not self.core.round:
            bases.check_trains(self.base)
        self._late.grid = grid
        nodes = self._wait_for_free(wait_for_nodes, grid)
        # Here, because the base may change the record.
        names, reference = self._named(arrays)
        self._names = tuple(names)
        transport = MessageTransport(grid, arrays, evaluate_config=self._evaluate_config, **self._asking)
        flights = self.core.parts.flights
        self.core.name_arrays(names)
        kept = self._kept_arrivals()
        recalled: Recalled | None = None
        if kept is None:
            chosen = self.core.choose(nodes, reference, transport, server_round)
        else:
            recalled = kept.recall(self.core.round + 1, reference, bool(self.core.settings.resume))
            chosen = self._choose_and_write(kept, recalled, nodes, reference, transport, server_round)
        sent = {} if flights is None else self._sent_again(flights, config, grid)
        if chosen:
            shown = SnapshotGrid(grid, chosen, self.wait_timeout)
            messages = configured(self.base, self.core.round - self._shown_from, arrays, config, shown, chosen)
            self._skipped = not messages
            if not messages:
                self.core.skip()
            sent |= messages
        self._dispatched = {node: addressed(message, node, self.core.asks) for node, message in sent.items()}
        known = {} if recalled is None else recalled.replies
        self._recalled = {node: known[one] for node in self._dispatched if (one := self.roster.name(node)) in known}
        self._unsent = frozenset(self._recalled)
        if self._timed is not None and flights is not None:
            self._timed.buffer, self._timed.patience_s = self.core.settings.buffer, self.core.settings.max_latency
        if self._timed is not None and self.core.settings.ends_early and self._dispatched:
            wanted = self.core.collector.waits_for(len(chosen))
            left = None if wanted is None else max(0, wanted - len(self._recalled))
            self._timed.early_end = EarlyEnd(left, self.core.current.deadline)
            self._unsent = frozenset(self._dispatched) if left == 0 else self._unsent
        if self._timed is not None and kept is not None:
            self._timed.on_reply = partial(self._write, kept)
        return [message for node, message in self._dispatched.items() if node not in self._unsent]

    def _choose_and_write(
        self, kept: Arrivals, recalled: Recalled | None, nodes: list[str], reference: Arrays,
        transport: MessageTransport, server_round: int,
    ) -> list[str]:  # fmt: skip
        """Choose nodes, in a round that is repeated among the same clients, and write among whom."""
        told, among = (None, None) if recalled is None else (recalled.answers, recalled.present)
        answers: Any = ProbeAnswers(transport, self.roster.name, told, self.core.parts.busy)
        chosen = self.core.choose(nodes, reference, answers, server_round, among)
        if chosen:
            kept.begin([self.roster.ids[row] for row in self.core.current.offered], answers.asked)
        for node in answers.silent:
            self.core.parts.busy.answered(node)
        return chosen

    def _write(self, kept: Arrivals, reply: Message, seconds: float) -> None:
        """Write a reply of the round in progress, as it arrives."""
        for node, message in by_node(self._dispatched, [reply]).items():
            kept.write(self.roster.name(node), message, seconds)

    def _sent_again(self, flights: Flights, config: ConfigRecord, grid: Grid) -> dict[str, Message]:
        """Return the messages to clients that were at work at the time of a checkpoint, with the models of then."""
        sent: dict[str, Message] = {}
        for batch in flights.lost(before=self.core.round):
            nodes = batch.busy_nodes
            shown = SnapshotGrid(grid, nodes, self.wait_timeout)
            number, model = batch.step - self._shown_from, self._encode(batch.model)
            # A copy, because the base writes the number of the round into the config.
            sent |= configured(self.base, number, model, ConfigRecord({**config}), shown, nodes)
        return sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Read the replies, let the base aggregate them, and report the round to the selector.

        Raises:
            RunError: The base needs more models, or Flower's simulation has lost its actors.
        """
        arrived = by_node({node: sent for node, (sent, _) in self._at_work.items()} | self._dispatched, replies)
        if self._recalled:
            arrived |= {
                node: Message(content, reply_to=self._dispatched[node]) for node, (content, _) in self._recalled.items()
            }
            arrived = {node: arrived[node] for node in self._dispatched if node in arrived}
            if self._timed is not None:
                self._timed.elapsed_s |= {node: seconds for node, (_, seconds) in self._recalled.items()}
        if not self._dispatched and not self.core.in_round:
            # The round is in the history already. Flower calls a base that has configured nobody too.
            return self.base.aggregate_train(self.core.round - self._shown_from, []) if self._skipped else (None, None)
        if self.core.parts.flights is None or self._timed is None:
            self._receive_late(self._note_unanswered(self._dispatched, arrived))
        arrays, metrics = self._aggregate(arrived)
        self._dispatched = {}
        self._record_metrics("train_metrics_clientapp", self.core.round, metrics)
        if self._result_so_far is not None and arrays is not None:
            self._result_so_far.arrays = arrays
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the base's evaluation messages, after a bounded wait for nodes."""
        self._evaluating = {}
        self._resuming.follow("evaluate", config)
        if not bases.evaluates(self.base):
            return []
        if self._resuming.is_over and self.core.numbering.absolute(server_round) > self.core.round:
            # The run has ended, but Flower counts its remaining rounds.
            return []
        least = bases.min_available(self.base, "min_available_nodes", "min_evaluate_nodes")
        # An evaluation of the base's own may need no node.
        needed = 0 if bases.outermost(self.base, "fraction_evaluate") == 0.0 else max(self.min_available, least)
        nodes = wait_for_nodes(grid, needed, self.wait_timeout, "evaluation by the base strategy")
        free = self.core.parts.busy.free(sorted(nodes, key=lambda node: id_order(self.roster.name(node))))
        if (flights := self.core.parts.flights) is not None:
            free = [node for node in free if node not in flights.nodes]
        shown = SnapshotGrid(grid, free, self.wait_timeout)
        with taking_all(self.base, dict.fromkeys(("min_evaluate_nodes", "min_available_nodes"), len(free))):
            number = self.core.numbering.absolute(server_round) - self._shown_from
            messages = list(self.base.configure_evaluate(number, arrays, config, shown))
        self._evaluating = {str(message.metadata.dst_node_id): message for message in messages}
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the base aggregate the replies with common metrics, in id order."""
        arrived = by_node(self._evaluating, replies)
        self._note_unanswered(self._evaluating, arrived)
        aggregated: MetricRecord | None = self._aggregate_evaluation(server_round, arrived)
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

    def _note_unanswered(self, sent: Mapping[str, Message], arrived: Collection[str]) -> list[Message]:
        """Mark nodes without an answer as busy until it comes, and return the messages that reached them."""
        settled = {*arrived, *self._rejected, *self._unsent}
        unanswered = [message for node, message in sent.items() if node not in settled]
        self._late.owe(unanswered)
        return unanswered

    def _receive_late(self, unanswered: Iterable[Message]) -> None:
        """Pass on the late replies to earlier rounds that have come, and note which may come after this round."""
        settings, timed = self.core.settings, self._timed
        if timed is None or not settings.reads_late:
            return
        if settings.round_deadline_s is not None:
            self.core.current.deadline = Deadline(timed.deadline_s)
        # Once more at the end, because a short round fetches none.
        self._late.fetch()
        for (sent, ended_s), message, took in self._late.take_arrived():
            reply = reply_of(self.base, message, self._model, took, settings.keys)
            sent.received(self.core, reply, max(0.0, took - ended_s))
        for message in unanswered:
            sent = SentModel.of(self.core, str(message.metadata.dst_node_id))
            self._late.kept[message.metadata.message_id] = (sent, timed.waited_s)

    @property
    def _cleaner(self) -> Cleaner:
        return Cleaner(self.base, self.core.settings.keys)

    @property
    def _sent(self) -> dict[str, RecordDict]:
        """The content that the clients have received; empty if replies are held against the global model."""
        sent = self._dispatched if self.core.settings.checks_structure else {}
        return {node: message.content for node, message in sent.items()}

    def _errors(self, arrived: Mapping[str, Message]) -> list[str]:
        return [message.error.reason or "" for message in arrived.values() if message.has_error()]

    def _models(self, arrived: Mapping[str, Message]) -> list[object]:
        return [message.content.array_records for message in arrived.values() if message.has_content()]

    def _read(self, arrived: Mapping[str, Message]) -> dict[str, Reply]:
        sent = self._sent
        if self._timed is not None and self.core.parts.flights is not None:
            # Those of earlier rounds too; the others of this round are at work.
            return {
                one.node: one.reply if isinstance(one.reply, Reply) else self._reply(one.node, one.reply, None)
                for one in self._timed.arrivals
            }
        return {node: self._reply(node, arrived.get(node), sent.get(node)) for node in self._dispatched}

    def _reply(self, node: str, message: Message | None, sent: RecordDict | None) -> Reply:
        """Return a node's reply, or the reason why it is missing, in plain types."""
        timed = self._timed
        observed = timed.elapsed_s.get(node) if timed is not None else None
        if message is None and node in self._rejected:
            return Reply(error=NOT_REACHED)
        if message is None and timed is not None and timed.straggler_reply is not None:
            return timed.straggler_reply
        if message is None:
            return Reply(error=no_answer(self._timeout), timed_out=True)
        reply = reply_of(self.base, message, self._model, observed, self.core.settings.keys, sent)
        fault = bases.fault_in_model(self.base, (array.tobytes() for array in reply.arrays or ()))
        return replace(reply, error=fault) if fault and not reply.error else reply

    def _landed(self, arrived: Mapping[str, Message], outcome: Outcome) -> Mapping[str, Message]:
        if self.core.parts.flights is None:
            return arrived
        self._at_work |= {node: (sent, None) for node, sent in self._dispatched.items()}
        self._at_work |= {node: (self._at_work[node][0], reply) for node, reply in arrived.items()}
        landed = {node: self._at_work.pop(node) for node in outcome.results}
        self._dispatched = {node: sent for node, (sent, _) in landed.items()}
        return {node: reply for node, (_, reply) in landed.items() if reply is not None}

    def _base_result(
        self, arrived: Mapping[str, Message], outcome: Outcome, faults: Mapping[str, str]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        template = next((arrived[node] for node in outcome.usable if node in arrived), None)
        late = {key: late_message(one, template, self._names, self.base) for key, one in outcome.late.items()}
        usable = {node: late.get(node) or arrived[node] for node in outcome.usable}
        kept = self._cleaner.cleaned(usable, outcome, self._model, self._sent)
        if outcome.averaging is not None:
            set_weights(kept, self._weight_key(), outcome.weights.tolist())
        failures = failures_of(self._dispatched, arrived, faults)
        number = self.core.round - self._shown_from
        return self.base.aggregate_train(number, [*kept, *failures])  # type: ignore[no-any-return]

    def _decode(self, model: ArrayRecord) -> Arrays:
        return [model[name].numpy() for name in self._names]

    def _encode(self, arrays: Arrays) -> ArrayRecord:
        return ArrayRecord({name: Array(np.asarray(one)) for name, one in zip(self._names, arrays, strict=True)})

    def _weight_key(self) -> str:
        return bases.weight_key(self.base)

    def _read_evaluations(self, arrived: Mapping[str, Message]) -> dict[str, Evaluation]:
        return self._cleaner.read_evaluations({node: one for node, one in arrived.items() if one.has_content()})

    def _base_evaluation(
        self, arrived: Mapping[str, Message], number: int, usable: list[str], faults: Mapping[str, str]
    ) -> MetricRecord | None:
        limit = self.core.parts.registrar.max_examples()
        cleaned = self._cleaner.evaluations({node: arrived[node] for node in usable}, limit)
        failures = failures_of(self._evaluating, arrived, faults)
        shown = number - self._shown_from
        return self.base.aggregate_evaluate(shown, [*cleaned, *failures])  # type: ignore[no-any-return]
