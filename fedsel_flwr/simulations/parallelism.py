"""Parallelism of simulations: runs at a time, threads of a run, and the size by which its backend is chosen."""

from __future__ import annotations

import numpy as np
import torch

from fedsel_flwr.checks import whole
from fedsel_flwr.clients.batched.backends import RunSize, convolves, step_operations
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World

THREADED_OPERATIONS = 2e9
"""A step of the whole round with less arithmetic is done by one thread sooner than by several."""


def check_jobs(scenario: Scenario, jobs: int, device: str) -> int:
    """Return the number of runs at a time.

    Raises:
        ParameterError: It is below 1, or above 1 where runs share Ray or a device.
    """
    number = whole("jobs", jobs, 1)
    if number > 1 and (scenario.engine != "vectorized" or device != "cpu"):
        shared = f"the device {device!r}" if scenario.engine == "vectorized" else "Ray, which uses every core already"
        raise ParameterError(
            f"jobs = {number} runs at a time would share {shared}. Leave jobs out, or use the engine 'vectorized' on "
            "the CPU"
        )
    return number


def threads_for(world: World) -> int:
    """Return how many threads torch uses in the vectorized engine on the CPU: those it has, or one for small products.

    A step on small stacks is some sixty operations of microseconds. Threads that meet after each of them wait longer
    than they work, and many times longer if the machine has other work. The rule depends on sizes only.
    """
    operations = step_operations(world.model, world.scenario.training.settings(), world.scenario.clients_per_round)
    return torch.get_num_threads() if convolves(world.model) or operations >= THREADED_OPERATIONS else 1


def run_size(world: World) -> RunSize:
    """Return the size of a world's run, from which its backend follows."""
    scenario, settings = world.scenario, world.scenario.training.settings()
    # Rounded up: the last batch of an epoch may be smaller.
    steps = settings.local_steps or settings.local_epochs * -(-world.sizes // settings.batch_size)
    return RunSize(scenario.rounds, scenario.clients_per_round, float(np.mean(steps)), int(world.sizes.max()))
