"""GPFL against rounds worked by hand and against a plain recount of the whole history, (5)-(8) of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import RoundReport, create
from tests.selectors import rounds
from tests.selectors.oracle_gpfl import Crowd, GPFLOracle
from tests.selectors.oracles import follow

ROUNDS = 120
WORLD = Crowd(num_clients=9, newcomers={0: 20, 6: 50}, unreported=0.0)


def build(**parameters: Any) -> Any:
    return create("gpfl", **{"clients_per_round": 3, "total_rounds": ROUNDS, "seed": 0} | parameters)


def play(selector: Any, available: Sequence[int], projections: dict[int, float], accuracy: float, loss: float) -> Any:
    """Choose and report projections, NaN for a failure; returns the choice."""
    told = {k: projection for k, projection in projections.items() if not math.isnan(projection)}
    columns = {"projection": told, "global_accuracy": accuracy, "global_loss": loss}
    return set(rounds.play(selector, available, dict.fromkeys(told, 1.0), late=5.0, **columns))


def test_rounds_by_hand() -> None:
    """Three clients, one a round, T = 10, rho = 1, corrected sign. Scores: mean + t/10 sqrt(2 ln n/n_k).

    Round 1: everyone; c = (0, ln 2, ln 3), so ctilde = (1/6, 2/6, 3/6); A = .1, F = 2.3, no factor.
    Round 2: mean (.1667, .3333, .5), bonus .2 sqrt(2 ln 3) = .2965 for all                                      -> 2
        c_2 = 0: ctilde = (.25, .5, .25); A as before, F falls to 1.3: mu_2 = .25 e^1 = .6796; n = (1, 1, 2)
    Round 3: mean (.2083, .4167, .5898) + (.4995, .4995, .3532) = (.7079, .9162, .9430)                          -> 2
        It fails: C kept, mu = (.25, .5, .25) without a factor; n = (1, 1, 3)
    Round 4: mean (.2222, .4444, .4765) + (.7176, .7176, .4143) = (.9399, 1.1621, .8909)                         -> 1
        c_1 = ln 6: ctilde = (.125, .75, .125); A rises to .3: mu_1 = .75 * 2 e^.2 = 1.8321; n = (1, 2, 3)
    Round 5: mean (.1979, .7914, .3886) + (.9465, .6693, .5465) = (1.1444, 1.4606, .9351)                        -> 1
        c_1 = ln 2: ctilde = (.25, .5, .25); A falls to .25: still amplified, mu_1 = .5 * 2 e^-.05 = .9512
    Round 6, 1 away: mean (.2083, ., .3609) + (1.1837, ., .6834) = (1.3920, ., 1.0443)                           -> 0
    """
    for seed in range(10):
        selector = build(clients_per_round=1, total_rounds=10, seed=seed)
        everyone = [0, 1, 2]
        assert play(selector, everyone, {0: 0.0, 1: math.log(2), 2: math.log(3)}, 0.1, 2.3) == {0, 1, 2}
        assert play(selector, everyone, {2: 0.0}, 0.1, 1.3) == {2}
        assert play(selector, everyone, {2: math.nan}, 0.1, 1.3) == {2}
        assert play(selector, everyone, {1: math.log(6)}, 0.3, 1.2) == {1}
        assert play(selector, everyone, {1: math.log(2)}, 0.25, 1.3) == {1}
        assert selector.select(np.array([0, 2])).tolist() == [0]


@pytest.mark.parametrize(("loss_sign", "expected"), [("corrected", {2}), ("paper", {1})])
def test_loss_sign_by_hand(loss_sign: str, expected: set[int]) -> None:
    """Round 3 of the rounds above: as printed the fall by 1 makes mu_2 = .25 e^-1 = .0920, mean (.5 + .0920)/2 = .2960.

    Scores (.7079, .9162, .2960 + .3532 = .6492)                                                                 -> 1
    """
    selector = build(clients_per_round=1, total_rounds=10, loss_sign=loss_sign)
    everyone = [0, 1, 2]
    play(selector, everyone, {0: 0.0, 1: math.log(2), 2: math.log(3)}, 0.1, 2.3)
    assert play(selector, everyone, {2: 0.0}, 0.1, 1.3) == {2}
    assert play(selector, everyone, {1: 0.0, 2: 0.0}, 0.1, 1.3) == expected


@pytest.mark.parametrize(("sort_by", "expected"), [("score", {2}), ("projection", {1})])
def test_algorithm_1_sorts_by_the_latest_projection(sort_by: str, expected: set[int]) -> None:
    """Round 3 of the rounds above: C is then (0, ln 2, 0)."""
    selector = build(clients_per_round=1, total_rounds=10, sort_by=sort_by)
    play(selector, [0, 1, 2], {0: 0.0, 1: math.log(2), 2: math.log(3)}, 0.1, 2.3)
    assert play(selector, [0, 1, 2], {2: 0.0}, 0.1, 1.3) == {2}
    assert set(selector.select(np.arange(3))) == expected


@pytest.mark.parametrize(("change", "exponent"), [(100.0, 50), (49.0, 49), (51.0, 50), (-3.0, -3)])
def test_exponents_are_clipped_at_50(change: float, exponent: float) -> None:
    """One client: its softmax is 1. The loss falls by 100, 49, 51, or rises by 3: mu = 1, then e^50, e^49, e^50, e^-3.

    With the printed sign it has to rise for that. The same for A (out of its range, as no accuracy changes so much):
    2 e^50, ...
    """
    ways = ("corrected", 0.0, 200.0 - change, 1.0), ("paper", 0.0, 200.0 + change, 1.0), ("paper", change, 200.0, 2.0)
    for loss_sign, accuracy, loss, factor in ways:
        selector = build(clients_per_round=1, loss_sign=loss_sign)
        play(selector, [0], {0: 0.3}, 0.0, 200.0)
        play(selector, [0], {0: 0.3}, accuracy, loss)
        [total] = selector.state_dict()["reward_sum"]
        assert total == pytest.approx(1.0 + factor * math.exp(exponent), rel=1e-12)


def test_rewards_stand_in_a_round_without_an_observation() -> None:
    """One a round. Round 1: c = (2, 0), ctilde = (.8808, .1192), which are the rewards.

    Round 2, client 1 alone: c_1 = 1: ctilde = (.7311, .2689), A rises by .8: mu_1 = .2689 * 2 e^.8 = 1.1971.
    Round 3 is chosen and never observed, in round 4 nobody is there: ctilde stands, twice, without a factor.
    Sums in round 5: (.8808 + 3 * .7311, .1192 + 1.1971 + 2 * .2689) = (3.0740, 1.8541).
    """
    selector = build(clients_per_round=1, total_rounds=1000)
    assert play(selector, [0, 1], {0: 2.0, 1: 0.0}, 0.1, 2.3) == {0, 1}
    assert play(selector, [1], {1: 1.0}, 0.9, 2.3) == {1}
    for available in ([0, 1], [], [0, 1]):
        selector.select(np.array(available, dtype=np.int64))
    assert selector.state_dict()["reward_sum"] == pytest.approx([3.0740, 1.8541], abs=1e-4)


def test_large_projections_do_not_overflow() -> None:
    """A softmax of (5000, 4999, -5000) is (.7311, .2689, 0): the largest goes next, then still the largest."""
    selector = build(clients_per_round=1)
    assert play(selector, [0, 1, 2], {0: 5000.0, 1: 4999.0, 2: -5000.0}, 0.1, 2.3) == {0, 1, 2}
    assert play(selector, [0, 1, 2], {0: 5000.0}, 0.1, 2.3) == {0}
    assert play(selector, [0, 1, 2], {0: 5000.0}, 0.1, 2.3) == {0}


def test_a_newcomer_goes_first_and_has_earned_nothing_before() -> None:
    """One a round, T = 1,000, so that bonuses hardly count. Round 1: 0 and 1, c = (2, 0), ctilde = (.8808, .1192).

    Round 2: newcomer 2 has an infinite score                                                                    -> 2
        c_2 = 3: ctilde = (.2595, .0351, .7054); A and F as they were: factor e^0 = 1.
    Round 3: mean ((.8808 + .2595)/2 = .5701, .0771, (0 + .7054)/2 = .3527); averaged over its own rounds alone, client
        2 would have .7054                                                                                       -> 0
    """
    selector = build(clients_per_round=1, total_rounds=1000)
    assert play(selector, [0, 1], {0: 2.0, 1: 0.0}, 0.1, 2.3) == {0, 1}
    assert play(selector, [0, 1, 2], {2: 3.0}, 0.1, 2.3) == {2}
    assert selector.select(np.arange(3)).tolist() == [0]


@pytest.mark.parametrize("loss_sign", ["corrected", "paper"])
@pytest.mark.parametrize(
    ("own", "spread", "seed"),
    [
        ({}, 1.0, 0),
        ({}, 1.0, 3),
        ({"rho": 0.0}, 0.1, 0),
        ({"rho": 0.3}, 3.0, 1),
        ({"rho": 5.0}, 20.0, 2),
        ({"exploration": 0.0}, 3.0, 1),
        ({"exploration": 0.2}, 3.0, 1),
        ({"exploration": 2.0, "rho": 7.0}, 3.0, 1),
    ],
)
def test_every_choice_has_the_largest_scores(own: dict[str, float], spread: float, seed: int, loss_sign: str) -> None:
    """Random availability, failures, newcomers and returning strangers; accuracy changes in half of the rounds.

    Softmaxes from flat to sharp; with a fixed `exploration` (Fig. 7a) alpha of (6) is the same whatever rho.
    """
    oracle = GPFLOracle(3, 200, loss_sign=loss_sign, spread=spread, **own)
    selector = build(loss_sign=loss_sign, total_rounds=200, seed=seed, **own)
    assert follow(selector, oracle, RoundReport, world=WORLD, rounds=100, seed=seed, forget_every=30) == []
    assert oracle.decided > 100 / 3


@pytest.mark.parametrize("seed", range(2))
def test_unobserved_rounds(seed: int) -> None:
    """Nobody available, or no report: the rewards that stand are followed throughout."""
    oracle, world = GPFLOracle(3, ROUNDS), Crowd(num_clients=9, newcomers={0: 20, 6: 50}, unreported=0.25)
    assert follow(build(seed=seed), oracle, RoundReport, world=world, rounds=ROUNDS, seed=seed) == []
    assert oracle.decided > ROUNDS / 2
