"""Flower's two APIs, as a scenario uses them: the base strategy, the rounds, and the clients as an app."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

from flwr.app import ArrayRecord, MetricRecord
from flwr.client import Client, ClientApp
from flwr.common import Context, NDArrays, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, ServerConfig, SimpleClientManager
from flwr.server import strategy as legacy_strategies
from flwr.serverapp import Grid
from flwr.serverapp import strategy as message_strategies

from fedsel_flwr.clients.torch_client import TorchClient, make_message_app
from fedsel_flwr.flower import start_grid
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World

BASE_CLASSES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedavgm": "FedAvgM",
}
"""Base in a scenario -> name of its class in ``flwr.server.strategy`` and in ``flwr.serverapp.strategy``."""


class LegacyApi:
    """Legacy API: the base holds the initial model and evaluates on the test set.

    Attributes:
        package: Name of the package with the selection strategies of this API.
        strategy_type: Base class of the strategies of this API.
    """

    package: ClassVar[str] = "fedsel_flwr.strategies"
    strategy_type: ClassVar[type] = legacy_strategies.Strategy

    def make_base(self, world: World) -> legacy_strategies.Strategy:
        """Make the scenario's base strategy.

        Args:
            world: The scenario's world.

        Returns:
            The base.
        """

        # Measures the model on the test set, which no selector sees. FedAvg calls this after each round and before the
        # first.
        def evaluate_fn(round: int, arrays: NDArrays, config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
            loss, accuracy = world.test(arrays)
            return loss, {"accuracy": accuracy}

        def fit_config(round: int) -> dict[str, Scalar]:
            return {"round": round}

        base: legacy_strategies.Strategy = getattr(legacy_strategies, BASE_CLASSES[world.scenario.aggregation.base])(
            fraction_evaluate=0.0,
            min_available_clients=world.scenario.num_clients,
            initial_parameters=ndarrays_to_parameters(list(world.initial_arrays())),
            evaluate_fn=evaluate_fn,
            on_fit_config_fn=fit_config,
            # Without a function, Flower warns in every run that metrics are not aggregated.
            fit_metrics_aggregation_fn=lambda metrics: {},
            **base_parameters(world.scenario),
        )
        return base

    def run(self, grid: Grid, world: World, strategy: Any) -> Arrays:
        """Run the scenario's rounds, or only the rounds after the strategy's checkpoint.

        Args:
            grid: Flower's connection to the nodes.
            world: The scenario's world.
            strategy: The selection strategy.

        Returns:
            The final global model.
        """
        scenario = world.scenario
        server = make_server(strategy, scenario.num_clients)
        # Flower's legacy server counts from 1 in every process, so a resumed run asks it only for the remaining rounds.
        done = 0 if strategy.resumed is None else strategy.resumed.round
        config = ServerConfig(num_rounds=scenario.rounds - done, round_timeout=scenario.aggregation.round_timeout_s)
        start_grid(grid=grid, server=server, config=config)
        return server_arrays(server)

    def make_client_app(self, client_of: Callable[[Context], TorchClient]) -> ClientApp:
        """Make the ClientApp of the simulated clients.

        Args:
            client_of: Function that returns the client of a node.

        Returns:
            The app.
        """

        def client_fn(context: Context) -> Client:
            return client_of(context).to_client()

        return ClientApp(client_fn=client_fn)


class MessageApi:
    """Message API: its bases do not evaluate on the server, so :meth:`run` passes the evaluation to Flower.

    This class has the same attributes and methods as :class:`LegacyApi`.
    """

    package: ClassVar[str] = "fedsel_flwr.strategies.message"
    strategy_type: ClassVar[type] = message_strategies.Strategy

    def make_base(self, world: World) -> message_strategies.Strategy:
        """Make the scenario's base strategy, see :meth:`LegacyApi.make_base`."""
        base: message_strategies.Strategy = getattr(message_strategies, BASE_CLASSES[world.scenario.aggregation.base])(
            fraction_evaluate=0.0, min_available_nodes=world.scenario.num_clients, **base_parameters(world.scenario)
        )
        return base

    def run(self, grid: Grid, world: World, strategy: Any) -> Arrays:
        """Run the scenario's rounds, see :meth:`LegacyApi.run`."""
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
        # Flower returns no arrays if no round delivered a model.
        final: ArrayRecord = result.arrays if result.arrays else initial
        return final.to_numpy_ndarrays()

    def make_client_app(self, client_of: Callable[[Context], TorchClient]) -> ClientApp:
        """Make the ClientApp of the simulated clients, see :meth:`LegacyApi.make_client_app`."""
        return make_message_app(client_of)


def base_parameters(scenario: Scenario) -> dict[str, Any]:
    """Return the parameters that are special to the scenario's base.

    Args:
        scenario: The scenario, whose table ``aggregation`` names the base.

    Returns:
        Keyword arguments, the same in both APIs.
    """
    if scenario.aggregation.base == "fedprox":
        return {"proximal_mu": scenario.training.proximal_mu}
    if scenario.aggregation.base in ("fedadam", "fedyogi"):
        return {"eta": scenario.aggregation.server_learning_rate}
    if scenario.aggregation.base == "fedavgm":
        return {"server_learning_rate": scenario.aggregation.server_learning_rate}
    return {}


def make_server(strategy: legacy_strategies.Strategy, max_workers: int) -> Server:
    """Make Flower's server for the legacy API.

    Args:
        strategy: The strategy.
        max_workers: Number of clients that may be asked at the same time. Each uses a thread, so that no client waits
            for another. Threads are started when they are needed.

    Returns:
        The server.
    """
    server = Server(client_manager=SimpleClientManager(), strategy=strategy)
    server.set_max_workers(max_workers)
    return server


def server_arrays(server: Server) -> Arrays:
    """Return the global model of a server of the legacy API."""
    return parameters_to_ndarrays(server.parameters)


APIS: Final[dict[str, LegacyApi | MessageApi]] = {"legacy": LegacyApi(), "message": MessageApi()}
"""Name of an API in a scenario -> the API."""
