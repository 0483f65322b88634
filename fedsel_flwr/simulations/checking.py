"""What is refused before a scenario runs: what its engine cannot do, and arguments of another kind."""

from __future__ import annotations

from typing import Any

from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.vectorized import check_vectorized
from fedsel_flwr.simulations.where import Where, check_device

ENGINES = ("ray", "vectorized")
"""What can run a scenario."""


def check_engine(scenario: Scenario, where: Where, device: str = "cpu", rounds_on_flower: int = 0) -> None:
    """Refuse a scenario that its engine cannot run, or where.

    Args:
        scenario: The scenario, with its engine.
        where: What Ray is given.
        device: Where the vectorized engine trains.
        rounds_on_flower: Rounds on Ray beside the vectorized engine's.

    Raises:
        FedSelError: Says what to change.
    """
    if scenario.engine == "vectorized":
        check_vectorized(scenario)
        check_device(device)
        if rounds_on_flower == 0:
            if where.asked:
                raise ParameterError(
                    f"{where.asked[0]} is for Ray, but the vectorized engine runs in one process: choose the engine "
                    "'ray', or leave it out"
                )
            return
    elif device != "cpu":
        raise ParameterError(
            f"device = {device!r} is where the vectorized engine trains; on Ray give each client a share of a GPU: "
            "client_gpus"
        )
    where.check()


def check_kinds(selector: Any, objective: Any, on_round: Any) -> None:
    """Refuse what is of another kind than :func:`~fedsel_flwr.simulations.engine.simulate` takes.

    Args:
        selector: Of one's own, or None.
        objective: Likewise.
        on_round: Told each round, or None.

    Raises:
        ParameterError: Says what was expected.
    """
    if selector is not None and not isinstance(selector, Selector):
        got = selector.__name__ if isinstance(selector, type) else repr(selector)
        raise ParameterError(
            f"selector must be a fedsel_flwr.selectors.Selector, such as Random(clients_per_round=3), got {got}; a "
            "name belongs into the scenario"
        )
    if objective is not None and not isinstance(objective, Objective):
        raise ParameterError(
            "objective must be a fedsel_flwr.clients.objectives.Objective(loss=..., quality=...), got "
            f"{type(objective).__name__}"
        )
    if on_round is not None and not callable(on_round):
        raise ParameterError(f"on_round must be a function of a RoundRecord, got {type(on_round).__name__}")
