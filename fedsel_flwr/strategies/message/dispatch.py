"""From a base strategy's message to those of the chosen nodes, and from their replies back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.untrusted import several_lines
from fedsel_flwr.strategies import bases
from fedsel_flwr.strategies.message.grids import ShownGrid


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
    reason = several_lines(failure.error.reason or "")
    if reason == (failure.error.reason or ""):
        return failure
    twin = copy.copy(failure)
    twin.error = Error(code=failure.error.code, reason=reason)
    return twin


def as_error(sent: Message, reason: str) -> Message:
    """An unusable reply as the error message that a base expects of a failed client."""
    return Message(error=Error(code=0, reason=reason), reply_to=sent)
