"""What a base strategy sees of the replies: Flower ends the run when they are not all alike."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedsel_flwr.rounds.replies import ClientResult
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.rounds.untrusted import finite_number, shown, usable_count
from fedsel_flwr.strategies import bases
from fedsel_flwr.strategies.message.records import model_in, reply_of

Kinds = frozenset[tuple[str, int]]
"""Metric keys, each with -1 for a number, the length of a list, or 0 for a list where lengths may differ."""


class Cleaner:
    """Finds the replies that are unlike the others, and makes those that stay alike.

    Args:
        base: The strategy that will aggregate them.
        keys: Names of our metrics; they are left out of the base's copies, unless the base itself reads them.
    """

    def __init__(self, base: object, keys: MetricKeys) -> None:
        layers = list(bases.layers(base))
        weights = [getattr(layer, "weighted_by_key", None) for layer in layers]
        self.weight_key: str = next((key for key in weights if key is not None), "num-examples")
        losses = [getattr(layer, "train_loss_key", None) for layer in layers]  # QFedAvg
        self._losses = [key for key in losses if key is not None]
        self._ours = keys.ours() - {self.weight_key, *self._losses}
        self._averages = any(  # Flower's own adds lists element by element, a user's function may not
            getattr(getattr(layer, name, None), "__name__", "") == "aggregate_metricrecords"
            for layer in layers
            for name in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn")
        )

    def odd_ones_out(self, messages: Mapping[str, Message]) -> dict[str, str]:
        """Which replies would make Flower end the run, and why.

        The metrics that most replies share, ours left aside, are the right ones; extra keys are dropped later,
        missing ones are a fault, and so is a list where the others have a number.

        Args:
            messages: Connection -> reply, ordered; of equally many the first decide. Those without exactly one
                MetricRecord are left out.

        Returns:
            Connection -> what is missing.
        """
        kinds = {node: self._kinds(metrics_of(m)) for node, m in messages.items() if comparable(m)}
        if not kinds:
            return {}
        expected = Counter(kinds.values()).most_common(1)[0][0]
        return {
            node: f"metrics: lacks {', '.join(sorted(key for key, _ in expected - own))} as the other replies have it"
            for node, own in kinds.items()
            if not expected <= own
        }

    def unusable_losses(self, messages: Mapping[str, Message]) -> dict[str, str]:
        """Which replies hold a training loss of which the base would make a model of NaN.

        Returns:
            Connection -> what is wrong.
        """
        return {
            node: f"metrics: {key}: expected a finite number of at least 0, got {shown(metrics_of(message)[key])}"
            for node, message in messages.items()
            if comparable(message)
            for key in self._losses
            if key in metrics_of(message) and ((loss := finite_number(metrics_of(message)[key])) is None or loss < 0.0)
        }

    def cleaned(
        self, messages: Mapping[str, Message], results: Mapping[str, ClientResult], names: Sequence[str]
    ) -> list[Message]:
        """Copies of the usable replies to TRAIN messages, in which all records agree."""
        copies = self._alike(messages)
        if copies:
            array_name = model_in(next(iter(messages.values())).content)[0]
            for node, twin in copies.items():
                twin.content[array_name] = _record(messages[node], results[node], names)
        return list(copies.values())

    def evaluations(self, messages: Mapping[str, Message]) -> tuple[list[Message], dict[str, str]]:
        """Copies of the usable replies to EVALUATE messages, and connection -> why the others cannot be used."""
        faults = {
            node: f"metrics: expected one MetricRecord, got {len(m.content.metric_records)}"
            for node, m in messages.items()
            if m.has_content() and not comparable(m)
        }
        for node, message in messages.items():
            if comparable(message):
                weight = reply_of(message, (), self.weight_key, None).num_examples
                if not usable_count(weight):
                    faults[node] = f"num_examples: expected a number above 0, got {shown(weight)}"
        faults |= self.odd_ones_out({node: m for node, m in messages.items() if node not in faults})
        usable = {node: m for node, m in messages.items() if node not in faults and m.has_content()}
        return list(self._alike(usable).values()), faults

    def _alike(self, messages: Mapping[str, Message]) -> dict[str, Message]:
        """Copies without arrays whose one MetricRecord has the same name and the same keys in all."""
        if not messages:
            return {}
        common = frozenset.intersection(*(frozenset(metrics_of(m).keys()) for m in messages.values())) - self._ours
        name = next(iter(next(iter(messages.values())).content.metric_records))
        copies = {}
        for node, message in messages.items():
            content = RecordDict(dict(message.content.config_records.items()))
            content[name] = MetricRecord({k: v for k, v in metrics_of(message).items() if k in common})
            copies[node] = copy.copy(message)
            copies[node].content = content
        return copies

    def _kinds(self, metrics: Mapping[str, Any]) -> Kinds:
        left_out: Collection[str] = {*self._ours, self.weight_key}
        return frozenset(
            (key, (len(value) if self._averages else 0) if isinstance(value, list) else -1)
            for key, value in metrics.items()
            if key not in left_out
        )


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
