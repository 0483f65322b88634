"""Between Flower's records and plain types."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedsel_flwr.strategies.replies import Arrays, ClientResult, MetricKeys, Reply


def addressed(template: Message, node: str) -> Message:
    """The template's message to another node; arrays are shared, everything that may be changed is copied."""
    content = RecordDict()
    source = template.content
    for name in source:
        content[name] = source[name] if name in source.array_records else copy.deepcopy(source[name])
    metadata = template.metadata
    return Message(
        content=content,
        dst_node_id=int(node),
        message_type=metadata.message_type,
        ttl=metadata.ttl,
        group_id=metadata.group_id,
    )


def numbers_and_text(content: RecordDict) -> dict[str, object]:
    """Everything in the metric and config records of a reply, whatever their names."""
    records: list[Any] = [*content.config_records.values(), *content.metric_records.values()]
    merged: dict[str, object] = {}
    for record in records:
        merged |= dict(record)
    return merged


def reference_of(arrays: ArrayRecord) -> tuple[list[str], Arrays]:
    """The names and arrays of the global model."""
    return list(arrays.keys()), arrays.to_numpy_ndarrays()


def reply_of(message: Message, names: Sequence[str], weight_key: str, observed_s: float | None) -> Reply:
    """A client's message in plain types; never raises for what a client sent."""
    if message.has_error():
        return Reply(error=f"exception: {message.error.reason}", observed_s=observed_s)
    content = message.content
    metrics = list(content.metric_records.values())
    if len(metrics) != 1:
        return Reply(error=f"metrics: expected one MetricRecord, got {len(metrics)}", observed_s=observed_s)
    values: dict[str, object] = dict(metrics[0])
    return Reply(
        arrays=_arrays(content, names),
        num_examples=_weight(values.get(weight_key), whole=weight_key == "num-examples"),
        metrics=values,
        observed_s=observed_s,
    )


def odd_ones_out(messages: dict[str, Message], keys: MetricKeys) -> dict[str, str]:
    """Which replies would make Flower's consistency check end the run, and why.

    Flower demands equal metric keys of all replies. The set of keys that most replies share, ours left aside, is the
    right one; extra keys are dropped later, missing ones are a fault.

    Args:
        messages: Connection -> reply without an error.
        keys: Names of our metrics.

    Returns:
        Connection -> what is missing.
    """
    sets = {node: frozenset(_metrics(m).keys()) - keys.reported() for node, m in messages.items()}
    expected = _most_common(list(sets.values()))
    return {
        node: f"metrics: lacks {', '.join(sorted(expected - own))}, which the other replies have"
        for node, own in sets.items()
        if not expected <= own
    }


def cleaned(
    messages: dict[str, Message], results: dict[str, ClientResult], names: Sequence[str], keys: MetricKeys
) -> list[Message]:
    """Copies of the usable replies in which records and metric keys agree; our metrics are left out."""
    if not messages:
        return []
    common = _most_common([frozenset(_metrics(m).keys()) - keys.reported() for m in messages.values()])
    array_name = next(iter(next(iter(messages.values())).content.array_records))
    metric_name = next(iter(next(iter(messages.values())).content.metric_records))
    copies = []
    for node, message in messages.items():
        content = RecordDict(dict(message.content.config_records.items()))
        content[array_name] = _record(message, results[node], names)
        content[metric_name] = MetricRecord({k: v for k, v in _metrics(message).items() if k in common})
        twin = copy.copy(message)
        twin.content = content
        copies.append(twin)
    return copies


def _record(message: Message, result: ClientResult, names: Sequence[str]) -> ArrayRecord:
    record: ArrayRecord = next(iter(message.content.array_records.values()))
    if result.converted is not None:
        return ArrayRecord({k: Array(np.asarray(v)) for k, v in zip(names, result.converted, strict=True)})
    return record


def _metrics(message: Message) -> MetricRecord:
    record: MetricRecord = next(iter(message.content.metric_records.values()))
    return record


def _arrays(content: RecordDict, names: Sequence[str]) -> Arrays | None:
    """The arrays of a reply, in the order of the global model; None if they are not there."""
    records = list(content.array_records.values())
    if len(records) != 1 or set(records[0].keys()) != set(names):
        return None
    try:
        arrays: list[Any] = [records[0][name].numpy() for name in names]
    except Exception:  # whatever a client sent
        return None
    return arrays if all(isinstance(array, np.ndarray) for array in arrays) else None


def _weight(value: object, *, whole: bool) -> object:
    """Flower's weights may be floats; under a key of the user's own (not num-examples) any positive one is good."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    if value.is_integer() and value >= 1:
        return int(value)
    return max(1, int(value)) if value > 0 and not whole else value


def _most_common(sets: list[frozenset[str]]) -> frozenset[str]:
    """The set that occurs most often; among equals the one that came first."""
    return Counter(sets).most_common(1)[0][0] if sets else frozenset()


def query(node: str, message_type: str, config: dict[str, str | int], arrays: ArrayRecord | None = None) -> Message:
    """A question to one node."""
    content = RecordDict({"config": ConfigRecord(dict(config))})
    if arrays is not None:
        content["arrays"] = arrays
    return Message(content=content, dst_node_id=int(node), message_type=message_type)
