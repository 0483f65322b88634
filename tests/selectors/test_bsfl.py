"""BSFL against rounds worked by hand and against every subset, (13) of Ben Ami et al. (2023)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsel_flwr.selectors import BSFL, RoundReport, create
from fedsel_flwr.selectors.bsfl import maximize
from tests.selectors.oracles import BSFLOracle, World, enumerate_best, follow, objective

ROUNDS = 130
UCB_GRID = [0.0, 0.25, 0.5, 1.0, 1.75, math.inf]
G_GRID = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]


def play(selector: BSFL, available: list[int], latencies: dict[int, float], failed: tuple[int, ...] = ()) -> set[int]:
    """Choose, then report those latencies of the chosen clients; returns the choice."""
    chosen = selector.select(np.array(available, dtype=np.int64)).tolist()
    assert len(chosen) == len(set(chosen))
    completed = np.array([client not in failed for client in chosen], dtype=bool)
    latency = np.array([latencies[client] for client in chosen], dtype=float)
    selector.observe(RoundReport(clients=np.array(chosen, dtype=np.int64), completed=completed, latency=latency))
    return set(chosen)


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
        assert play(selector, [0, 1], {0: 0.125, 1: 0.2}) == {0, 1}
        assert play(selector, [2, 3], {2: 0.125, 3: 1.0}, failed=(3,)) == {2, 3}
        assert play(selector, [0, 1], {0: 0.1 / second_speed, 1: 0.2}) == {0, 1}
        assert set(selector.select(np.arange(4)).tolist()) == expected


def test_data_weights_by_hand() -> None:
    """Three clients, m = 1, alpha = 10, weights (1, 2, 3): targets m d/sum(d) = (1/6, 1/3, 1/2), (4).

    Rounds 1-3 play 0, 1, 2 (availability), always at speed .5, as in every later round.
    Round 4: equal ucb; g = targets - (1, 1, 1)/4 = (-.0833, .0833, .25)                               -> 2
    Round 5: n = (1, 1, 2); ucb = .5 + sqrt(2 ln 4/n) = (2.1651, 2.1651, 1.6774);
        g = targets - n/5 = (-.0333, .1333, .1); ucb + 10 g = (1.8318, 3.4984, 2.6774)                  -> 1
    Round 6: n = (1, 2, 2); ucb = .5 + sqrt(2 ln 5/n) = (2.2941, 1.7686, 1.7686);
        g = targets - n/6 = (0, 0, .1667); ucb + 10 g = (2.2941, 1.7686, 3.4353)                        -> 2
    """
    for scale in (1.0, 40.0):  # any positive scale
        selector = BSFL(
            clients_per_round=1, min_latency=0.1, alpha=10.0, data_weights=scale * np.array([1.0, 2.0, 3.0])
        )
        selector.inform(np.arange(3))
        latencies = dict.fromkeys(range(3), 0.2)
        for client in range(3):
            assert play(selector, [client], latencies) == {client}
        assert [play(selector, [2, 0, 1], latencies) for _ in range(3)] == [{2}, {1}, {2}]


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


def test_a_newcomer_lowers_the_targets_of_the_others() -> None:
    """Weights (1, 1, 6), m = 1, alpha = 10; rounds 1, 2 play clients 0 and 1 at speed .5, round 3 plays 0 again.

    Round 4 of 0 and 1: n = (2, 1), ucb = .5 + sqrt(2 ln 3/n) = (1.5482, 1.9823).
        Only 0 and 1 registered: targets (.5, .5), g = (0, .25): 1.5482 against 4.4823                         -> 1
    With client 2 registered targets are (.125, .125, .75), g = (-.375, -.125); beta 1                         -> 1
    The choices agree; the values tell the readings apart: g_1 = .25 (all given weights: -.125) and -.125.
    """
    for informed, expected in ([0, 1], [0.0, 0.25]), ([0, 1, 2], [-0.375, -0.125]):
        selector = BSFL(clients_per_round=1, min_latency=0.1, alpha=10.0, data_weights=[1.0, 1.0, 6.0])
        selector.inform(np.array(informed))
        for client in (0, 1, 0):
            assert play(selector, [client], {client: 0.2}) == {client}
        assert selector.select(np.arange(2)).tolist() == [1]
        assert selector._generalization()[:2] == pytest.approx(expected)


def test_data_weights_decide_the_opening() -> None:
    """Weights 1..6, m = 2, nobody observed: all bounds are infinite, so g decides: {4, 5} for every seed.

    Without weights g ties too: the generator decides.
    """
    weights = np.arange(1.0, 7.0)
    opening = [BSFL(clients_per_round=2, min_latency=0.1, data_weights=weights, seed=seed) for seed in range(200)]
    assert {tuple(selector.select(np.arange(6)).tolist()) for selector in opening} == {(4, 5)}
    drawn = [BSFL(clients_per_round=2, min_latency=0.1, seed=seed) for seed in range(200)]
    assert len({tuple(selector.select(np.arange(6)).tolist()) for selector in drawn}) == 15


def test_data_weights_may_become_known_with_the_fleet() -> None:
    """A mapping may be empty at first; who is admitted must have a weight that can be one; all zero: no targets."""
    weights: dict[int, float] = {}
    selector = BSFL(clients_per_round=1, min_latency=0.1, data_weights=weights)
    weights |= {0: 0.0, 1: -1.0, 2: 3.0}
    assert selector.select(np.array([0])).tolist() == [0]
    assert selector._generalization()[0] == 0.0
    for missing, said in (1, "every one of data_weights must be .* at least 0, got -1"), (5, "data_weights covers 3"):
        with pytest.raises(ValueError, match=said):
            selector.inform(np.array([missing]))
    selector.inform(np.array([2]))
    assert selector._generalization()[[0, 2]] == pytest.approx([0.0, 1.0])


def test_registered_clients_by_hand() -> None:
    """K counts clients informed or seen, not indices: only 2 and 4 ever appear, so the target is 1/2, not 1/5.

    m = 1, alpha = 1, beta = 2. Rounds 1, 2 play client 4 (speed .7 both), round 3 plays client 2 (speed .19).
    Round 4: n = (2, 1); ucb_4 = .7 + sqrt(2 ln 3/2) = 1.7481, ucb_2 = .19 + sqrt(2 ln 3) = 1.6723.
        K = 2: g_4 = (1/2 - 2/4)^2 = 0, g_2 = (1/2 - 1/4)^2 = .0625: 1.7481 against 1.7348              -> 4
        K = 5 (informed up front): g_4 = -(1/5 - 2/4)^2 = -.09, g_2 = -(1/5 - 1/4)^2 = -.0025:
            1.6581 against 1.6698                                                                     -> 2
    """
    for informed, expected in ([], {4}), ([0, 1, 2, 3, 4], {2}):
        selector = BSFL(clients_per_round=1, min_latency=0.1, alpha=1.0, beta=2)
        selector.inform(np.array(informed, dtype=np.int64))
        for client, speed in (4, 0.7), (4, 0.7), (2, 0.19):
            assert play(selector, [client], {client: 0.1 / speed}) == {client}
        assert set(selector.select(np.array([2, 4])).tolist()) == expected


def test_unreported_round_by_hand() -> None:
    """A choice that is never observed was never made, but its round counts.

    m = 1, alpha = 0; clients 0, 1, 0 are played in rounds 1-3 at speeds .9, .4, .9: n = (2, 1). Nothing after that is
    observed. ucb_0 = .9 + sqrt(2 ln(t-1)/2), ucb_1 = .4 + sqrt(2 ln(t-1)):
        t = 4: 1.9481, 1.8823 -> 0     t = 5: 2.0774, 2.0651 -> 0     t = 6: 2.1686, 2.1941 -> 1
        t = 7: nobody is available     t = 8: 2.2950, 2.3728 -> 1
    Were round 4's choice a play, round 5 would take 1; were the rounds not counted, it would be 0 throughout.
    """
    selector = BSFL(clients_per_round=1, min_latency=0.1, alpha=0.0)
    for client, speed in (0, 0.9), (1, 0.4), (0, 0.9):
        assert play(selector, [client], {client: 0.1 / speed}) == {client}
    choices = [
        selector.select(np.array(available, dtype=np.int64)).tolist() for available in ([0, 1],) * 3 + ([], [0, 1])
    ]
    assert choices == [[0], [0], [1], [], [1]]


def test_a_report_before_the_first_choice() -> None:
    """Warm starts are rounds before round 1, where (12) has ln(t - 1) = ln 0: it counts as ln 1 = 0.

    Speeds .5 and .25 are known of clients 0 and 1; client 2, never observed, is first, and 0 beats 1 without a bonus.
    """
    for available, expected in ([0, 1, 2], [2]), ([0, 1], [0]):
        selector = BSFL(clients_per_round=1, min_latency=0.1, alpha=0.0, seed=0)
        selector.inform(np.arange(3))
        selector.observe(RoundReport(clients=[0, 1], completed=[True, True], latency=[0.2, 0.4]))
        assert selector._bounds().tolist() == [0.5, 0.25, math.inf]
        assert selector.select(np.array(available)).tolist() == expected


@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "iid"])
@pytest.mark.parametrize("inform", [True, False], ids=["informed", "seen"])
@pytest.mark.parametrize("beta", [1, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 10.0])
@pytest.mark.parametrize(("num_clients", "m", "seed"), [(5, 2, 0), (6, 3, 1), (7, 3, 2)])
def test_every_choice_maximizes(
    num_clients: int, m: int, seed: int, alpha: float, beta: int, inform: bool, weighted: bool
) -> None:
    """Random availability, failures, unreported rounds and two newcomers, against all subsets."""
    weights = np.random.default_rng(seed).integers(1, 9, num_clients).astype(float) if weighted else None
    settings = {"clients_per_round": m, "min_latency": 0.05, "alpha": alpha, "beta": beta}
    selector = BSFL(**settings, data_weights=weights, seed=seed)
    oracle = BSFLOracle(
        m, 1.0, min_latency=0.05, alpha=alpha, beta=beta, data_weights=None if weights is None else weights.tolist()
    )
    newcomers = {0: 40, num_clients - 1: 90}
    if weighted and not inform:
        newcomers = {}
    if inform or weighted:
        selector.inform(np.arange(num_clients))
        oracle.inform(range(num_clients))
    world = World(num_clients=num_clients, newcomers=newcomers, grid=(0.04, 0.1, 0.2, 1.0) if inform else ())
    assert follow(selector, oracle, RoundReport, world=world, rounds=ROUNDS, seed=2000 + seed) == []
    assert oracle.decided > ROUNDS / 2


@pytest.mark.parametrize("seed", range(3))
def test_every_choice_maximizes_when_all_are_there(seed: int) -> None:
    """The regret experiment's conditions at small size: always available, nobody fails, nobody informed."""
    selector = create("bsfl", clients_per_round=3, min_latency=0.05, alpha=10.0, seed=seed)
    oracle = BSFLOracle(3, 1.0, min_latency=0.05, alpha=10.0, beta=1)
    world = World(num_clients=7, presence=1, failure=0, unreported=0)
    assert follow(selector, oracle, RoundReport, world=world, rounds=ROUNDS, seed=seed) == []
    assert oracle.decided > ROUNDS / 2


