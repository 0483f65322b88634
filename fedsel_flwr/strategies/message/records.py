"""Between Flower's records and plain types."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.selectors.columns import VECTORS


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


def everything_in(content: RecordDict) -> dict[str, object]:
    """Everything in the metric and config records of a reply, whatever their names, and its vector columns."""
    records: list[Any] = [*content.config_records.values(), *content.metric_records.values()]
    merged: dict[str, object] = {}
    for record in records:
        merged |= dict(record)
    return merged | vectors_in(content)


def vectors_in(content: RecordDict) -> dict[str, object]:
    """The vector columns of a reply: an ArrayRecord of the column's name that holds one array."""
    vectors: dict[str, object] = {}
    for name in VECTORS & content.array_records.keys():
        arrays = list(content.array_records[name].values())
        with contextlib.suppress(Exception):  # whatever a client sent
            vectors[name] = arrays[0].numpy() if len(arrays) == 1 else None
    return vectors


def model_in(content: RecordDict) -> list[str]:
    """The names of the records that may be the model: every ArrayRecord that is no vector column."""
    return [name for name in content.array_records if name not in VECTORS]


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
        weight=values.get(weight_key),
        metrics=values | vectors_in(content),
        observed_s=observed_s,
    )


def _arrays(content: RecordDict, names: Sequence[str]) -> Arrays | None:
    """The arrays of a reply, in the order of the global model; None if they are not there."""
    records = [content.array_records[name] for name in model_in(content)]
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


def query(node: str, message_type: str, config: dict[str, str | int], arrays: ArrayRecord | None = None) -> Message:
    """A question to one node."""
    content = RecordDict({"config": ConfigRecord(dict(config))})
    if arrays is not None:
        content["arrays"] = arrays
    return Message(content=content, dst_node_id=int(node), message_type=message_type)
