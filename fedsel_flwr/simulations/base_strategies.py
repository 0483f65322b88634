"""The base strategies a scenario can name: their classes have the same names in both of Flower's APIs."""

from __future__ import annotations

from typing import Any

from fedsel_flwr.simulations.scenario import Scenario

CLASSES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedavgm": "FedAvgM",
}
"""The scenario's name -> the class, of ``flwr.server.strategy`` and of ``flwr.serverapp.strategy``."""


def own_parameters(scenario: Scenario) -> dict[str, Any]:
    """The parameters that the scenario's base alone has.

    Args:
        scenario: The scenario; its table ``aggregation`` names the base.

    Returns:
        Keyword arguments, the same in both APIs.
    """
    if scenario.aggregation.base == "fedprox":
        return {"proximal_mu": scenario.training.proximal_mu}
    if scenario.aggregation.base in ("fedadam", "fedyogi"):
        return {"eta": scenario.aggregation.server_learning_rate}
    if scenario.aggregation.base == "fedavgm":
        return {"server_learning_rate": scenario.aggregation.server_learning_rate}
    return {}
