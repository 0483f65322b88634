"""Running a scenario's rounds over a Flower grid, after counting the nodes."""

from __future__ import annotations

import os
import time

from flwr.server import Server, ServerConfig
from flwr.server.compat import start_grid
from flwr.serverapp import Grid

from fedsel_flwr.errors import RunError
from fedsel_flwr.simulations.scenario import Scenario

SETTLED_S = 3.0
"""The number of nodes counts as final when it has not changed for this long."""


def run_legacy(grid: Grid, server: Server, scenario: Scenario) -> None:
    """Run the scenario's rounds with Flower's legacy server."""
    start_grid(
        grid=grid,
        server=server,
        config=ServerConfig(num_rounds=scenario.rounds, round_timeout=scenario.aggregation.round_timeout_s),
    )


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
