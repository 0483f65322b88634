"""A scenario in Flower's legacy API: its base strategy, its rounds, its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.client import Client, ClientApp
from flwr.common import Context, NDArrays, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, ServerConfig, SimpleClientManager, strategy
from flwr.serverapp import Grid

from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.flower import start_grid
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.simulations.base_strategies import CLASSES, own_parameters
from fedsel_flwr.simulations.world import World

PACKAGE = "fedsel_flwr.strategies"
"""Where the selection strategies are."""
STRATEGY: type = strategy.Strategy
"""The class of every strategy."""


def make_base(world: World) -> strategy.Strategy:
    """The scenario's base strategy; it knows the initial model and evaluates on the test set.

    Args:
        world: The scenario's world.

    Returns:
        The base.
    """

    def evaluate_fn(round: int, arrays: NDArrays, config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
        loss, accuracy = world.test(arrays)
        return loss, {"accuracy": accuracy}

    def fit_config(round: int) -> dict[str, Scalar]:
        return {"round": round}

    base: strategy.Strategy = getattr(strategy, CLASSES[world.scenario.aggregation.base])(
        fraction_evaluate=0.0,
        min_available_clients=world.scenario.num_clients,
        initial_parameters=ndarrays_to_parameters(list(world.initial_arrays())),
        evaluate_fn=evaluate_fn,
        on_fit_config_fn=fit_config,
        fit_metrics_aggregation_fn=lambda metrics: {},
        **own_parameters(world.scenario),
    )
    return base


def run(grid: Grid, world: World, strategy: Any) -> Arrays:
    """Run the scenario's rounds, or those that the strategy's checkpoint does not have.

    Args:
        grid: Flower's connection to the nodes.
        world: The scenario's world.
        strategy: The selection strategy.

    Returns:
        The final global model.
    """
    scenario = world.scenario
    server = make_server(strategy, scenario.num_clients)
    done = 0 if strategy.resumed is None else strategy.resumed.round
    config = ServerConfig(num_rounds=scenario.rounds - done, round_timeout=scenario.aggregation.round_timeout_s)
    start_grid(grid=grid, server=server, config=config)
    return server_arrays(server)


def make_client_app(client_of: Callable[[Context], TorchClient]) -> ClientApp:
    """The simulated clients as an app.

    Args:
        client_of: Returns the client of a node.

    Returns:
        The app.
    """

    def client_fn(context: Context) -> Client:
        return client_of(context).to_client()

    return ClientApp(client_fn=client_fn)


def make_server(strategy: strategy.Strategy, max_workers: int) -> Server:
    """Flower's server for the legacy API.

    Args:
        strategy: The strategy.
        max_workers: A thread for each client that may be asked at once, so that none waits for another; threads are
            started as they are needed.

    Returns:
        The server.
    """
    server = Server(client_manager=SimpleClientManager(), strategy=strategy)
    server.set_max_workers(max_workers)
    return server


def server_arrays(server: Server) -> Arrays:
    """The global model a server holds."""
    return parameters_to_ndarrays(server.parameters)
