"""The linear program (23) of Xia et al.: cases solved by hand, and a proof of optimality that needs no solver."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.theory import fair_optimum, xia_genie

MEANS, FAIRNESS = np.array([0.4, 0.7, 0.9]), np.array([0.6, 0.5, 0.4])  # Xia's K = 3, m = 2; 3, 1.5, .5 s of 5 s


def independent(availability: np.ndarray) -> dict[tuple[int, ...], float]:
    """The probability of each of the 2^K sets of available clients."""
    clients = range(len(availability))
    sets = [e for size in range(len(availability) + 1) for e in combinations(clients, size)]
    return {e: float(np.prod([availability[k] if k in e else 1 - availability[k] for k in clients])) for e in sets}


def shares(policy: dict, chances: dict, num_clients: int) -> np.ndarray:
    """E[b_k] of (21)."""
    served = np.zeros(num_clients)
    for e, choice in policy.items():
        for chosen, q in choice.items():
            served[list(chosen)] += chances[e] * q
    return served


def dual(multipliers: np.ndarray, mean: np.ndarray, chances: dict, fairness: np.ndarray, m: int) -> tuple:
    """The Lagrangian of (23), solved set by set, and its subgradient: never below r* where the multipliers are >= 0."""
    value, slope = -float(multipliers @ fairness), -fairness.copy()
    for e, chance in chances.items():
        if e:
            best = max(combinations(e, min(m, len(e))), key=lambda s: mean[list(s)].min() + multipliers[list(s)].sum())
            value += chance * (mean[list(best)].min() + multipliers[list(best)].sum())
            slope[list(best)] += chance
    return value, slope


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Means, availability, a fairness that some random policy meets with 3 % to spare, and m."""
    generator = np.random.default_rng(seed)
    num_clients = int(generator.integers(3, 6))
    m = int(generator.integers(1, num_clients))
    availability = generator.uniform(0.3, 1.0, num_clients)
    chances = independent(availability)
    policy = {}
    for e in chances:
        sets = list(combinations(e, min(m, len(e))))
        policy[e] = dict(zip(sets, generator.dirichlet(np.full(len(sets), 0.4)), strict=True))
    return generator.random(num_clients), availability, 0.97 * shares(policy, chances, num_clients), m


def test_available_nine_times_in_ten_by_hand() -> None:
    """m = 2 of 3: everyone .729, each pair .081, each alone .009, nobody .001 of the rounds.

    The slow client is served .171 without a choice (two pairs and alone), and needs .429 of the full rounds more:
    .429 x .4 + .3 x .7 = .3816. Pairs: .081 (.4 + .4 + .7) = .1215. Alone: .009 (.4 + .7 + .9) = .018. r* = .5211.
    """
    best_reward, policy = fair_optimum(MEANS, 0.9, FAIRNESS, 2)
    assert best_reward == pytest.approx(0.5211, abs=1e-9)
    assert len(policy) == 8
    assert policy[()] == {(): 1.0}
    assert policy[0, 2] == {(0, 2): 1.0}
    assert 0.729 * policy[0, 1, 2][1, 2] == pytest.approx(0.3, abs=1e-9)


def test_the_slow_take_part_together() -> None:
    """Two slow and two fast clients, m = 2, a fairness of .5 for the slow: both at once, every other round."""
    best_reward, policy = fair_optimum([0.0, 0.0, 1.0, 1.0], 1.0, [0.5, 0.5, 0.0, 0.0], 2)
    assert best_reward == pytest.approx(0.5, abs=1e-9)
    assert policy[0, 1, 2, 3] == pytest.approx({(0, 1): 0.5, (2, 3): 0.5}, abs=1e-9)


@pytest.mark.parametrize("availability", [1.0, np.array([0.5, 0.9, 0.7, 1.0])], ids=["always", "random"])
@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_without_fairness_each_available_set_has_its_own_genie(m: int, availability: Any) -> None:
    mean = np.random.default_rng(m).random(4)
    chances = independent(np.broadcast_to(availability, 4))
    best_reward, policy = fair_optimum(mean, availability, 0.0, m)
    genies = {e: xia_genie(mean[list(e)], m) for e, p in chances.items() if e and p}
    assert best_reward == pytest.approx(sum(chances[e] * value for e, (_, value) in genies.items()), abs=1e-9)
    for e, (chosen, _) in genies.items():
        assert policy[e] == pytest.approx({tuple(np.array(e)[chosen].tolist()): 1.0})


@pytest.mark.parametrize("seed", range(12))
def test_policy_is_feasible_and_nothing_is_better(seed: int) -> None:
    """The policy earns r* within the constraints, and Lagrange multipliers prove that no policy earns more.

    They are found by subgradient steps, so that the proof does not lean on the solver.
    """
    mean, availability, fairness, m = random_case(seed)
    chances = independent(availability)
    best_reward, policy = fair_optimum(mean, availability, fairness, m)
    assert policy.keys() == {e for e, p in chances.items() if p > 0}
    assert all(sum(choice.values()) == pytest.approx(1.0, abs=1e-7) for choice in policy.values())
    assert all(set(s) <= set(e) and len(s) == min(m, len(e)) for e, choice in policy.items() for s in choice)
    assert (shares(policy, chances, mean.size) >= fairness - 1e-7).all()
    earned = sum(chances[e] * q * mean[list(s)].min() for e, ch in policy.items() for s, q in ch.items() if s)
    assert earned == pytest.approx(best_reward, abs=1e-9)

    multipliers, lowest = np.zeros(mean.size), np.inf
    for _ in range(4000):
        value, slope = dual(multipliers, mean, chances, fairness, m)
        assert value >= best_reward - 1e-7
        lowest = min(lowest, value)
        if lowest < best_reward + 1e-3 or not slope.any():
            break
        multipliers = np.maximum(multipliers - (value - best_reward) / (slope @ slope) * slope, 0.0)
    assert lowest < best_reward + 1e-3


@pytest.mark.parametrize(
    ("availability", "fairness", "named"),
    [
        (1.0, [0.9, 0.9, 0.9], "fairness cannot be met with m = 2"), (0.9, [0.95, 0.0, 0.0], "fairness cannot be met"),
        (1.5, 0.1, "^availability"), ([0.5, 0.5], 0.1, "^availability"), (1.0, [0.1, 0.1], "^fairness"),
        (1.0, -0.1, "^fairness"),
    ],
)  # fmt: skip
def test_refuses_what_cannot_be_met_or_is_out_of_range(availability: Any, fairness: Any, named: str) -> None:
    with pytest.raises(ParameterError, match=named):
        fair_optimum(MEANS, availability, fairness, 2)


def test_nobody_is_ever_available() -> None:
    assert fair_optimum(MEANS, 0.0, 0.0, 2) == (0.0, {(): {(): 1.0}})


@pytest.mark.parametrize(("num_clients", "availability", "m"), [(12, 0.9, 5), (30, 1.0, 5), (40, 0.5, 1)])
def test_refuses_a_program_that_is_too_large_before_building_it(num_clients: int, availability: float, m: int) -> None:
    with pytest.raises(ParameterError, match=r"at most 20000 variables, got \d+"):
        fair_optimum(np.ones(num_clients), availability, 0.0, m)
