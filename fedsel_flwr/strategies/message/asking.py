"""Questions to many nodes at once, with a bounded wait: the core's transport in the Message API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from fedsel_flwr.rounds.busy import Busy
from fedsel_flwr.strategies.congestion import crowds
from fedsel_flwr.strategies.late import LateAnswers
from fedsel_flwr.strategies.message.grids import TimedGrid
from fedsel_flwr.strategies.message.records import everything_in, query
from fedsel_flwr.strategies.message.turns import send_in_turn


@dataclass(frozen=True)
class Asking:
    """The grid through which nodes can be asked, and the model a probe is about.

    Args:
        grid: Flower's grid.
        arrays: The current global model.
        timeout: Longest wait for all answers, seconds.
        late: Told of questions that were not answered in time.
    """

    grid: Grid
    arrays: ArrayRecord
    timeout: float
    late: LateAnswers = field(default_factory=lambda: LateAnswers(Busy()))

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Mapping[str, object] | None], list[str]]:
        """Ask nodes who they are: node -> what it said, None for an error; and the nodes that hang."""
        answers, asked = self._ask([query(node, MessageType.QUERY, {}) for node in nodes])
        said = {node: everything_in(m.content) if m.has_content() else None for node, m in answers.items()}
        return said, [node for node in asked if node not in said]

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Mapping[str, Mapping[str, object]]:
        """Have nodes evaluate the current model."""
        answers, _ = self._ask([query(node, MessageType.EVALUATE, dict(config), self.arrays) for node in nodes])
        return {node: everything_in(m.content) for node, m in answers.items() if m.has_content()}

    def _ask(self, messages: list[Message]) -> tuple[dict[str, Message], list[str]]:
        """Send questions and wait a bounded time; node -> answer, and the nodes that were asked."""
        inner = self.grid._grid if isinstance(self.grid, TimedGrid) else self.grid
        if crowds(inner):
            replies, sent = send_in_turn(inner, messages, self.timeout)
        else:
            replies, sent = list(inner.send_and_receive(messages, timeout=self.timeout)), messages
        asked = [str(message.metadata.dst_node_id) for message in sent]
        node_of = {message.metadata.message_id: node for message, node in zip(sent, asked, strict=True)}
        answers = {
            node_of[reply.metadata.reply_to_message_id]: reply
            for reply in replies
            if reply.metadata.reply_to_message_id in node_of
        }
        self.late.owe(message for message, node in zip(sent, asked, strict=True) if node not in answers)
        return answers, asked
