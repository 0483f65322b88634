"""Who knows the truth, and a second random: what a selector can gain at most, and what chance alone makes.

The truth are the mean latencies of the system model, which no selector knows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.selectors import Random, Selector
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.theory import sorted_groups

GENIE, GROUPS, CHANCE = "genie", "sorted-groups", "random-again"
"""Their labels."""


class Genie(Selector):
    """The m available clients of the least true mean latency, in every round (Xia et al., equation (13))."""

    name: ClassVar[str] = GENIE

    def __init__(self, *, clients_per_round: int, seed: int | None = None, mean_latency: FloatArray) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.mean_latency = mean_latency

    def _select(self, available: IntArray) -> IntArray:
        return self._largest(-self.mean_latency, available)


class SortedGroups(Selector):
    """Groups of clients that are equally fast, in turn: the least waiting that equal shares allow.

    The available clients, sorted by true mean latency, are cut into groups of m; the group that was chosen least often
    so far is next, the faster one of equals.
    """

    name: ClassVar[str] = GROUPS
    client_state: ClassVar[dict[str, float]] = {"_plays": 0}
    _plays: IntArray

    def __init__(self, *, clients_per_round: int, seed: int | None = None, mean_latency: FloatArray) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.mean_latency = mean_latency

    def _select(self, available: IntArray) -> IntArray:
        groups = sorted_groups(self.mean_latency[available], self.asked_per_round)
        means = [self._plays[available[group]].mean() for group in groups]
        chosen = available[groups[int(np.argmin(means))]]
        self._plays[chosen] += 1
        return chosen


def references(world: World) -> dict[str, Callable[..., Selector]]:
    """The references of a scenario: label -> what makes them.

    Args:
        world: Its system model gives the true means; its seed must not be that of the second random.
    """
    means = mean_latencies(world.system)
    return {
        GENIE: partial(Genie, mean_latency=means),
        GROUPS: partial(SortedGroups, mean_latency=means),
        CHANCE: lambda *, clients_per_round, seed: Random(clients_per_round=clients_per_round, seed=seed + 1_000_003),
    }