def test_ties_are_random() -> None:
    """Never-observed clients tie: each of 6 is in round 1's pair in a third of 300 seeds (100 +- 8.2)."""
    counts = np.zeros(6)
    for seed in range(300):
        counts[BSFL(clients_per_round=2, min_latency=0.1, seed=seed).select(np.arange(6))] += 1
    assert counts.min() > 65
    assert counts.max() < 135


def assert_maximizes(ucb: np.ndarray, generalization: np.ndarray, m: int, alpha: float) -> None:
    """Assert that `maximize` returns m different indices of the largest value, and leaves its input alone."""
    ucb_before, generalization_before = ucb.copy(), generalization.copy()
    chosen = np.asarray(maximize(ucb, generalization, m, alpha))
    np.testing.assert_array_equal(ucb, ucb_before)
    np.testing.assert_array_equal(generalization, generalization_before)
    assert np.issubdtype(chosen.dtype, np.integer)
    assert len(chosen) == m
    assert len(set(chosen.tolist())) == m
    assert set(chosen.tolist()) <= set(range(len(ucb)))
    mine = objective(chosen, ucb.tolist(), generalization.tolist(), m, alpha)
    best = enumerate_best(ucb.tolist(), generalization.tolist(), m, alpha)
    assert mine == best or abs(mine - best) <= 1e-9, f"{chosen} has value {mine}, the best is {best}"


