"""One round with functions as clients, in both of Flower's APIs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import RoundRobin
from fedsel_flwr.testing.in_process import play_round
from tests.testing.strategies_under_test import APIS

GOOD: Any = ([np.ones(2)], 10, {"latency_s": 0.5})


@pytest.mark.parametrize(
    "reply",
    [
        ([np.ones(2)], 10, {"latency_s": 0.5, "note": None}),
        ([np.ones(2)], 10, {"latency_s": 0.5, "note": {"a": 1}}),
        ([np.ones(2)], 10, None),
        ([np.ones(2)], None, {"latency_s": 0.5}),
        (None, 10, {"latency_s": 0.5}),
        ([np.ones(2)], 10),
    ],
    ids=["none", "mapping", "no metrics", "no examples", "no arrays", "two values"],
)
def test_a_reply_that_flower_cannot_send_is_a_failed_client(api: str, reply: Any) -> None:
    strategy = APIS[api].SelectionStrategy(RoundRobin(clients_per_round=2))
    (model,) = play_round(strategy, [lambda model, config: GOOD, lambda model, config: reply], [np.zeros(2)])
    assert model.tolist() == [1.0, 1.0]
    assert [row.completed for row in strategy.history.clients] == [True, False]
    assert strategy.history.problem_counts() == {"exception": 1}
