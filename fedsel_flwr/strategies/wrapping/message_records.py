"""Records of the Message API: read into plain types, and cleaned for a base strategy.

A base strategy gets copies of the usable replies, all with the same metrics. Flower ends the run if the keys of two
replies differ.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import ClientResult, Reply
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.rounds.untrusted import finite_number, shown
from fedsel_flwr.selectors.columns import ASKED, VECTORS
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.aggregating import Evaluation
from fedsel_flwr.strategies.wrapping.failure_reasons import reason_of

SENT = sorted(ASKED & VECTORS)
"""The columns of vectors that clients send, each in a record with the column's key."""
SCALAR = -1
"""Kind of a metric that is a number. The kind of a list is its length, or 0 if lengths may differ."""


def reply_of(
    message: Message, names: Sequence[str], weight_key: str, observed_s: float | None, keys: MetricKeys
) -> Reply:
    """Read a client's message into plain types; no content of a message raises an error."""
    if message.has_error():
        return Reply(error=reason_of(message.error), observed_s=observed_s)
    content = message.content
    metrics = list(content.metric_records.values())
    if len(metrics) != 1:
        return Reply(error=f"metrics: expected one MetricRecord, got {len(metrics)}", observed_s=observed_s)
    models = [content.array_records[name] for name in _model_records(content, keys)]
    if len(models) != 1:
        return Reply(error=f"arrays: expected one ArrayRecord, got {len(models)}", observed_s=observed_s)
    arrays = _decoded(models[0], names)
    if isinstance(arrays, str):
        return Reply(error=f"arrays: {arrays}", observed_s=observed_s)
    return Reply(
        arrays=arrays,
        num_examples=_weight_of(metrics[0], weight_key),
        weight=metrics[0].get(weight_key),
        metrics=dict(metrics[0])
        | _vectors_in(content, content.array_records.keys() - _model_records(content, keys), keys),
        observed_s=observed_s,
    )


def entries_in(content: RecordDict, keys: MetricKeys) -> dict[str, object]:
    """Return all entries of the metric and config records of a reply, with any record names, and its vector columns."""
    # Metrics come last, because if a config repeats a metric's key, the metric is the measured value.
    records: list[Any] = [*content.config_records.values(), *content.metric_records.values()]
    merged: dict[str, object] = {}
    for record in records:
        merged |= dict(record)
    return merged | _vectors_in(content, content.array_records, keys)


def metrics_of(message: Message) -> MetricRecord:
    """Return the only MetricRecord of a reply."""
    record: MetricRecord = next(iter(message.content.metric_records.values()))
    return record


def names_and_arrays(record: ArrayRecord) -> tuple[list[str], Arrays]:
    """Return the names and arrays of a model."""
    return list(record), [array.numpy() for array in record.values()]


def record_of(checkpoint: Checkpoint) -> ArrayRecord:
    """Return the model of a checkpoint as Flower's record."""
    return ArrayRecord({name: Array(a) for name, a in zip(checkpoint.names, checkpoint.model, strict=True)})


def query(
    node: str,
    message_type: str,
    config: Mapping[str, Any],
    arrays: ArrayRecord | None = None,
    array_name: str = "arrays",
    config_name: str = "config",
) -> Message:
    """Return a question to one node, in records with the given names."""
    content = RecordDict() if arrays is None else RecordDict({array_name: arrays})
    content[config_name] = ConfigRecord(dict(config))
    return Message(content=content, dst_node_id=int(node), message_type=message_type)


def renumber_rounds(result: Result, done: int) -> None:
    """Renumber the rounds of a resumed run's result from its checkpoint on; evaluation 0 is the checkpoint's round."""
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        setattr(result, name, {number + done: record for number, record in getattr(result, name).items()})