def test_maximize_equals_enumeration_on_1000_instances() -> None:
    """Values from small grids, so that ties abound; any share of the bounds is infinite."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        size = int(rng.integers(1, 10))
        m = int(rng.integers(1, size + 1))
        infinite = rng.choice([0.0, 0.2, 0.7, 1.0])
        ucb = np.where(rng.random(size) < infinite, math.inf, rng.choice(UCB_GRID[:-1], size))
        assert_maximizes(ucb, rng.choice(G_GRID, size), m, float(rng.choice([0.0, 0.5, 1.0, 10.0])))


def test_maximize_equals_enumeration_on_continuous_values() -> None:
    """The same without ties, where the maximizer is one set."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        size = int(rng.integers(2, 11))
        m = int(rng.integers(1, size + 1))
        assert_maximizes(rng.random(size), rng.uniform(-1, 1, size), m, float(rng.uniform(0, 3)))


@settings(deadline=None)
@given(st.data())
def test_maximize_property(data: st.DataObject) -> None:
    """Any finite or infinite bounds, any g in [-1, 1], any m."""
    size = data.draw(st.integers(1, 8), label="size")
    bound = st.one_of(st.sampled_from(UCB_GRID), st.floats(0, 100))
    contribution = st.one_of(st.sampled_from(G_GRID), st.floats(-1, 1))
    ucb = data.draw(st.lists(bound, min_size=size, max_size=size), label="ucb")
    generalization = data.draw(st.lists(contribution, min_size=size, max_size=size), label="generalization")
    m = data.draw(st.integers(1, size), label="m")
    alpha = data.draw(st.one_of(st.just(0.0), st.floats(0, 20)), label="alpha")
    assert_maximizes(np.array(ucb), np.array(generalization), m, alpha)


