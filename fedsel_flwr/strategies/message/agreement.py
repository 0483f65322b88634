"""Which metrics of a set of replies a base strategy sees: Flower ends the run where their keys are not all the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flwr.app import MetricRecord

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
