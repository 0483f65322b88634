"""The exact sweep, ALSA and plain annealing against brute force: (13), (16)-(19) of Ben Ami et al. (2023)."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import bsfl_solvers, create
from fedsel_flwr.selectors.bsfl_solvers import _swaps, anneal, maximize
from fedsel_flwr.theory import bsfl_genie
from tests.selectors.oracles import enumerate_best, objective
from tests.selectors.rounds import play

KINDS = ["alsa", "annealing"]
UCB_GRID = [0.0, 0.25, 0.5, 1.0, 1.75, math.inf]
G_GRID = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]
K, M = 8, 4  # Fig. 3
STATES = list(combinations(range(K), M))


def instance(seed: int, num_clients: int = K) -> tuple[np.ndarray, np.ndarray]:
    """Draw bounds and g without ties."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.2, 1.5, num_clients), rng.uniform(-0.5, 0.5, num_clients)


def argmins(members: set[int], values: np.ndarray) -> set[int]:
    lowest = min(values[k] for k in members)
    return {k for k in members if values[k] == lowest}


def swaps(state: set[int], ucb: np.ndarray, generalization: np.ndarray, kind: str) -> set[tuple[int, int]]:
    """Return (leaving, entering) of every neighbour among all sets: (18), or (19) with every argmin of a tie."""
    found = set()
    for others in combinations(range(len(ucb)), len(state)):
        other = set(others)
        if len(state & other) != len(state) - 1:
            continue
        (leaving,), (entering,) = state - other, other - state
        weak_here = argmins(state, ucb) | argmins(state, generalization)
        weak_there = argmins(other, ucb) | argmins(other, generalization)
        if kind == "annealing" or leaving in weak_here or entering in weak_there:
            found.add((leaving, entering))
    return found


def asked(state: Any, ucb: np.ndarray, generalization: np.ndarray, kind: str) -> set[tuple[int, int]]:
    """Ask the package for the neighbours; each has to be listed once."""
    swaps = _swaps(np.isin(np.arange(len(ucb)), list(state)), ucb, generalization, kind)
    pairs = [(int(i), int(j)) for i in swaps.free for j in swaps.outside]
    pairs += [(int(i), int(j)) for i in swaps.staying for j in swaps.entering]
    assert len(pairs) == len(set(pairs))
    return set(pairs)


