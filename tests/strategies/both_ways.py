"""The same clients played to a base strategy alone and to one that is wrapped, in either API, in one fixed order."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.server.client_manager import SimpleClientManager
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from tests.strategies.helpers import FakeProxy
from tests.strategies.message.helpers import FakeGrid, FakeNode

ROUNDS = 3


@dataclass
class Course:
    """What came of a run: the model and the aggregated metrics of each round, and what a user's function was given."""

    models: list[list[bytes]] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    evaluated: list[Any] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)


def legacy_function(course: Course) -> Any:
    """A user's own aggregation function of the legacy API, which keeps what it was given."""

    def aggregate(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        course.given.append(copy.deepcopy(metrics))
        total = sum(count for count, _ in metrics)
        return {"acc": sum(count * m["acc"] for count, m in metrics) / total, "clients": len(metrics)}

    return aggregate


def message_function(course: Course) -> Any:
    """A user's own aggregation function of the Message API, which keeps what it was given."""

    def aggregate(records: list[RecordDict], weighted_by_key: str) -> MetricRecord:
        course.given.append([_written(record) for record in records])
        return aggregate_metricrecords(records, weighted_by_key)

    return aggregate


def play_legacy(strategy: Any, proxies: Iterable[FakeProxy], course: Course, rounds: int = ROUNDS) -> Course:
    """Play a strategy as Flower's server does, clients one after the other."""
    manager = SimpleClientManager()
    for proxy in proxies:
        manager.register(proxy)
    parameters = strategy.initialize_parameters(manager)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (Flower's noise comes from it)
    for server_round in range(1, rounds + 1):
        asked = {"server_round": server_round, "parameters": parameters, "client_manager": manager}
        results, failures = _answers(strategy.configure_fit(**asked), "fit", server_round)
        new, metrics = strategy.aggregate_fit(server_round, results, failures)
        parameters = parameters if new is None else new
        course.models.append(_bytes(parameters))
        course.metrics.append(metrics)
        asked["parameters"] = parameters
        results, failures = _answers(strategy.configure_evaluate(**asked), "evaluate", server_round)
        course.evaluated.append(strategy.aggregate_evaluate(server_round, results, failures) if results else None)
    return course


def _bytes(parameters: Any) -> list[bytes]:
    """A global model's bytes; that of FedXgbNnAvg is a network and a list of trees."""
    if isinstance(parameters, list):
        return [*parameters[0].tensors, repr(parameters[1]).encode()]
    return list(parameters.tensors)


def _answers(instructions: Any, call: str, server_round: int) -> tuple[list[Any], list[Any]]:
    results, failures = [], []
    for client, ins in sorted(instructions, key=lambda pair: int(pair[0].cid.split("-")[1])):
        try:
            results.append((client, getattr(client, call)(copy.deepcopy(ins), None, server_round)))
        except TypeError as error:
            failures.append(error)
    return results, failures


class OrderedGrid(FakeGrid):
    """Answers in the order of the clients, whatever the order in which they were asked."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        asked = sorted(messages, key=lambda message: self.nodes[message.metadata.dst_node_id].proxy.number)
        replies = list(super().send_and_receive(asked, timeout=timeout))
        order = {message.metadata.message_id: i for i, message in enumerate(asked)}
        return sorted(replies, key=lambda reply: order[reply.metadata.reply_to_message_id])


def play_messages(
    strategy: Any, nodes: dict[int, FakeNode], course: Course, initial: ArrayRecord, rounds: int = ROUNDS
) -> Course:
    """Run Flower's own loop."""

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round:
            course.models.append([array.tobytes() for array in arrays.to_numpy_ndarrays()])
        return MetricRecord({"accuracy": 0.5})

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (Flower's noise comes from it)
    result = strategy.start(OrderedGrid(nodes), initial, rounds, 5.0, evaluate_fn=evaluate_fn)
    course.metrics = [dict(result.train_metrics_clientapp.get(n, {})) for n in range(1, rounds + 1)]
    course.evaluated = [dict(result.evaluate_metrics_clientapp.get(n, {})) for n in range(1, rounds + 1)]
    return course


def _written(record: RecordDict) -> Any:
    """A reply in comparable form."""
    metrics = {name: dict(one.items()) for name, one in record.metric_records.items()}
    configs = {name: dict(one.items()) for name, one in record.config_records.items()}
    arrays = {
        name: {key: (a.dtype, a.shape, a.data) for key, a in one.items()} for name, one in record.array_records.items()
    }
    return metrics, configs, arrays
