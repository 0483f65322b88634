"""Running a scenario's rounds over a Flower grid, after counting the nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.common import parameters_to_ndarrays
from flwr.server import Server, ServerConfig, SimpleClientManager
from flwr.server.compat import start_grid
from flwr.serverapp import Grid

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.simulations.building import given_or_made
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.world import World, world_of
from fedsel_flwr.strategies import History, RoundRecord, SelectionStrategy

SETTLED_S = 3.0
"""The number of nodes counts as final when it has not changed for this long."""


@dataclass(frozen=True)
class RunResult:
    """What a simulation leaves behind.

    Attributes:
        history: Round by round and client by client.
        arrays: The final global model.
    """

    history: History
    arrays: Arrays


def drive(
    grid: Grid, scenario: Scenario, *, strategy: Any = None, on_round: Callable[[RoundRecord], None] | None = None
) -> RunResult:
    """Run the scenario's rounds over the nodes of a grid.

    The nodes are counted first, before the data are read.

    Args:
        grid: Flower's connection to the nodes.
        scenario: The scenario.
        strategy: A selection strategy of the scenario's API; None makes the scenario's own.
        on_round: Called with each finished round of the scenario's own strategy.

    Returns:
        History and final model.

    Raises:
        RunError: There are more or fewer nodes than the scenario has clients; says the command to use.
        ParameterError: The data or a parameter cannot be used, or the strategy is not of the scenario's API or is
            given together with ``on_round``.
    """
    count_nodes(grid, scenario)
    world = world_of(scenario)
    strategy = given_or_made(scenario, world, strategy, on_round)
    if scenario.api == "message":
        return _drive_message(grid, scenario, world, strategy)
    server = make_server(strategy, scenario.num_clients)
    config = ServerConfig(num_rounds=scenario.rounds, round_timeout=scenario.aggregation.round_timeout_s)
    start_grid(grid=grid, server=server, config=config)
    return RunResult(history=strategy.history, arrays=server_arrays(server))


def make_server(strategy: SelectionStrategy, max_workers: int) -> Server:
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


def command(num_clients: int) -> str:
    """The ``flwr run`` command that starts as many virtual nodes as a scenario has clients.

    >>> command(200).split(" --")[1:2]
    ['stream']
    """
    cores = os.cpu_count() or 1
    return (
        f'flwr run . --stream --federation-config "num-supernodes={num_clients} '
        f'client-resources-num-cpus=1 init-args-num-cpus={cores}"'
    )


def count_nodes(grid: Grid, scenario: Scenario) -> None:
    """Wait until there are as many nodes as the scenario has clients.

    Args:
        grid: Flower's connection to the nodes.
        scenario: The scenario.

    Raises:
        RunError: There are more or fewer; says the command to use.
    """
    deadline = time.monotonic() + scenario.aggregation.wait_timeout_s
    seen, since = -1, time.monotonic()
    while (count := len(list(grid.get_node_ids()))) != scenario.num_clients:
        now = time.monotonic()
        if count != seen:
            seen, since = count, now
        if (count > 0 and now - since >= SETTLED_S) or now >= deadline:
            raise RunError(
                f"scenario {scenario.name!r} has {scenario.num_clients} clients, but {count} SuperNodes are connected. "
                f"Use:\n\n    {command(scenario.num_clients)}\n\n"
                f'or another size of the scenario: --run-config "num_clients={count} clients_per_round=1"'
            )
        time.sleep(0.2)


def _drive_message(grid: Grid, scenario: Scenario, world: World, strategy: Any) -> RunResult:
    """The rounds through the Message API; the test set is evaluated here, as its bases do not evaluate."""
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