def test_maximize_keeps_input_order_on_ties() -> None:
    """Five equal clients: the first two; and the same answer every time."""
    for _ in range(3):
        assert set(np.asarray(maximize(np.ones(5), np.full(5, 0.2), 2, 1.0)).tolist()) == {0, 1}


def test_maximize_among_sets_of_equal_value() -> None:
    """First the larger smallest ucb, then members of larger ucb, then the order of the input.

    ucb = (.8, .9, .1), g = (.5, .5, 1), alpha = 10, m = 2: with client 2 both sets have .1 + 5 x 1.5; 1 is faster than
    0. For ucb = (.5, .7), g = (.4, .2), m = 1, alpha = 1 both have .9; 1 is the faster set.
    """
    assert maximize(np.array([0.8, 0.9, 0.1]), np.array([0.5, 0.5, 1.0]), 2, 10.0).tolist() == [1, 2]
    assert maximize(np.array([0.5, 0.75]), np.array([0.5, 0.25]), 1, 1.0).tolist() == [1]
    assert maximize(np.array([0.8, 0.8, 0.1]), np.array([0.5, 0.5, 1.0]), 2, 10.0).tolist() == [0, 2]


def test_slow_but_useful_clients_travel_together() -> None:
    """Where a slow client pays for itself, its fast companions give way to other useful ones (the text under (5)).

    ucb = (.9, .9, .1, .1), g = (-.5, -.5, .5, .5), m = 2. alpha = 2: {0, 1} .9 - 1, {0, 2} .1 + 0, {2, 3} .1 + 1.
    alpha = .5: {0, 1} .9 - .25 = .65, {2, 3} .1 + .25 = .35.
    """
    ucb, generalization = np.array([0.9, 0.9, 0.1, 0.1]), np.array([-0.5, -0.5, 0.5, 0.5])
    assert set(np.asarray(maximize(ucb, generalization, 2, 2.0)).tolist()) == {2, 3}
    assert set(np.asarray(maximize(ucb, generalization, 2, 0.5)).tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", -1.0),
        ("alpha", float("nan")),
        ("min_latency", 0.0),
        ("min_latency", -0.1),
        ("min_latency", float("nan")),
        ("beta", -1),
        ("clients_per_round", 0),
    ],
)
def test_wrong_parameters_are_refused_by_name(name: str, value: float) -> None:
    """The message names the parameter and the value that came."""
    parameters = {"clients_per_round": 2, "min_latency": 0.1, name: value}
    with pytest.raises(ValueError, match=f"(?s)(?=.*{name})(?=.*{value:g})"):
        create("bsfl", **parameters)
    with pytest.raises(ValueError, match=name):
        BSFL(**parameters)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [0.0, 0.0], [1.0, math.nan], [[1.0, 2.0]]])
def test_wrong_data_weights_are_refused_by_name(weights: list[float]) -> None:
    """Weights are non-negative, finite, one-dimensional and not all zero."""
    with pytest.raises(ValueError, match="data_weights"):
        BSFL(clients_per_round=1, min_latency=0.1, data_weights=np.array(weights))


@pytest.mark.parametrize(
    ("ucb", "generalization", "m", "alpha", "name"),
    [
        ([0.1, math.nan, 0.3], [0.0, 0.0, 0.0], 2, 1.0, "ucb"),
        ([0.1, 0.2, 0.3], [0.0, math.nan, 0.0], 2, 1.0, "generalization"),
        ([0.1, 0.2, 0.3], [0.0, 0.0], 2, 1.0, "generalization"),
        ([[0.1, 0.2, 0.3]], [[0.0, 0.0, 0.0]], 2, 1.0, "ucb"),
        ([0.1, 0.2, 0.3], [0.0, 0.0, 0.0], 2, -1.0, "alpha"),
        ([0.1, 0.2, 0.3], [0.0, 0.0, 0.0], 0, 1.0, "clients_per_round"),
    ],
)
def test_maximize_refuses_wrong_input_by_name(
    ucb: list[float], generalization: list[float], m: int, alpha: float, name: str
) -> None:
    """A NaN would silently win or lose every comparison; a wrong shape would pair the wrong clients."""
    with pytest.raises(ValueError, match=name):
        maximize(np.array(ucb), np.array(generalization), m, alpha)