class Cleaner:
    """Finds the replies that a base strategy cannot use, and gives the others the same metrics.

    Metrics that the base reads by name are required, and a client without them has failed. No reply is lost because of
    other metrics. :func:`~fedsel_flwr.strategies.wrapping.message_records.common_metrics` decides which of them the
    base sees.

    Args:
        base: The strategy that will aggregate the replies.
        keys: Names of our metrics.
        max_examples: Largest number of examples that a client may claim in an evaluation; None for no limit.
    """

    def __init__(self, base: object, keys: MetricKeys, max_examples: int | None = None) -> None:
        self._base, self._max_examples = base, max_examples
        self.weight_key = bases.weight_key(base)
        self._ours, self._keys = keys.own_keys(), keys

    def faults(self, messages: Mapping[str, Message]) -> dict[str, str]:
        """Find the replies to TRAIN messages that lack a metric that the base reads by name.

        Args:
            messages: Connection -> reply. Replies without exactly one MetricRecord are left out.

        Returns:
            Connection -> fault.
        """
        found = {
            node: bases.fault_in_metrics(self._base, metrics_of(message))
            for node, message in messages.items()
            if _has_one_metric_record(message)
        }
        return {node: fault for node, fault in found.items() if fault}

    def cleaned(
        self,
        messages: Mapping[str, Message],
        results: Mapping[str, ClientResult],
        kept: Iterable[str],
        names: Sequence[str],
    ) -> list[Message]:
        """Copy replies to TRAIN messages so that all have the same metrics and the arrays of the global model.

        Args:
            messages: Connection -> reply, of every client whose update is usable.
            results: Connection -> the result of reading its reply.
            kept: The connections whose updates are averaged, in their order.
            names: The names of the global model's arrays.
        """
        limits = {node: results[node].weight for node in messages}
        # Metrics common to all usable replies, not only to those in ``kept``, so that FedCA's filter does not change
        # them.
        copies = self._with_common_metrics(messages, "train_metrics_aggr_fn", limits)
        found = {node: _model_records(messages[node].content, self._keys)[0] for node in copies}
        array_name = next(iter(found.values()), "")
        for node, twin in copies.items():
            record = messages[node].content.array_records[found[node]]
            twin.content[array_name] = _model_record(record, results[node], names)
        return [copies[node] for node in kept]

    def evaluation(self, message: Message) -> Evaluation:
        """Read a reply to an EVALUATE message that is no error."""
        if not _has_one_metric_record(message):
            return Evaluation(0, (), f"metrics: expected one MetricRecord, got {len(message.content.metric_records)}")
        metrics = metrics_of(message)
        return Evaluation(_weight_of(metrics, self.weight_key), metrics.items())

    def evaluations(self, messages: Mapping[str, Message]) -> list[Message]:
        """Copy the usable replies to EVALUATE messages."""
        limits = {} if self._max_examples is None else dict.fromkeys(messages, self._max_examples)
        return list(self._with_common_metrics(messages, "evaluate_metrics_aggr_fn", limits).values())

    def _with_common_metrics(
        self, messages: Mapping[str, Message], function: str, limits: Mapping[str, float]
    ) -> dict[str, Message]:
        """Copy messages without arrays, with equal names and keys of their only MetricRecord; large weights are cut."""
        if not messages:
            return {}
        lengths = bases.averages_lists(self._base, function)
        kept = common_metrics([metrics_of(message) for message in messages.values()], self._ours, lengths=lengths)
        name = next(iter(next(iter(messages.values())).content.metric_records))
        copies = {}
        for node, message in messages.items():
            content = RecordDict(dict(message.content.config_records.items()))
            content[name] = metrics = with_common_metrics(metrics_of(message), kept, lengths=lengths)
            weight = finite_number(metrics[self.weight_key])
            if node in limits and weight is not None and weight > limits[node]:
                metrics[self.weight_key] = limits[node]
            # A shallow copy keeps the metadata, with which Flower identifies the client. The original reply does not
            # change.
            copies[node] = copy.copy(message)
            copies[node].content = content
        return copies


def common_metrics(
    records: Collection[Mapping[str, Any]], ours: Collection[str], *, lengths: bool
) -> dict[str, float | list[float]]:
    """Return the metrics that a base strategy sees.

    These are the metrics that more than half of the replies have in one kind. Our metrics must be in all replies,
    because a user's aggregation function must not depend on metrics that only this package reads.

    Args:
        records: The metrics of each usable reply.
        ours: Keys that only this package reads.
        lengths: Whether lists of different lengths are of different kinds.

    Returns:
        Key -> value that stands for it in replies without it, in the metric's kind.

    >>> common_metrics([{"acc": 0.5}, {"acc": 1.0, "new": 1}, {"acc": [1.0]}], (), lengths=True)
    {'acc': nan}
    """
    carried = Counter((key, _kind(value, lengths)) for record in records for key, value in record.items())
    return {
        key: math.nan if kind == SCALAR else _nans(key, records)
        for (key, kind), count in carried.items()
        if count == len(records) or (key not in ours and 2 * count > len(records))
    }


