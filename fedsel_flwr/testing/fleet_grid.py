"""The fleet in Flower's Message API: an in-memory grid."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedsel_flwr.flower import ErrorCode
from fedsel_flwr.testing.course import Course
from fedsel_flwr.testing.faults import Answer, Silence

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
