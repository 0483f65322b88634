"""How many processes train in the vectorized engine, and for how long the helpers stay."""

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

CLIENTS_EACH, MOST = 8, 8
"""A process of fewer clients waits for Python rather than for arithmetic; and there are no more processes than that."""
STEP_OPERATIONS = 20e6
"""A step of the whole round with less arithmetic is over before sharing it pays (about a millisecond)."""
THREADED_OPERATIONS = 2e9
"""A step of the whole round with less arithmetic is done by one thread sooner than by several."""
RUN_OPERATIONS = 30e9
"""A run with less arithmetic ends before a helper has started (about two seconds)."""
COMPILED_STEPS = 25_000
"""A run with fewer steps, of all its clients, saves less time than the compiled loops take to load (about a second, at
forty microseconds a step)."""


class WorkerPool:
    """Gives the vectorized engine its trainers; helper processes start with the first that needs them and end with it.

    Keep one over several runs, and the helpers do not start again::

        with WorkerPool() as staff:
            for seed in range(20):
                simulate(scenario.model_copy(update={"seed": seed}), engine="vectorized", processes=staff)

    Args:
        processes: How many processes train, this one included; None: as :func:`processes_for` says for each run.
        way: How clients are trained (:class:`~fedsel_flwr.clients.batched.BatchedTrainer`); None: as :func:`way_for`
            says for each run.

    Raises:
        ParameterError: ``processes`` is below 1, or there is no such way.
    """

    def __init__(self, processes: int | None = None, way: Way | None = None) -> None:
        self.processes = None if processes is None else whole("processes", processes, 1)
        self.way = way if way is None else one_of("way", way, WAYS)
        self._helpers: Helpers | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._dismiss()

    def helpers(self, processes: int) -> Helpers:
        """The helpers with which so many processes train; those of another number end."""
        if self._helpers is None or self._helpers.closed or self._helpers.processes != processes:
            self._dismiss()
            self._helpers = Helpers(processes)
        return self._helpers

    def trainer(self, world: World, device: str) -> BatchedTrainer | SharedTrainer:
        """What trains the clients of a world.

        Args:
            world: The scenario's.
            device: Where; helpers work on the CPU only.

        Raises:
            ParameterError: Several processes are to train on another device.
        """
        if self.processes != 1:  # one can train anything
            check_processes(world.scenario, self.processes, device)
        settings = world.scenario.training.settings()
        way: Way = self.way or way_for(world, device)  # type: ignore[assignment]
        processes = self.processes or (processes_for(world) if device == "cpu" and way != "compiled" else 1)
        threads = torch.get_num_threads() if processes == 1 else 1  # as now: during the run torch has fewer
        trainer = BatchedTrainer(
            world.model, settings, device=device, objective=world.objective, way=way, threads=threads
        )
        return trainer if processes == 1 else SharedTrainer(trainer, self.helpers(processes))

    def _dismiss(self) -> None:
        if self._helpers is not None:
            self._helpers.close()
            self._helpers = None


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
    return torch.get_num_threads() if _convolves(world) or _step_operations(world) >= THREADED_OPERATIONS else 1


def way_for(world: World, device: str) -> Way:
    """How clients are trained where nobody says it: "compiled" where that can be and the run is long, else "auto".

    The rule knows kinds and sizes only, and whether Numba is there.
    """
    settings, train = world.scenario.training.settings(), world.dataset.train
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
    """How many processes train where nobody says it; the rule knows sizes only, so that a scenario repeats itself.

    As many as torch uses threads here, one for each eight clients of a round and eight at most; but only this one

    - where clients are trained the compiled way, on threads of this process,
    - where the model has convolutions, of which several chunks run on as many threads as well,
    - where a step of the round has less than 20 million operations, or the run less than 30 thousand million, counted
      as six for each parameter and example.
    """
    scenario = world.scenario
    if _convolves(world):
        return 1
    cohort, step = scenario.clients_per_round, _step_operations(world)
    settings = scenario.training.settings()
    round_operations = step / settings.batch_size * float(examples_per_round(settings, world.sizes).mean())
    if step < STEP_OPERATIONS or round_operations * scenario.rounds < RUN_OPERATIONS:
        return 1
    return max(1, min(torch.get_num_threads(), cohort // CLIENTS_EACH, MOST))


def _convolves(world: World) -> bool:
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in world.model.modules())


def _step_operations(world: World) -> float:
    """Of a step of all clients of a round: six for each parameter and example."""
    parameters = sum(parameter.numel() for parameter in world.model.parameters())
    return 6.0 * parameters * world.scenario.clients_per_round * world.scenario.training.batch_size
