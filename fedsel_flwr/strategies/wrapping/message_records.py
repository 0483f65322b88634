"""Records of the Message API: read into plain types, and cleaned for a base strategy.

A base strategy gets copies of the usable replies, all with the same metrics. Flower ends the run if the keys of two
replies differ.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.late import LateUpdate
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.reply_checks import structure_of
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.rounds.untrusted import decoded, finite_number, shown
from fedsel_flwr.selectors.columns import ASKED, VECTORS
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.adapter import Evaluation
from fedsel_flwr.strategies.wrapping.failure_reasons import reason_of

SENT = sorted(ASKED & VECTORS)
"""The columns of vectors that clients send, each in a record with the column's key."""
SCALAR = -1
"""Kind of a metric that is a number. The kind of a list is its length, or 0 if lengths may differ."""


def reply_of(
    base: object, message: Message, model: ArrayRecord, observed_s: float | None, keys: MetricKeys,
    sent: RecordDict | None = None,
) -> Reply:  # fmt: skip
    """Read a client's message into plain types; no content of a message raises an error.

    Args:
        base: The strategy that will aggregate the replies.
        message: The client's reply.
        model: The global model.
        observed_s: Seconds that the server waited for the client; None if it was not timed.
        keys: Names of our metrics.
        sent: The content that the client received; None if its reply is held against the global model.
    """
    if message.has_error():
        return Reply(error=reason_of(message.error), observed_s=observed_s)
    content = message.content
    metrics, weight_key = _metrics_in(content), bases.weight_key(base)
    if _has_one_metric_record(message) and (fault := bases.fault_in_metrics(base, metrics)):
        return Reply(error=fault, observed_s=observed_s)
    models = {name: content.array_records[name] for name in _model_records(content, keys, sent)}
    received = _named_like({"": model} if sent is None else sent.array_records, models)
    misfit = _misfit(models, received, len(content.metric_records))
    # In the order of the arrays that the client received.
    order = list(_flat(models if misfit else received))
    arrays = None if misfit and sent is None else _decoded([models[record][name] for record, name in order])
    if arrays is None and sent is None:
        return Reply(error=misfit or "arrays: cannot be decoded", observed_s=observed_s)
    reply = Reply(
        arrays=arrays,
        num_examples=_weight_of(metrics, weight_key),
        weight=metrics.get(weight_key),
        metrics=metrics | _vectors_in(content, content.array_records.keys() - models.keys(), keys),
        observed_s=observed_s,
    )
    if sent is None or arrays is None:
        return reply
    shapes = [np.broadcast_to(np.zeros((), array.dtype), array.shape) for array in _flat(received).values()]
    structure = structure_of(["/".join(key) for key in order], arrays, content.metric_records)
    return replace(reply, misfit=misfit, sent=shapes, structure=structure)


def entries_in(content: RecordDict, keys: MetricKeys) -> dict[str, object]:
    """Return all entries of the metric and config records of a reply, with any record names, and its vector columns."""
    # Metrics come last, because if a config repeats a metric's key, the metric is the measured value.
    records: list[Any] = [*content.config_records.values(), *content.metric_records.values()]
    merged = {key: value for record in records for key, value in record.items()}
    return merged | _vectors_in(content, content.array_records, keys)


def late_message(update: LateUpdate, template: Message | None, names: Sequence[str], base: object) -> Message:
    """Return a late update as a client's reply, with the names that a reply of this round has.

    Args:
        update: The update.
        template: A reply of this round; None if there is none.
        names: The names of the model's arrays.
        base: The strategy that will aggregate the replies.
    """
    content, like = RecordDict(), RecordDict() if template is None else template.content
    name = next(iter(like.array_records), bases.record_names(base)[0])
    metrics = next(iter(like.metric_records), "metrics")
    # The cleaner replaces the arrays by the moved model.
    content[name] = ArrayRecord({key: Array(one) for key, one in zip(names, update.change, strict=True)})
    content[metrics] = MetricRecord({key: one for key, one in update.metrics.items() if not isinstance(one, str)})
    return Message(content, reply_to=Message(RecordDict(), dst_node_id=int(update.node), message_type="train"))


def set_weights(messages: Iterable[Message], key: str, weights: Iterable[float]) -> None:
    """Replace the weights of replies that have one."""
    for message, weight in zip(messages, weights, strict=True):
        for record in message.content.metric_records.values():
            if key in record:
                # Schemes compute floats, but bases expect integers as numbers of examples.
                record[key] = int(weight) if weight.is_integer() else weight


