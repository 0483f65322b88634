"""Evaluations without a finite number, and updates without a norm: what Flower cannot average or clip, in both APIs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.common import ndarrays_to_parameters

from fedsel_flwr.flower import task_identity
from fedsel_flwr.testing.in_process import (
    RUN,
    SERVER,
    TASK,
    Functions,
    InProcessGrid,
    legacy_replies,
    manager_of,
    play_round,
    record_of,
)
from tests.strategies.either_api import BOTH, base_of, private, selection


class Evaluated(Functions):
    """Clients that return their model unchanged, and evaluate with the given metrics; the first is the loss."""

    def __init__(self, metrics: list[dict[str, float]]) -> None:
        super().__init__([lambda model, config: (model, 10, {"latency_s": 0.5})] * len(metrics), [np.zeros(2)])
        self._metrics = metrics

    def evaluation_reply(self, node: str, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        metrics = dict(self._metrics[self.connected[node]])
        return metrics.pop("loss"), 10, metrics


def _evaluated(api: str, clients: Evaluated) -> dict[str, Any]:
    """The base's average over all clients."""
    mean = {
        "legacy": {"evaluate_metrics_aggregation_fn": lambda all: {"acc": float(np.mean([m["acc"] for _, m in all]))}},
        "message": {},
    }[api]
    base = base_of(api, fraction_evaluate=1.0, **mean)
    strategy = selection(api, len(clients.connected), base)
    if api == "legacy":
        parameters, manager = ndarrays_to_parameters(clients.arrays), manager_of(clients)
        strategy.configure_fit(1, parameters, manager)
        asked = strategy.configure_evaluate(1, parameters, manager)
        loss, metrics = strategy.aggregate_evaluate(1, *legacy_replies(clients, asked, "evaluate", 1))
        return {"loss": loss, **metrics}
    grid, arrays = InProcessGrid(clients), record_of(clients.arrays)
    with task_identity(RUN, TASK, SERVER):
        strategy.configure_train(1, arrays, ConfigRecord(), grid)
        asked = strategy.configure_evaluate(1, arrays, ConfigRecord(), grid)
        return dict(strategy.aggregate_evaluate(1, grid.send_and_receive(asked)))


@BOTH
@pytest.mark.parametrize("key", ["loss", "acc"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_evaluation_that_is_not_finite_is_left_out(api: str, key: str, value: float, caplog: Any) -> None:
    good = {"loss": 1.0, "acc": 0.5}
    with caplog.at_level("WARNING", "fedsel_flwr"):
        average = _evaluated(api, Evaluated([good, {**good, key: value}, {"loss": 3.0, "acc": 0.7}]))
    assert average["loss"] == 2.0
    assert average["acc"] == pytest.approx(0.6)
    assert f"client 1: evaluation: {key}: expected finite numbers, got {value}" in caplog.text


@BOTH
@pytest.mark.parametrize("kind", ["ServerSideFixed", "ServerSideAdaptive"])
@pytest.mark.parametrize("size", [0.0, 1e-30])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_an_update_without_a_norm_is_clipped_to_itself(api: str, kind: str, size: float, dtype: Any) -> None:
    """In float32 the square of 1e-30 is 0 too. Clipping divides by the norm."""
    steps = [size, 0.25, 0.5]
    model = [np.zeros(2, dtype), np.full((2, 2), 0.75, dtype)]
    clients = [
        lambda arrays, config, step=step: ([(a + dtype(step)).astype(dtype) for a in arrays], 10, {"latency_s": 0.5})
        for step in steps
    ]
    norm = {"clipping_norm": 9.0} if "Fixed" in kind else {"initial_clipping_norm": 9.0}
    strategy = selection(api, 3, private(api, base_of(api), kind, **norm))
    after = play_round(strategy, clients, model)
    assert [row.completed for row in strategy.history.clients] == [True] * 3
    for array, before in zip(after, model, strict=True):
        np.testing.assert_allclose(array - before, np.full(before.shape, 0.25, dtype), rtol=0, atol=2e-3)
