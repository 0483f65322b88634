"""Client selection around any strategy of Flower's Message API: the round that all papers share.

``configure_train`` lets the selector choose the nodes that train, and ``aggregate_train`` reads their replies. The base
strategy configures and averages. :class:`~fedsel_flwr.rounds.core.SelectionCore` plays the round. This room translates
between it and Flower's messages.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.rounds.run_length import check_should_stop
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.adapter import Adapter
from fedsel_flwr.strategies.wrapping.failure_reasons import NOT_REACHED, no_answer
from fedsel_flwr.strategies.wrapping.grids import EarlyEnd, SnapshotGrid, TimedGrid, wait_for_nodes
from fedsel_flwr.strategies.wrapping.message_records import (
    Cleaner,
    metrics_of,
    names_and_arrays,
    renumber_rounds,
    reply_of,
)
from fedsel_flwr.strategies.wrapping.message_transport import (
    MessageTransport,
    addressed,
    by_node,
    configured,
    error_reply,
    sanitized,
)

logger = logging.getLogger("fedsel_flwr")


class SelectionStrategy(Adapter, Strategy):
    """Wraps a Message API strategy: the selector chooses the clients that train, ``base`` aggregates their updates.

    Make this the outermost wrapper, with differential-privacy wrappers inside. The options are those of
    :class:`fedsel_flwr.rounds.settings.Options`, described below. The attributes are those of
    :class:`fedsel_flwr.strategies.wrapping.adapter.Adapter`.

    A round:
        1. ``configure_train`` waits a bounded time for nodes, and registers new nodes with QUERY messages.
        2. The selector chooses nodes. Before that it may probe nodes with EVALUATE messages.
        3. One of the messages that ``base`` configures is the template, and each chosen node gets a copy. The
           strategies inside ``base`` see exactly these messages.
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

    strategy_type: ClassVar[type] = Strategy
    default_base = partial(FedAvg, fraction_evaluate=0.0)
    _timed: TimedGrid | None = None
    _names: tuple[str, ...] = ()
    _arrays: ArrayRecord | None = None
    _evaluates = False
    # The run's own, for probes.
    _evaluate_config: ConfigRecord | None = None
    _evaluating: tuple[Message, ...] = ()
    # The result that ``should_stop`` gets. Flower's own result does not leave its ``start`` before the run ends.
    _result_so_far: Result | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Run the rounds, and time the nodes on the server's clock; see ``flwr.serverapp.strategy.Strategy.start``.

        ``should_stop`` works with every version of flwr, although ``start`` does not have it up to 1.42. The strategy's
        own option applies too, with absolute rounds.

        A resumed run starts from the checkpoint's arrays instead of ``initial_arrays``. It runs ``num_rounds`` minus
        the finished rounds. The rounds in its result are absolute, and the result has no metrics of earlier rounds.

        Raises:
            RunError: There are checkpoints, but none can be used. Or a checkpoint cannot be written.
        """
        check_should_stop(should_stop)
        self._result_so_far = result_so_far = Result()
        signal = None if should_stop is None else lambda number, _: should_stop(number, result_so_far)
        checkpoint = self._begin_run({name: array.numpy() for name, array in initial_arrays.items()}, signal)
        done = 0 if checkpoint is None else checkpoint.round
        num_rounds = self._resuming.rounds_left(num_rounds, done)
        if checkpoint is not None:
            initial_arrays = ArrayRecord(
                {name: Array(a) for name, a in zip(checkpoint.names, checkpoint.model, strict=True)}
            )
        result_so_far.arrays = initial_arrays
        if self.core.settings.clock == "server":
            grid = self._timed = TimedGrid(grid)
            self._timed.late = self._late
        self._evaluates, self._timeout, self._evaluate_config = evaluate_fn is not None, timeout, evaluate_config
        recording = None if evaluate_fn is None else self._recording(evaluate_fn)
        if checkpoint is not None and not self._evaluates:
            # With a central evaluation, Flower's round 0 evaluates the checkpoint's round once more and closes it.
            self._end_round(0)
        start = partial(super().start, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config)
        # From flwr 1.43 on. Older versions count the remaining rounds, which choose no clients.
        if "should_stop" in inspect.signature(Strategy.start).parameters:
            start = partial(start, should_stop=lambda number, result: self.core.ended)
        with self.saving_on_error():
            result = start(recording)
        self.end_metrics()
        if checkpoint is not None:
            renumber_rounds(result, done)
            result.arrays = result.arrays or initial_arrays
        return result

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
        self._arrays, self._dispatched = arrays, {}
        # Before anything can fail, so that an error of this round can name the place of the model.
        self._keeper.keep(self.core.round, partial(names_and_arrays, arrays))
        if self._resuming.is_over:
            return []
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
        # The base waits without limit for its own minimum of nodes, although its messages are only templates.
        shown = SnapshotGrid(grid, nodes, self.wait_timeout, at_least=bases.min_available(self.base))
        messages = configured(self.base, self.core.round, arrays, config, shown, chosen)
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
            # No client was chosen, and ``choose`` already wrote the round to the history.
            return None, None
        # Converting the replies belongs to reading them, which ``collect`` does.
        self.core.stopwatch.switch("collect")
        self._check_actors(reply.error.reason or "" for reply in arrived.values() if reply.has_error())
        self._note_unanswered(self._dispatched, arrived)
        cleaner = self._cleaner()
        faults, key = cleaner.faults(arrived), cleaner.weight_key
        # The models are measured here, before the base, because a base may aggregate in place.
        outcome = self.core.collect(
            {node: self._reply(node, arrived.get(node), faults, key) for node in self._dispatched}
        )
        arrays: ArrayRecord | None = None
        metrics: MetricRecord | None = None
        if outcome.enough:
            bases.check_survivors(self.base, len(outcome.kept), self.core.round)
            # A base counts failures, for accept_failures or to calibrate noise, and an unusable update is a failure
            # too.
            failures = [
                sanitized(message) if message.has_error() else self._as_error(sent, outcome.results[node].problems)
                for node, sent in self._dispatched.items()
                if (message := arrived.get(node)) is not None
                and node not in outcome.usable
                and not outcome.results[node].spare
            ]
            usable = {node: arrived[node] for node in outcome.usable}
            kept = cleaner.cleaned(usable, outcome.results, outcome.kept, self._names)
            if outcome.averaging is not None:
                # Schemes compute floats, but bases expect integers as numbers of examples.
                for message, weight in zip(kept, outcome.weights.tolist(), strict=True):
                    metrics_of(message)[key] = int(weight) if weight.is_integer() else weight
            arrays, metrics = self.base.aggregate_train(self.core.round, [*kept, *failures])
        # Decoding a model takes time and memory, so it is skipped if no part reads the arrays.
        after = self._decode(arrays) if arrays is not None and self.core.reads_global(outcome) else None
        model = self.core.finish(after)
        if model is not None and model is not after:
            # The averaging scheme has mixed in the old model.
            arrays = self._encode(model)
        self._arrays = self._arrays if arrays is None else arrays
        self._keeper.keep(self.core.round, partial(names_and_arrays, self._arrays or ArrayRecord()))
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
        shown = SnapshotGrid(grid, free, self.wait_timeout, at_least=bases.min_evaluation_nodes(self.base))
        messages = self.base.configure_evaluate(self.core.numbering.absolute(server_round), arrays, config, shown)
        # SnapshotGrid adds invented nodes, and no client can evaluate on these.
        connected = frozenset(free)
        self._evaluating = tuple(message for message in messages if str(message.metadata.dst_node_id) in connected)
        return list(self._evaluating)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the base aggregate the replies with common metrics, in id order."""
        absolute = self.core.numbering.absolute(server_round)
        sent = {str(message.metadata.dst_node_id): message for message in self._evaluating}
        arrived = by_node(sent, replies)
        self._note_unanswered(sent, arrived)
        # Replies arrive in any order, and a sum of floats depends on the order.
        ordered = dict(sorted(arrived.items(), key=lambda item: id_order(self.roster.name(item[0]))))
        usable, faults = self._cleaner().evaluations(ordered)
        for node, fault in faults.items():
            logger.warning("round %d, client %s: evaluation: %s", absolute, self.roster.name(node), fault)
        failures = [
            sanitized(message) if message.has_error() else self._as_error(sent[node], (faults[node],))
            for node, message in ordered.items()
            if message.has_error() or node in faults
        ]
        aggregated: MetricRecord | None = self.base.aggregate_evaluate(absolute, [*usable, *failures])
        self._record_metrics("evaluate_metrics_clientapp", absolute, aggregated)
        if not self._evaluates:
            # Flower calls this even if no client evaluates: without a central evaluation it is the round's last call.
            save = partial(self._save, server_round, self._arrays)
            save()
            self.finish_round(server_round, tuple, save)
        return aggregated

    def _recording(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        """Return a central evaluation that also writes the checkpoint and records its results in the history."""

        def recording(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            number = self.core.numbering.absolute(server_round)
            save = partial(self._save, server_round, arrays)
            metrics: MetricRecord | None = None

            # finish_round calls this only if the evaluation of this round is due.
            def evaluate() -> tuple[object, ...]:
                nonlocal metrics
                metrics = evaluate_fn(number, arrays)
                self._record_metrics("evaluate_metrics_serverapp", number, metrics)
                return () if metrics is None else (metrics.get("loss"), metrics.get("accuracy"))

            save()
            self.finish_round(server_round, evaluate, save)
            return metrics

        return recording

    def _save(self, server_round: int, arrays: ArrayRecord | None) -> None:
        """Write the round's checkpoint, if one is due."""
        number = self.core.numbering.absolute(server_round)
        if arrays is not None and self._resuming.is_due(number):
            names, model = names_and_arrays(arrays)
            self.round_trained(number, model, names)
        self._resuming.hold(number)

    @property
    def _rejected(self) -> frozenset[str]:
        """Return the nodes whose last message the SuperLink did not accept; known only on the server's clock."""
        return frozenset() if self._timed is None else self._timed.rejected

    def _note_unanswered(self, sent: Mapping[str, Message], arrived: Collection[str]) -> None:
        """Mark nodes that were reached and have not answered as busy until their answer comes."""
        settled = {*arrived, *self._rejected}
        self._late.owe(message for node, message in sent.items() if node not in settled)

    def _record_metrics(self, kind: str, number: int, metrics: MetricRecord | None) -> None:
        """Add the metrics of a round to the result that ``should_stop`` gets."""
        if self._result_so_far is not None and metrics is not None:
            getattr(self._result_so_far, kind)[number] = metrics

    def _cleaner(self) -> Cleaner:
        # A new one in each round, because under "auto" max_examples follows the clients' last claims.
        return Cleaner(self.base, self.core.settings.keys, self.core.max_examples)

    def _decode(self, record: ArrayRecord) -> Arrays:
        """Return a record's arrays in the order of the model."""
        return [record[name].numpy() for name in self._names]

    def _encode(self, arrays: Arrays) -> ArrayRecord:
        """Return arrays under the names of the model."""
        return ArrayRecord({name: Array(np.asarray(a)) for name, a in zip(self._names, arrays, strict=True)})

    def _reply(self, node: str, message: Message | None, faults: dict[str, str], weight_key: str) -> Reply:
        """Return a node's reply, or the reason why it is missing, in plain types."""
        observed = self._timed.elapsed_s.get(node) if self._timed is not None else None
        if message is None and node in self._rejected:
            return Reply(error=NOT_REACHED)
        if message is None and self._timed is not None and self._timed.straggler_reply is not None:
            return self._timed.straggler_reply
        if message is None:
            return Reply(error=no_answer(self._timeout), timed_out=True)
        if node in faults:
            return Reply(error=faults[node], observed_s=observed)
        reply = reply_of(message, self._names, weight_key, observed, self.core.settings.keys)
        fault = bases.fault_in_model(self.base, (array.tobytes() for array in reply.arrays or ()))
        return replace(reply, error=fault) if fault and not reply.error else reply

    def _as_error(self, sent: Message, problems: tuple[str, ...]) -> Message:
        """Return an unusable reply as the error that the base expects."""
        return error_reply(sent, self._fault(str(sent.metadata.dst_node_id), problems))
