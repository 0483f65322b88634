"""Evaluation by the base strategy: one odd answer does not end the run (Message API)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict

from tests.strategies.either_api import Server, base_of, selection
from tests.strategies.helpers import FakeProxy, fleet
from tests.strategies.message.faults import reports
from tests.strategies.message.helpers import FakeNode

pytestmark = pytest.mark.timeout(30)


def _again(node: FakeNode, message: Message, content: RecordDict) -> RecordDict:
    return RecordDict({"metrics": content["metrics"], "again": MetricRecord({"num-examples": 1, "loss": 1.0})})


FAULTS: dict[str, tuple[Any, str]] = {
    "extra": (reports({"x": 1.0}), "counts"),
    "ours": (reports({"f1": 0.5, "latency_s": 1.0}), "counts"),
    "lacks": (reports({}, "loss"), "nan"),
    "list": (reports({"loss": [1.0]}), "nan"),
    "weight": (reports({"num-examples": [1, 2]}), "left out"),
    "no weight": (reports({}, "num-examples", "loss"), "left out"),
    "two": (_again, "left out"),
    "none": (lambda node, message, content: RecordDict({}), "left out"),
    "error": (lambda node, message, content: Error(0, "I break"), "left out"),
}


@pytest.mark.parametrize("honest", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_odd_evaluation_does_not_end_the_run(fault: str, honest: int) -> None:
    change, becomes = FAULTS[fault]
    strategy = selection("message", 2, base_of("message", fraction_evaluate=1.0), min_available=honest + 1)
    server = Server("message", strategy, fleet(honest))
    server.connect(FakeProxy("odd", honest, number=honest), evaluate_fault=change)
    server.play(2)
    counted = range(honest + (becomes == "counts"))
    mean = sum((10 + 3 * k) * 0.1 * (k + 1) for k in counted) / sum(10 + 3 * k for k in counted)
    for server_round in (1, 2):
        found = server.result.evaluate_metrics_clientapp[server_round]
        if honest == 1 and becomes == "nan":
            assert math.isnan(found.get("loss", math.nan))
        else:
            assert found == {"loss": pytest.approx(math.nan if becomes == "nan" else mean, nan_ok=True)}
