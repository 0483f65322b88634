"""Flower app of this repository for ``flwr run .``: a scenario as a ServerApp and a ClientApp in either API.

You can override every scenario key: ``--run-config "scenario='smoke' rounds=5 set='wireless.max_latency_s=5'"``. Keys
that ``pyproject.toml`` lists are set directly. All other keys are set in ``set``, in the form of ``fedsel run --set``.
An empty string keeps the scenario's value. ``checkpoint_dir`` and ``resume`` have the same meaning as in
:func:`~fedsel_flwr.simulations.engine.simulate`, whose engine "ray" runs the rounds with the functions of this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from flwr.client import ClientApp
from flwr.common import Context, log
from flwr.server import ServerApp
from flwr.serverapp import Grid

from fedsel_flwr.arguments import read_assignments
from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.report.run_folder import create_run_folder
from fedsel_flwr.rounds.checkpoints import Resume
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.simulations.diagnosis import finished_run
from fedsel_flwr.simulations.on_flower.building import APIS, make_strategy
from fedsel_flwr.simulations.on_flower.ray_session import SharedWorld, receive_world, share_world
from fedsel_flwr.simulations.results import RunResult, write_interrupted_run, write_run
from fedsel_flwr.simulations.run_identity import code_identity, identity
from fedsel_flwr.simulations.run_options import CheckpointPlan
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World, world_of

RUN_KEYS = ("scenario", "set", "runs_dir", "checkpoint_dir", "resume")
"""Run-config keys that are not scenario keys."""
SETTLED_S = 3.0
"""Seconds without change after which the number of connected nodes counts as final."""
FLOWER = "flwr"
"""Name of Flower's logger."""


def scenario_of(context: Context) -> Scenario:
    """Return the scenario that a run config describes.

    Args:
        context: Flower's context. Its ``run_config`` holds ``scenario``, single scenario keys, and ``set`` with other
            keys.

    Returns:
        The scenario.

    Raises:
        ParameterError: The scenario or a key is unknown, or a value is not allowed.
    """
    return _scenario(tuple(sorted(context.run_config.items())))


# Every message asks for the scenario. Without the cache, each message would read and validate the TOML file again.
@lru_cache(maxsize=8)
def _scenario(config: tuple[tuple[str, object], ...]) -> Scenario:
    given = dict(config)
    overrides = {key: value for key, value in config if key not in RUN_KEYS}
    if given.get("set"):
        overrides |= read_assignments(str(given["set"]), "set")
    scenario = load_scenario(str(given.get("scenario") or "digits"), overrides)
    if scenario.engine != "ray":
        raise ParameterError(
            f"engine = {scenario.engine!r}, but flwr run always uses Flower's engine. Leave engine out, or use fedsel "
            f"run --engine {scenario.engine}."
        )
    return scenario


