"""Client selection around any strategy of Flower's Message API: the round that all papers share.

``configure_train`` asks the selector who trains, and ``aggregate_train`` reads what came back. The base strategy
configures and averages. The course of the round is :class:`~fedsel_flwr.rounds.core.SelectionCore`'s, and this room
translates Flower's messages for it.
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
    """Wraps a Message API strategy: a selector decides who trains, ``base`` decides how updates are aggregated.

    It is the outermost wrapper; differential-privacy wrappers go inside. Its options are those of
    :class:`fedsel_flwr.rounds.settings.Options`, explained below; its attributes are those of
    :class:`fedsel_flwr.strategies.wrapping.adapter.Adapter`.

    A round:
        1. ``configure_train`` waits a bounded time for nodes, and registers newcomers by QUERY messages.
        2. The selector chooses; before that it may probe nodes, by EVALUATE messages.
        3. One of the messages that ``base`` configures is the template, copied for each chosen node. Strategies that
           ``base`` consists of see exactly these messages.
        4. ``aggregate_train`` drops updates that cannot be used, and lets ``base`` aggregate copies of the others in a
           fixed order. The copies are alike in their keys, so that one odd reply cannot end the run.
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
    _evaluating: tuple[Message, ...] = ()
    # what ``should_stop`` is shown; Flower's own result does not leave its ``start`` before the run ends
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
        """Run the rounds; see ``flwr.serverapp.strategy.Strategy.start``. On the server's clock nodes are timed.

        ``should_stop`` works with every flwr, although ``start`` has none up to 1.42. The strategy's own option holds
        as well. Its rounds are absolute.

        A resumed run takes the checkpoint's arrays in place of ``initial_arrays``, and runs ``num_rounds`` minus the
        rounds that were done. The rounds in its result are absolute; the result has no metrics of earlier rounds.

        Raises:
            RunError: There are checkpoints, but none can be used; or a checkpoint cannot be written.
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
        self._evaluates, self._timeout = evaluate_fn is not None, timeout
        recording = None if evaluate_fn is None else self._recording(evaluate_fn)
        if checkpoint is not None and not self._evaluates:
            # with a central evaluation Flower's round 0 evaluates the checkpoint's round once more, and closes it
            self._end_round(0)
        start = partial(super().start, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config)
        # from flwr 1.43 on; an older one counts its remaining rounds, in which nobody is chosen
        if "should_stop" in inspect.signature(Strategy.start).parameters:
            start = partial(start, should_stop=lambda number, result: self.core.ended)
        with self.saving_on_error():
            result = start(recording)
        if checkpoint is not None:
            renumber_rounds(result, done)
            result.arrays = result.arrays or initial_arrays
        return result

    def summary(self) -> None:
        """Log the base's configuration."""
        self.base.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Choose nodes and return the base's message for each of them.

        Raises:
            RunError: Too few nodes were connected when the time was over, or the base decides itself who trains.
        """
        self._arrays, self._dispatched = arrays, {}
        # before anything can fail: an error of this round then says where the model is
        self._keeper.keep(self.core.round, partial(names_and_arrays, arrays))
        if self._resuming.is_over:
            return []
        self._late.grid = grid
        connected = partial(wait_for_nodes, grid, self.min_available, self.wait_timeout, "min_available")
        nodes = self._wait_for_free(connected)
        names, reference = names_and_arrays(arrays)
        self._names = tuple(names)
        transport = MessageTransport(grid, arrays, self._question_timeout, self._late)
        chosen = self.core.choose(nodes, reference, transport, server_round)
        if not chosen:
            return []
        # base waits without end for its own least number of nodes, although its messages are templates only
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
            # nobody was chosen, and the history got its record with the choice
            return None, None
        self._check_actors(reply.error.reason or "" for reply in arrived.values() if reply.has_error())
        self._note_unanswered(self._dispatched, arrived)
        cleaner = self._cleaner()
        faults, key = cleaner.faults(arrived), cleaner.weight_key
        # the models are measured in here, as a base may aggregate in place
        outcome = self.core.collect(
            {node: self._reply(node, arrived.get(node), faults, key) for node in self._dispatched}
        )
        arrays: ArrayRecord | None = None
        metrics: MetricRecord | None = None
        if outcome.enough:
            bases.check_survivors(self.base, len(outcome.kept), self.core.round)
            # a base counts failures, for accept_failures or to calibrate noise: an unusable update is one as well
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
                # schemes work on floats, but the numbers of examples that bases expect are integers
                for message, weight in zip(kept, outcome.weights.tolist(), strict=True):
                    metrics_of(message)[key] = int(weight) if weight.is_integer() else weight
            arrays, metrics = self.base.aggregate_train(self.core.round, [*kept, *failures])
        # decoding a model takes time and memory, so it is left out if nothing reads the arrays
        after = self._decode(arrays) if arrays is not None and self.core.reads_global(outcome) else None
        model = self.core.finish(after)
        if model is not None and model is not after:
            # the averaging scheme has mixed the old model in
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
        """Return the base's evaluation messages; waits a bounded time."""
        self._evaluating = ()
        if not bases.evaluates(self.base):
            return []
        if self._resuming.is_over and self.core.numbering.absolute(server_round) > self.core.round:
            # the run has ended, but Flower counts its remaining rounds
            return []
        needed = max(self.min_available, bases.min_evaluation_nodes(self.base))
        nodes = wait_for_nodes(grid, needed, self.wait_timeout, "evaluation by the base strategy")
        free = self.core.parts.busy.free(sorted(nodes, key=lambda node: id_order(self.roster.name(node))))
        shown = SnapshotGrid(grid, free, self.wait_timeout, at_least=bases.min_evaluation_nodes(self.base))
        messages = self.base.configure_evaluate(self.core.numbering.absolute(server_round), arrays, config, shown)
        # SnapshotGrid fills up with made-up nodes, which nobody can evaluate on
        connected = frozenset(free)
        self._evaluating = tuple(message for message in messages if str(message.metadata.dst_node_id) in connected)
        return list(self._evaluating)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the base aggregate the replies that are alike, in id order."""
        absolute = self.core.numbering.absolute(server_round)
        sent = {str(message.metadata.dst_node_id): message for message in self._evaluating}
        arrived = by_node(sent, replies)
        self._note_unanswered(sent, arrived)
        # replies arrive in any order, and a sum of floats depends on it
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
            # Flower calls this even if nobody evaluates: without a central evaluation it is the round's last call
            save = partial(self._save, server_round, self._arrays)
            save()
            self.finish_round(server_round, tuple, save)
        return aggregated

    def _recording(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        """Return the central evaluation that also writes the checkpoint and records its results in the history."""

        def recording(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            number = self.core.numbering.absolute(server_round)
            save = partial(self._save, server_round, arrays)
            metrics: MetricRecord | None = None

            # called by finish_round, and only if the evaluation of this round is due
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
        """Return the nodes whose last message the SuperLink did not take; known on the server's clock only."""
        return frozenset() if self._timed is None else self._timed.rejected

    def _note_unanswered(self, sent: Mapping[str, Message], arrived: Collection[str]) -> None:
        """Note the nodes that were reached and have not answered: they are busy until their answer comes."""
        settled = {*arrived, *self._rejected}
        self._late.owe(message for node, message in sent.items() if node not in settled)

    def _record_metrics(self, kind: str, number: int, metrics: MetricRecord | None) -> None:
        """Enter the metrics of a round into the result that ``should_stop`` is shown."""
        if self._result_so_far is not None and metrics is not None:
            getattr(self._result_so_far, kind)[number] = metrics

    def _cleaner(self) -> Cleaner:
        # a new one each round: under "auto" max_examples follows the clients' last claims
        return Cleaner(self.base, self.core.settings.keys, self.core.max_examples)

    def _decode(self, record: ArrayRecord) -> Arrays:
        """Return a record's arrays in the order of the model."""
        return [record[name].numpy() for name in self._names]

    def _encode(self, arrays: Arrays) -> ArrayRecord:
        """Return arrays under the names of the model."""
        return ArrayRecord({name: Array(np.asarray(a)) for name, a in zip(self._names, arrays, strict=True)})

    def _reply(self, node: str, message: Message | None, faults: dict[str, str], weight_key: str) -> Reply:
        """Return a node's reply, or the reason for its absence, in plain types."""
        observed = self._timed.elapsed_s.get(node) if self._timed is not None else None
        if message is None and node in self._rejected:
            return Reply(error=NOT_REACHED)
        if message is None and self._timed is not None and self._timed.straggler_reply is not None:
            return self._timed.straggler_reply
        if message is None:
            return Reply(error=no_answer(self._timeout), timed_out=True)
        if node in faults:
            return Reply(error=faults[node], observed_s=observed)
        reply = reply_of(message, self._names, weight_key, observed)
        fault = bases.fault_in_model(self.base, (array.tobytes() for array in reply.arrays or ()))
        return replace(reply, error=fault) if fault and not reply.error else reply

    def _as_error(self, sent: Message, problems: tuple[str, ...]) -> Message:
        """Return an unusable reply as the error that the base expects."""
        return error_reply(sent, self._fault(str(sent.metadata.dst_node_id), problems))
