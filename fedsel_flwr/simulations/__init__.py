"""Federations simulated on one machine: scenarios, the two engines, comparisons.

>>> from fedsel_flwr.simulations import load_scenario
>>> load_scenario("smoke").num_clients
10

Importing this package loads neither torch nor Flower; each name brings what it needs when it is first used.
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
        if str(error.name).startswith("fedsel_flwr"):
            raise
        raise RunError(
            f"fedsel_flwr.simulations.{name} needs {error.name}, which is not installed: pip install 'fedsel-flwr[sim]'"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
