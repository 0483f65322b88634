"""DivFL against a round by hand, brute-force greedy and the best set; projections against their bound.

The oracles are the definition in plain Python, every distance and every set, and the plain greedy choice in NumPy,
which sums every candidate in every step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import create
from fedsel_flwr.selectors._vectors import projected
from tests.selectors.rounds import report

Array = npt.NDArray[Any]
Gradients = Mapping[int, Sequence[float]]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The Euclidean distance, not squared."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def uncovered(gradients: Gradients, chosen: Collection[int]) -> float:
    """(4): what is left between every client and the nearest chosen one."""
    return sum(min(apart(mine, gradients[j]) for j in chosen) for mine in gradients.values())


def greedy(gradients: Gradients, available: Iterable[int], count: int) -> set[frozenset[int]]:
    """(5): whoever leaves the least, one after the other; all sets that this may end in, as two may leave the same."""
    candidates, sets = [k for k in available if k in gradients], {frozenset[int]()}
    for _ in range(min(count, len(candidates))):
        longer = set()
        for chosen in sets:
            left = {k: uncovered(gradients, {*chosen, k}) for k in candidates if k not in chosen}
            longer |= {chosen | {k} for k, value in left.items() if value <= min(left.values()) * (1 + 1e-6)}
        sets = longer
    return sets


def plain_greedy(distances: Array, candidates: Array, count: int, looked_at: Callable[[Array], Array]) -> list[int]:
    """(5), step by step: the first candidate whose sum is the least, to one in a million.

    Distances are those from each candidate to everybody; a step sums only candidates that are looked at.
    """
    nearest, left, chosen = np.full(distances.shape[1], np.inf), np.ones(len(candidates), dtype=np.bool_), list[int]()
    for _ in range(count):
        places = looked_at(np.flatnonzero(left))
        uncovered = np.minimum(nearest, distances[places]).sum(axis=1)
        best = places[np.argmax(uncovered <= uncovered.min() * (1 + 1e-6))]
        nearest, left[best] = np.minimum(nearest, distances[best]), False
        chosen.append(int(candidates[best]))
    return chosen


build = partial(create, "divfl", clients_per_round=2, seed=0)


def told(gradients: Any, **parameters: Any) -> Any:
    """A selector that knows the gradients of clients 0, 1, ..."""
    selector = build(**parameters)
    selector.inform(np.arange(len(gradients)), gradient=np.asarray(gradients, dtype=np.float64))
    return selector


def test_a_round_by_hand() -> None:
    """Gradients (0, 0), (3, 4), (3, 5), (-6, 8); m = 2.

    Distances: 0-1 5, 0-2 sqrt(34) = 5.8310, 0-3 10, 1-2 1, 1-3 sqrt(97) = 9.8489, 2-3 sqrt(90) = 9.4868.
    First: left 20.8310 by 0, 15.8489 by 1, 16.3178 by 2, 29.3357 by 3                                       -> 1
    Then beside 1, which leaves (5, 0, 1, 9.8489): with 0 10.8489, with 2 14.4868, with 3 6                    -> 3
    Client 1 is away: first 2 (16.3178), which leaves (5.8310, 1, 0, 9.4868): with 0 10.4868, with 3 6.8310    -> 3
    """
    gradients = [[0, 0], [3, 4], [3, 5], [-6, 8]]
    for seed in range(5):
        selector = told(gradients, seed=seed)
        assert selector.select(np.arange(4)).tolist() == [1, 3]
        assert selector.select(np.array([0, 2, 3])).tolist() == [2, 3]


def test_rounds_with_the_utility_by_hand() -> None:
    """The same gradients; m = 2, weight .5. Accuracies .7, .1, .6, .3, scores .9, .3, .8, .5: u = (.8, .2, .7, .4).

    First: left by 0 .2*5 + .7*5.8310 + .4*10 = 9.0817, by 1 .8*5 + .7*1 + .4*9.8489 = 8.6396,
        by 2 .8*5.8310 + .2*1 + .4*9.4868 = 8.6595, by 3 .8*10 + .2*9.8489 + .7*9.4868 = 16.6105           -> 1
    Then beside 1: with 0 .7*1 + .4*9.8489 = 4.6396, with 2 .8*5 + .4*9.4868 = 7.7947, with 3 .8*5 + .7 = 4.7  -> 0
    Without weights it is 1, 3, and the two largest utilities are 0, 2.
    Client 0 reports accuracy .1 and score .1: u_0 = .1; 1 fails and keeps .2.
    First: by 0 9.0817, by 1 .5 + .7 + 3.9396 = 5.1396, by 2 .5831 + .2 + 3.7947 = 4.5778, by 3 9.6105         -> 2
    Then beside 2: with 0 .2 + 3.7947 = 3.9947, with 1 .5 + 3.7947 = 4.2947, with 3 .5831 + .2 = .7831         -> 3
    """
    gradients = np.array([[0.0, 0], [3, 4], [3, 5], [-6, 8]])
    for seed in range(5):
        selector = told(gradients, seed=seed, accuracy_weight=0.5)
        assert selector.needs == {"gradient", "accuracy", "energy_score"}
        selector.inform(np.arange(4), energy_score=np.array([0.9, 0.3, 0.8, 0.5]))
        selector.inform(np.arange(4), accuracy=np.array([0.7, 0.1, 0.6, 0.3]))
        assert selector.select(np.arange(4)).tolist() == [0, 1]
        selector.observe(report([0, 1], failed=[1], gradient=gradients[:2], accuracy={0: 0.1}, energy_score={0: 0.1}))
        assert selector.select(np.arange(4)).tolist() == [2, 3]


def test_everybody_is_asked_and_who_gives_no_gradient_three_times() -> None:
    """Client 3 never answers, and fills the choice only; newcomer 4 is asked when it comes."""
    selector = build(clients_per_round=3)
    for expected in [0, 1, 2, 3], [3], [3]:
        asked = selector.probe(np.array([2, 0, 3, 1]))
        assert (asked.clients.tolist(), asked.columns) == (expected, ("gradient",))
        selector.inform(asked.clients, gradient=np.where(asked.clients[:, None] == 3, np.nan, np.ones((1, 2))))
        assert selector.select(np.arange(4)).tolist() == [0, 1, 2]
    assert selector.probe(np.arange(4)) is None
    assert selector.select(np.array([0, 1, 3])).tolist() == [0, 1, 3]
    assert selector.probe(np.arange(5)).clients.tolist() == [4]


def test_gradients_of_those_chosen_are_refreshed() -> None:
    """Client 0 stands for all at first (it leaves .85); its own gradient then moves away to 9.

    Client 1 then leaves 8.9 + .3 + .15 + .4 = 9.75, 2 9.2 + .3 + .45 + .1 = 10.05, 3 9.9, 4 10.35.
    """
    selector = told([[0.0], [0.1], [-0.2], [0.25], [-0.3]], clients_per_round=1)
    for failed, moved in ([0], 9.0), ([], np.nan), ([], 9.0):  # what is known stays, stays, changes
        assert selector.select(np.arange(5)).tolist() == [0]
        selector.observe(report([0], failed=failed, gradient=np.array([[moved]])))
    assert selector.select(np.arange(5)).tolist() == [1]
    selector.inform(np.arange(2), gradient=np.ones((2, 7)))  # of another length: as not given
    assert selector.select(np.arange(5)).tolist() == [1]


@pytest.mark.parametrize("seed", range(3))
def test_every_choice_is_the_brute_force_greedy_one(seed: int) -> None:
    """Random availability, failures, missing answers, newcomers and forgotten clients; 40 rounds each."""
    rng = np.random.default_rng(seed)
    selector, gradients = build(clients_per_round=3, seed=seed), dict[int, list[float]]()
    decided = 0
    for number in range(40):
        available = np.flatnonzero(rng.random(6 + number // 10) < 0.8)
        if (asked := selector.probe(available)) is not None:
            answers = rng.normal(size=(asked.clients.size, 5))
            answers[rng.random(asked.clients.size) < 0.2] = np.nan
            selector.inform(asked.clients, gradient=answers)
            gradients |= {int(k): g.tolist() for k, g in zip(asked.clients, answers, strict=True) if g[0] == g[0]}
        chosen = selector.select(available)
        sets = greedy(gradients, available.tolist(), 3)
        assert frozenset(k for k in chosen.tolist() if k in gradients) in sets
        assert len(chosen) == min(3, available.size)
        decided += len(sets) == 1 and len(chosen) == 3 < available.size
        completed = rng.random(chosen.size) < 0.8
        fresh = rng.normal(size=(chosen.size, 5))
        selector.observe(report(chosen, failed=chosen[~completed], gradient=fresh))
        gradients |= {int(k): g.tolist() for k, g, ok in zip(chosen, fresh, completed, strict=True) if ok}
        if number % 13 == 12:
            selector.forget(np.array([2]))
            gradients.pop(2, None)
    assert decided > 15


def instance(seed: int) -> tuple[Any, int]:
    """Gradients and m: clusters, points on a grid (ties), duplicates, all equal; m from 1 to everybody."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 90))
    points = [
        rng.normal(size=(6, 8))[rng.integers(0, 6, count)] * 3 + rng.normal(size=(count, 8)),
        rng.integers(0, 3, (count, 2)).astype(float),
        np.repeat(rng.normal(size=(count, 4)), 3, axis=0)[:count],
        np.ones((count, 3)),
        rng.normal(size=(count, 5)) * rng.choice([1e-6, 1.0, 1e6], size=(count, 1)),
    ][seed % 5]
    return points, (1, count, int(rng.integers(1, count + 1)))[seed // 5 % 3]


@pytest.mark.parametrize(("epsilon", "weight"), [(None, None), (0.3, None), (None, 0.5)])
def test_the_lazy_choices_are_those_of_the_plain_greedy(epsilon: float | None, weight: float | None) -> None:
    """60 instances, three choices each, with gradients that change in between: the same clients in the same order."""
    for seed in range(60):
        points, m = instance(seed)
        options = {"clients_per_round": m, "seed": seed, "epsilon": epsilon, "accuracy_weight": weight}
        selector, rng = told(points, **options), np.random.default_rng(seed)
        # Some clients have the utility 0.
        utility = np.maximum(rng.random(len(points)) - 0.2, 0.0) if weight else np.ones(len(points))
        selector.inform(np.arange(len(points)), accuracy=utility, energy_score=utility)
        for _ in range(3):
            order = rng.permutation(len(points))[: max(1, len(points) * 4 // 5)]
            distances = selector._distances()[order] * utility
            drawn = selector._generator.bit_generator.state
            lazy = selector._greedy(order).tolist()
            selector._generator.bit_generator.state = drawn
            looked_at = partial(selector._step_candidates, num_candidates=order.size)
            assert lazy == plain_greedy(distances, order, min(m, order.size), looked_at), seed
            chosen = np.sort(lazy)
            moved = points[chosen] + 0.3 * rng.integers(0, 2, points[chosen].shape)
            selector.observe(report(chosen, gradient=moved, accuracy=utility[chosen], energy_score=utility[chosen]))


def test_the_stochastic_steps_look_at_fewer_candidates_and_stay_good() -> None:
    """12 clients, m = 3, epsilon = .3: ceil(4 ln(1/.3)) = 5 candidates a step; mean over seeds near greedy's."""
    points = np.random.default_rng(3).normal(size=(12, 2))
    gradients = {k: point.tolist() for k, point in enumerate(points)}
    left, steps = [], Counter[int]()
    for seed in range(60):
        selector = told(points, clients_per_round=3, epsilon=0.3, seed=seed)
        original = selector._step_candidates
        selector._step_candidates = lambda *args, ask=original: (steps.update([len(got := ask(*args))]), got)[1]
        left.append(uncovered(gradients, selector.select(np.arange(12)).tolist()))
    reach = max(apart(a, b) for a in gradients.values() for b in gradients.values())
    best = min(uncovered(gradients, chosen) for chosen in combinations(gradients, 3))
    assert steps == {5: 180}
    assert reach * 12 - float(np.mean(left)) >= (1 - 1 / math.e - 0.3) * (reach * 12 - best)
    assert len({round(value, 9) for value in left}) > 3


def test_a_projection_is_by_signs() -> None:
    """So the expected square of a distance stays as it is."""
    short = projected(np.eye(60), 200, seed=1) * math.sqrt(200)
    assert set(np.unique(short.round(12)).tolist()) == {-1.0, 1.0}
    assert abs(short.mean()) < 4.5 / math.sqrt(short.size)


def test_a_sketched_selector_keeps_so_many_numbers_and_chooses_like_a_whole_one_where_clusters_are_clear() -> None:
    rng = np.random.default_rng(1)
    points = np.repeat(rng.normal(size=(3, 500)), 4, axis=0) + 0.05 * rng.normal(size=(12, 500))
    whole, short = told(points, clients_per_round=3), told(points, clients_per_round=3, sketch_size=64)
    assert whole.state_dict()["numbers"].size == 12 * 500
    assert short.state_dict()["numbers"].size == 12 * 64
    for selector in (whole, short):
        assert {k // 4 for k in selector.select(np.arange(12)).tolist()} == {0, 1, 2}
    resumed = build(clients_per_round=3, sketch_size=64, seed=99)
    resumed.load_state_dict(short.state_dict())
    fresh = report([0, 5], gradient=rng.normal(size=(2, 500)))
    for selector in (short, resumed):
        selector.observe(fresh)
    assert short.state_dict()["numbers"].tolist() == resumed.state_dict()["numbers"].tolist()  # the same signs


def test_a_forgotten_client_makes_room() -> None:
    selector = told(np.eye(5), max_clients=5)
    with pytest.raises(
        ParameterError, match=r"max_clients = 5 clients, got 6. .*\(distances of 6 clients take 0.00 GiB\)"
    ):
        selector.select(np.array([0, 5]))
    assert selector.num_clients == 5
    selector.forget(np.array([1]))
    assert selector.select(np.array([0, 5])).tolist() == [0, 5]
