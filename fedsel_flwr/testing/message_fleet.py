"""The fleet in Flower's Message API: an in-memory grid, and Flower's own loop of rounds on it."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsel_flwr.flower import ErrorCode, task_identity
from fedsel_flwr.testing.fleet import Model, NoReply, Reply
from fedsel_flwr.testing.observed_run import ObservedRun, ReceivedUpdate

RUN, SERVER = 7, 1
"""Run id and the server's node id."""
TIMEOUT_S = 0.3
"""Seconds that the strategy waits for clients that never answer, if it times clients itself."""
NO_TEXT = [1.0, 2.0]
"""Stands for a text, which a MetricRecord cannot hold: a list in place of a number."""


class FleetGrid(Grid):
    """An in-memory grid over the fleet; replies are ready as soon as a message is pushed.

    Args:
        run: The run, which holds the fleet and records the configs and replies.
    """

    def __init__(self, run: ObservedRun) -> None:
        self._run, self._replies, self._number = run, dict[str, Message](), 0

    def set_run(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the call: there is one run."""

    @property
    def run(self) -> Any:
        """The run, by its id."""
        return SimpleNamespace(run_id=RUN)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Refuse, as Flower does."""
        raise NotImplementedError("Grid.create_message is deprecated. Construct the Message itself")

    def get_node_ids(self) -> list[int]:
        """Return the ids of the connected nodes."""
        return [int(node) for node in self._run.fleet.connected]

    def get_nodes(self) -> list[Any]:
        """Return the connected nodes with the names under which they are registered."""
        return self._run.fleet.nodes()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages, make the replies, and return the messages' ids."""
        ids = []
        for message in messages:
            self._number += 1
            # Flower's grid sets the id in the same private field: the metadata has no setter.
            vars(message.metadata)["_message_id"] = f"message-{self._number}"
            ids.append(message.metadata.message_id)
            if (content := self._reply_to(message)) is not None:
                self._replies[ids[-1]] = Message(content, reply_to=message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that exist to these messages, in the order in which they arrive."""
        here = sorted(one for one in message_ids if one in self._replies)
        return self._run.fleet.in_arrival_order([self._replies.pop(one) for one in here])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push messages and pull the replies, without waiting for clients that never answer."""
        return self.pull_messages(self.push_messages(messages))

    def _reply_to(self, message: Message) -> RecordDict | Error | None:
        node, run = str(message.metadata.dst_node_id), self._run
        if node not in run.fleet.connected:
            return Error(ErrorCode.NODE_UNAVAILABLE, "no such node")
        config = config_of(message)
        try:
            if message.metadata.message_type == MessageType.QUERY:
                return RecordDict({"facts": ConfigRecord(run.fleet.properties_of(node))})
            if message.metadata.message_type == MessageType.EVALUATE:
                if "probe" not in config:
                    run.now.evaluated[node] = config
                loss, examples, metrics = run.fleet.evaluation_reply(node, config)
                return _content({"num-examples": examples, "loss": loss, **metrics})
            run.now.configs[node] = config
            (record,) = message.content.array_records.values()
            names = list(record)
            reply = run.fleet.training_reply(node, [record[name].numpy() for name in names], config)
        except NoReply:
            return None
        except Exception as error:
            # Flower's ClientApp too turns any exception into an error reply.
            return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}")
        run.now.sent[node] = reply
        if reply.refused:
            return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reply.refused)
        content = _content({"num-examples": reply.num_examples, **reply.metrics})
        content["arrays"] = _encoded(reply, names)
        return content


def config_of(message: Message) -> dict[str, Any]:
    """Return the entries of all config records of a message."""
    return {key: value for record in message.content.config_records.values() for key, value in record.items()}


def _content(metrics: dict[str, Any]) -> RecordDict:
    """Return metrics as records: each vector in an ArrayRecord, everything else in one MetricRecord."""
    vectors = {key: ArrayRecord({"0": Array(v)}) for key, v in metrics.items() if isinstance(v, np.ndarray)}
    numbers = {k: NO_TEXT if isinstance(v, str) else v for k, v in metrics.items() if k not in vectors}
    return RecordDict({**vectors, "metrics": MetricRecord(numbers)})


