"""Parallelism of the vectorized engine: worker processes, threads, and the size of a run from which both follow."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import torch

from fedsel_flwr.checks import one_of, whole
from fedsel_flwr.clients.batched import BatchedTrainer, SharedTrainer, WorkerPool
from fedsel_flwr.clients.batched.backends import BACKENDS, Backend, RunSize, convolves, step_operations
from fedsel_flwr.clients.training_settings import examples_per_round
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World

THREADED_OPERATIONS = 2e9
"""A step of the whole round with less arithmetic is done by one thread sooner than by several."""


class TrainerPool:
    """A pool of worker processes, and the trainers of the vectorized engine that use it.

    The workers start with the first trainer that needs them and end with the pool. Keep a pool over several runs, and
    they do not start again::

        with TrainerPool() as pool:
            for seed in range(20):
                simulate(scenario.model_copy(update={"seed": seed}), engine="vectorized", processes=pool)

    Args:
        processes: Number of processes that train, this one included; None:
            :func:`~fedsel_flwr.clients.batched.backends.choose_backend` decides for each run.
        backend: What trains clients; None: the same function decides.

    Raises:
        ParameterError: ``processes`` is below 1, or there is no such backend.
    """

    def __init__(self, processes: int | None = None, backend: Backend | None = None) -> None:
        self.processes = None if processes is None else whole("processes", processes, 1)
        self.backend: Backend | None = None
        if backend is not None:
            self.backend = one_of("backend", backend, BACKENDS)  # type: ignore[assignment]
        self._workers: WorkerPool | None = None

    def __enter__(self) -> TrainerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def workers(self, processes: int) -> WorkerPool:
        """Return the workers for this number of processes; workers for another number end."""
        if self._workers is None or self._workers.closed or self._workers.processes != processes:
            self._close()
            self._workers = WorkerPool(processes)
        return self._workers

    def trainer(self, world: World, device: str) -> BatchedTrainer | SharedTrainer:
        """Return the trainer of a world's clients.

        Args:
            world: The scenario's.
            device: Device on which models train; workers use the CPU only.

        Raises:
            ParameterError: Several processes are to train on another device.
        """
        # One process can train on any device.
        if self.processes != 1:
            check_processes(world.scenario, self.processes, device)
        trainer = BatchedTrainer(
            world.model,
            world.scenario.training.settings(),
            device=device,
            objective=world.objective,
            backend=self.backend,
            size=run_size(world),
            processes=self.processes,
            # Read now: during the run torch has fewer threads.
            threads=torch.get_num_threads(),
        )
        return trainer if self.processes == 1 else SharedTrainer(trainer, self.workers)

    def _close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def check_processes(scenario: Scenario, processes: int | None, device: str = "cpu") -> int | None:
    """Return the number of processes that train as an int; None stays None.

    Raises:
        ParameterError: It is below 1, or above 1 where the engine is not "vectorized" or the device not the CPU.
    """
    if processes is None:
        return None
    number = whole("processes", processes, 1)
    if scenario.engine != "vectorized":
        raise ParameterError(
            f"processes = {number} is for the vectorized engine, but the engine is {scenario.engine!r}, whose actors "
            "num_cpus counts. Leave processes out, or set engine = 'vectorized'"
        )
    if number > 1 and torch.device(device).type != "cpu":
        raise ParameterError(
            f"processes = {number} train on the CPU, but the device is {device!r}. Leave processes out, or set "
            "device = 'cpu'"
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
    """Return the size of a world's run, from which its backend and its processes follow."""
    scenario, settings = world.scenario, world.scenario.training.settings()
    # Rounded up: the last batch of an epoch may be smaller.
    steps = settings.local_steps or settings.local_epochs * -(-world.sizes // settings.batch_size)
    examples = float(examples_per_round(settings, world.sizes).mean())
    return RunSize(scenario.rounds, scenario.clients_per_round, float(np.mean(steps)), examples)
