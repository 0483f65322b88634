"""Agreement with Flower: check that the first rounds of a comparison choose the same clients on Flower and Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.selectors import Selector, create
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.building import first_rounds, selector_params
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import world_of


@dataclass(frozen=True)
class Agreement:
    """Agreement of two runs: whether they selected the same clients in their common rounds.

    Attributes:
        rounds: Number of common rounds.
        parted: First round with a different choice; 0 if there is none.
    """

    rounds: int
    parted: int

    @property
    def sentence(self) -> str:
        """Agreement as a sentence."""
        engines = "Flower on Ray and the vectorized engine"
        if self.parted:
            return f"{engines} selected different clients from round {self.parted} on."
        return f"{engines} selected the same clients in all {self.rounds} rounds that both ran."


def run_on_flower(
    scenario: Scenario,
    rounds: int,
    selector: Selector | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    **options: Any,
) -> RunResult:
    """Run a scenario's first rounds with Flower on Ray.

    Args:
        scenario: The scenario.
        rounds: Number of rounds, at least 1. The selector still plans for the scenario's number of rounds.
        selector: A new selector. If None, the scenario's selector is made.
        on_round: Function called with each finished round.
        **options: Options of :func:`~fedsel_flwr.simulations.engine.simulate`.

    Returns:
        History and model after these rounds.

    Raises:
        ParameterError: See :func:`~fedsel_flwr.simulations.engine.simulate`.
        RunError: See :func:`~fedsel_flwr.simulations.engine.simulate`.
    """
    # Made here from the full scenario, because `simulate` would make it plan for fewer rounds.
    if selector is None:
        brought = OwnParts(*(options.get(key) for key in ("model", "data", "objective")))
        sizes = world_of(brought.named_in(scenario), brought).num_examples()
        selector = create(scenario.selector, **selector_params(scenario, sizes))
    short = first_rounds(scenario, rounds).model_copy(update={"engine": "ray"})
    return simulate(short, selector=selector, on_round=on_round, **options)


def compare_choices(one: History, other: History) -> Agreement:
    """Compare the clients selected in two runs; the order within a round does not count.

    Args:
        one: A history.
        other: Another history.

    Returns:
        Number of common rounds, and the first round that differs.
    """
    shared = min(len(one.rounds), len(other.rounds))
    for record in one.rounds[:shared]:
        if _chosen(one, record.round) != _chosen(other, record.round):
            return Agreement(shared, record.round)
    return Agreement(shared, 0)


def _chosen(history: History, round: int) -> set[str]:
    return {row.client_id for row in history.clients if row.round == round}
