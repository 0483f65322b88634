"""A scenario as Flower sees it: the client function and the server with its selection strategy."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.client import Client, ClientApp
from flwr.common import Context, parameters_to_ndarrays
from flwr.server import Server, SimpleClientManager
from flwr.serverapp import Grid

from fedsel_flwr.clients.message_client import make_message_app
from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import create
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.simulations.availability import BernoulliAvailability, TraceAvailability
from fedsel_flwr.simulations.base_strategies import legacy_base, message_base
from fedsel_flwr.simulations.rounds import count_nodes, run_legacy
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.world import World, world_of
from fedsel_flwr.strategies import Filter, History, RoundRecord, SelectionStrategy
from fedsel_flwr.strategies.core import Availability
from fedsel_flwr.strategies.measuring import ON_VALIDATION
from fedsel_flwr.strategies.replies import Arrays
from fedsel_flwr.strategies.roster import Roster, RowValues


@dataclass(frozen=True)
class RunResult:
    """What a simulation leaves behind.

    Attributes:
        history: Round by round and client by client.
        arrays: The final global model.
    """

    history: History
    arrays: Arrays


class ScenarioApp(ClientApp):
    """The simulated clients, in the API that the scenario names.

    Args:
        scenario_of: Returns the scenario from a node's context; must be picklable. The node's ``partition-id`` says
            which client it is.
    """

    def __init__(self, scenario_of: Callable[[Context], Scenario]) -> None:
        super().__init__()
        self._scenario_of = scenario_of
        self._legacy = ClientApp(client_fn=make_client_fn(scenario_of))
        self._message = make_message_app(lambda context: _client(scenario_of(context), context))

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        app = self._message if self._scenario_of(context).api == "message" else self._legacy
        return app(message, context)


def make_client_fn(scenario_of: Callable[[Context], Scenario]) -> Callable[[Context], Client]:
    """Return the legacy API's ``client_fn``; the node's ``partition-id`` says which client it is."""

    def client_fn(context: Context) -> Client:
        return _client(scenario_of(context), context).to_client()

    return client_fn


def make_strategy(scenario: Scenario, world: World, on_round: Callable[[RoundRecord], None] | None = None) -> Any:
    """Build the scenario's selection strategy around its base strategy, in the API that the scenario names.

    Args:
        scenario: The scenario.
        world: Its data and model.
        on_round: Called with each finished round.

    Returns:
        The strategy, a ``SelectionStrategy`` of either API.

    Raises:
        ParameterError: A selector parameter is missing or out of range.
    """
    api = importlib.import_module("fedsel_flwr.strategies" + (".message" if scenario.api == "message" else ""))
    options: dict[str, Any] = {
        "base": message_base(scenario) if scenario.api == "message" else legacy_base(scenario, world),
        "max_latency": scenario.wireless.max_latency_s,
        "min_completed": scenario.aggregation.min_completed,
        "min_available": scenario.num_clients,
        "wait_timeout": scenario.aggregation.wait_timeout_s,
        "channels": scenario.wireless.channels or scenario.clients_per_round,
        "availability": make_availability(scenario),
        "on_round": on_round,
        **_measuring(scenario, world),
    }
    params = selector_params(scenario, world.num_examples())
    for name in api.__all__:
        paper = getattr(api, name)
        if getattr(getattr(paper, "selector_class", None), "name", None) == scenario.selector:
            return paper(**params | options)
    return api.SelectionStrategy(create(scenario.selector, **params), **options)


def drive(grid: Grid, scenario: Scenario, world: World, strategy: Any) -> RunResult:
    """Run the scenario's rounds over the nodes of a grid.

    Args:
        grid: Flower's connection to the nodes.
        scenario: The scenario.
        world: Its data and model.
        strategy: What :func:`make_strategy` returned.

    Returns:
        History and final model.

    Raises:
        RunError: There are more or fewer nodes than the scenario has clients; says the command to use.
    """
    count_nodes(grid, scenario)
    if scenario.api == "legacy":
        server = make_server(strategy, scenario.clients_per_round)
        run_legacy(grid, server, scenario)
        return RunResult(history=strategy.history, arrays=server_arrays(server))
    initial = ArrayRecord(list(world.initial_arrays()))

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
    final = result.arrays if result.arrays else initial
    return RunResult(history=strategy.history, arrays=final.to_numpy_ndarrays())


def _measuring(scenario: Scenario, world: World) -> dict[str, Any]:
    """The options of a strategy whose selector or filter measures models on the server."""
    needs, chosen = selector_class(scenario.selector).needs, scenario.aggregation
    score = chosen.filter or ("loss" if "kept" in needs else "")
    options: dict[str, Any] = {}
    if score or needs & ON_VALIDATION:
        options["validation"] = world.validation()
    if score:
        options["filter"] = Filter(score=score)
    if "projection" in needs:
        options |= {"learning_rate": scenario.training.learning_rate, "momentum": chosen.direction_momentum}
    if chosen.averaging:
        options["averaging"] = chosen.averaging
    return options


def make_availability(scenario: Scenario) -> Availability | None:
    """Who is there in a round; None for everybody."""
    kind = scenario.availability.kind
    if kind == "bernoulli":
        return BernoulliAvailability(scenario.availability.probability, scenario.seed)
    return TraceAvailability(scenario.availability.trace) if kind == "trace" else None


def check_selectors(scenario: Scenario, names: Sequence[str]) -> None:
    """Raise :class:`ParameterError` if one of the selectors lacks a parameter or has one out of range."""
    sizes = dict.fromkeys(range(scenario.num_clients), 1)
    for name in names:
        params = selector_params(scenario.model_copy(update={"selector": name}), sizes)
        create(name, **params)
        for key in selector_class(name).by_client & {key for key, value in params.items() if value is not None}:
            values = RowValues(key, params[key], Roster())
            lacking = [k for k in range(scenario.num_clients) if not values.covers(str(k))]
            if lacking:
                raise ParameterError(
                    f"selectors.{name}.{key} has {len(values)} entries but none for client {lacking[0]}: give one for "
                    f"each of the {scenario.num_clients} clients"
                )


def selector_params(scenario: Scenario, num_examples: Mapping[int, int]) -> dict[str, Any]:
    """The selector's parameters; "sizes" in a per-client parameter stands for the clients' numbers of examples."""
    cls = selector_class(scenario.selector)
    accepted = inspect.signature(cls).parameters
    params: dict[str, Any] = {"seed": scenario.seed}
    if accepted["clients_per_round"].default is inspect.Parameter.empty:
        params["clients_per_round"] = scenario.clients_per_round
    if "total_rounds" in accepted:
        params["total_rounds"] = scenario.rounds
    params |= scenario.selectors.get(scenario.selector, {})
    if "max_latency" in accepted:
        params.setdefault("max_latency", scenario.wireless.max_latency_s)
    for key in cls.by_client:
        if params.get(key) == "sizes":
            params[key] = dict(num_examples)
    return params


def make_server(strategy: SelectionStrategy, clients_per_round: int) -> Server:
    """Flower's server with a thread for each client of a round, so that none waits for another."""
    server = Server(client_manager=SimpleClientManager(), strategy=strategy)
    server.set_max_workers(clients_per_round)
    return server


def server_arrays(server: Server) -> Arrays:
    """The global model a server holds."""
    return parameters_to_ndarrays(server.parameters)


def _client(scenario: Scenario, context: Context) -> TorchClient:
    torch.set_num_threads(1)  # an actor has one core; the same sums in the same order everywhere
    return world_of(scenario).client(int(context.node_config["partition-id"]))
