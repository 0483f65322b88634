"""The Flower app of this repository: ``flwr run .``.

Every scenario key can be overridden: ``--run-config "scenario='smoke' selector='cs-ucb' rounds=5"``. An empty string
leaves the scenario's own value; lists are written as strings, as Flower's bundler refuses lists. ``checkpoint_dir`` and
``resume`` are those of :func:`~fedsel_flwr.simulations.engine.simulate`.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flwr.common import Context, log
from flwr.server import ServerApp
from flwr.serverapp import Grid

from fedsel_flwr.errors import FedSelError, ParameterError
from fedsel_flwr.report.run_folder import create_run_folder
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.simulations.client_app import ScenarioApp
from fedsel_flwr.simulations.driving import drive
from fedsel_flwr.simulations.last_words import message_alone
from fedsel_flwr.simulations.results import write_cut_off, write_run
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario

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
        path = write_cut_off(_folder(context, scenario), scenario, strategy.history, strategy.last_model)
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
