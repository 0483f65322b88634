"""Transport of the Message API: the roll call, probes and the round's messages to many nodes at once.

:class:`MessageTransport` asks nodes for their identity, and lets them measure the model. :func:`configured` gets one
message for each chosen node from a base strategy, and :func:`addressed` adds the selector's wishes. :func:`by_node`
sorts the replies.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import isdatadescriptor
from itertools import islice
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.roll_call import NO_PROPERTIES, Answers
from fedsel_flwr.rounds.untrusted import indented_lines, shown
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.failure_reasons import has_no_query, reason_of
from fedsel_flwr.strategies.wrapping.grids import FIRST_WINDOW, WINDOW, TimedGrid, Transport, accepted
from fedsel_flwr.strategies.wrapping.message_records import entries_in

POLL_S = 0.05
"""Seconds between two requests for answers in a simulation, in which a request needs no network."""


@dataclass(frozen=True)
class MessageTransport(Transport):
    """Reaches the nodes of the Message API for the roll call and for probes of the current model.

    Args:
        grid: Flower's grid.
        arrays: The current global model.
        evaluate_config: The run's config of evaluations, which a probe carries too.
        **options: Those of :class:`~fedsel_flwr.strategies.wrapping.grids.Transport`, by keyword.
    """

    grid: Grid
    arrays: ArrayRecord
    evaluate_config: ConfigRecord | None = None
    # An app without a query function answers with an error and its traceback, so one such answer is enough.
    one_first: ClassVar[bool] = True

    @property
    def inner(self) -> Any:
        """Flower's own grid. A timed grid keeps the times of the round, and questions must not overwrite them."""
        return self.grid._grid if isinstance(self.grid, TimedGrid) else self.grid

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Mapping[str, object] | None], list[str]]:
        """Ask nodes for their properties: node -> properties, None for an error; and the nodes that hang."""
        answers, asked = self._ask([query(node, MessageType.QUERY, {"config": ConfigRecord()}) for node in nodes])
        facts = {node: self._facts(message) for node, message in answers.items()}
        return facts, [node for node in asked if node not in facts]

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Answers:
        """Let nodes evaluate the current model; the message is that of Flower's own evaluation, and names the probe."""
        model, config_name = bases.record_names(self.base)
        sent = {**(self.evaluate_config or {}), "server-round": config["round"], **config}
        answers, _ = self._ask(
            [query(node, MessageType.EVALUATE, {model: self.arrays, config_name: ConfigRecord(sent)}) for node in nodes]
        )
        self.check_errors(message.error.reason or "" for message in answers.values() if message.has_error())
        return {
            node: entries_in(m.content, self.keys) if m.has_content() else reason_of(m.error)
            for node, m in answers.items()
        }

    def _ask(self, messages: list[Message]) -> tuple[dict[str, Message], list[str]]:
        """Send questions and wait a bounded time; return node -> answer, and the nodes that were asked."""
        if self.simulated:
            replies, sent = self._send_windowed(messages)
        else:
            # A timed grid of its own: an answer that is uploaded must not hold up the others.
            timed = TimedGrid(self.inner)
            timed.late = self.late
            replies, sent = timed.send_and_receive(messages, timeout=self.timeout), messages
        asked = [str(message.metadata.dst_node_id) for message in sent]
        answers = by_node(dict(zip(asked, sent, strict=True)), replies)
        self.late.owe(message for message, node in zip(sent, asked, strict=True) if node not in answers)
        return answers, asked

    def _send_windowed(self, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """Send messages and wait for the replies; after each reply two more messages are sent, up to a window.

        ``FIRST_WINDOW`` messages are in flight before the first reply, and ``WINDOW`` at most. After half the time the
        window opens without a reply.

        Args:
            messages: The messages to send, in this order.

        Returns:
            The replies, and the messages that were sent. The other messages had no room in time.
        """
        grid, timeout, startup, began = self.inner, self.timeout, self.startup, time.monotonic()
        waiting = iter(messages)
        sent: list[Message] = []
        replies: list[Message] = []
        pending: set[str] = set()
        while True:
            # Each reply opens the window and decreases ``pending``, so two more messages follow.
            # If the first nodes hang, the others must still be asked.
            open_at = startup.deadline(began, timeout) - timeout / 2
            opened = WINDOW if time.monotonic() >= open_at else min(WINDOW, FIRST_WINDOW + len(replies))
            room = opened - len(pending)
            if batch := list(islice(waiting, max(0, room))):
                sent += batch
                pending |= accepted(grid.push_messages(batch))
            arrived = list(grid.pull_messages(pending)) if pending else []
            pending -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
            if arrived:
                startup.answered()
            if not pending and len(sent) == len(messages):
                return replies, sent
            if (left := startup.deadline(began, timeout) - time.monotonic()) <= 0:
                return replies, sent
            if not arrived:
                time.sleep(min(POLL_S, left))

    def _facts(self, message: Message) -> Mapping[str, object] | None:
        """Return the content of an answer; None for an error."""
        if message.has_content():
            return entries_in(message.content, self.keys)
        return NO_PROPERTIES if has_no_query(message.error) else None


def configured(
    base: Strategy, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, chosen: Sequence[str]
) -> dict[str, Message]:
    """Return the messages that ``base`` configures for the chosen nodes, each node's own.

    A node without a message gets a copy of another node's, if all messages have the same content.

    Args:
        base: The wrapped strategy.
        server_round: The absolute round.
        arrays: The global model.
        config: The round's config.
        grid: A grid that shows the chosen nodes.
        chosen: The nodes.

    Returns:
        Node -> message, in the order of ``chosen``; empty if the base configures no client in this round.

    Raises:
        RunError: The base sends messages to other nodes, several to one node, or different ones to a part of the nodes.
    """
    limits = {"fraction_train": float("1"), "min_train_nodes": len(chosen), "min_available_nodes": len(chosen)}
    with taking_all(base, limits):
        messages: list[Message] = list(base.configure_train(server_round, arrays, config, grid))
    sent = {str(message.metadata.dst_node_id): message for message in messages}
    others = sent.keys() - {*chosen}
    differ = 0 < len(sent) < len(chosen) and any(one.content != messages[0].content for one in messages)
    if len(sent) < len(messages) or others or differ:
        fault = f"{len(messages)} messages to {len(sent)} nodes"
        fault += f", {shown(sorted(others))} among them" if others else ", with different contents" if differ else ""
        raise RunError(
            f"{type(base).__name__} configured {fault}, but the selector chose {len(chosen)} nodes, {shown(chosen)}. A "
            "base that chooses clients itself cannot have a selector. Let it send one message to each node of its grid"
        )
    return {node: sent.get(node) or addressed(messages[0], node) for node in chosen} if sent else {}


@contextmanager
def taking_all(base: object, limits: Mapping[str, float]) -> Iterator[None]:
    """Let every layer of ``base`` take all of the nodes that it sees, for one call.

    Args:
        base: The wrapped strategy.
        limits: Attribute -> its largest value for the call; a fraction has this value, unless it is 0. What the base
            itself assigns during the call stays.
    """
    changed = []
    for layer in bases.layers(base):
        for name, most in limits.items():
            old, described = getattr(layer, name, None), isdatadescriptor(getattr(type(layer), name, None))
            # Some classes declare the number, and their objects have no such attribute.
            before = old if described or name in vars(layer) else None
            if isinstance(old, int | float) and old and (old > most or name.startswith("fraction")):
                # A property without a setter stays as it is.
                with suppress(AttributeError):
                    setattr(layer, name, most)
                    changed.append((layer, name, described, most, before))
    try:
        yield
    finally:
        for layer, name, described, most, before in changed:
            now = getattr(layer, name)
            if now == most if described else now is most:
                delattr(layer, name) if before is None else setattr(layer, name, before)


def query(node: str, message_type: str, records: dict[str, Any]) -> Message:
    """Return a question to one node, with records by name."""
    return Message(RecordDict(records), dst_node_id=int(node), message_type=message_type)


def addressed(template: Message, node: str, asks: str = "") -> Message:
    """Return the template's message, addressed to another node.

    If the selector needs columns, the copy's config lists them (``asks``) under ``needs``.
    """
    content = RecordDict()
    source = template.content
    # Arrays are shared, because a copy for each node would fill the memory. All parts that a base may change are
    # copied.
    for name in source:
        content[name] = source[name] if name in source.array_records else copy.deepcopy(source[name])
    if asks:
        if not content.config_records:
            content["config"] = ConfigRecord()
        next(iter(content.config_records.values()))["needs"] = asks
    kind, ttl, group_id = template.metadata.message_type, template.metadata.ttl, template.metadata.group_id
    return Message(content, dst_node_id=int(node), message_type=kind, ttl=ttl, group_id=group_id)


def by_node(sent: Mapping[str, Message], replies: Iterable[Message]) -> dict[str, Message]:
    """Sort replies by node, in the order sent."""
    # The SuperLink may send an error in place of a node. The id of the answered message identifies the node.
    node_of = {message.metadata.message_id: node for node, message in sent.items()}
    arrived = {
        node_of.get(reply.metadata.reply_to_message_id, str(reply.metadata.src_node_id)): reply for reply in replies
    }
    return {node: arrived[node] for node in sent if node in arrived}


def sanitized(failure: Message) -> Message:
    """Return a client's error message as Flower may log it: none of its lines looks like a line of the log."""
    reason = indented_lines(failure.error.reason or "")
    if reason == (failure.error.reason or ""):
        return failure
    twin = copy.copy(failure)
    twin.error = Error(code=failure.error.code, reason=reason)
    return twin


def failures_of(
    sent: Mapping[str, Message], arrived: Mapping[str, Message], faults: Mapping[str, str]
) -> list[Message]:
    """Return the failures that a base expects: the clients' own errors, and one in place of each unusable reply."""
    return [
        sanitized(reply)
        if reply.has_error()
        else Message(error=Error(code=0, reason=faults[node]), reply_to=sent[node])
        for node, reply in arrived.items()
        if reply.has_error() or node in faults
    ]