def names_and_arrays(record: ArrayRecord) -> tuple[list[str], Arrays]:
    """Return the names and arrays of a model."""
    return list(record), [array.numpy() for array in record.values()]


def record_of(checkpoint: Checkpoint) -> ArrayRecord:
    """Return the model of a checkpoint as Flower's record."""
    return ArrayRecord({name: Array(a) for name, a in zip(checkpoint.names, checkpoint.model, strict=True)})


def renumber_rounds(result: Result, done: int) -> None:
    """Renumber the rounds of a resumed run's result from its checkpoint on; evaluation 0 is the checkpoint's round."""
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        setattr(result, name, {number + done: record for number, record in getattr(result, name).items()})


class Cleaner:
    """Gives the replies that a base strategy can use the same metrics.

    Metrics that the base reads by name are required, and a client without them has failed (:func:`reply_of`). No reply
    is lost because of other metrics. :func:`~fedsel_flwr.strategies.wrapping.message_records.common_metrics` decides
    which of them the base sees.

    Args:
        base: The strategy that will aggregate the replies.
        keys: Names of our metrics.
    """

    def __init__(self, base: object, keys: MetricKeys) -> None:
        self._base, self._keys, self._ours = base, keys, keys.own_keys()
        self.weight_key = bases.weight_key(base)

    def cleaned(
        self, messages: Mapping[str, Message], outcome: Outcome, model: ArrayRecord, sent: Mapping[str, RecordDict]
    ) -> list[Message]:
        """Copy the kept replies to TRAIN messages so that all have the same metrics.

        An update with the structure of the arrays that its client received also gets their order and types.

        Args:
            messages: Connection -> reply, of every client whose update is usable.
            outcome: The outcome of the round.
            model: The global model.
            sent: Connection -> the content that the client received; empty if replies are held against the model.
        """
        limits = {node: outcome.results[node].weight for node in messages}
        # Metrics common to all usable replies, not only to those in ``kept``, so that FedCA's filter does not change
        # them.
        copies = self._with_common_metrics(messages, "train_metrics_aggr_fn", limits, outcome.left_out)
        array_name = ""
        for node, twin in copies.items():
            content, received = messages[node].content, sent.get(node)
            records = {name: content.array_records[name] for name in _model_records(content, self._keys, received)}
            if outcome.as_sent:
                given = {"": model} if received is None else received.array_records
                records = _as_sent(records, given, outcome.results[node].converted)
            if len(records) == 1:
                # All get the name that the first reply has.
                array_name = array_name or next(iter(records))
                records = {array_name: next(iter(records.values()))}
            for name, record in records.items():
                twin.content[name] = record
        return [copies[node] for node in outcome.kept]

    def read_evaluations(self, messages: Mapping[str, Message]) -> dict[str, Evaluation]:
        """Read the replies to EVALUATE messages that are no errors."""
        # A base with its own method may read any number of records.
        numbers = Counter(len(message.content.metric_records) for message in messages.values())
        own = bases.brings_own(self._base, "aggregate_evaluate")
        number = next((n for n, count in numbers.items() if own and 2 * count > len(messages)), 1)
        read: dict[str, Evaluation] = {}
        for node, message in messages.items():
            metrics, got = _metrics_in(message.content), len(message.content.metric_records)
            expected = "one MetricRecord" if number == 1 else f"{number} MetricRecords"
            fault = "" if got == number else f"metrics: expected {expected}, got {got}"
            read[node] = Evaluation(_weight_of(metrics, self.weight_key), metrics.items(), fault)
        return read

    def evaluations(self, messages: Mapping[str, Message], max_examples: int | None) -> list[Message]:
        """Copy the usable replies to EVALUATE messages.

        Args:
            messages: Connection -> reply.
            max_examples: Largest number of examples that a client may claim; None for no limit.
        """
        limits = {} if max_examples is None else dict.fromkeys(messages, max_examples)
        return list(self._with_common_metrics(messages, "evaluate_metrics_aggr_fn", limits, arrays=True).values())

    def _with_common_metrics(
        self, messages: Mapping[str, Message], function: str, limits: Mapping[str, float],
        left_out: Collection[str] = (), arrays: bool = False,
    ) -> dict[str, Message]:  # fmt: skip
        """Copy messages, so that their MetricRecords have equal names and keys; large weights are cut."""
        lengths = bases.averages_lists(self._base, function)
        single = all(_has_one_metric_record(message) for message in messages.values())
        groups: dict[str, list[MetricRecord]] = {}
        for message in messages.values():
            for name, record in message.content.metric_records.items():
                groups.setdefault(next(iter(groups), name) if single else name, []).append(record)
        kept = {
            name: {key: v for key, v in common_metrics(own, self._ours, lengths=lengths).items() if key not in left_out}
            for name, own in groups.items()
        }
        copies = {}
        for node, message in messages.items():
            content = RecordDict(dict(message.content.config_records.items()))
            for name, unread in message.content.array_records.items() if arrays else ():
                content[name] = unread
            for name, record in message.content.metric_records.items():
                name = next(iter(groups)) if single else name
                content[name] = metrics = with_common_metrics(record, kept[name], lengths=lengths)
                weight, limit = finite_number(metrics.get(self.weight_key)), limits.get(node)
                if limit and weight is not None and weight > limit:
                    metrics[self.weight_key] = limit
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


