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
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roster import id_order
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.rounds.run_length import check_should_stop
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.adapter import Adapter
from fedsel_flwr.strategies.wrapping.aggregating import Evaluation
from fedsel_flwr.strategies.wrapping.failure_reasons import NOT_REACHED, no_answer
from fedsel_flwr.strategies.wrapping.grids import EarlyEnd, SnapshotGrid, TimedGrid, wait_for_nodes
from fedsel_flwr.strategies.wrapping.message_records import (
    Cleaner,
    metrics_of,
    names_and_arrays,
    record_of,
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
    taking_all,
)
from fedsel_flwr.strategies.wrapping.own_start import with_own_start

logger = logging.getLogger("fedsel_flwr")


class SelectionStrategy(Adapter, Strategy):
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

    strategy_type: ClassVar[type] = Strategy
    default_base = partial(FedAvg, fraction_evaluate=0.0)
    _timed: TimedGrid | None = None
    _names: tuple[str, ...] = ()
    _evaluates = False
    # Whether the base has configured nobody in this round.
    _skipped = False
    # The run's own, for probes.
    _evaluate_config: ConfigRecord | None = None
    _evaluating: tuple[Message, ...] = ()
    # While the base's own ``start`` runs: how often it has called Flower's loop; else None.
    _loops: int | None = None
    # The last absolute round that the base does not count, because its own ``start`` has begun another loop.
    _shown_from = 0
    _checkpoint: Checkpoint | None = None
    # The server's number of the round that is not closed yet.
    _open: int | None = None
    _recording_now = False
    # Loss and accuracy of the open round, from an evaluation that a base's function has called.
    _evaluated: tuple[object, ...] = ()
    _signals: list[Callable[[int, Result], bool]]
    # The result that ``should_stop`` gets. Flower's own result does not leave its ``start`` before the run ends.
    _result_so_far: Result | None = None

    @with_own_start
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

        A base's own ``start`` is called with the same arguments, and may call this one by ``super().start``. If it is a
        loop of its own, the run cannot be resumed.

        A resumed run starts from the checkpoint's arrays instead of ``initial_arrays``. It runs ``num_rounds`` minus
        the finished rounds. The rounds in its result are absolute, and the result has no metrics of earlier rounds.

        Raises:
            RunError: There are checkpoints, but none can be used. Or a checkpoint cannot be written. Or the run
                should be resumed, but the base has a loop of its own.
        """
        check_should_stop(should_stop)
        if self._loops is None:
            self._begin(initial_arrays, should_stop)
        elif should_stop is not None:
            self._signals.append(should_stop)
        if self._loops:
            # One more loop of a base's own ``start``, in which Flower counts from 1 again.
            self._close_open_round()
            self._checkpoint, self._shown_from = None, self.core.round
            self.core.begin_run(self.core.round, self._signal)
        self._loops = None if self._loops is None else self._loops + 1
        self._timeout, self._evaluates, checkpoint = timeout, evaluate_fn is not None, self._checkpoint
        self._evaluate_config = evaluate_config
        done = 0 if checkpoint is None else checkpoint.round
        num_rounds = self._resuming.rounds_left(num_rounds, done)
        if checkpoint is not None:
            initial_arrays = record_of(checkpoint)
        recording = None if evaluate_fn is None else self._recording(evaluate_fn)
        start = partial(
            super().start, self._timed_grid(grid), initial_arrays, num_rounds, timeout, train_config, evaluate_config
        )
        # From flwr 1.43 on. Older versions count the remaining rounds, which choose no clients.
        if "should_stop" in inspect.signature(Strategy.start).parameters:
            start = partial(start, should_stop=lambda number, result: self.core.ended)
        # A base's own start goes on. It may evaluate the last model, or catch an error.
        result = start(recording) if self._loops else self._guarded(lambda: start(recording))
        if checkpoint is not None:
            renumber_rounds(result, done)
            result.arrays = result.arrays or initial_arrays
        return result

    def _begin(self, initial_arrays: ArrayRecord | None, should_stop: Callable[[int, Result], bool] | None) -> None:
        """Begin a run, and load the checkpoint from which it is resumed."""
        self._result_so_far, self._signals, self._shown_from = Result(), [], 0
        if should_stop is not None:
            self._signals.append(should_stop)
        initial = None if initial_arrays is None else {name: one.numpy() for name, one in initial_arrays.items()}
        self._checkpoint = self._begin_run(initial, self._signal)
        arrays = initial_arrays if self._checkpoint is None else record_of(self._checkpoint)
        self._result_so_far.arrays = ArrayRecord() if arrays is None else arrays
        # A resumed run closes the checkpoint's round once more.
        self._open, self._model = 0, arrays

    def _signal(self, number: int, history: History) -> bool:
        """Return whether a signal that ``start`` got ends the run."""
        # A list, because every signal is called: each may count rounds.
        return any([stop(number, self._result_so_far or Result()) for stop in self._signals])

    def _run_own_start(self, start: Callable[..., Result], given: Mapping[str, Any], should_stop: Any) -> Result:
        """Run a base's own ``start``.

        Args:
            start: Calls it with other arguments in place of some of its own, by the ids of these.
            given: Its arguments that Flower knows.
            should_stop: The stop signal, if its own ``start`` does not take one.
        """
        check_should_stop(should_stop)
        grid, initial_arrays, evaluate_fn = given["grid"], given["initial_arrays"], given.get("evaluate_fn")
        self._begin(initial_arrays, should_stop)
        self._loops, self._evaluates, self._timeout = 0, evaluate_fn is not None, given.get("timeout")
        self._evaluate_config = given.get("evaluate_config")
        swapped = {id(initial_arrays): self._model, id(grid): self._timed_grid(grid)}
        if evaluate_fn is not None:
            swapped[id(evaluate_fn)] = self._recording(evaluate_fn)
        try:
            return self._guarded(lambda: start(swapped))
        finally:
            self._loops = None

    def _guarded(self, play: Callable[[], Result]) -> Result:
        """Play all rounds of a run, and end it."""
        with self.saving_on_error():
            result = play()
            self._close_open_round()
        self.end_metrics()
        return result

    def _timed_grid(self, grid: Any) -> Any:
        """Return a grid that times nodes, on the server's clock."""
        if self.core.settings.clock != "server" or grid is None:
            return grid
        if not isinstance(grid, TimedGrid):
            grid = TimedGrid(grid)
            grid.late = self._late
        self._timed = grid
        return grid

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

    def _close_open_round(self) -> None:
        """Close the round that no central evaluation has closed, if there is one."""
        if (server_round := self._open) is not None:
            self._open, save = None, partial(self._save, server_round, self._model)
            save()
            self.finish_round(server_round, lambda: self._evaluated, save)

    def _check_own_loop(self) -> None:
        """Refuse what a base's own loop of rounds cannot do."""
        base = type(self.base).__name__
        if self.core.settings.resume:
            raise RunError(
                f"start of {base} is a loop of its own, which begins at round 1, so that the run cannot be resumed. "
                "Leave resume out, or let its start call super().start"
            )
        if self._dispatched:
            raise RunError(
                f"start of {base} did not call self.aggregate_train after self.configure_train, so that the selector "
                "learned nothing. Call it once in each round"
            )

    def _recording(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        """Return a central evaluation that also writes the checkpoint and records its results in the history."""

        def recording(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            # A base may wrap the function that it gets, and Flower's loop records the outer one. Or it evaluates twice.
            if self._recording_now or server_round != self._open:
                inner = evaluate_fn(server_round, arrays)
                self._evaluated = _loss_and_accuracy(inner)
                return inner
            number = self.core.numbering.absolute(server_round)
            save = partial(self._save, server_round, arrays)
            metrics: MetricRecord | None = None

            # finish_round calls this only if the evaluation of this round is due.
            def evaluate() -> tuple[object, ...]:
                nonlocal metrics
                metrics = evaluate_fn(number - self._shown_from, arrays)
                self._record_metrics("evaluate_metrics_serverapp", number, metrics)
                return _loss_and_accuracy(metrics)

            self._recording_now = True
            try:
                save()
                self.finish_round(server_round, evaluate, save)
                self._open = None
            finally:
                self._recording_now = False
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


def _loss_and_accuracy(metrics: MetricRecord | None) -> tuple[object, ...]:
    return () if metrics is None else (metrics.get("loss"), metrics.get("accuracy"))


class _Replies:
    """The replies to a round's training (:class:`~fedsel_flwr.strategies.wrapping.aggregating.Replies`)."""

    def __init__(self, strategy: SelectionStrategy, arrived: Mapping[str, Message]) -> None:
        self._strategy, self._arrived = strategy, arrived
        self._cleaner = strategy._cleaner()

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
        reply = reply_of(message, strategy._names, self._cleaner.weight_key, observed, strategy.core.settings.keys)
        fault = bases.fault_in_model(strategy.base, (array.tobytes() for array in reply.arrays or ()))
        return replace(reply, error=fault) if fault and not reply.error else reply

    def base_result(
        self, outcome: Outcome, faults: Mapping[str, str]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        usable = {node: self._arrived[node] for node in outcome.usable}
        kept = self._cleaner.cleaned(usable, outcome.results, outcome.kept, self._strategy._names)
        if outcome.averaging is not None:
            # Schemes compute floats, but bases expect integers as numbers of examples.
            for message, weight in zip(kept, outcome.weights.tolist(), strict=True):
                metrics_of(message)[self._cleaner.weight_key] = int(weight) if weight.is_integer() else weight
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
        return {n: self._cleaner.evaluation(message) for n, message in self._arrived.items() if message.has_content()}

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
