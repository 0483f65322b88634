"""Evaluation by the base strategy: bounded, and one odd answer does not end the run (Message API)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from flwr.app import Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedsel_flwr.errors import RunError
from fedsel_flwr.strategies.message import CSUCB
from tests.strategies.helpers import FakeProxy, chosen
from tests.strategies.message.helpers import FakeGrid, FakeNode, crowd, node_id, play, wrapped

pytestmark = pytest.mark.timeout(30)


@pytest.mark.timeout(15)
def test_evaluation_is_bounded() -> None:
    for options in ({"min_evaluate_nodes": 50}, {"min_available_nodes": 50}, {"fraction_evaluate": 2.0}):
        base = FedAvg(**{"fraction_evaluate": 0.5, **options})
        with pytest.raises(RunError, match="wait_timeout"):
            play(wrapped(2, base, min_available=2), FakeGrid(crowd(3)), 1)


def test_evaluation_reaches_the_number_the_base_asks_for() -> None:
    strategy = wrapped(2, FedAvg(fraction_evaluate=0.5, min_evaluate_nodes=1))
    grid = FakeGrid(crowd(8))
    result, _ = play(strategy, grid, 3)
    evaluated = [len(b) for b in grid.sent if b and b[0].metadata.message_type == MessageType.EVALUATE]
    assert evaluated == [4, 4, 4]
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]


@pytest.mark.parametrize("fault", ["extra", "lacks", "list", "two", "none", "weight", "error"])
def test_an_odd_evaluation_does_not_end_the_run(fault: str) -> None:
    from flwr.app import Error

    def change(node: FakeNode, message: Message, content: RecordDict) -> Any:
        metrics = dict(content["metrics"])
        if fault == "error":
            return Error(0, "I break")
        if fault == "two":
            content["again"] = MetricRecord({"num-examples": 1, "loss": 1.0})
        elif fault == "none":
            del content["metrics"]
        else:
            new = {
                "extra": {**metrics, "x": 1.0}, "lacks": {"num-examples": 1}, "list": {**metrics, "loss": [1.0]},
                "weight": {**metrics, "num-examples": [1, 2]},
            }  # fmt: skip
            content["metrics"] = MetricRecord(new[fault])
        return content

    nodes = crowd(3)
    nodes[node_id(3)] = FakeNode(FakeProxy("3", 3, number=3), evaluate_fault=change)
    result, _ = play(wrapped(2, FedAvg(fraction_evaluate=1.0), min_available=4), FakeGrid(nodes), 2)
    honest = sum((10 + 3 * k) * 0.1 * (k + 1) for k in range(3)) / sum(10 + 3 * k for k in range(3))
    with_odd = (honest * 39 + 19 * 0.1 * 4) / 58
    expected = {"extra": with_odd, "lacks": math.nan, "list": math.nan}.get(fault, honest)
    assert result.evaluate_metrics_clientapp[2] == {"loss": pytest.approx(expected, nan_ok=True)}


def test_an_evaluation_without_a_weight_changes_nothing_for_the_others() -> None:
    nodes = crowd(3)
    nodes[node_id(3)] = FakeNode(
        FakeProxy("3", 3, number=3), evaluate_fault=lambda n, m, c: RecordDict({"metrics": MetricRecord({})})
    )
    result, _ = play(wrapped(2, FedAvg(fraction_evaluate=1.0), min_available=4), FakeGrid(nodes), 1)
    honest = sum((10 + 3 * k) * 0.1 * (k + 1) for k in range(3)) / sum(10 + 3 * k for k in range(3))
    assert result.evaluate_metrics_clientapp[1] == {"loss": pytest.approx(honest)}


@pytest.mark.parametrize("clients", [2, 3])
def test_a_metric_of_one_client_is_dropped_and_its_evaluation_counts(clients: int) -> None:
    def more(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
        content["metrics"] = MetricRecord({**dict(content["metrics"]), "f1": 0.5, "latency_s": 1.0})
        return content

    nodes = crowd(clients)
    nodes[node_id(0)].evaluate_fault = more
    result, _ = play(wrapped(2, FedAvg(fraction_evaluate=1.0), min_available=clients), FakeGrid(nodes), 1)
    total = sum(10 + 3 * k for k in range(clients))
    loss = sum((10 + 3 * k) * 0.1 * (k + 1) for k in range(clients)) / total
    assert result.evaluate_metrics_clientapp[1] == {"loss": pytest.approx(loss)}


def test_evaluation_does_not_disturb_the_choice_of_training_nodes() -> None:
    runs = []
    for fraction in (0.0, 1.0):
        strategy = CSUCB(clients_per_round=3, max_latency=9.0, seed=2, base=FedAvg(fraction_evaluate=fraction))
        play(strategy, FakeGrid(crowd(9)), 5)
        runs.append(chosen(strategy))
    assert runs[0] == runs[1]
