"""Runs on Ray for the tests of engines: ``python -m tests.simulations.ray_runs NAME FILE ...`` pickles what came out.

In a process of their own, as Ray leaves threads, signal handlers and warnings behind.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import psutil

from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from tests.processes import ROOT, Command, command_line

SMOKE = load_scenario(
    "smoke", {"training.local_epochs": 5, "rounds": 4, "partition.kind": "dirichlet", "partition.alpha": 0.3}
)


def outcome(name: str, folder: Path, *args: str) -> Any:
    """Call a function of this file in a process of its own; returns what it returned."""
    result = folder / "result"
    with Command(sys.executable, "-m", __name__, name, str(result), *args, folder=folder, cwd=ROOT) as command:
        assert command.wait(600) == 0, command.stderr[-5000:]
        return pickle.loads(result.read_bytes())


def at_work(process: psutil.Process) -> bool:
    """Whether a process is an actor that is answering a message."""
    return "ray::ClientAppActor.run" in " ".join(command_line(process))


def with_one_actor() -> RunResult:
    return simulate(SMOKE, num_cpus=1)


def played(text: str) -> RunResult:
    return simulate(Scenario.model_validate_json(text), engine="ray")


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*sys.argv[3:])
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))
