"""The fleet in Flower's Message API: Flower's own loop, on an in-memory grid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from fedsel_flwr.flower import identity
from fedsel_flwr.testing.course import Course, Given
from fedsel_flwr.testing.faults import Model
from fedsel_flwr.testing.fleet_grid import RUN, FleetGrid, config_of

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
    with identity(RUN, 1, SERVER):
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
