"""The Flower app of this repository: ``flwr run .``.

Every scenario key can be overridden: ``--run-config "scenario='smoke' selector='cs-ucb' rounds=5"``. An empty string
leaves the scenario's own value; lists are written as strings, as Flower's bundler refuses lists. ``checkpoint_dir`` and
``resume`` are those of :func:`~fedsel_flwr.simulations.engine.simulate`.

The simulated clients of a scenario as a Flower app, in either API.

What stands at the end of a Flower run that failed: the message of an error that explains itself, no traceback.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from flwr.client import ClientApp
from flwr.common import Context, log
from flwr.server import ServerApp
from flwr.serverapp import Grid

from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.errors import FedSelError, ParameterError
from fedsel_flwr.report.run_folder import create_run_folder
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.simulations.on_flower.driving import drive
from fedsel_flwr.simulations.on_flower.flower_apis import APIS
from fedsel_flwr.simulations.on_flower.ray_session import Offer, accept, offered
from fedsel_flwr.simulations.results import write_interrupted_run, write_run
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import world_of


class ScenarioApp(ClientApp):
    """The simulated clients, in the API that the scenario names.

    Flower pickles it with each message. It then takes along where the actor finds the world that this process has
    built (:mod:`fedsel_flwr.simulations.on_flower.ray_session`).

    Args:
        scenario_of: Returns the scenario from a node's context; must be picklable. The node's ``partition-id`` says
            which client it is.
        offer: Where the world is that another process has built; None if nowhere.
    """

    def __init__(self, scenario_of: Callable[[Context], Scenario], offer: Offer | None = None) -> None:
        super().__init__()
        self._scenario_of, self._offer = scenario_of, offer

        def client(context: Context) -> TorchClient:
            return client_of(scenario_of(context), context)

        self._apps = {name: api.make_client_app(client) for name, api in APIS.items()}

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        if self._offer is not None:
            accept(self._offer)
        return self._apps[self._scenario_of(context).api](message, context)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """The scenario, and where its world is; the rest is made anew."""
        return type(self), (self._scenario_of, self._offer or offered())


def client_of(scenario: Scenario, context: Context) -> TorchClient:
    """The client that a node is.

    Args:
        scenario: The scenario.
        context: The node's; its ``partition-id`` says which client it is.

    Returns:
        The client.

    Raises:
        ParameterError: There is no such client; the data or a parameter cannot be used.
    """
    torch.set_num_threads(1)  # an actor has one core; the same sums in the same order everywhere
    world = world_of(scenario)
    world.model.to(own_device())
    return world.client(int(context.node_config["partition-id"]))


def own_device() -> str:
    """Where this process's clients train: on the GPU that Ray has given it, else on the CPU.

    >>> own_device()
    'cpu'
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "cpu"
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU")
    return "cuda" if given and torch.cuda.is_available() else "cpu"


FLOWER = "flwr"
"""The name of Flower's logger."""


@contextlib.contextmanager
def message_alone() -> Iterator[None]:
    """Have Flower's log show an error of this package as its message alone.

    The error is raised all the same, so that the run counts as failed. Flower logs it with its traceback, which buries
    the message; the traceback goes to the log's debug level (``FLWR_LOG_LEVEL=DEBUG``). Any other exception is a fault
    of a program and keeps its traceback.

    Raises:
        FedSelError: What the block raised.
    """
    try:
        yield
    except FedSelError as error:
        logger = logging.getLogger(FLOWER)
        logger.debug("where the error was raised:", exc_info=error)
        logger.addFilter(_MessageAlone(error))
        raise