def _encoded(reply: Reply, names: list[str]) -> ArrayRecord:
    if isinstance(reply.arrays, bytes):
        garbage = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=reply.arrays)
        return ArrayRecord(dict.fromkeys(names, garbage))
    more = [*names, *(f"more-{i}" for i in range(len(reply.arrays)))]
    return ArrayRecord({name: Array(array) for name, array in zip(more, reply.arrays, strict=False)})


def play_messages(run: ObservedRun, rounds: int) -> None:
    """Play rounds by Flower's own loop, the strategy's ``start``."""
    strategy = run.strategy
    names = [str(i) for i in range(len(run.model))]
    configure, aggregate = strategy.configure_train, strategy.aggregate_train

    def configure_train(*args: Any, **kwargs: Any) -> Any:
        run.begin_round()
        messages = list(configure(*args, **kwargs))
        run.record_asked([str(message.metadata.dst_node_id) for message in messages])
        return messages

    def aggregate_train(*args: Any, **kwargs: Any) -> Any:
        arrays, metrics = aggregate(*args, **kwargs)
        run.end_round(None if arrays is None else decoded(arrays, names))
        return arrays, metrics

    vars(strategy).update(configure_train=configure_train, aggregate_train=aggregate_train)
    initial = ArrayRecord({name: Array(array) for name, array in zip(names, run.model, strict=True)})
    # Outside of a run Flower refuses to construct messages.
    with task_identity(RUN, 1, SERVER):
        strategy.start(
            FleetGrid(run),
            initial,
            rounds,
            TIMEOUT_S,
            ConfigRecord({"fleet-train": 1}),
            ConfigRecord({"fleet-evaluate": 2}),
            lambda number, arrays: MetricRecord({"loss": 1.0 / (number + 1), "accuracy": 0.5}),
        )


def record_message_base(run: ObservedRun) -> None:
    """Record the configs that the base strategy sends and the updates it receives."""
    base = run.strategy.base
    configure, aggregate, evaluation = base.configure_train, base.aggregate_train, base.configure_evaluate
    names = [str(i) for i in range(len(run.model))]

    def configure_train(*args: Any, **kwargs: Any) -> Any:
        messages = list(configure(*args, **kwargs))
        run.now.base_config = config_of(messages[0]) if messages else {}
        return messages

    def aggregate_train(server_round: int, replies: Iterable[Message]) -> Any:
        messages = list(replies)
        good = [message for message in messages if message.has_content()]
        run.now.given, run.now.failures = [_received(one, names) for one in good], len(messages) - len(good)
        arrays, metrics = aggregate(server_round, messages)
        run.now.base_model = None if arrays is None else decoded(arrays, names)
        return arrays, metrics

    def configure_evaluate(*args: Any, **kwargs: Any) -> Any:
        messages = list(evaluation(*args, **kwargs))
        run.now.base_evaluated = {str(one.metadata.dst_node_id): config_of(one) for one in messages}
        return messages

    vars(base).update(
        configure_train=configure_train, aggregate_train=aggregate_train, configure_evaluate=configure_evaluate
    )  # fmt: skip


def decoded(record: ArrayRecord, names: list[str]) -> Model:
    """Return the arrays in the order of the initial model; under other names, in their own order."""
    return [record[name].numpy() for name in (names if set(names) == set(record) else record)]


def _received(message: Message, names: list[str]) -> ReceivedUpdate:
    records, metrics = message.content.array_records, dict[str, Any]()
    for record in message.content.metric_records.values():
        metrics |= dict(record)
    try:
        arrays = decoded(next(iter(records.values())), names)
    except Exception:
        # A fault may have sent anything; undecodable bytes equal no update.
        arrays = []
    return ReceivedUpdate(str(message.metadata.src_node_id), arrays, metrics.get("num-examples", float("nan")))
