"""A third adapter beside Flower's two APIs: the core on stacked arrays (clients x parameters), in plain NumPy.

This is what a vectorized engine stands on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.models import ModelStack
from fedsel_flwr.rounds.replies import Reply
from tests.strategies import numpy_world as world

NODES = {f"node-{k}": k for k in range(world.FLEET)}
"""Connection -> client."""


class InProcess:
    """The transport: everybody answers at once."""

    def __init__(self, model: world.Array) -> None:
        self.model = model

    def introduce(self, nodes: list[str]) -> tuple[dict[str, Any], list[str]]:
        return {node: world.facts(NODES[node]) for node in nodes}, []

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> dict[str, Any]:
        return {node: world.probed(NODES[node], self.model) for node in nodes}


def play_stacked(core: SelectionCore, rounds: int, model: world.Array | None = None) -> list[world.Array]:
    """Play rounds from a model; returns the global model after each of them."""
    model, models = world.initial() if model is None else model, []
    for _ in range(rounds):
        chosen = core.choose(NODES, [model], InProcess(model))
        if chosen:
            trained = ModelStack([world.train(model, world.np.array([NODES[node] for node in chosen], dtype=int))])
            replies = {
                node: Reply(
                    num_examples=world.num_examples(k := NODES[node]),
                    metrics=world.metrics(k, core.round) | world.asked(k, model, core.asks),
                )
                for node in chosen
                if world.answers(NODES[node])
            }
            outcome = core.collect(replies, trained)
            kept = outcome.models.take(outcome.positions).flat()
            mean = world.np.average(kept, axis=0, weights=outcome.weights) if outcome.enough else None
            after = core.finish(None if mean is None else [mean])
            model = model if after is None else after[0]
        models.append(model)
    return models
