"""A scenario's rounds over a Flower grid: the nodes are counted first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.checkpoints import Resume
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.rounds.untrusted import log_simulated_faults
from fedsel_flwr.simulations.divergence import diagnose
from fedsel_flwr.simulations.existing_runs import CheckpointPlan
from fedsel_flwr.simulations.fingerprints import code_fingerprints, fingerprints
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.on_flower.flower_apis import APIS
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World, world_of

SETTLED_S = 3.0
"""The number of nodes counts as final when it has not changed for this long."""


def drive(
    grid: Grid,
    scenario: Scenario,
    *,
    on_round: Callable[[RoundRecord], None] | None = None,
    on_error: Callable[[Any], None] | None = None,
    checkpoint_dir: str | Path | None = None,
    resume: Resume = False,
) -> RunResult:
    """Run the scenario's rounds with its own strategy over the nodes of a grid.

    The nodes are counted first, before the data are read.

    Args:
        grid: Flower's connection to the nodes.
        scenario: The scenario.
        on_round: Called with each finished round.
        on_error: Called with the strategy when an error ends its rounds.
        checkpoint_dir: Folder of the run's checkpoints; None: none.
        resume: Whether to go on from them, as in :func:`~fedsel_flwr.simulations.engine.simulate`.

    Returns:
        History and final model.

    Raises:
        RunError: There are more or fewer nodes than the scenario has clients; says the command to use. Or there are
            checkpoints that cannot be gone on from.
        ParameterError: The data or a parameter cannot be used.
    """
    keeping = CheckpointPlan.of(scenario, None, checkpoint_dir, None, 3, resume)
    count_nodes(grid, scenario)
    world = world_of(scenario)
    strategy = make_strategy(world, on_round, keeping=keeping.options(scenario))
    prints = fingerprints(world, OwnParts(), code_fingerprints(scenario, None, OwnParts()))
    keeping.attach(strategy, world, prints)
    try:
        return replace(run_rounds(grid, world, strategy), fingerprints=prints)
    except BaseException:
        if on_error is not None:
            on_error(strategy)
        raise


def run_rounds(grid: Grid, world: World, strategy: Any) -> RunResult:
    """Run a scenario's rounds with a strategy over the nodes of a grid, which are all there.

    Args:
        grid: Flower's connection to the nodes.
        world: The scenario's world.
        strategy: A selection strategy of the scenario's API.

    Returns:
        History and final model.
    """
    strategy.core.in_simulation()
    arrays = APIS[world.scenario.api].run(grid, world, strategy)
    log_simulated_faults(strategy.history, bool(world.scenario.aggregation.over_selection))
    return RunResult(history=strategy.history, arrays=arrays, diagnosis=diagnose(world, strategy.history))


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
