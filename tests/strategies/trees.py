"""Boosted trees as Flower's bagging expects them: XGBoost's JSON, of which only the counts and the trees are read."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common import FitIns, FitRes, Parameters

from tests.strategies.foreign.world import Outcome
from tests.strategies.helpers import OK, FakeProxy


def booster(number: int, server_round: int) -> bytes:
    """The one tree that client ``number`` adds in a round."""
    tree = {"id": 0, "base_weights": [0.5 * number, -0.25 * server_round]}
    model = {
        "gbtree_model_param": {"num_trees": "1", "num_parallel_tree": "1"},
        "iteration_indptr": [0, 1],
        "tree_info": [0],
        "trees": [tree],
    }
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def grown(model: bytes) -> list[list[float]]:
    """The weights of a model's trees, in order."""
    trees = json.loads(model)["learner"]["gradient_booster"]["model"]["trees"]
    return [tree["base_weights"] for tree in trees]


def grown_in(outcome: Outcome) -> list[list[float]]:
    """The same of the last model of a run."""
    if outcome.models:
        return grown(outcome.models[-1][0])
    _, _, data = outcome.returned["arrays"]["0"]
    return grown(np.load(io.BytesIO(data)).tobytes())


class TreeProxy(FakeProxy):
    """Adds a tree a round."""

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        assert group_id is not None
        self.fits.append(ins)
        metrics: dict[str, Any] = {"latency_s": 0.5 + 0.125 * self.number, **self.extra}
        return FitRes(OK, Parameters([booster(self.number, group_id)], ""), self.num_examples, metrics)


def as_record(model: bytes) -> ArrayRecord:
    """A model's bytes as Flower's quickstart sends them."""
    return ArrayRecord({"0": Array(np.frombuffer(model, dtype=np.uint8))})
