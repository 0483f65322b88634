"""The aggregation of the vectorized engine: the mean of a stack, or what a base strategy of Flower makes of it."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.models import Arrays, ModelStack
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.strategies.wrapping import bases

AVERAGES = ("FedAvg", "FedProx")
"""Base strategies of Flower whose model is the mean of the clients', weighted by numbers of examples."""


class Named(ClientProxy):
    """A client that a base strategy knows by name only; it trains in this process and cannot be asked.

    Args:
        cid: Its name.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(f"client {self.cid} trains in this process: a base strategy cannot ask it; use the engine 'ray'")

    fit = evaluate = get_properties = get_parameters = reconnect = _refuse


def aggregated(base: Any, round: int, outcome: Outcome) -> Arrays | None:
    """What a base strategy of the legacy API makes of the kept models.

    Flower's FedAvg and FedProx are weighted means, which a stack has at once; any other base gets Flower's types.

    Args:
        base: The base strategy.
        round: The absolute round.
        outcome: What came back.

    Returns:
        The new model; None if the base keeps the old one.
    """
    bases.check_survivors(base, len(outcome.kept), round)
    kept, weights = outcome.models.take(outcome.positions), outcome.weights
    if type(base).__name__ in AVERAGES and type(base).__module__.startswith("flwr.") and isinstance(kept, ModelStack):
        return stack_mean(kept, weights)
    ok = Status(Code.OK, "")
    results = [
        (Named(node), FitRes(ok, ndarrays_to_parameters(list(arrays)), int(weight), {}))
        for node, arrays, weight in zip(outcome.kept, kept.listed(), weights, strict=True)
    ]
    parameters, _ = base.aggregate_fit(bases.aggregation_round(base, round), results, [])
    return None if parameters is None else parameters_to_ndarrays(parameters)


def stack_mean(stack: ModelStack, weights: FloatArray) -> Arrays:
    """The weighted mean of a stack's models, in the types of its layers."""
    total = float(weights.sum())
    means = []
    for layer in stack.layers:
        held = layer if layer.dtype.kind == "f" else layer.astype(np.float64)
        flat = held.reshape(len(held), -1)
        mean = (weights.astype(held.dtype) @ flat) / total
        means.append(mean.reshape(layer.shape[1:]).astype(held.dtype, copy=False))
    return means
