"""Parallelism of simulations: parallel runs, the threads of a run, and the size that decides its backend."""

from __future__ import annotations

import numpy as np
import torch

from fedsel_flwr.checks import whole
from fedsel_flwr.clients.batched.backends import RunSize, convolves, step_operations
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World

THREADED_OPERATIONS = 2e9
"""Arithmetic of one step of the whole round below which one thread is faster than several."""


def check_jobs(scenario: Scenario, jobs: int | None, device: str, *, on_cluster: bool = False) -> int | None:
    """Return the checked number of parallel runs.

    Args:
        scenario: Scenario of the runs.
        jobs: The number. If None, 1, or on a cluster as many as it has room for.
        device: Device on which the vectorized engine trains.
        on_cluster: Whether the runs are tasks on a Ray cluster, each with its own cores and GPUs.

    Returns:
        The number; None if the cluster decides.

    Raises:
        ParameterError: The number is below 1, or it is above 1 although the runs share Ray or a device.
    """
    if on_cluster:
        return None if jobs is None else whole("jobs", jobs, 1)
    number = 1 if jobs is None else whole("jobs", jobs, 1)
    if number > 1 and (scenario.engine != "vectorized" or device != "cpu"):
        shared = f"the device {device!r}" if scenario.engine == "vectorized" else "Ray, which uses every core already"
        raise ParameterError(
            f"jobs = {number} runs at a time would share {shared}. Leave jobs out, or use the engine 'vectorized' on "
            "the CPU"
        )
    return number


def threads_for(world: World) -> int:
    """Return the number of torch threads for the vectorized engine on the CPU: all of them, or one for small products.

    A step on small stacks consists of about sixty operations of a few microseconds each. Threads synchronize after
    each operation, so they wait longer than they work. On a busy machine they wait many times longer. The rule depends
    on sizes only.
    """
    operations = step_operations(world.model, world.scenario.training.settings(), world.scenario.clients_per_round)
    return torch.get_num_threads() if convolves(world.model) or operations >= THREADED_OPERATIONS else 1


def run_size(world: World) -> RunSize:
    """Return the size of a world's run, which decides its backend."""
    scenario, settings = world.scenario, world.scenario.training.settings()
    # Rounded up, because the last batch of an epoch may be smaller.
    steps = settings.local_steps or settings.local_epochs * -(-world.sizes // settings.batch_size)
    return RunSize(scenario.rounds, scenario.clients_per_round, float(np.mean(steps)), int(world.sizes.max()))
