"""An update that is too large is refused, of a list and of a stack alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.models import ModelStack, update_norm
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.selectors import Random
from tests.rounds.written import Written, core_of, facts

REFERENCE = [np.full((2, 2), 1.0, dtype=np.float32), np.zeros(1, dtype=np.float32), np.array(3, dtype=np.int64)]
MODELS = [  # differences (2, 0, 0, 0), (0), 0: norm 2; (0, 3, 0, 0), (4), 0: norm 5; and 0, 0, 12 more: norm 13
    [np.array([[3.0, 1.0], [1.0, 1.0]], np.float32), np.zeros(1, np.float32), np.array(3)],
    [np.array([[1.0, 4.0], [1.0, 1.0]], np.float32), np.full(1, 4.0, np.float32), np.array(3)],
    [np.array([[1.0, 4.0], [1.0, 1.0]], np.float32), np.full(1, 4.0, np.float32), np.array(15)],
    [np.full((2, 2), np.nan, np.float32), np.zeros(1, np.float32), np.array(3)],
]


def _collected(limit: float | None, *, stacked: bool) -> Any:
    core = core_of(Random(clients_per_round=4, seed=0), max_latency=5.0, max_update_norm=limit)
    nodes = core.choose(list("abcd"), REFERENCE, Written(facts(*"abcd")))
    metrics = {"latency_s": 1.0}
    if stacked:
        stack = ModelStack([np.stack([model[i] for model in MODELS]) for i in range(3)])
        return core.collect({node: Reply(num_examples=1, metrics=metrics) for node in nodes}, stack)
    pairs = zip(nodes, MODELS, strict=True)
    return core.collect({node: Reply(arrays=model, num_examples=1, metrics=metrics) for node, model in pairs})


def test_the_norm_is_over_all_arrays() -> None:
    assert [update_norm(model, REFERENCE) for model in MODELS[:3]] == [2.0, 5.0, 13.0]


@pytest.mark.parametrize("stacked", [False, True])
def test_a_larger_update_is_refused_by_name(stacked: bool) -> None:
    assert _collected(None, stacked=stacked).usable == ["a", "b", "c"]
    outcome = _collected(5.0, stacked=stacked)
    assert outcome.usable == ["a", "b"]
    problems = {node: result.problems for node, result in outcome.results.items()}
    assert problems["c"] == ("update norm: 13 is above max_update_norm = 5",)
    assert problems["d"] == ("arrays: not finite at 0",)  # the first thing that is wrong
    assert outcome.results["c"].latency_s == 5.0


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "5", True])
def test_a_limit_must_be_a_number_above_0(value: Any) -> None:
    with pytest.raises(ParameterError, match="max_update_norm"):
        core_of(Random(clients_per_round=1), max_update_norm=value)


def test_there_is_no_limit_where_there_are_no_norms() -> None:
    with pytest.raises(ParameterError, match="max_update_norm"):
        core_of(Random(clients_per_round=1), max_update_norm=1.0, compare_models=False)
    core = core_of(Random(clients_per_round=1), max_update_norm=1.0)
    core.choose(["a"], None, Written(facts("a")))  # a global model that cannot be decoded
    with pytest.raises(RunError, match="max_update_norm works on its numbers"):
        core.collect({"a": Reply(num_examples=1, metrics={"latency_s": 1.0})})
