"""What a base strategy sees of the replies: copies that are all alike, of those that can be used."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedsel_flwr.rounds.replies import ClientResult
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.rounds.untrusted import MAX_METRICS, finite_number, shown, usable_count
from fedsel_flwr.strategies import bases
from fedsel_flwr.strategies.message.agreement import agreed, made_alike
from fedsel_flwr.strategies.message.records import model_in, weight_of


class Cleaner:
    """Finds the replies that a base strategy cannot use, and makes the others alike.

    What the base reads by name is compulsory: a client that lacks it has failed. Over other metrics no reply is lost;
    :func:`~fedsel_flwr.strategies.message.agreement.agreed` says which of them stay.

    Args:
        base: The strategy that will aggregate the replies.
        keys: Names of our metrics.
        max_examples: Most examples that a client may claim in an evaluation; None for no limit.
    """

    def __init__(self, base: object, keys: MetricKeys, max_examples: int | None = None) -> None:
        self._base, self._max_examples = base, max_examples
        self.weight_key = bases.weight_key(base)
        self._ours = keys.ours()

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
