"""BSFL against rounds worked by hand and against every subset, (13) of Ben Ami et al. (2023)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.selectors import BSFL
from tests.selectors.oracles import BSFLOracle, World, follow
from tests.selectors.rounds import play, report

ROUNDS = 130


@pytest.mark.parametrize(("second_speed", "expected"), [(0.78, {0, 2}), (0.61, {2, 3})])
def test_rounds_by_hand(second_speed: float, expected: set[int]) -> None:
    """Four clients, m = 2, min_latency .1 s, alpha = 1, beta = 1; rounds 1-3 are forced by availability.

    Round 1, {0, 1}: speeds .1/.125 = .8 and .1/.2 = .5. Round 2, {2, 3}: client 2 takes .125 s (.8), client 3 fails
    and its row holds max_latency = 1 s (.1). Round 3, {0, 1} again: speed of 0 is a, of 1 is .5. So n = (2, 2, 1, 1)
    and the means are ((.8 + a)/2, .5, .8, .1).
    Round 4: (m+1) ln(t-1) = 3 ln 3 = 3.2958; bonus sqrt(3.2958/2) = 1.2837 and sqrt(3.2958/1) = 1.8154.
        ucb = ((.8 + a)/2 + 1.2837, 1.7837, 2.6154, 1.9154)
        g = m/K - n/t = .5 - (2, 2, 1, 1)/4 = (0, 0, .25, .25); alpha/m = 1/2
    a = .78: ucb_0 = 2.0737.  {0, 2}: 2.0737 + .125 = 2.1987;  {2, 3}: 1.9154 + .25 = 2.1654   -> {0, 2}
        (ln t in place of ln(t-1), or n/(t-1) in g, would take {2, 3})
    a = .61: ucb_0 = 1.9887.  {0, 2}: 1.9887 + .125 = 2.1137;  {2, 3}: 2.1654                  -> {2, 3}
        (m in place of m+1 under the root would take {0, 2}; a failure that is no play, {2, 3} both times)
    """
    for seed in range(20):
        selector = BSFL(clients_per_round=2, min_latency=0.1, alpha=1.0, beta=1, seed=seed)
        selector.inform(np.arange(4))
        assert play(selector, [0, 1], {0: 0.125, 1: 0.2}) == [0, 1]
        assert play(selector, [2, 3], {2: 0.125, 3: 1.0}, failed=(3,)) == [2, 3]
        assert play(selector, [0, 1], {0: 0.1 / second_speed, 1: 0.2}) == [0, 1]
        assert set(selector.select(np.arange(4)).tolist()) == expected


def test_data_weights_are_summed_over_the_registered() -> None:
    """Three of six clients of weights (1, 2, 3, 4, 5, 85) are registered, m = 1; one of them is forgotten later.

    Targets (4) over 0, 1, 3: (1, 2, 4)/7. Round 1, nobody played: g = targets. Over all given weights they would be
    (1, 2, 4)/100. Then 3 is forgotten: (1, 2)/3; with its row's weight still counted (1, 2)/4 at least.
    """
    selector = BSFL(clients_per_round=1, min_latency=0.1, data_weights=[1.0, 2.0, 3.0, 4.0, 5.0, 85.0])
    selector.inform(np.array([0, 1, 3]))
    selector.select(np.array([0]))
    assert selector._generalization()[[0, 1, 3]] == pytest.approx(np.array([1, 2, 4]) / 7)
    selector.forget(np.array([3]))
    assert selector._generalization()[[0, 1]] == pytest.approx(np.array([1, 2]) / 3)


def test_data_weights_may_become_known_with_the_fleet() -> None:
    """A mapping may be empty at first; who is admitted must have a weight that can be one; all zero: no targets."""
    weights: dict[int, float] = {}
    selector = BSFL(clients_per_round=1, min_latency=0.1, data_weights=weights)
    weights |= {0: 0.0, 1: -1.0, 2: 3.0}
    assert selector.select(np.array([0])).tolist() == [0]
    assert selector._generalization()[0] == 0.0
    for missing, said in (1, "each value of data_weights must be .* at least 0, got -1"), (5, "data_weights covers 3"):
        with pytest.raises(ValueError, match=said):
            selector.inform(np.array([missing]))
    selector.inform(np.array([2]))
    assert selector._generalization()[[0, 2]] == pytest.approx([0.0, 1.0])


def test_a_report_before_the_first_choice() -> None:
    """Warm starts are rounds before round 1, where (12) has ln(t - 1) = ln 0: it counts as ln 1 = 0.

    Speeds .5 and .25 are known of clients 0 and 1; client 2, never observed, is first, and 0 beats 1 without a bonus.
    """
    for available, expected in ([0, 1, 2], [2]), ([0, 1], [0]):
        selector = BSFL(clients_per_round=1, min_latency=0.1, alpha=0.0, seed=0)
        selector.inform(np.arange(3))
        selector.observe(report([0, 1], {0: 0.2, 1: 0.4}))
        assert selector._bounds().tolist() == [0.5, 0.25, math.inf]
        assert selector.select(np.array(available)).tolist() == expected


@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "iid"])
@pytest.mark.parametrize("inform", [True, False], ids=["informed", "seen"])
@pytest.mark.parametrize("beta", [1, 2])
@pytest.mark.parametrize(("num_clients", "m", "seed"), [(5, 2, 0), (6, 3, 1), (7, 3, 2)])
def test_every_choice_maximizes(num_clients: int, m: int, seed: int, beta: int, inform: bool, weighted: bool) -> None:
    """Random availability, failures, unreported rounds and two newcomers, against all subsets."""
    alpha = (0.0, 0.5, 10.0)[(seed + beta + weighted) % 3]
    weights = np.random.default_rng(seed).integers(1, 9, num_clients).astype(float).tolist() if weighted else None
    settings = {"min_latency": 0.05, "alpha": alpha, "beta": beta, "data_weights": weights}
    selector, oracle = BSFL(clients_per_round=m, **settings, seed=seed), BSFLOracle(m, 1.0, **settings)
    if inform or weighted:
        selector.inform(np.arange(num_clients))
        oracle.inform(range(num_clients))
    newcomers = {} if weighted and not inform else {0: 40, num_clients - 1: 90}
    world = World(num_clients=num_clients, newcomers=newcomers, grid=(0.04, 0.1, 0.2, 1.0) if inform else ())
    assert follow(selector, oracle, world=world, rounds=ROUNDS, seed=2000 + seed) == []
    assert oracle.decided > ROUNDS / 2