def solve(
    ucb: np.ndarray, g: np.ndarray, m: int, alpha: float, kind: str, *, steps: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Anneal with a fresh generator; checks what every answer must satisfy."""
    before = ucb.copy(), g.copy()
    indices, energies = anneal(ucb, g, m, alpha, kind=kind, steps=steps, generator=np.random.default_rng(seed))
    np.testing.assert_array_equal(ucb, before[0])
    np.testing.assert_array_equal(g, before[1])
    assert np.issubdtype(indices.dtype, np.integer)
    assert len(indices) == min(m, len(ucb))
    assert (np.diff(indices) > 0).all()
    assert set(indices.tolist()) <= set(range(len(ucb)))
    assert energies.shape == (steps + 1,)
    assert np.isfinite(energies).all()
    return indices, energies


# ---- the exact sweep -----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_maximize_property(data: st.DataObject) -> None:
    """Any finite or infinite bounds, any g in [-1, 1], any m: m different indices of the largest value."""
    size = data.draw(st.integers(1, 9), label="size")
    bound = st.one_of(st.sampled_from(UCB_GRID), st.floats(0, 100))
    contribution = st.one_of(st.sampled_from(G_GRID), st.floats(-1, 1))
    ucb = data.draw(st.lists(bound, min_size=size, max_size=size), label="ucb")
    generalization = data.draw(st.lists(contribution, min_size=size, max_size=size), label="generalization")
    m = data.draw(st.integers(1, size), label="m")
    alpha = data.draw(st.one_of(st.just(0.0), st.floats(0, 20)), label="alpha")
    arrays = np.array(ucb), np.array(generalization)
    chosen = maximize(*arrays, m, alpha)
    np.testing.assert_array_equal(arrays, (ucb, generalization))  # left alone
    assert np.issubdtype(chosen.dtype, np.integer)
    assert len(chosen) == len(set(chosen.tolist())) == m
    mine, best = objective(chosen, ucb, generalization, m, alpha), enumerate_best(ucb, generalization, m, alpha)
    assert mine == best or abs(mine - best) <= 1e-9, f"{chosen} has value {mine}, the best is {best}"


@pytest.mark.parametrize(
    ("ucb", "g", "m", "alpha", "expected"),
    [
        ([1.0] * 5, [0.2] * 5, 2, 1.0, [0, 1]),  # the order of the input, where nothing else decides
        # With client 2 both sets have .1 + 5 x 1.5: the larger smallest ucb first, then members of larger ucb.
        ([0.8, 0.9, 0.1], [0.5, 0.5, 1.0], 2, 10.0, [1, 2]),
        ([0.8, 0.8, 0.1], [0.5, 0.5, 1.0], 2, 10.0, [0, 2]),
        ([0.5, 0.75], [0.5, 0.25], 1, 1.0, [1]),  # both have 1; 1 is the faster set
        # A slow client that pays for itself takes its like along (the text under (5)):
        # {0, 1} .9 - 1, {0, 2} .1 + 0, {2, 3} .1 + 1; for alpha = .5 {0, 1} .9 - .25, {2, 3} .1 + .25.
        ([0.9, 0.9, 0.1, 0.1], [-0.5, -0.5, 0.5, 0.5], 2, 2.0, [2, 3]),
        ([0.9, 0.9, 0.1, 0.1], [-0.5, -0.5, 0.5, 0.5], 2, 0.5, [0, 1]),
    ],
)
def test_maximize_by_hand(ucb: list[float], g: list[float], m: int, alpha: float, expected: list[int]) -> None:
    assert maximize(np.array(ucb), np.array(g), m, alpha).tolist() == expected


@pytest.mark.parametrize(
    ("ucb", "g", "m", "alpha", "name"),
    [
        ([0.1, math.nan], [0.0, 0.0], 2, 1.0, "ucb"), ([0.1, 0.2], [0.0, math.nan], 2, 1.0, "generalization"),
        ([0.1, 0.2, 0.3], [0.0, 0.0], 2, 1.0, "generalization"), ([[0.1, 0.2]], [[0.0, 0.0]], 2, 1.0, "ucb"),
        ([0.1, 0.2], [0.0, 0.0], 2, -1.0, "alpha"), ([0.1, 0.2], [0.0, 0.0], 0, 1.0, "clients_per_round"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_by_name(ucb: Any, g: Any, m: int, alpha: float, name: str) -> None:
    """A NaN would silently win or lose every comparison; a wrong shape would pair the wrong clients."""
    arrays, generator = (np.array(ucb), np.array(g)), np.random.default_rng(0)
    with pytest.raises(ParameterError, match=name):
        maximize(*arrays, m, alpha)
    with pytest.raises(ParameterError, match=name):
        anneal(*arrays, m, alpha, kind="alsa", steps=5, generator=generator)


@pytest.mark.parametrize("wrong", [{"kind": "exact"}, {"steps": -1}])
def test_a_wrong_kind_and_wrong_steps_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        anneal(*instance(0), M, 1.0, **{"kind": "alsa", "steps": 5, "generator": np.random.default_rng(0)} | wrong)


def plain(ucb: FloatArray, g: FloatArray, m: int, alpha: float) -> IntArray:
    """Return the best set, with each client in turn as the slowest member; the earliest among equals."""
    order = np.argsort(-ucb, kind="stable")
    best, end = -np.inf, m
    for i in range(m, len(ucb) + 1):
        score = ucb[order[i - 1]] + alpha / m * np.sort(g[order[:i]])[-m:].sum()
        if score > best + 1e-12:
            best, end = score, i
    return np.sort(order[np.argsort(-g[order[:end]], kind="stable")[:m]])


def sweep_instance(kind: str, num_clients: int, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Bounds, and generalization values that are unlike them, tied, or the larger the slower."""
    ucb, g = rng.uniform(0, 3, num_clients), rng.uniform(-1, 1, num_clients)
    if kind == "tied":
        return np.round(ucb), np.round(2 * g) / 2
    return ucb, 1 - ucb + rng.normal(size=num_clients) * 1e-9 if kind == "opposed" else g


@pytest.mark.parametrize("kind", ["independent", "tied", "opposed"])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0, 1e6])
def test_as_the_plain_sweep(kind: str, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(40):
        monkeypatch.setattr(bsfl_solvers, "SLICE", (2, 32)[seed % 2])
        rng = np.random.default_rng(seed)
        num_clients = int(rng.integers(2, 150))
        m = int(rng.integers(1, num_clients))
        ucb, g = sweep_instance(kind, num_clients, rng)
        assert bsfl_solvers.maximize(ucb, g, m, alpha).tolist() == plain(ucb, g, m, alpha).tolist()


def test_it_ends_where_no_slower_client_can_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100,000 clients the slow ones cannot make up for their speed: only the first slices are looked at."""
    looked = []

    class Watched(bsfl_solvers._Sweep):
        def advance(self, order, start, end):
            looked.append(end)
            return super().advance(order, start, end)

    monkeypatch.setattr(bsfl_solvers, "_Sweep", Watched)
    bsfl_solvers.maximize(*sweep_instance("independent", 100_000, np.random.default_rng(2)), 100, 0.01)
    assert max(looked, default=0) <= 2 * bsfl_solvers.SLICE


# ---- annealing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_clients", "m"), [(K, M), (5, 1), (5, 2), (6, 5), (4, 4)])
def test_neighbours_equal_brute_force(kind: str, num_clients: int, m: int) -> None:
    """All states: 70 of 8 choose 4, as in Fig. 3; one client a round; all but one; everybody (no neighbour at all).

    (18) has m(K - m) neighbours; (19) at least K - m and no more than 4(K - m) on average (the text under it).
    """
    for seed in range(4):
        ucb, g = instance(seed, num_clients)
        found = {state: asked(state, ucb, g, kind) for state in combinations(range(num_clients), m)}
        assert found == {state: swaps(set(state), ucb, g, kind) for state in found}
        outside, counts = num_clients - m, [len(neighbours) for neighbours in found.values()]
        if kind == "annealing":
            assert set(counts) == {m * outside}
        assert min(counts) >= outside
        assert kind == "annealing" or np.mean(counts) <= 4 * outside


def test_neighbours_by_hand() -> None:
    """Five clients, S = {1, 2, 3}; ucb = (.1, .2, .3, .4, .5), g = (.5, .2, .4, .1, .3).

    In S client 1 has the lowest ucb and 3 the lowest g: each may leave for 0 or 4. Client 2 may leave for one that is
    an argmin afterwards: 0 has the lowest ucb of {0, 1, 3}; 4 is neither in {1, 3, 4} (ucb: 1, g: 3).
    """
    ucb, g = np.array([0.1, 0.2, 0.3, 0.4, 0.5]), np.array([0.5, 0.2, 0.4, 0.1, 0.3])
    assert asked([1, 2, 3], ucb, g, "alsa") == {(1, 0), (1, 4), (3, 0), (3, 4), (2, 0)}
    assert asked([1, 2, 3], ucb, g, "annealing") == {
        (leaving, entering) for leaving in (1, 2, 3) for entering in (0, 4)
    }


def test_ties_stay_between_the_smallest_and_the_largest_reading() -> None:
    """With ties any member of an argmin may stand for it: never a swap that the widest reading of (19) forbids."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        ucb, g = rng.integers(0, 3, K) / 2, rng.integers(0, 3, K) / 4
        for state in STATES:
            mine = asked(state, ucb, g, "alsa")
            assert mine <= swaps(set(state), ucb, g, "alsa")
            assert len({entering for _, entering in mine}) == K - M


def chain(ucb: np.ndarray, g: np.ndarray, m: int, alpha: float, kind: str, steps: int) -> np.ndarray:
    """Return the exact chance of each state after each step, by (16) with T_i = Delta_max/log(i+1), i = 1, 2, …"""
    states = list(combinations(range(len(ucb)), m))
    energy = [objective(state, ucb, g, m, alpha) for state in states]
    delta_max = np.ptp(ucb) + alpha * np.ptp(g)
    chance = np.full((steps + 1, len(states)), 1 / len(states))  # the first state is drawn at random
    for i in range(1, steps + 1):
        temperature = delta_max / math.log(i + 1)
        chance[i] = 0
        for row, state in enumerate(states):
            around = swaps(set(state), ucb, g, kind)
            for leaving, entering in around:
                other = states.index(tuple(sorted({*state, entering} - {leaving})))
                accept = min(1.0, math.exp((energy[other] - energy[row]) / temperature))
                chance[i, other] += chance[i - 1, row] * accept / len(around)
                chance[i, row] += chance[i - 1, row] * (1 - accept) / len(around)
    return chance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_clients", "m", "alpha"), [(2, 1, 0.0), (5, 3, 0.5)])
def test_steps_follow_the_acceptance_rule(kind: str, num_clients: int, m: int, alpha: float) -> None:
    """1,000 runs visit each state after each of 12 steps as often as the exact Markov chain says, within 4.5 sigma.

    For K = 2, m = 1, alpha = 0 by hand: Delta_max is the gap itself, so step i leaves the better client with
    probability exp(-log(i+1)) = 1/(i+1) and always leaves the worse one: 1/2, 3/4, 3/4 - 1/4 + 1/4 = 3/4, …
    """
    steps, runs = 12, 1000
    ucb, g = instance(100 + num_clients + m, num_clients)
    expected = chain(ucb, g, m, alpha, kind, steps)
    if num_clients == 2:
        np.testing.assert_allclose(expected[:3, ucb.argmax()], [1 / 2, 3 / 4, 3 / 4])
    energy = np.array([objective(state, ucb, g, m, alpha) for state in combinations(range(num_clients), m)])
    visits = np.zeros_like(expected)
    for seed in range(runs):
        _, energies = solve(ucb, g, m, alpha, kind, steps=steps, seed=seed)
        visits[np.arange(steps + 1), np.abs(energies[:, None] - energy).argmin(axis=1)] += 1
    sigma = np.sqrt(expected * (1 - expected) / runs) + 1e-9
    assert (np.abs(visits / runs - expected) / sigma).max() < 4.5


@pytest.mark.parametrize("kind", KINDS)
def test_annealing_at_its_edges(kind: str) -> None:
    """Equal clients: Delta_max = 0. Everybody is chosen: no neighbour. Nobody at all: no member and no energy.

    (17) divides by m, not by |S|: K = 2, m = 3, alpha = 1: .8 + (.3 + .3)/3 = 1, as the genie (6) counts it.
    """
    indices, energies = solve(np.full(6, 0.5), np.zeros(6), 3, 1.0, kind, steps=40)
    assert len(indices) == 3
    np.testing.assert_allclose(energies, 0.5)
    two = np.array([0.8, 0.9]), np.array([0.3, 0.3])
    for (ucb, g), m, energy in (two, 3, bsfl_genie(*two, 3, 1.0)[1]), (two, 2, 1.1), ((np.empty(0),) * 2, 3, 0.0):
        indices, energies = solve(ucb, g, m, 1.0, kind, steps=4)
        assert indices.tolist() == list(range(len(ucb)))
        np.testing.assert_allclose(energies, energy)


# ---- BSFL with them ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bsfl_chooses_by_the_solver(kind: str) -> None:
    """With one step other choices than with many; infinite bounds reach the solver, so everybody is asked soon."""

    def drive(steps: int) -> list[list[int]]:
        rng, choices = np.random.default_rng(5), []
        selector = create("bsfl", clients_per_round=3, min_latency=0.1, solver=kind, solver_steps=steps, seed=2)
        for _ in range(30):
            available = np.flatnonzero(rng.random(8) < 0.8)
            seconds = dict(enumerate((0.1 * np.arange(1, 9) * rng.uniform(0.9, 1.1, 8)).tolist()))
            choices.append(play(selector, available, seconds))
        return choices

    many = drive(300)
    assert many != drive(1)
    assert {k for chosen in many[:10] for k in chosen} == set(range(8))


@pytest.mark.parametrize("kind", KINDS)
def test_at_a_low_temperature_no_step_lowers_the_energy(kind: str) -> None:
    ucb, g = instance(0)
    steps = {"kind": kind, "steps": 300}
    cold = anneal(ucb, g, M, 1.0, **steps, generator=np.random.default_rng(1), temperature=1e-9)[1]
    warm = anneal(ucb, g, M, 1.0, **steps, generator=np.random.default_rng(1))[1]
    assert (np.diff(cold) >= 0).all()
    assert (np.diff(warm) < 0).any()
