"""Chances of drawn sets by enumeration, and whether frequencies agree with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np
from scipy.stats import chisquare

Chances = dict[frozenset[int], float]


def drawn_one_by_one(weights: Mapping[int, float], count: int) -> Chances:
    """Chance of each set of `count` clients, drawn one after the other in proportion to the weights of those left."""
    chances: Chances = {}
    for order in permutations(sorted(weights), min(count, len(weights))):
        left, chance = math.fsum(weights.values()), 1.0
        for client in order:
            chance *= weights[client] / left if left > 0 else 0.0
            left -= weights[client]
        chances[frozenset(order)] = chances.get(frozenset(order), 0.0) + chance
    return chances


def then_uniformly(first: Chances, clients: Iterable[int], size: int) -> Chances:
    """Fill each set up to `size` with clients drawn uniformly from all others."""
    chances: Chances = {}
    for members, chance in first.items():
        others = [client for client in clients if client not in members]
        for more, share in drawn_one_by_one(dict.fromkeys(others, 1.0), size - len(members)).items():
            chances[members | more] = chances.get(members | more, 0.0) + chance * share
    return chances


def frozen(selector: Any, available: Iterable[int]) -> Callable[[], list[int]]:
    """A function that chooses in the state as it is now, with new draws each time."""
    state, here = selector.state_dict(), np.array(list(available))

    def choose() -> list[int]:
        selector.load_state_dict(state | {"generator": selector.state_dict()["generator"]})
        return list(selector.select(here).tolist())

    return choose


def frequencies(choose: Callable[[], Sequence[int]], times: int) -> Counter[frozenset[int]]:
    """How often each set is chosen."""
    return Counter(frozenset(int(client) for client in choose()) for _ in range(times))


def p_value(counts: Counter[frozenset[int]], chances: Chances) -> float:
    """Chi-square of counts against chances; 0 where a set came that has no chance."""
    total = sum(counts.values())
    if any(chances.get(members, 0.0) <= 0.0 for members in counts):
        return 0.0
    common = {members: chance for members, chance in chances.items() if chance * total >= 5}
    rest = 1.0 - math.fsum(common.values())
    seen = [counts[members] for members in common]
    expected = [chance * total for chance in common.values()]
    if rest * total >= 1:
        seen, expected = [*seen, total - sum(seen)], [*expected, rest * total]
    scale = sum(seen) / sum(expected)
    if len(seen) == 1:
        return 1.0
    return float(chisquare(seen, [each * scale for each in expected]).pvalue)
