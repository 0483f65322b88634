"""Questions to many nodes at once, with a bounded wait: the core's transport in the Message API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from fedsel_flwr.rounds.busy import Busy
from fedsel_flwr.rounds.rollcall import CANNOT_SAY
from fedsel_flwr.rounds.transport import Registration
from fedsel_flwr.strategies.congestion import crowds
from fedsel_flwr.strategies.late import LateAnswers
from fedsel_flwr.strategies.message.grids import TimedGrid
from fedsel_flwr.strategies.message.records import everything_in, query
from fedsel_flwr.strategies.message.turns import send_in_turn
from fedsel_flwr.strategies.registry import registrations
from fedsel_flwr.strategies.silence import has_no_query


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
    one_first: ClassVar[bool] = True

    @property
    def simulated(self) -> bool:
        """Whether the nodes are those of Flower's simulation."""
        return crowds(self._inner)

    def registrations(self) -> Mapping[str, Registration] | None:
        """What the SuperLink says of its nodes."""
        return registrations(self._inner)

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Mapping[str, object] | None], list[str]]:
        """Ask nodes who they are: node -> what it said, None for an error; and the nodes that hang."""
        answers, asked = self._ask([query(node, MessageType.QUERY, {}) for node in nodes])
        said = {node: _facts(message) for node, message in answers.items()}
        return said, [node for node in asked if node not in said]

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Mapping[str, Mapping[str, object]]:
        """Have nodes evaluate the current model."""
        answers, _ = self._ask([query(node, MessageType.EVALUATE, dict(config), self.arrays) for node in nodes])
        return {node: everything_in(m.content) for node, m in answers.items() if m.has_content()}

    @property
    def _inner(self) -> Grid:
        """Flower's own grid: questions are not timed."""
        return self.grid._grid if isinstance(self.grid, TimedGrid) else self.grid

    def _ask(self, messages: list[Message]) -> tuple[dict[str, Message], list[str]]:
        """Send questions and wait a bounded time; node -> answer, and the nodes that were asked."""
        inner = self._inner
        if self.simulated:
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


def _facts(message: Message) -> Mapping[str, object] | None:
    """What an answer says, None for an error."""
    if message.has_content():
        return everything_in(message.content)
    return CANNOT_SAY if has_no_query(message.error) else None