def with_common_metrics(
    record: Mapping[str, Any], kept: Mapping[str, float | list[float]], *, lengths: bool
) -> MetricRecord:
    """Return a copy of a reply's metrics with exactly the common keys, each in its kind."""
    # In the order of the reply's keys.
    common = {key: value for key, value in record.items() if key in kept}
    for key, missing in kept.items():
        if key not in common or _kind(common[key], lengths) != _kind(missing, lengths):
            common[key] = missing
    return MetricRecord(common)


def _kind(value: object, lengths: bool) -> int:
    if not isinstance(value, list):
        return SCALAR
    return len(value) if lengths else 0


def _nans(key: str, records: Collection[Mapping[str, Any]]) -> list[float]:
    """Return a list of NaN with the most frequent length of this key's lists."""
    lists: Sequence[list[Any]] = [record[key] for record in records if isinstance(record.get(key), list)]
    return [math.nan] * Counter(map(len, lists)).most_common(1)[0][0]


def _has_one_metric_record(message: Message) -> bool:
    """Return whether a reply is no error and has one MetricRecord, as Flower's strategies require."""
    return message.has_content() and len(message.content.metric_records) == 1


def _weight_of(metrics: Mapping[str, object], weight_key: str) -> object:
    """Return the value that stands for the number of examples.

    Flower's weights may be floats. If the user chose another key than num-examples, any positive weight is valid.
    """
    value = metrics.get(weight_key)
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    if value.is_integer() and value >= 1:
        return int(value)
    # Selectors read whole numbers of examples. The base still gets the float as its weight.
    return max(1, int(value)) if value > 0 and weight_key != "num-examples" else value


def _model_records(content: RecordDict, keys: MetricKeys) -> list[str]:
    """Return the names of the records that may be the model: all ArrayRecords that are not vector columns."""
    # A single ArrayRecord is the model, even if it has a column's name by chance.
    vectors = {keys.of(name) for name in SENT}
    others = [name for name in content.array_records if name not in vectors]
    return others or (list(content.array_records) if len(content.array_records) == 1 else [])


def _model_record(record: ArrayRecord, result: ClientResult, names: Sequence[str]) -> ArrayRecord:
    """Return the arrays of a reply in the types and the order of the global model."""
    # Flower's averages take the order of the first reply, which then becomes the order of the next global model.
    if result.converted is not None:
        return ArrayRecord({k: Array(np.asarray(v)) for k, v in zip(names, result.converted, strict=True)})
    return ArrayRecord({name: record[name] for name in names})


def _vectors_in(content: RecordDict, records: Collection[str], keys: MetricKeys) -> dict[str, object]:
    """Return the vector columns among these records of a reply: ArrayRecords with a column's key and one array.

    A text stands for a vector that cannot be read. It is refused later, with the column's name.
    """
    vectors: dict[str, object] = {}
    for name in {keys.of(column) for column in SENT}.intersection(records):
        arrays = list(content.array_records[name].values())
        vectors[name] = f"an ArrayRecord of {len(arrays)} arrays"
        if len(arrays) == 1:
            try:
                vectors[name] = arrays[0].numpy()
            # A client may send any content, so any error may be raised.
            except Exception:
                vectors[name] = "an array that cannot be decoded"
    return vectors


def _decoded(record: ArrayRecord, names: Sequence[str]) -> Arrays | str:
    """Return a record's arrays in the order of the global model, or their fault."""
    if len(record) != len(names):
        return f"expected {len(names)}, got {len(record)}"
    if record.keys() != set(names):
        return f"expected the names {shown(sorted(names))}, got {shown(sorted(record.keys()))}"
    try:
        arrays: list[Any] = [record[name].numpy() for name in names]
    except Exception:
        return "cannot be decoded"
    return arrays if all(isinstance(array, np.ndarray) for array in arrays) else "cannot be decoded"
