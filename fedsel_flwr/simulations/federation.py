"""A scenario as Flower sees it: the client function and the server with its selection strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from flwr.client import Client
from flwr.common import Context, NDArrays, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, SimpleClientManager
from flwr.server.strategy import FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy

from fedsel_flwr import strategies
from fedsel_flwr.selectors import create
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.world import World, world_of
from fedsel_flwr.strategies import RoundRecord, SelectionStrategy
from fedsel_flwr.strategies.paper import PaperStrategy
from fedsel_flwr.strategies.replies import Arrays

_PAPERS: tuple[type[PaperStrategy], ...] = (strategies.BSFL, strategies.CSUCB)


def make_client_fn(scenario_of: Callable[[Context], Scenario]) -> Callable[[Context], Client]:
    """Return Flower's ``client_fn``; the node's ``partition-id`` says which client it is."""

    def client_fn(context: Context) -> Client:
        torch.set_num_threads(1)  # an actor has one core; the same sums in the same order everywhere
        return world_of(scenario_of(context)).client(int(context.node_config["partition-id"])).to_client()

    return client_fn


def make_strategy(
    scenario: Scenario, world: World, on_round: Callable[[RoundRecord], None] | None = None
) -> SelectionStrategy:
    """Build the scenario's selection strategy around its base strategy.

    Args:
        scenario: The scenario.
        world: Its data and model.
        on_round: Called with each finished round.

    Returns:
        The strategy, ready for Flower's server.

    Raises:
        ParameterError: A selector parameter is missing or out of range.
    """
    options: dict[str, Any] = {
        "base": _base(scenario, world),
        "max_latency": scenario.wireless.max_latency_s,
        "min_completed": scenario.aggregation.min_completed,
        "min_available": scenario.num_clients,
        "wait_timeout": scenario.aggregation.wait_timeout_s,
        "channels": scenario.wireless.channels or scenario.clients_per_round,
        "on_round": on_round,
    }
    params = selector_params(scenario, world.num_examples())
    for paper in _PAPERS:
        if paper.selector_class.name == scenario.selector:
            return paper(**params | options)
    return SelectionStrategy(create(scenario.selector, **params), **options)


def check_selectors(scenario: Scenario, names: Sequence[str]) -> None:
    """Raise :class:`ParameterError` if one of the selectors lacks a parameter or has one out of range."""
    sizes = dict.fromkeys(range(scenario.num_clients), 1)
    for name in names:
        create(name, **selector_params(scenario.model_copy(update={"selector": name}), sizes))


def selector_params(scenario: Scenario, num_examples: Mapping[int, int]) -> dict[str, Any]:
    """The selector's parameters; "sizes" in a per-client parameter stands for the clients' numbers of examples."""
    cls = selector_class(scenario.selector)
    params: dict[str, Any] = {"clients_per_round": scenario.clients_per_round, "seed": scenario.seed}
    params |= scenario.selectors.get(scenario.selector, {})
    if "max_latency" in inspect.signature(cls).parameters:
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


def _base(scenario: Scenario, world: World) -> Strategy:
    classes: dict[str, type[FedAvg]] = {
        "fedavg": FedAvg, "fedprox": FedProx, "fedadam": FedAdam, "fedyogi": FedYogi, "fedavgm": FedAvgM,
    }  # fmt: skip
    extra: dict[str, Any] = {}
    if scenario.aggregation.base == "fedprox":
        extra["proximal_mu"] = scenario.training.proximal_mu
    elif scenario.aggregation.base in ("fedadam", "fedyogi"):
        extra["eta"] = scenario.aggregation.server_learning_rate
    elif scenario.aggregation.base == "fedavgm":
        extra["server_learning_rate"] = scenario.aggregation.server_learning_rate

    def evaluate_fn(round: int, arrays: NDArrays, config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
        loss, accuracy = world.test(arrays)
        return loss, {"accuracy": accuracy}

    def fit_config(round: int) -> dict[str, Scalar]:
        return {"round": round}

    return classes[scenario.aggregation.base](
        fraction_evaluate=0.0,
        min_available_clients=scenario.num_clients,
        initial_parameters=ndarrays_to_parameters(list(world.initial_arrays())),
        evaluate_fn=evaluate_fn,
        on_fit_config_fn=fit_config,
        fit_metrics_aggregation_fn=lambda metrics: {},
        **extra,
    )
