"""What a simulation leaves behind, in memory and on disk."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from pydantic import ValidationError

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.files import replacing
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.simulations.scenario import Scenario


@dataclass(frozen=True)
class RunResult:
    """What a simulation leaves behind.

    Attributes:
        history: Round by round and client by client.
        arrays: The final global model.
    """

    history: History
    arrays: Arrays


RUN = "run.json"
"""What a run is called, and the versions that made it."""


def write_run(folder: Path, scenario: Scenario, result: RunResult, label: str | None = None) -> None:
    """Write the resolved scenario, the history and the model of one run.

    Args:
        folder: Where to; made if needed.
        scenario: What was run.
        result: What came out.
        label: What the selector is called; None: as in the scenario.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made_by = {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in ("fedsel-flwr", "flwr", "torch", "numpy")
    }
    said = {"scenario": scenario.name, "selector": label or scenario.selector, "versions": made_by}
    with replacing(folder / RUN) as temporary:
        temporary.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    run_folder.write_scenario(folder, tomli_w.dumps(scenario.model_dump(exclude={"name"})))
    run_folder.write_history(folder, result.history)
    run_folder.write_model(folder, list(result.arrays))


def read_run(folder: Path) -> tuple[str, Scenario, RunResult]:
    """Read back what :func:`write_run` wrote; the selector itself is not needed.

    Args:
        folder: The folder of one run.

    Returns:
        The selector's label, the scenario, and what came out.

    Raises:
        ParameterError: A file is missing or damaged.
    """
    try:
        said = json.loads((folder / RUN).read_text("utf-8"))
        tables = tomllib.loads((folder / run_folder.SCENARIO).read_text("utf-8"))
        label, name = str(said["selector"]), str(said["scenario"])
        scenario = Scenario.model_validate({"name": name} | tables)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:  # JSON's and TOML's are ValueErrors
        raise ParameterError(f"{str(folder)!r} is no finished run: {error}") from error
    return label, scenario, RunResult(run_folder.read_history(folder), run_folder.read_model(folder))
