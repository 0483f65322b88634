"""Flower's two APIs as a scenario uses them: the base strategy, the rounds, the clients as an app.

The base strategies have the same names in both APIs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol

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

CLASSES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedavgm": "FedAvgM",
}
"""The scenario's name -> the class, of ``flwr.server.strategy`` and of ``flwr.serverapp.strategy``."""


def own_parameters(scenario: Scenario) -> dict[str, Any]:
    """The parameters that the scenario's base alone has.

    Args:
        scenario: The scenario; its table ``aggregation`` names the base.

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


class Api(Protocol):
    """What a scenario needs of one of Flower's APIs.

    Attributes:
        package: Where the selection strategies are.
        strategy_type: The class of every strategy.
    """

    package: ClassVar[str]
    strategy_type: ClassVar[type]

    def make_base(self, world: World) -> Any:
        """Make the scenario's base strategy.

        Args:
            world: The scenario's world.

        Returns:
            The base.
        """
        ...

    def run(self, grid: Grid, world: World, strategy: Any) -> Arrays:
        """Run the scenario's rounds, or those that the strategy's checkpoint does not have.

        Args:
            grid: Flower's connection to the nodes.
            world: The scenario's world.
            strategy: The selection strategy.

        Returns:
            The final global model.
        """
        ...

    def make_client_app(self, client_of: Callable[[Context], TorchClient]) -> ClientApp:
        """Make an app of the simulated clients.

        Args:
            client_of: Returns the client of a node.

        Returns:
            The app.
        """
        ...


class LegacyApi:
    """The legacy API; the base knows the initial model and evaluates on the test set."""

    package: ClassVar[str] = "fedsel_flwr.strategies"
    strategy_type: ClassVar[type] = legacy_strategies.Strategy

    def make_base(self, world: World) -> legacy_strategies.Strategy:
        """As :meth:`Api.make_base`."""

        def evaluate_fn(round: int, arrays: NDArrays, config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
            loss, accuracy = world.test(arrays)
            return loss, {"accuracy": accuracy}

        def fit_config(round: int) -> dict[str, Scalar]:
            return {"round": round}

        base: legacy_strategies.Strategy = getattr(legacy_strategies, CLASSES[world.scenario.aggregation.base])(
            fraction_evaluate=0.0,
            min_available_clients=world.scenario.num_clients,
            initial_parameters=ndarrays_to_parameters(list(world.initial_arrays())),
            evaluate_fn=evaluate_fn,
            on_fit_config_fn=fit_config,
            fit_metrics_aggregation_fn=lambda metrics: {},
            **own_parameters(world.scenario),
        )
        return base

    def run(self, grid: Grid, world: World, strategy: Any) -> Arrays:
        """As :meth:`Api.run`."""
        scenario = world.scenario
        server = make_server(strategy, scenario.num_clients)
        done = 0 if strategy.resumed is None else strategy.resumed.round
        config = ServerConfig(num_rounds=scenario.rounds - done, round_timeout=scenario.aggregation.round_timeout_s)
        start_grid(grid=grid, server=server, config=config)
        return server_arrays(server)

    def make_client_app(self, client_of: Callable[[Context], TorchClient]) -> ClientApp:
        """As :meth:`Api.make_client_app`."""

        def client_fn(context: Context) -> Client:
            return client_of(context).to_client()

        return ClientApp(client_fn=client_fn)


class MessageApi:
    """The Message API; the test set is evaluated in :meth:`run`, as the bases do not evaluate."""

    package: ClassVar[str] = "fedsel_flwr.strategies.message"
    strategy_type: ClassVar[type] = message_strategies.Strategy

    def make_base(self, world: World) -> message_strategies.Strategy:
        """As :meth:`Api.make_base`."""
        base: message_strategies.Strategy = getattr(message_strategies, CLASSES[world.scenario.aggregation.base])(
            fraction_evaluate=0.0, min_available_nodes=world.scenario.num_clients, **own_parameters(world.scenario)
        )
        return base

    def run(self, grid: Grid, world: World, strategy: Any) -> Arrays:
        """As :meth:`Api.run`."""
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

    def make_client_app(self, client_of: Callable[[Context], TorchClient]) -> ClientApp:
        """As :meth:`Api.make_client_app`."""
        return make_message_app(client_of)


def make_server(strategy: legacy_strategies.Strategy, max_workers: int) -> Server:
    """Make Flower's server for the legacy API.

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
    """Return the global model of a server of the legacy API."""
    return parameters_to_ndarrays(server.parameters)


APIS: Final[dict[str, Api]] = {"legacy": LegacyApi(), "message": MessageApi()}
"""The scenario's name for an API -> what it needs of it."""