def _metrics_in(content: RecordDict) -> dict[str, Any]:
    """Return the metrics of all MetricRecords of a reply; of equal keys that of the first record."""
    records = reversed(list(content.metric_records.values()))
    return {key: value for record in records for key, value in record.items()}


def _model_records(content: RecordDict, keys: MetricKeys, sent: RecordDict | None) -> list[str]:
    """Return the names of the records that may be the update: all ArrayRecords that are not vector columns.

    If replies are not held against the global model, only the columns that were asked for are no part of the update.
    """
    asked = next((str(one["needs"]) for one in sent.config_records.values() if "needs" in one), "") if sent else ""
    vectors = [keys.of(name) for name in SENT if sent is None or name in asked.split(",")]
    # A single ArrayRecord is the model, even if it has a column's name by chance.
    others = [name for name in content.array_records if name not in vectors]
    return others or (list(content.array_records) if len(content.array_records) == 1 else [])


def _as_sent(
    records: Mapping[str, ArrayRecord], sent: Mapping[str, ArrayRecord], converted: Arrays | None
) -> dict[str, ArrayRecord]:
    """Return the records of a reply with the types and the order of the arrays that the client received."""
    # Flower's averages take the order of the first reply, which then becomes the order of the next global model.
    typed = None if converted is None else iter(converted)
    return {
        name: ArrayRecord(
            {key: records[name][key] if typed is None else Array(np.asarray(next(typed))) for key in given}
        )
        for name, given in _named_like(sent, records).items()
    }


def _named_like(sent: Mapping[str, ArrayRecord], records: Mapping[str, ArrayRecord]) -> dict[str, ArrayRecord]:
    """Return what was sent; the name of a single record is the client's choice, so it gets the name of the reply's."""
    return dict(zip(records if len(records) == len(sent) == 1 else sent, sent.values(), strict=True))


def _flat(records: Mapping[str, ArrayRecord]) -> dict[tuple[str, str], Array]:
    """Return the arrays of several records by the names of record and array."""
    return {(name, key): array for name, record in records.items() for key, array in record.items()}


def _vectors_in(content: RecordDict, records: Collection[str], keys: MetricKeys) -> dict[str, object]:
    """Return the vector columns among these records of a reply: ArrayRecords with a column's key and one array.

    A text stands for a vector that cannot be read. It is refused later, with the column's name.
    """
    vectors: dict[str, object] = {}
    for name in {keys.of(column) for column in SENT}.intersection(records):
        arrays = list(content.array_records[name].values())
        vectors[name] = f"an ArrayRecord of {len(arrays)} arrays"
        if len(arrays) == 1:
            found = _decoded(arrays)
            vectors[name] = found[0] if found else "an array that cannot be decoded"
    return vectors


def _misfit(models: Mapping[str, ArrayRecord], received: Mapping[str, ArrayRecord], num_metrics: int) -> str:
    """Return the difference between the records of a reply and those that its client received; empty without one."""
    if num_metrics != 1:
        return f"metrics: expected one MetricRecord, got {num_metrics}"
    if len(models) != len(received):
        return f"arrays: expected {len(received)} ArrayRecord(s), got {len(models)}"
    own, wanted = _flat(models), _flat(received)
    if own.keys() == wanted.keys():
        return ""
    if len(own) != len(wanted):
        return f"arrays: expected {len(wanted)}, got {len(own)}"
    return f"arrays: expected the names {shown(sorted(n for _, n in wanted))}, got {shown(sorted(n for _, n in own))}"


def _decoded(encoded: Sequence[Array]) -> Arrays | None:
    """Return the arrays of a reply; None if they cannot be decoded."""
    return decoded(lambda: [array.numpy() for array in encoded])
