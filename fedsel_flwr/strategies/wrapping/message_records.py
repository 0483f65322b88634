"""Between Flower's records and plain types.

Which metrics of a set of replies a base strategy sees: Flower ends the run where their keys are not all the same.

What a base strategy sees of the replies: copies that are all alike, of those that can be used.
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

from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import ClientResult, Reply
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.rounds.untrusted import MAX_METRICS, finite_number, shown, usable_count
from fedsel_flwr.selectors.columns import ASKED, VECTORS
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.failure_reasons import reason_of

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


NUMBER = -1
"""The kind of a metric that is a number; that of a list is its length, or 0 where lengths may differ."""


def agreed(
    records: Collection[Mapping[str, Any]], ours: Collection[str], *, lengths: bool
) -> dict[str, tuple[int, float | list[float]]]:
    """Which metrics stay.

    A metric stays that more than half of the replies carry in one kind, and one of ours only if all of them do: whoever
    aggregates metrics must not depend on what only this package reads.

    Args:
        records: The metrics of each usable reply.
        ours: Keys that nobody but this package reads.
        lengths: Whether lists of different lengths are of different kinds.

    Returns:
        Key -> its kind, and what stands for it where it is missing.

    >>> agreed([{"acc": 0.5}, {"acc": 1.0, "new": 1}, {"acc": [1.0]}], (), lengths=True)
    {'acc': (-1, nan)}
    """
    carried = Counter((key, _kind(value, lengths)) for record in records for key, value in record.items())
    kept: dict[str, tuple[int, float | list[float]]] = {}
    for (key, kind), count in carried.items():
        if count == len(records) or (key not in ours and 2 * count > len(records)):
            kept[key] = (kind, math.nan if kind == NUMBER else _nans(key, records))
    return kept


def made_alike(
    record: Mapping[str, Any], kept: Mapping[str, tuple[int, float | list[float]]], *, lengths: bool
) -> MetricRecord:
    """A copy of a reply's metrics with exactly the keys that stay, each in its kind."""
    alike = {
        key: value if _kind(value, lengths) == kept[key][0] else kept[key][1]
        for key, value in record.items()
        if key in kept
    }
    return MetricRecord(alike | {key: missing for key, (_, missing) in kept.items() if key not in alike})


def _kind(value: object, lengths: bool) -> int:
    if not isinstance(value, list):
        return NUMBER
    return len(value) if lengths else 0


def _nans(key: str, records: Collection[Mapping[str, Any]]) -> list[float]:
    """A list of NaN of the length that most lists of this key have."""
    lists: Sequence[list[Any]] = [record[key] for record in records if isinstance(record.get(key), list)]
    return [math.nan] * Counter(map(len, lists)).most_common(1)[0][0]


class Cleaner:
    """Finds the replies that a base strategy cannot use, and makes the others alike.

    What the base reads by name is compulsory: a client that lacks it has failed. Over other metrics no reply is lost;
    :func:`~fedsel_flwr.strategies.wrapping.message_records.agreed` says which of them stay.

    Args:
        base: The strategy that will aggregate the replies.
        keys: Names of our metrics.
        max_examples: Most examples that a client may claim in an evaluation; None for no limit.
    """

    def __init__(self, base: object, keys: MetricKeys, max_examples: int | None = None) -> None:
        self._base, self._max_examples = base, max_examples
        self.weight_key = bases.weight_key(base)
        self._ours = keys.own_keys()

    def faults(self, messages: Mapping[str, Message]) -> dict[str, str]:
        """Which replies to TRAIN messages lack a metric that the base reads by name.

        Args:
            messages: Connection -> reply; those without exactly one MetricRecord are left out.

        Returns:
            Connection -> what is wrong.
        """
        found = {
            node: bases.fault_in_metrics(self._base, metrics_of(message))
            for node, message in messages.items()
            if comparable(message)
        }
        return {node: fault for node, fault in found.items() if fault}

    def cleaned(
        self,
        messages: Mapping[str, Message],
        results: Mapping[str, ClientResult],
        kept: Iterable[str],
        names: Sequence[str],
    ) -> list[Message]:
        """Copies of replies to TRAIN messages in which all records agree.

        Args:
            messages: Connection -> reply, of every client whose update is usable.
            results: What was read of them.
            kept: The connections whose updates are averaged, in their order.
            names: The names of the global model's arrays.
        """
        copies = self._alike(messages, "train_metrics_aggr_fn", {node: results[node].weight for node in messages})
        array_name = model_in(next(iter(messages.values())).content)[0] if copies else ""
        for node, twin in copies.items():
            twin.content[array_name] = _record(messages[node], results[node], names)
        return [copies[node] for node in kept]

    def evaluations(self, messages: Mapping[str, Message]) -> tuple[list[Message], dict[str, str]]:
        """Copies of the usable replies to EVALUATE messages, and connection -> why the others cannot be used."""
        usable, faults = dict[str, Message](), dict[str, str]()
        for node, message in messages.items():
            if not message.has_content():
                continue
            if not comparable(message):
                faults[node] = f"metrics: expected one MetricRecord, got {len(message.content.metric_records)}"
            elif len(metrics_of(message)) > MAX_METRICS:
                faults[node] = f"metrics: {len(metrics_of(message))} of them, more than {MAX_METRICS}"
            elif not usable_count(weight := weight_of(metrics_of(message), self.weight_key)):
                faults[node] = f"{self.weight_key}: expected a number above 0, got {shown(weight)}"
            else:
                usable[node] = message
        limits = {} if self._max_examples is None else dict.fromkeys(usable, self._max_examples)
        return list(self._alike(usable, "evaluate_metrics_aggr_fn", limits).values()), faults

    def _alike(self, messages: Mapping[str, Message], function: str, limits: Mapping[str, float]) -> dict[str, Message]:
        """Copies without arrays whose one MetricRecord has the same name and keys in all; weights are cut."""
        if not messages:
            return {}
        lengths = bases.adds_lists(self._base, function)
        kept = agreed([metrics_of(message) for message in messages.values()], self._ours, lengths=lengths)
        name = next(iter(next(iter(messages.values())).content.metric_records))
        copies = {}
        for node, message in messages.items():
            content = RecordDict(dict(message.content.config_records.items()))
            content[name] = metrics = made_alike(metrics_of(message), kept, lengths=lengths)
            weight = finite_number(metrics[self.weight_key])
            if node in limits and weight is not None and weight > limits[node]:
                metrics[self.weight_key] = limits[node]
            copies[node] = copy.copy(message)
            copies[node].content = content
        return copies


def comparable(message: Message) -> bool:
    """Whether a reply can be compared with others: no error, one MetricRecord."""
    return message.has_content() and len(message.content.metric_records) == 1


def metrics_of(message: Message) -> MetricRecord:
    """The one MetricRecord of a reply."""
    record: MetricRecord = next(iter(message.content.metric_records.values()))
    return record


def _record(message: Message, result: ClientResult, names: Sequence[str]) -> ArrayRecord:
    """The arrays of a reply in the types and the order of the global model: averages take the order of the first."""
    record: ArrayRecord = message.content.array_records[model_in(message.content)[0]]
    if result.converted is not None:
        return ArrayRecord({k: Array(np.asarray(v)) for k, v in zip(names, result.converted, strict=True)})
    return ArrayRecord({name: record[name] for name in names})
