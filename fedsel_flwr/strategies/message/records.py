"""Between Flower's records and plain types."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import Result

from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.selectors.columns import ASKED, VECTORS
from fedsel_flwr.strategies.silence import reason_of

SENT = ASKED & VECTORS
"""The vectors that clients send, each in a record of its name."""


def everything_in(content: RecordDict) -> dict[str, object]:
    """Everything in the metric and config records of a reply, whatever their names, and its vector columns."""
    records: list[Any] = [*content.config_records.values(), *content.metric_records.values()]
    merged: dict[str, object] = {}
    for record in records:
        merged |= dict(record)
    return merged | vectors_in(content, content.array_records)


def vectors_in(content: RecordDict, records: Collection[str]) -> dict[str, object]:
    """The vector columns among these records of a reply: an ArrayRecord of the column's name that holds one array."""
    vectors: dict[str, object] = {}
    for name in SENT.intersection(records):
        arrays = list(content.array_records[name].values())
        vectors[name] = f"an ArrayRecord of {len(arrays)} arrays"
        if len(arrays) == 1:
            try:
                vectors[name] = arrays[0].numpy()
            except Exception:  # whatever a client sent
                vectors[name] = "an array that cannot be decoded"
    return vectors


def model_in(content: RecordDict) -> list[str]:
    """The names of the records that may be the model: every ArrayRecord that is no vector column beside another."""
    others = [name for name in content.array_records if name not in SENT]
    return others or (list(content.array_records) if len(content.array_records) == 1 else [])


def reference_of(arrays: ArrayRecord) -> tuple[list[str], Arrays]:
    """The names and arrays of the global model."""
    return list(arrays.keys()), arrays.to_numpy_ndarrays()


def reply_of(message: Message, names: Sequence[str], weight_key: str, observed_s: float | None) -> Reply:
    """A client's message in plain types; never raises for what a client sent."""
    if message.has_error():
        return Reply(error=reason_of(message.error), observed_s=observed_s)
    content = message.content
    metrics = list(content.metric_records.values())
    if len(metrics) != 1:
        return Reply(error=f"metrics: expected one MetricRecord, got {len(metrics)}", observed_s=observed_s)
    models = [content.array_records[name] for name in model_in(content)]
    if len(models) != 1:
        return Reply(error=f"arrays: expected one ArrayRecord, got {len(models)}", observed_s=observed_s)
    arrays = _decoded(models[0], names)
    if isinstance(arrays, str):
        return Reply(error=f"arrays: {arrays}", observed_s=observed_s)
    return Reply(
        arrays=arrays,
        num_examples=weight_of(metrics[0], weight_key),
        weight=metrics[0].get(weight_key),
        metrics=dict(metrics[0]) | vectors_in(content, content.array_records.keys() - model_in(content)),
        observed_s=observed_s,
    )


def _decoded(record: ArrayRecord, names: Sequence[str]) -> Arrays | str:
    """A record's arrays in the order of the global model, or what is wrong with them."""
    if len(record) != len(names):
        return f"expected {len(names)}, got {len(record)}"
    if record.keys() != set(names):
        return f"expected the names {shown(sorted(names))}, got {shown(sorted(record.keys()))}"
    try:
        arrays: list[Any] = [record[name].numpy() for name in names]
    except Exception:  # whatever a client sent
        return "cannot be decoded"
    return arrays if all(isinstance(array, np.ndarray) for array in arrays) else "cannot be decoded"


def weight_of(metrics: Mapping[str, object], weight_key: str) -> object:
    """What stands for the number of examples.

    Flower's weights may be floats; under a key of the user's own (not num-examples) any positive one is good.
    """
    value = metrics.get(weight_key)
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    if value.is_integer() and value >= 1:
        return int(value)
    return max(1, int(value)) if value > 0 and weight_key != "num-examples" else value


def in_plain_types(record: ArrayRecord) -> tuple[list[str], Arrays]:
    """The names and arrays of a model."""
    return list(record), [array.numpy() for array in record.values()]


def query(node: str, message_type: str, config: dict[str, str | int], arrays: ArrayRecord | None = None) -> Message:
    """A question to one node."""
    content = RecordDict({"config": ConfigRecord(dict(config))})
    if arrays is not None:
        content["arrays"] = arrays
    return Message(content=content, dst_node_id=int(node), message_type=message_type)


def in_absolute_rounds(result: Result, done: int) -> None:
    """Count the rounds of a result on from those that were done before; its evaluation "0" is the last of these."""
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        setattr(result, name, {number + done: record for number, record in getattr(result, name).items()})