class _MessageAlone(logging.Filter):
    """Replaces the first record that carries the error by its message; then it has done its work.

    Args:
        error: The error.
    """

    def __init__(self, error: FedSelError) -> None:
        super().__init__()
        self._error = error

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, that of the error as its message."""
        if record.exc_info and record.exc_info[1] is self._error:
            record.msg, record.args, record.exc_info, record.exc_text = "%s", (str(self._error),), None, None
            logging.getLogger(FLOWER).removeFilter(self)
        return True


INFO, ERROR = 20, 40
OWN_KEYS = ("scenario", "runs_dir", "checkpoint_dir", "resume")
"""Run-config keys that are not scenario keys."""


def scenario_of(context: Context) -> Scenario:
    """The scenario that a run config describes.

    Args:
        context: Flower's context; ``run_config`` holds ``scenario`` and any scenario key, dotted.

    Returns:
        The scenario.

    Raises:
        ParameterError: An unknown scenario or key, or a value that is not allowed.
    """
    return _scenario(tuple(sorted(context.run_config.items())))


@lru_cache(maxsize=8)
def _scenario(config: tuple[tuple[str, object], ...]) -> Scenario:
    overrides = {key: value for key, value in config if key not in OWN_KEYS}
    scenario = load_scenario(str(dict(config).get("scenario") or "digits"), overrides)
    if scenario.engine != "ray":
        raise ParameterError(
            f"engine = {scenario.engine!r}, but flwr run is Flower's own engine: leave engine out, or use fedsel run "
            f"--engine {scenario.engine}"
        )
    return scenario


client_app = ScenarioApp(scenario_of)
server_app = ServerApp()


@server_app.main()
@message_alone()
def main(grid: Grid, context: Context) -> None:
    """Run the scenario over the nodes there are and write the run folder."""
    scenario = scenario_of(context)
    result = drive(
        grid, scenario, on_round=_log_round, on_error=partial(_leave, context, scenario), **keeping_of(context)
    )
    folder = _folder(context, scenario)
    write_run(folder, scenario, result)
    _log_last_clients(result.history)
    log(INFO, "history, model and resolved scenario: %s", folder)


def _folder(context: Context, scenario: Scenario) -> Path:
    root = Path(str(context.run_config.get("runs_dir") or "runs")).expanduser()
    return create_run_folder(f"{scenario.name}-{scenario.selector}", root).resolve()


def _leave(context: Context, scenario: Scenario, strategy: Any) -> None:
    """Write the rounds and the last model of a run that an error ends."""
    if not strategy.history.rounds:
        return
    try:
        path = write_interrupted_run(_folder(context, scenario), scenario, strategy.history, strategy.last_model)
    except (FedSelError, OSError) as failure:
        log(ERROR, "the rounds that were done cannot be written: %s", failure)
    else:
        log(INFO, "the rounds that were done, and the model after the last of them: %s", path)


def keeping_of(context: Context) -> dict[str, Any]:
    """Where checkpoints go and whether the run goes on from them, as far as the run config says.

    Raises:
        ParameterError: ``resume`` without ``checkpoint_dir``, or of another value.
    """
    folder, resume = (context.run_config.get(key, "") for key in ("checkpoint_dir", "resume"))
    if resume not in ("", True, False, "must"):
        raise ParameterError(f"resume must be true, false or 'must', got {resume!r}")
    if resume and not folder:
        raise ParameterError(f"resume = {resume!r} needs checkpoint_dir, the folder of the run's checkpoints")
    return {"checkpoint_dir": Path(str(folder)).expanduser(), "resume": resume or False} if folder else {}


def _log_round(record: RoundRecord) -> None:
    log(
        INFO,
        "round %d: accuracy %.4f, simulated %.3f s, energy %.4f J, completed %d of %d",
        record.round, record.accuracy, record.simulated_s, record.total_energy_j,
        record.num_completed, record.num_selected,
    )  # fmt: skip


def _log_last_clients(history: History) -> None:
    last = history.rounds[-1].round
    log(INFO, "the last round, client by client (every round is in clients.parquet):")
    for row in history.clients:
        if row.round == last:
            log(INFO, "  client %s: %.4f s, %.5f J %s", row.client_id, row.latency_s, row.energy_j, row.problem)
