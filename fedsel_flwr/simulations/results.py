"""What a simulation leaves behind, in memory and on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli_w

from fedsel_flwr.report import run_folder
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


def write_run(folder: Path, scenario: Scenario, result: RunResult) -> None:
    """Write the resolved scenario, the history and the model of one run.

    Args:
        folder: Where to; made if needed.
        scenario: What was run.
        result: What came out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_scenario(folder, tomli_w.dumps(scenario.model_dump(exclude={"name"})))
    run_folder.write_history(folder, result.history)
    run_folder.write_model(folder, list(result.arrays))
