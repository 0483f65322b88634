"""Vectors that clients report: of one column, all must have one length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from fedsel_flwr.rounds.replies import ClientResult
from fedsel_flwr.selectors.columns import VECTORS


def usual_length(values: Iterable[object]) -> int:
    """The length that most vectors have, of equally many the longest; 0 where there is none.

    >>> usual_length([np.ones(2), None, np.ones(3), np.zeros(2)])
    2
    """
    lengths = Counter(len(value) for value in values if isinstance(value, np.ndarray))
    return max(lengths, key=lambda n: (lengths[n], n), default=0)


def of_other_lengths(values: Sequence[object]) -> dict[int, str]:
    """Which vectors have another length than most, and what is wrong with each.

    >>> of_other_lengths([np.ones(2), None, np.ones(3), np.zeros(2)])
    {2: 'expected 2 numbers, as most have, got 3'}
    """
    usual = usual_length(values)
    return {
        i: f"expected {usual} numbers, as most have, got {len(value)}"
        for i, value in enumerate(values)
        if isinstance(value, np.ndarray) and len(value) != usual
    }


def of_one_length(results: dict[str, ClientResult], wanted: frozenset[str]) -> dict[str, ClientResult]:
    """The results of a round without the vectors that are of another length than most, each named as a problem.

    Args:
        results: Connection -> its reply after reading.
        wanted: Columns that clients report and the selector needs.
    """
    for name in sorted(wanted & VECTORS):
        nodes = list(results)
        for i, fault in of_other_lengths([results[node].columns.get(name) for node in nodes]).items():
            old = results[nodes[i]]
            columns = {key: value for key, value in old.columns.items() if key != name}
            new = replace(old, columns=columns, problems=(*old.problems, f"{name}: {fault}"))
            results = {**results, nodes[i]: new}
    return results
