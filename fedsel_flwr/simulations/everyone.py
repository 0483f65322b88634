"""Every selector there is, as far as a scenario can run it."""

from __future__ import annotations

from fedsel_flwr.errors import FedSelError
from fedsel_flwr.rounds.settings import settled
from fedsel_flwr.selectors import create
from fedsel_flwr.selectors.registry import names, selector_class
from fedsel_flwr.simulations.building import check_selectors, selector_params
from fedsel_flwr.simulations.ingredients import Own
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.world import world_of

ALL = "all"
"""What stands for them on the command line, and in :func:`~fedsel_flwr.simulations.comparing.compare`."""


def every_selector(scenario: Scenario, own: Own = Own()) -> tuple[list[str], dict[str, str]]:  # noqa: B008 (frozen)
    """Find out who can run in a scenario.

    Args:
        scenario: The scenario.
        own: Model, data and objective of the caller's.

    Returns:
        The names of those that can, and for each of the others why it cannot.
    """
    world = world_of(own.named_in(scenario), own)
    able, left_out = [], {}
    for name in names():
        try:
            check_selectors(scenario, [name])
            world.check_measured(selector_class(name).needs, name)
            _check_fleet(scenario, name)
        except FedSelError as error:
            left_out[name] = str(error)
        else:
            able.append(name)
    return able, left_out


def _check_fleet(scenario: Scenario, name: str) -> None:
    """Refuse a fleet that the selector's algorithm is too slow for, and over-selection where it decides how many."""
    sizes = dict.fromkeys(range(scenario.num_clients), 1)
    selector = create(name, **selector_params(scenario.model_copy(update={"selector": name}), sizes))
    settled(selector, over_selection=scenario.aggregation.over_selection)
    most = getattr(selector, "max_clients", None)
    if most is not None and scenario.num_clients > most:
        raise FedSelError(f"takes at most {most} clients, and there are {scenario.num_clients}")
