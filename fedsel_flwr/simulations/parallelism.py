"""Parallelism of the vectorized engine: how clients are trained, by how many processes and threads."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import torch
from torch import nn

from fedsel_flwr.checks import one_of, whole
from fedsel_flwr.clients.batched import BatchedTrainer, Examples, Helpers, SharedTrainer
from fedsel_flwr.clients.batched.steps import Refused
from fedsel_flwr.clients.batched.trainer import WAYS, Way, compiled
from fedsel_flwr.clients.training_settings import examples_per_round
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World

CLIENTS_PER_PROCESS, MAX_PROCESSES = 8, 8
"""Fewest clients for each process, which with less arithmetic waits for Python, and most processes."""
STEP_OPERATIONS = 20e6
"""A step of the whole round with less arithmetic is over before sharing it pays (about a millisecond)."""
THREADED_OPERATIONS = 2e9
"""A step of the whole round with less arithmetic is done by one thread sooner than by several."""
RUN_OPERATIONS = 30e9
"""A run with less arithmetic ends before a helper has started (about two seconds)."""
COMPILED_STEPS = 25_000
"""Fewest steps of a run, of all its clients, that save the time to load the compiled loops.

Loading takes about a second; a compiled step saves forty microseconds.
"""


class TrainerPool:
    """A pool of worker processes, and the trainers of the vectorized engine that use it.

    The workers start with the first trainer that needs them and end with the pool. Keep a pool over several runs, and
    they do not start again::

        with TrainerPool() as pool:
            for seed in range(20):
                simulate(scenario.model_copy(update={"seed": seed}), engine="vectorized", processes=pool)

    Args:
        processes: Number of processes that train, this one included; None: :func:`processes_for` each run.
        way: How clients are trained (:class:`~fedsel_flwr.clients.batched.BatchedTrainer`); None: :func:`way_for` each
            run.

    Raises:
        ParameterError: ``processes`` is below 1, or there is no such way.
    """

    def __init__(self, processes: int | None = None, way: Way | None = None) -> None:
        self.processes = None if processes is None else whole("processes", processes, 1)
        self.way = way if way is None else one_of("way", way, WAYS)
        self._helpers: Helpers | None = None

    def __enter__(self) -> TrainerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def helpers(self, processes: int) -> Helpers:
        """Return the workers for this number of processes; workers for another number end."""
        if self._helpers is None or self._helpers.closed or self._helpers.processes != processes:
            self._close()
            self._helpers = Helpers(processes)
        return self._helpers

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
        settings = world.scenario.training.settings()
        way: Way = self.way or way_for(world, device)  # type: ignore[assignment]
        processes = self.processes or (processes_for(world) if device == "cpu" and way != "compiled" else 1)
        # Read now: during the run torch has fewer threads. One of several processes gets a single thread.
        threads = torch.get_num_threads() if processes == 1 else 1
        trainer = BatchedTrainer(
            world.model, settings, device=device, objective=world.objective, way=way, threads=threads
        )
        return trainer if processes == 1 else SharedTrainer(trainer, self.helpers(processes))

    def _close(self) -> None:
        if self._helpers is not None:
            self._helpers.close()
            self._helpers = None


def check_processes(scenario: Scenario, processes: int | None, device: str = "cpu") -> int | None:
    """Return the number of processes that train as an int; None stays None.

    Raises:
        ParameterError: It is below 1, or above 1 though the engine is not "vectorized" or the device not the CPU.
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
    return torch.get_num_threads() if _convolves(world) or _step_operations(world) >= THREADED_OPERATIONS else 1


def way_for(world: World, device: str) -> Way:
    """Return how clients are trained by default: "compiled" if that is possible and the run is long, else "auto".

    The rule depends on kinds and sizes only, and on whether Numba is installed.
    """
    settings, train = world.scenario.training.settings(), world.dataset.train
    # Rounded up: the last batch of an epoch may be smaller.
    steps = settings.local_steps or settings.local_epochs * -(-world.sizes // settings.batch_size)
    played = world.scenario.rounds * world.scenario.clients_per_round * float(np.mean(steps))
    if device != "cpu" or played < COMPILED_STEPS:
        return "auto"
    data = Examples(train.inputs, train.labels, []).on(torch.device(device))
    try:
        compiled(world.model, world.objective.loss, *data, settings)
    except Refused:
        return "auto"
    return "compiled"


def processes_for(world: World) -> int:
    """Return how many processes train by default.

    As many as torch has threads here, at most one for each eight clients of a round, and at most eight. The rule
    depends on sizes only, so that a scenario gives the same result again. Only this process trains

    - if clients are trained the compiled way, on threads of this process,
    - if the model has convolutions, several chunks of which run on as many threads,
    - if a step of the round has less than 20 million operations, or the run less than 30 thousand million, counted as
      six for each parameter and example.
    """
    scenario = world.scenario
    if _convolves(world):
        return 1
    cohort, step = scenario.clients_per_round, _step_operations(world)
    settings = scenario.training.settings()
    round_operations = step / settings.batch_size * float(examples_per_round(settings, world.sizes).mean())
    if step < STEP_OPERATIONS or round_operations * scenario.rounds < RUN_OPERATIONS:
        return 1
    return max(1, min(torch.get_num_threads(), cohort // CLIENTS_PER_PROCESS, MAX_PROCESSES))


def _convolves(world: World) -> bool:
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in world.model.modules())


def _step_operations(world: World) -> float:
    """Count the operations of a step of all clients of a round: six for each parameter and example."""
    # Two for the forward pass, two each for the gradients of inputs and of parameters.
    parameters = sum(parameter.numel() for parameter in world.model.parameters())
    return 6.0 * parameters * world.scenario.clients_per_round * world.scenario.training.batch_size
