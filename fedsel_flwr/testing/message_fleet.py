"""The fleet in Flower's Message API: an in-memory grid.

The fleet in Flower's Message API: Flower's own loop, on an in-memory grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsel_flwr.flower import ErrorCode, task_identity
from fedsel_flwr.testing.course import Course, Given
from fedsel_flwr.testing.fleet import Answer, Model, Silence

RUN = 7
"""Flower's number of the run."""
NO_TEXT = [1.0, 2.0]
"""What stands for a text among metrics."""


class FleetGrid(Grid):
    """A grid over the fleet.

    Args:
        course: Whose fleet it is, and where is noted what clients are asked.
    """

    def __init__(self, course: Course) -> None:
        self._course, self._replies, self._number = course, dict[str, Message](), 0

    def set_run(self, *args: Any, **kwargs: Any) -> None:
        """Ignore: there is one run."""

    @property
    def run(self) -> Any:
        """The run."""
        return SimpleNamespace(run_id=RUN)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Refuse, as Flower does."""
        raise NotImplementedError("deprecated: make the Message itself")

    def get_node_ids(self) -> list[int]:
        """Who is connected."""
        return [int(node) for node in self._course.fleet.connected]

    def get_nodes(self) -> list[Any]:
        """Who is connected, and under which name it is registered."""
        return self._course.fleet.nodes()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages; each is answered at once, if at all."""
        ids = []
        for message in messages:
            self._number += 1
            vars(message.metadata)["_message_id"] = f"message-{self._number}"
            ids.append(message.metadata.message_id)
            if (content := self._answer(message)) is not None:
                self._replies[ids[-1]] = Message(content, reply_to=message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to some messages, in the order in which they happen to arrive."""
        here = sorted(one for one in message_ids if one in self._replies)
        return self._course.fleet.shuffled([self._replies.pop(one) for one in here])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages; nobody waits for those that never answer."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> RecordDict | Error | None:
        node, course = str(message.metadata.dst_node_id), self._course
        if node not in course.fleet.connected:
            return Error(ErrorCode.NODE_UNAVAILABLE, "no such node")
        config = config_of(message)
        try:
            if message.metadata.message_type == MessageType.QUERY:
                return RecordDict({"facts": ConfigRecord(course.fleet.introduction(node))})
            if message.metadata.message_type == MessageType.EVALUATE:
                if "probe" not in config:
                    course.now.evaluated[node] = config
                loss, examples, metrics = course.fleet.measured(node, config)
                return _content({"num-examples": examples, "loss": loss, **metrics})
            course.now.configs[node] = config
            (record,) = message.content.array_records.values()
            names = list(record)
            answer = course.fleet.trained(node, [record[name].numpy() for name in names], config)
        except Silence:
            return None
        except Exception as error:  # as Flower's ClientApp does
            return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}")
        course.now.sent[node] = answer
        if answer.refused:
            return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, answer.refused)
        content = _content({"num-examples": answer.num_examples, **answer.metrics})
        content["arrays"] = _encoded(answer, names)
        return content


def config_of(message: Message) -> dict[str, Any]:
    """Everything in the config records of a message."""
    return {key: value for record in message.content.config_records.values() for key, value in record.items()}


def _content(metrics: dict[str, Any]) -> RecordDict:
    """Metrics as this API has them: vectors are arrays in records of their own, and texts there are none."""
    vectors = {key: ArrayRecord({"0": Array(v)}) for key, v in metrics.items() if isinstance(v, np.ndarray)}
    numbers = {k: NO_TEXT if isinstance(v, str) else v for k, v in metrics.items() if k not in vectors}
    return RecordDict({**vectors, "metrics": MetricRecord(numbers)})


def _encoded(answer: Answer, names: list[str]) -> ArrayRecord:
    if isinstance(answer.arrays, bytes):
        garbage = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=answer.arrays)
        return ArrayRecord(dict.fromkeys(names, garbage))
    more = [*names, *(f"more-{i}" for i in range(len(answer.arrays)))]
    return ArrayRecord({name: Array(array) for name, array in zip(more, answer.arrays, strict=False)})


SERVER = 1
"""Node id of the server."""
TIMEOUT_S = 0.3
"""How long the strategy waits for clients that never answer, where it times them itself."""


def play_messages(course: Course, rounds: int) -> None:
    """Run Flower's own loop."""
    strategy = course.strategy
    names = [str(i) for i in range(len(course.model))]
    configure, aggregate = strategy.configure_train, strategy.aggregate_train

    def configure_train(*args: Any, **kwargs: Any) -> Any:
        course.begin_round()
        messages = list(configure(*args, **kwargs))
        course.asks([str(message.metadata.dst_node_id) for message in messages])
        return messages

    def aggregate_train(*args: Any, **kwargs: Any) -> Any:
        arrays, metrics = aggregate(*args, **kwargs)
        course.end_round(None if arrays is None else decoded(arrays, names))
        return arrays, metrics

    vars(strategy).update(configure_train=configure_train, aggregate_train=aggregate_train)
    initial = ArrayRecord({name: Array(array) for name, array in zip(names, course.model, strict=True)})
    with task_identity(RUN, 1, SERVER):
        strategy.start(
            FleetGrid(course),
            initial,
            rounds,
            TIMEOUT_S,
            ConfigRecord({"fleet-train": 1}),
            ConfigRecord({"fleet-evaluate": 2}),
            lambda number, arrays: MetricRecord({"loss": 1.0 / (number + 1), "accuracy": 0.5}),
        )


def watch_messages(course: Course) -> None:
    """Keep what the base strategy configures and what it is given."""
    base = course.strategy.base
    configure, aggregate, evaluation = base.configure_train, base.aggregate_train, base.configure_evaluate
    names = [str(i) for i in range(len(course.model))]

    def configure_train(*args: Any, **kwargs: Any) -> Any:
        messages = list(configure(*args, **kwargs))
        course.now.base_config = config_of(messages[0]) if messages else {}
        return messages

    def aggregate_train(server_round: int, replies: Iterable[Message]) -> Any:
        messages = list(replies)
        good = [message for message in messages if message.has_content()]
        course.now.given, course.now.failures = [_given(one, names) for one in good], len(messages) - len(good)
        arrays, metrics = aggregate(server_round, messages)
        course.now.base_model = None if arrays is None else decoded(arrays, names)
        return arrays, metrics

    def configure_evaluate(*args: Any, **kwargs: Any) -> Any:
        messages = list(evaluation(*args, **kwargs))
        course.now.base_evaluated = {str(one.metadata.dst_node_id): config_of(one) for one in messages}
        return messages

    vars(base).update(
        configure_train=configure_train, aggregate_train=aggregate_train, configure_evaluate=configure_evaluate
    )  # fmt: skip


def decoded(record: ArrayRecord, names: list[str]) -> Model:
    """The arrays in the order of the initial model, in their own where the names are others."""
    return [record[name].numpy() for name in (names if set(names) == set(record) else record)]


def _given(message: Message, names: list[str]) -> Given:
    records, metrics = message.content.array_records, dict[str, Any]()
    for record in message.content.metric_records.values():
        metrics |= dict(record)
    try:
        arrays = decoded(next(iter(records.values())), names)
    except Exception:  # whatever a client sent
        arrays = []
    return Given(str(message.metadata.src_node_id), arrays, metrics.get("num-examples", float("nan")))
