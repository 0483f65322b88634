"""Fake Flower clients, of both APIs, that do the arithmetic of the NumPy world."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, GetPropertiesIns, GetPropertiesRes
from flwr.common import ndarrays_to_parameters as encoded

from tests.strategies import numpy_world as world
from tests.strategies.either_api import Server, base_of
from tests.strategies.helpers import OK, FakeProxy, parameters_to_ndarrays


class WorldProxy(FakeProxy):
    """Client ``number`` of the NumPy world."""

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        return GetPropertiesRes(OK, world.facts(self.number))

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        assert group_id is not None
        if not world.answers(self.number):
            raise TypeError("the battery is empty")
        (model,) = parameters_to_ndarrays(ins.parameters)
        trained = world.train(model, np.array([self.number]))[0]
        metrics = world.metrics(self.number, group_id)
        metrics |= world.asked(self.number, model, str(ins.config.get("needs", "")))
        return FitRes(OK, encoded([trained]), world.num_examples(self.number), metrics)

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        (model,) = parameters_to_ndarrays(ins.parameters)
        answers = world.probed(self.number, model)  # the loss of the result would answer for one among them
        return EvaluateRes(OK, float("nan"), world.num_examples(self.number), answers)


def proxies() -> list[WorldProxy]:
    return [WorldProxy(f"node-{k}", k, number=k) for k in range(world.FLEET)]


def base(api: str, name: str = "FedAvg", **options: Any) -> Any:
    """A base by name that starts from the world's model."""
    start = {"initial_parameters": encoded([world.initial()])} if api == "legacy" else {}
    return base_of(api, name, **start, **options)


legacy_base = partial(base, "legacy")


def play(api: str, strategy: Any, rounds: int) -> list[world.Array]:
    """Play rounds; returns the global model after each of them."""
    return [arrays[0] for arrays in Server(api, strategy, proxies(), start=[world.initial()]).play(rounds).models]


def comparable(history: Any) -> Any:
    """What a history says, without texts that differ between the adapters."""
    rounds = [
        (r.round, r.num_available, r.num_selected, r.num_completed, r.round_s, r.simulated_s, r.energy_j, r.probe_s)
        for r in history.rounds
    ]
    clients = [
        (r.round, r.client_id, r.client, r.completed, r.latency_s, repr(r.energy_j), r.num_examples)
        for r in history.clients
    ]
    return rounds, clients
