"""How many processes train in the vectorized engine, and for how long the workers stay."""

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


class Staff:
    """Gives the vectorized engine its trainers; worker processes start with the first that needs them and end with it.

    Keep one over several runs, and the workers do not start again::

        with Staff() as staff:
            for seed in range(20):
                simulate(scenario.model_copy(update={"seed": seed}), engine="vectorized", processes=staff)

    Args:
        processes: How many processes train, this one included; None: as
            :func:`~fedsel_flwr.clients.batched.backends.choose_backend` says for each run.
        backend: What trains clients; None: as :func:`~fedsel_flwr.clients.batched.backends.choose_backend` says for
            each run.

    Raises:
        ParameterError: ``processes`` is below 1, or there is no such backend.
    """

    def __init__(self, processes: int | None = None, backend: Backend | None = None) -> None:
        self.processes = None if processes is None else whole("processes", processes, 1)
        self.backend: Backend | None = None if backend is None else one_of("backend", backend, BACKENDS)  # type: ignore[assignment]
        self._workers: WorkerPool | None = None

    def __enter__(self) -> Staff:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._dismiss()

    def workers(self, processes: int) -> WorkerPool:
        """The workers with which so many processes train; those of another number end."""
        if self._workers is None or self._workers.closed or self._workers.processes != processes:
            self._dismiss()
            self._workers = WorkerPool(processes)
        return self._workers

    def trainer(self, world: World, device: str) -> BatchedTrainer | SharedTrainer:
        """What trains the clients of a world.

        Args:
            world: The scenario's.
            device: Where; workers work on the CPU only.

        Raises:
            ParameterError: Several processes are to train on another device.
        """
        if self.processes != 1:  # one can train anything
            check_processes(world.scenario, self.processes, device)
        settings = world.scenario.training.settings()
        trainer = BatchedTrainer(
            world.model, settings, device=device, objective=world.objective, backend=self.backend, size=run_size(world),
            # as now: during the run torch has fewer
            processes=self.processes, threads=torch.get_num_threads(),
        )  # fmt: skip
        return trainer if self.processes == 1 else SharedTrainer(trainer, self.workers)

    def _dismiss(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def check_processes(scenario: Scenario, processes: int | None, device: str = "cpu") -> int | None:
    """How many processes train, as a number of Python's; None stays None.

    Raises:
        ParameterError: It is below 1, or above 1 where the engine is not "vectorized" or the device not the CPU.
    """
    if processes is None:
        return None
    number = whole("processes", processes, 1)
    if scenario.engine != "vectorized":
        raise ParameterError(
            f"processes = {number} is of the vectorized engine, but the engine is {scenario.engine!r}, whose actors "
            "are counted by num_cpus: leave processes out, or set engine = 'vectorized'"
        )
    if number > 1 and torch.device(device).type != "cpu":
        raise ParameterError(
            f"processes = {number} train on the CPU, but the device is {device!r}: leave processes out, or set "
            "device = 'cpu'"
        )
    return number


def threads_for(world: World) -> int:
    """How many threads torch uses in the vectorized engine on the CPU: those it has, or one where products are small.

    A step on small stacks is some sixty operations of microseconds; threads that meet after each of them wait for each
    other longer than they work, and many times longer where the machine has other work. The rule knows sizes only.
    """
    operations = step_operations(world.model, world.scenario.training.settings(), world.scenario.clients_per_round)
    return torch.get_num_threads() if convolves(world.model) or operations >= THREADED_OPERATIONS else 1


def run_size(world: World) -> RunSize:
    """Return the size of a world's run, from which its backend and its processes follow."""
    scenario, settings = world.scenario, world.scenario.training.settings()
    steps = settings.local_steps or settings.local_epochs * -(-world.sizes // settings.batch_size)
    examples = float(examples_per_round(settings, world.sizes).mean())
    return RunSize(scenario.rounds, scenario.clients_per_round, float(np.mean(steps)), examples)