class ScenarioApp(ClientApp):
    """ClientApp of the simulated clients, in the API that the scenario names.

    Flower pickles the app with each message. The pickle contains a reference to the world that this process has built
    (:mod:`fedsel_flwr.simulations.on_flower.ray_session`), and the actor then uses this world.

    Args:
        scenario_of: Function that returns the scenario from a node's context. It must be picklable. The node's
            ``partition-id`` is the number of its client.
        shared: The world that another process has put into Ray; None if there is none.
    """

    def __init__(self, scenario_of: Callable[[Context], Scenario], shared: SharedWorld | None = None) -> None:
        super().__init__()
        self._scenario_of, self._shared = scenario_of, shared

        def client(context: Context) -> TorchClient:
            return client_of(scenario_of(context), context)

        self._apps = {name: api.make_client_app(client) for name, api in APIS.items()}

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        if self._shared is not None:
            receive_world(self._shared)
        return self._apps[self._scenario_of(context).api](message, context)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Pickle the scenario and the reference to its world; unpickling builds the rest."""
        # Flower calls this for each message in the server's process. The first call puts the world into Ray.
        return type(self), (self._scenario_of, self._shared or share_world())


def client_of(scenario: Scenario, context: Context) -> TorchClient:
    """Return the client of a node.

    Args:
        scenario: The scenario.
        context: The node's context. Its ``partition-id`` is the number of the client.

    Returns:
        The client.

    Raises:
        ParameterError: There is no such client, or the data or a parameter cannot be used.
    """
    # An actor has one core. One thread also fixes the order of sums, so that every machine trains the same model.
    torch.set_num_threads(1)
    world = world_of(scenario)
    world.model.to(assigned_device())
    return world.client(int(context.node_config["partition-id"]))


def assigned_device() -> str:
    """Return the device for clients in this process: the GPU that Ray has assigned, or else the CPU.

    >>> assigned_device()
    'cpu'
    """
    # Not imported, because deployments do not have Ray, and Ray's actors have already loaded it.
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "cpu"
    # Ask Ray, because torch sees every GPU of the machine, not only those that Ray has assigned to this actor.
    return "cuda" if ray.get_runtime_context().get_accelerator_ids().get("GPU") and torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def log_message_only() -> Iterator[None]:
    """Make Flower log errors of this package as their message, without a traceback.

    The error is still raised, so that the run counts as failed. Flower would log it with a traceback, which hides the
    message. The traceback is logged at debug level (``FLWR_LOG_LEVEL=DEBUG``). Any other exception is a bug and keeps
    its traceback.

    Raises:
        FedSelError: The error that the block raised.
    """
    try:
        yield
    except FedSelError as error:
        logger, raised = logging.getLogger(FLOWER), error
        logger.debug("where the error was raised:", exc_info=error)

        def message_only(record: logging.LogRecord) -> bool:
            """Let every record pass, and reduce the first one with the error to the error's message."""
            if record.exc_info and record.exc_info[1] is raised:
                record.msg, record.args, record.exc_info, record.exc_text = "%s", (str(raised),), None, None
                logger.removeFilter(message_only)
            return True

        logger.addFilter(message_only)
        raise


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
    strategy.core.collector.simulated = True
    # The arrays of a simulated model are numbered, so that they would not say which of them are running statistics.
    strategy.core.name_arrays(list(world.model.state_dict()))
    return finished_run(world, strategy, APIS[world.scenario.api].run(grid, world, strategy))


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


client_app = ScenarioApp(scenario_of)
server_app = ServerApp()


@server_app.main()
@log_message_only()
def main(grid: Grid, context: Context) -> None:
    """Run the scenario over the connected nodes, and write the run's folder."""
    scenario = scenario_of(context)
    result = drive(
        grid,
        scenario,
        on_round=_log_round,
        on_error=partial(_write_interrupted, context, scenario),
        **checkpoint_options(context),
    )
    folder = _folder(context, scenario)
    write_run(folder, scenario, result)
    log(logging.INFO, "history, model and resolved scenario: %s", folder)


def _folder(context: Context, scenario: Scenario) -> Path:
    # An absolute path, so that the log names the place in whichever folder Flower runs the app.
    root = Path(str(context.run_config.get("runs_dir") or "runs")).expanduser()
    return create_run_folder(f"{scenario.name}-{scenario.selector}", root).resolve()


def _write_interrupted(context: Context, scenario: Scenario, strategy: Any) -> None:
    """Write the rounds and the last model of a run that ended with an error."""
    if not strategy.history.rounds:
        return
    try:
        path = write_interrupted_run(_folder(context, scenario), scenario, strategy.history, strategy.last_model)
    except (FedSelError, OSError) as failure:
        log(logging.ERROR, "the finished rounds cannot be written: %s", failure)
    else:
        log(logging.INFO, "the finished rounds, and the model after the last one: %s", path)


def checkpoint_options(context: Context) -> dict[str, Any]:
    """Return the checkpoint options of a run config, as keyword arguments of :func:`drive`.

    Raises:
        ParameterError: ``resume`` is set without ``checkpoint_dir``, or is not true, false or 'must'.
    """
    folder, resume = (context.run_config.get(key, "") for key in ("checkpoint_dir", "resume"))
    if resume not in ("", True, False, "must"):
        raise ParameterError(f"resume must be true, false or 'must', got {resume!r}.")
    if resume and not folder:
        raise ParameterError(f"resume = {resume!r} needs checkpoint_dir. Give the folder of the run's checkpoints.")
    return {"checkpoint_dir": Path(str(folder)).expanduser(), "resume": resume or False} if folder else {}


def _log_round(record: RoundRecord) -> None:
    log(
        logging.INFO,
        "round %d: accuracy %.4f, simulated %.3f s, energy %.4f J, completed %d of %d",
        record.round, record.accuracy, record.simulated_s, record.total_energy_j,
        record.num_completed, record.num_selected,
    )  # fmt: skip
