"""A plain reading of TiFL's Algorithm 2: the chances of each round's tier and of its clients.

Nothing is drawn here: for a state of affairs (profiles, accuracies, credits) it says what may be drawn how often.

References:
    Chai et al. (2020), TiFL, section 4, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from tests.selectors.oracle_draws import Chances, drawn_one_by_one


def tiers_of(profiles: Mapping[int, float], count: int) -> list[list[int]]:
    """Clients by latency in parts of equal number, the first ones larger by one where it does not divide."""
    order = sorted(profiles, key=lambda client: (profiles[client], client))
    size, larger = divmod(len(order), count)
    tiers, start = [], 0
    for number in range(count):
        end = start + size + (number < larger)
        tiers.append(order[start:end])
        start = end
    return tiers


def chances_by_accuracy(tiers: Sequence[Sequence[int]], accuracy: Mapping[int, Fraction]) -> list[Fraction]:
    """In proportion to 1 - A_t, A_t the mean over the tier's clients."""
    wrong = [1 - sum((accuracy[client] for client in tier), Fraction(0)) / len(tier) for tier in tiers]
    return [each / sum(wrong) for each in wrong]


def cohorts(tiers: Sequence[Sequence[int]], chances: Sequence[float], credits: Sequence[int] | None, m: int) -> Chances:
    """Chance of each cohort: a tier with credits, then m of its clients uniformly, filled up with the others."""
    allowed = [chance if credits is None or credits[t] > 0 else 0.0 for t, chance in enumerate(chances)]
    everybody = [client for tier in tiers for client in tier]
    found: Chances = {}
    for tier, chance in zip(tiers, allowed, strict=True):
        for members, share in drawn_one_by_one(dict.fromkeys(tier, 1.0), min(m, len(tier))).items():
            others = dict.fromkeys((client for client in everybody if client not in members), 1.0)
            for more, part in drawn_one_by_one(others, m - len(members)).items():
                cohort = members | more
                found[cohort] = found.get(cohort, 0.0) + chance / sum(allowed) * share * part
    return found
