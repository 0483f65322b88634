"""Questions to many nodes at once, with a bounded wait: the core's transport in the Message API.

Messages to many nodes of a simulation, few of them on their way at once.

From a base strategy's message to those of the chosen nodes, and from their replies back.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.rounds.roll_call import NO_PROPERTIES, Registration
from fedsel_flwr.rounds.untrusted import indented_lines
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.failure_reasons import accepted, has_no_query, registrations
from fedsel_flwr.strategies.wrapping.grids import ShownGrid, TimedGrid
from fedsel_flwr.strategies.wrapping.message_records import everything_in, query
from fedsel_flwr.strategies.wrapping.waiting import FIRST, POLL_S, WINDOW, LateAnswers, crowds


def send_in_turn(
    grid: Grid, messages: Sequence[Message], timeout: float, *, first: int = FIRST, window: int = WINDOW
) -> tuple[list[Message], list[Message]]:
    """Send messages and wait for the replies; each reply makes room for two more, up to a window.

    Args:
        grid: Flower's grid.
        messages: What to send, in this order.
        timeout: Longest wait for all replies, seconds.
        first: Messages on their way before the first reply; after half the time the window opens without one.
        window: Messages on their way at most.

    Returns:
        The replies, and the messages that were sent; the others found no room in time.
    """
    patience, deadline = time.monotonic() + timeout / 2, time.monotonic() + timeout
    waiting = iter(messages)
    sent: list[Message] = []
    replies: list[Message] = []
    pending: set[str] = set()
    while True:
        opened = window if time.monotonic() >= patience else min(window, first + len(replies))
        room = opened - len(pending)
        if batch := list(islice(waiting, max(0, room))):
            sent += batch
            pending |= accepted(grid.push_messages(batch))
        arrived = list(grid.pull_messages(pending)) if pending else []
        pending -= {reply.metadata.reply_to_message_id for reply in arrived}
        replies += arrived
        if not pending and len(sent) == len(messages):
            return replies, sent
        if (left := deadline - time.monotonic()) <= 0:
            return replies, sent
        if not arrived:
            time.sleep(min(POLL_S, left))


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
    return NO_PROPERTIES if has_no_query(message.error) else None


def configured(
    base: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    crowd: ShownGrid | Grid,
    chosen: Sequence[str],
) -> dict[str, Message]:
    """What ``base`` configures for the chosen nodes.

    The innermost strategy's first message is the template. Those around it get one for each chosen node: a wrapper may
    count them, as that for differential privacy with an accountant does.

    Args:
        base: The wrapped strategy.
        server_round: The absolute round.
        arrays: The global model.
        config: The round's config.
        crowd: A grid that shows as many nodes as ``base`` asks for.
        chosen: The nodes.

    Returns:
        Node -> message, in the order of ``chosen``.

    Raises:
        RunError: The base decides itself who trains, or configures nothing.
    """
    bases.check_asks_who_trains(base)
    with _for_exactly(base, chosen):
        messages: list[Message] = list(base.configure_train(server_round, arrays, config, crowd))
    sent = {str(message.metadata.dst_node_id): message for message in messages}
    if len(messages) != len(chosen) or sent.keys() != {*chosen}:
        raise RunError(
            f"{type(base).__name__} configured {len(messages)} messages, but the selector chose {len(chosen)} nodes: "
            "this base decides itself who trains and cannot be combined with a selector"
        )
    return {node: sent[node] for node in chosen}


@contextmanager
def _for_exactly(base: Strategy, chosen: Sequence[str]) -> Iterator[None]:
    """Have the innermost strategy of ``base`` configure one message for each chosen node."""
    *_, inner = bases.layers(base)
    configure, own = inner.configure_train, vars(inner).get("configure_train")  # type: ignore[attr-defined]

    def for_the_chosen(*args: Any, **kwargs: Any) -> list[Message]:
        messages = list(configure(*args, **kwargs))
        if not messages:
            fraction = getattr(base, "fraction_train", getattr(inner, "fraction_train", "unknown"))
            raise RunError(
                f"{type(base).__name__} configured no message, its fraction_train is {fraction}: set fraction_train "
                "above 0; the selector decides how many train"
            )
        return [addressed(messages[0], node) for node in chosen]

    inner.configure_train = for_the_chosen  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if own is None:
            del inner.configure_train  # type: ignore[attr-defined]
        else:
            inner.configure_train = own  # type: ignore[attr-defined]


def addressed(template: Message, node: str, asks: str = "") -> Message:
    """The template's message to another node; arrays are shared, everything that may be changed is copied.

    Columns that the selector needs, ``asks``, stand under ``needs`` in the copy's config.
    """
    content = RecordDict()
    source = template.content
    for name in source:
        content[name] = source[name] if name in source.array_records else copy.deepcopy(source[name])
    if asks:
        if not content.config_records:
            content["config"] = ConfigRecord()
        next(iter(content.config_records.values()))["needs"] = asks
    metadata = template.metadata
    return Message(
        content=content,
        dst_node_id=int(node),
        message_type=metadata.message_type,
        ttl=metadata.ttl,
        group_id=metadata.group_id,
    )


def by_node(sent: Mapping[str, Message], replies: Iterable[Message]) -> dict[str, Message]:
    """Node -> reply, in the order sent. Errors may come from the SuperLink; the message they answer says whose."""
    node_of = {message.metadata.message_id: node for node, message in sent.items()}
    arrived = {
        node_of.get(reply.metadata.reply_to_message_id, str(reply.metadata.src_node_id)): reply for reply in replies
    }
    return {node: arrived[node] for node in sent if node in arrived}


def harmless(failure: Message) -> Message:
    """A client's error message as Flower may log it: none of its lines can pass for one of the log's own."""
    reason = indented_lines(failure.error.reason or "")
    if reason == (failure.error.reason or ""):
        return failure
    twin = copy.copy(failure)
    twin.error = Error(code=failure.error.code, reason=reason)
    return twin


def as_error(sent: Message, reason: str) -> Message:
    """An unusable reply as the error message that a base expects of a failed client."""
    return Message(error=Error(code=0, reason=reason), reply_to=sent)
