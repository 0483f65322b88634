"""Simulations of a federation: scenarios, the two engines, comparisons.

>>> from fedsel_flwr.simulations import load_scenario
>>> load_scenario("smoke").num_clients
10

Modules, in the order in which a run uses them:

======================  ============================================================================================
``scenario_tables``     the tables of a scenario that describe its world, and synthetic data
``scenario``            everything that defines a simulation
``listing``             names of scenarios and selectors: ``fedsel list``
``scenario_files``      TOML files, overrides of single keys, errors that name the key; checks of others' files
``scenario_text``       a scenario with its units and defaults: ``fedsel show``
``worlds``              data, partition, model and availability of a scenario
``run_options``         the options of a run, and its checkpoints
``engine``              :func:`simulate`: checks, engine, folder and checkpoints of a run
``run_identity``        ``run.json``: with which code, scenario and data a run was made, and a digest of each file
``vectorized``          the vectorized engine: all clients of a round as one batch, in this process
``on_flower``           the Ray engine, and the app of ``flwr run``: a scenario on Flower
``diagnosis``           a finished run: divergence or no updates, regret, accuracy of each client and class
``results``             the run's folder: written, read, and compared with the scenario that resumes it
``comparisons``         several selectors on the same seeds
``doctor``              checks of the installation and of this machine: ``fedsel doctor``
``shutdown``            Ctrl-C and SIGTERM
======================  ============================================================================================

Importing this package loads neither torch nor Flower. Each name loads what it needs on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedsel_flwr.errors import RunError

if TYPE_CHECKING:
    from fedsel_flwr.simulations.comparisons.comparing import compare
    from fedsel_flwr.simulations.comparisons.comparison import Comparison
    from fedsel_flwr.simulations.engine import simulate
    from fedsel_flwr.simulations.scenario import Scenario
    from fedsel_flwr.simulations.scenario_files import load_scenario
    from fedsel_flwr.simulations.worlds.own_data import OwnData

__all__ = ["Comparison", "OwnData", "Scenario", "compare", "load_scenario", "simulate"]

# Names are loaded on first use, because the command line and selectors import this package without torch and Flower.
_HOMES = {
    "Comparison": "comparisons.comparison",
    "OwnData": "worlds.own_data",
    "Scenario": "scenario",
    "compare": "comparisons.comparing",
    "load_scenario": "scenario_files",
    "simulate": "engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        # If one of our own modules is missing, the package is broken, and installing an extra does not help.
        if str(error.name).startswith("fedsel_flwr"):
            raise
        raise RunError(
            f"fedsel_flwr.simulations.{name} needs {error.name}, which is not installed. Install it with "
            "pip install 'fedsel-flwr[sim]'"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
