"""Selection for Flower's Message API."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedsel_flwr.errors import RunError
from fedsel_flwr.strategies import bases
from fedsel_flwr.strategies.adapter import Adapter
from fedsel_flwr.strategies.core import Introduction
from fedsel_flwr.strategies.message.grids import CrowdGrid, SettledGrid, TimedGrid, wait_for_nodes
from fedsel_flwr.strategies.message.records import (
    addressed,
    cleaned,
    numbers_and_text,
    odd_ones_out,
    query,
    reference_of,
    reply_of,
)
from fedsel_flwr.strategies.replies import Reply


class SelectionStrategy(Adapter, Strategy):
    """Wraps a Message API strategy: a selector decides who trains, ``base`` decides how updates are aggregated.

    One of the messages that ``base`` configures is the template, sent with a copy of its record to each chosen node.
    New nodes are asked who they are by a QUERY message, probes are EVALUATE messages. Replies are cleaned before
    ``base`` sees them, so that one odd reply cannot end the run. Options and attributes are those of
    :class:`fedsel_flwr.strategies.adapter.Adapter`.

    References:
        Flower 1.22 to 1.41, ``flwr.serverapp.strategy.Strategy``.
    """

    strategy_type: ClassVar[type] = Strategy
    _timed: TimedGrid | None = None
    _names: tuple[str, ...] = ()
    _evaluates = False

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds; see ``flwr.serverapp.strategy.Strategy.start``. On the server's clock nodes are timed."""
        if self.core.settings.clock == "server":
            grid = self._timed = TimedGrid(grid)
        self._evaluates = evaluate_fn is not None
        entering = None if evaluate_fn is None else self._entering(evaluate_fn)
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, entering)

    def summary(self) -> None:
        """Log the base's configuration."""
        self.base.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Choose nodes and return the base's message for each of them."""
        nodes = wait_for_nodes(grid, self.min_available, self.wait_timeout, "min_available")
        self._call_roll(nodes, grid)
        self._probe(nodes, arrays, grid)
        chosen = self.core.choose(nodes)
        self._dispatched = {}
        if not chosen:
            self.core.finish(self.core.collect({}, None))
            return []
        names, self._reference = reference_of(arrays)
        self._names = tuple(names)
        template = self._template(server_round, arrays, config, grid, nodes)
        self._dispatched = {node: addressed(template, node) for node in chosen}
        return list(self._dispatched.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clean the replies, let the base aggregate them, and tell the selector what came back."""
        arrived = self._by_node(replies)
        if not self._dispatched and not arrived:
            return None, None  # nobody was chosen: the round is in the history already
        odd = odd_ones_out({node: m for node, m in arrived.items() if self._complete(m)}, self.core.settings.keys)
        outcome = self.core.collect({node: self._reply(node, m, odd) for node, m in arrived.items()}, self._reference)
        usable = cleaned(
            {node: arrived[node] for node in outcome.usable}, dict(outcome.results), self._names,
            self.core.settings.keys,
        )  # fmt: skip
        failures = [
            message if message.has_error() else self._as_error(node, outcome.results[node].problems)
            for node, message in arrived.items()
            if node not in outcome.usable and node in outcome.results
        ]
        aggregated: tuple[ArrayRecord | None, MetricRecord | None] = (None, None)
        if outcome.enough:
            bases.check_survivors(self.base, len(usable), server_round)
            aggregated = self.base.aggregate_train(server_round, [*usable, *failures])
        self.core.finish(outcome)
        return aggregated

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the base's evaluation messages; waits a bounded time."""
        if getattr(self.base, "fraction_evaluate", 1.0) == 0.0:
            return []
        needed = max(self.min_available, *(int(getattr(layer, "min_evaluate_nodes", 0))
                                           for layer in bases.layers(self.base)))  # fmt: skip
        nodes = wait_for_nodes(grid, needed, self.wait_timeout, "evaluation by the base strategy")
        nodes.sort(key=lambda node: self.roster.name(node))
        return list(self.base.configure_evaluate(server_round, arrays, config, SettledGrid(grid, nodes)))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the base aggregate."""
        aggregated: MetricRecord | None = self.base.aggregate_evaluate(server_round, list(replies))
        if not self._evaluates:
            self._end_round(server_round)
        return aggregated

    def _default_base(self) -> FedAvg:
        return FedAvg(fraction_evaluate=0.0)

    def _entering(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        """The central evaluation, entering what it finds into the history."""

        def entering(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays)
            if metrics is not None:
                self._enter_evaluation(server_round, metrics.get("loss"), dict(metrics.items()))
            self._end_round(server_round)
            return metrics

        return entering

    def _template(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, nodes: list[str]
    ) -> Message:
        name = type(self.base).__name__
        if any(bases.is_a(layer, "FedXgbCyclic") for layer in bases.layers(self.base)):
            raise RunError(f"{name} decides itself who trains, one node after the other; no selector can be combined")
        crowd = CrowdGrid(grid, nodes, bases.min_available(self.base))
        messages: list[Message] = list(self.base.configure_train(server_round, arrays, config, crowd))
        if not messages:
            fraction = getattr(self.base, "fraction_train", "unknown")
            raise RunError(
                f"{name} configured no message, its fraction_train is {fraction}: set fraction_train above 0; the "
                "selector decides how many train"
            )
        return messages[0]

    def _call_roll(self, nodes: list[str], grid: Grid) -> None:
        upcoming = self.core.round + 1
        due = self._roll_call.due(self.core.strangers(nodes), upcoming)
        if not due:
            return
        answers = self._ask([query(node, MessageType.QUERY, {}) for node in due], grid)
        keys = self.core.settings.keys
        said = {}
        for node, message in answers.items():
            facts = numbers_and_text(message.content) if message.has_content() else {}
            said[node] = Introduction(
                client_id=facts.get(keys.client_id),
                num_examples=facts.get(keys.num_examples, facts.get("num-examples")),
                energy_score=facts.get(keys.energy_score),
            )
        self._roll_call.missed([node for node in due if node not in said], upcoming)
        self.core.enroll(said)

    def _probe(self, nodes: list[str], arrays: ArrayRecord, grid: Grid) -> None:
        question = self.core.question(nodes)
        if question is None:
            return
        messages = [query(node, MessageType.EVALUATE, question.config, arrays) for node in question.nodes]
        answers = self._ask(messages, grid)
        self.core.answer({n: numbers_and_text(m.content) for n, m in answers.items() if m.has_content()})

    def _ask(self, messages: list[Message], grid: Grid) -> dict[str, Message]:
        """Send questions and wait a bounded time; node -> answer."""
        inner = grid._grid if isinstance(grid, TimedGrid) else grid
        replies = list(inner.send_and_receive(messages, timeout=self._roll_call.timeout))
        node_of = {message.metadata.message_id: str(message.metadata.dst_node_id) for message in messages}
        return {
            node_of[reply.metadata.reply_to_message_id]: reply
            for reply in replies
            if reply.metadata.reply_to_message_id in node_of
        }

    def _by_node(self, replies: Iterable[Message]) -> dict[str, Message]:
        """Node -> reply. Errors may come from the SuperLink; only the message they answer says whose they are."""
        node_of = {message.metadata.message_id: node for node, message in self._dispatched.items()}
        arrived = {}
        for reply in replies:
            node = node_of.get(reply.metadata.reply_to_message_id, str(reply.metadata.src_node_id))
            if node in self._dispatched:
                arrived[node] = reply
        return arrived

    def _complete(self, message: Message) -> bool:
        """Whether a reply can be compared with the others: no error, one MetricRecord."""
        return message.has_content() and len(message.content.metric_records) == 1

    def _reply(self, node: str, message: Message, odd: dict[str, str]) -> Reply:
        observed = self._timed.elapsed_s.get(node) if self._timed is not None else None
        if node in odd:
            return Reply(error=odd[node], observed_s=observed)
        return reply_of(message, self._names, self._weight_key, observed)

    @property
    def _weight_key(self) -> str:
        """Under which metric the base finds a client's weight."""
        keys = [getattr(layer, "weighted_by_key", None) for layer in bases.layers(self.base)]
        return next((key for key in keys if key is not None), "num-examples")

    def _as_error(self, node: str, problems: tuple[str, ...]) -> Message:
        """An unusable reply as the error message that the base expects of a failed client."""
        client = self.roster.name(node)
        return Message(
            error=Error(code=0, reason=f"client {client}: {'; '.join(problems)}"), reply_to=self._dispatched[node]
        )
