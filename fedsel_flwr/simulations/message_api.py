"""A scenario in Flower's Message API: its base strategy, its rounds, its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.client import ClientApp
from flwr.common import Context
from flwr.serverapp import Grid, strategy

from fedsel_flwr.clients.torch_client import TorchClient, make_message_app
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.simulations.base_strategies import CLASSES, own_parameters
from fedsel_flwr.simulations.world import World

PACKAGE = "fedsel_flwr.strategies.message"
"""Where the selection strategies are."""
STRATEGY: type = strategy.Strategy
"""The class of every strategy."""


def make_base(world: World) -> strategy.Strategy:
    """The scenario's base strategy.

    Args:
        world: The scenario's world.

    Returns:
        The base.
    """
    base: strategy.Strategy = getattr(strategy, CLASSES[world.scenario.aggregation.base])(
        fraction_evaluate=0.0, min_available_nodes=world.scenario.num_clients, **own_parameters(world.scenario)
    )
    return base


def run(grid: Grid, world: World, strategy: Any) -> Arrays:
    """Run the scenario's rounds, or those that the strategy's checkpoint does not have.

    The test set is evaluated here, as the bases do not evaluate.

    Args:
        grid: Flower's connection to the nodes.
        world: The scenario's world.
        strategy: The selection strategy.

    Returns:
        The final global model.
    """
    scenario, initial = world.scenario, ArrayRecord(list(world.initial_arrays()))

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        loss, accuracy = world.test(arrays.to_numpy_ndarrays())
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    result = strategy.start(
        grid=grid,
        initial_arrays=initial,
        num_rounds=scenario.rounds,
        timeout=scenario.aggregation.round_timeout_s,
        evaluate_fn=evaluate_fn,
    )
    final: ArrayRecord = result.arrays if result.arrays else initial
    return final.to_numpy_ndarrays()


def make_client_app(client_of: Callable[[Context], TorchClient]) -> ClientApp:
    """The simulated clients as an app.

    Args:
        client_of: Returns the client of a node.

    Returns:
        The app.
    """
    return make_message_app(client_of)
