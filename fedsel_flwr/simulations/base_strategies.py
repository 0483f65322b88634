"""The base strategies a scenario can name, in both of Flower's APIs."""

from __future__ import annotations

from typing import Any

from flwr.common import NDArrays, Scalar, ndarrays_to_parameters
from flwr.server import strategy as legacy
from flwr.serverapp import strategy as message

from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.world import World

CLASSES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedavgm": "FedAvgM",
}


def legacy_base(scenario: Scenario, world: World) -> legacy.Strategy:
    """The base strategy for the legacy API; it knows the initial model and evaluates on the test set."""

    def evaluate_fn(round: int, arrays: NDArrays, config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
        loss, accuracy = world.test(arrays)
        return loss, {"accuracy": accuracy}

    def fit_config(round: int) -> dict[str, Scalar]:
        return {"round": round}

    base: legacy.Strategy = getattr(legacy, CLASSES[scenario.aggregation.base])(
        fraction_evaluate=0.0,
        min_available_clients=scenario.num_clients,
        initial_parameters=ndarrays_to_parameters(list(world.initial_arrays())),
        evaluate_fn=evaluate_fn,
        on_fit_config_fn=fit_config,
        fit_metrics_aggregation_fn=lambda metrics: {},
        **_own_parameters(scenario),
    )
    return base


def message_base(scenario: Scenario) -> message.Strategy:
    """The base strategy for the Message API."""
    base: message.Strategy = getattr(message, CLASSES[scenario.aggregation.base])(
        fraction_evaluate=0.0, min_available_nodes=scenario.num_clients, **_own_parameters(scenario)
    )
    return base


def _own_parameters(scenario: Scenario) -> dict[str, Any]:
    if scenario.aggregation.base == "fedprox":
        return {"proximal_mu": scenario.training.proximal_mu}
    if scenario.aggregation.base in ("fedadam", "fedyogi"):
        return {"eta": scenario.aggregation.server_learning_rate}
    if scenario.aggregation.base == "fedavgm":
        return {"server_learning_rate": scenario.aggregation.server_learning_rate}
    return {}
