"""Execution of a scenario over a Flower grid: wait for the nodes, build the strategy, run the rounds."""

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
from fedsel_flwr.simulations.divergence import diagnose, log_simulated_faults
from fedsel_flwr.simulations.existing_runs import CheckpointPlan
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.on_flower.flower_apis import APIS
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.run_identity import code_identity, identity
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World, world_of

SETTLED_S = 3.0
"""Seconds without change after which the number of connected nodes counts as final."""


def drive(
    grid: Grid,
    scenario: Scenario,
    *,
    on_round: Callable[[RoundRecord], None] | None = None,
    on_error: Callable[[Any], None] | None = None,
    checkpoint_dir: str | Path | None = None,
    resume: Resume = False,
) -> RunResult:
    """Run the scenario's rounds with its strategy over the nodes of a grid.

    The nodes are counted first, so that a wrong number of nodes ends the run before the data are read.

    Args:
        grid: Flower's connection to the nodes.
        scenario: The scenario.
        on_round: Function called with each finished round.
        on_error: Function called with the strategy if an error ends its rounds.
        checkpoint_dir: Folder of the run's checkpoints. If None, no checkpoints are written.
        resume: Whether to resume from the checkpoints, as in :func:`~fedsel_flwr.simulations.engine.simulate`.

    Returns:
        History and final model.

    Raises:
        RunError: The number of nodes differs from the scenario's number of clients; the message has the right command.
            Also raised if the run cannot be resumed from the checkpoints.
        ParameterError: The data or a parameter cannot be used.
    """
    keeping = CheckpointPlan.of(scenario, None, checkpoint_dir, None, 3, resume)
    wait_for_nodes(grid, scenario)
    world = world_of(scenario)
    strategy = make_strategy(world, on_round, checkpointing=keeping.options(scenario))
    prints = identity(world, OwnParts(), code_identity(scenario, None, OwnParts()))
    keeping.attach(strategy, world, prints)
    try:
        return replace(run_rounds(grid, world, strategy), fingerprints=prints)
    # BaseException, because after Ctrl-C the finished rounds are written too.
    except BaseException:
        if on_error is not None:
            on_error(strategy)
        raise


def run_rounds(grid: Grid, world: World, strategy: Any) -> RunResult:
    """Run a scenario's rounds with a strategy over the nodes of a grid; all nodes must be connected.

    Args:
        grid: Flower's connection to the nodes.
        world: The scenario's world.
        strategy: A selection strategy of the scenario's API.

    Returns:
        History and final model.
    """
    strategy.core.in_simulation()
    arrays = APIS[world.scenario.api].run(grid, world, strategy)
    # Flower does not tell a strategy of the legacy API that the run has ended.
    strategy.end_metrics()
    log_simulated_faults(strategy.history, bool(strategy.core.settings.over_selection))
    return RunResult(
        history=strategy.history,
        arrays=arrays,
        diagnosis=diagnose(world, strategy.history),
        timing=strategy.core.stopwatch.columns(len(strategy.history.rounds)),
    )


def wait_for_nodes(grid: Grid, scenario: Scenario) -> None:
    """Wait until as many nodes are connected as the scenario has clients.

    Args:
        grid: Flower's connection to the nodes.
        scenario: The scenario.

    Raises:
        RunError: More or fewer nodes are connected. The message has the right command.
    """
    # Virtual nodes register one after another, so the count is final only when it no longer grows.
    deadline = time.monotonic() + scenario.aggregation.options()["wait_timeout"]
    seen, since = -1, time.monotonic()
    while (count := len(list(grid.get_node_ids()))) != scenario.num_clients:
        now = time.monotonic()
        if count != seen:
            seen, since = count, now
        if (count > 0 and now - since >= SETTLED_S) or now >= deadline:
            raise RunError(
                f"scenario {scenario.name!r} has {scenario.num_clients} clients, but {count} SuperNodes are connected. "
                f"Use:\n\n    {flwr_run_command(scenario.num_clients)}\n\n"
                f'or change the size of the scenario: --run-config "num_clients={count} clients_per_round=1"'
            )
        time.sleep(0.2)


def flwr_run_command(num_clients: int) -> str:
    """Return the ``flwr run`` command that starts one virtual node per client of a scenario.

    >>> flwr_run_command(200).split(" --")[1:2]
    ['stream']
    """
    cores = os.cpu_count() or 1
    return (
        f'flwr run . --stream --federation-config "num-supernodes={num_clients} '
        f'client-resources-num-cpus=1 init-args-num-cpus={cores}"'
    )
