"""LSH and NCCB against rounds by hand, a recount of the whole history, and clusters that are known."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.answering import SKETCH_BITS
from fedsel_flwr.selectors import create
from fedsel_flwr.selectors.nccb import cluster
from tests.selectors.oracle_draws import frequencies, frozen
from tests.selectors.rounds import report


def hamming(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def centre(hashes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Each bit as more than half have it."""
    return tuple(int(2 * sum(bits) > len(hashes)) for bits in zip(*hashes, strict=True))


class GroupOracle:
    """The history of (client, utility); a failure has utility 0."""

    def __init__(self, exploration: float) -> None:
        self.exploration = exploration
        self.plays: list[tuple[int, float]] = []

    def bound(self, members: Iterable[int]) -> float:
        """Mean + sqrt(exploration ln(all plays) / plays) of a group."""
        members = set(members)
        mine = [utility for client, utility in self.plays if client in members]
        if not mine:
            return math.inf
        return sum(mine) / len(mine) + math.sqrt(self.exploration * math.log(len(self.plays)) / len(mine))

    def right(self, chosen: Sequence[int], available: Sequence[int], groups: Sequence[Iterable[int]]) -> bool:
        """Whether nobody left out has a larger bound than somebody chosen."""
        bounds = {k: self.bound(group) for group in groups for k in group}
        inside = [bounds[k] for k in chosen]
        outside = [bounds[k] for k in available if k not in chosen]
        return not outside or not inside or min(inside) >= max(outside) - 1e-9


BOTH = pytest.mark.parametrize("name", ["lsh", "nccb"])
build = partial(create, clients_per_round=1, seed=0)


def play(selector: Any, chosen: Any, accuracy: Any, energy: Any) -> None:
    """Report a round; an accuracy of NaN is a failure."""
    failed = np.isnan(accuracy)
    energy = np.where(failed, np.nan, energy)
    selector.observe(report(chosen, failed=chosen[failed], accuracy=np.array(accuracy), energy_score=energy))


HASHES = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=np.float64)


def test_rounds_of_lsh_by_hand() -> None:
    """Clients 0 and 1 have one hash, 2 and 3 their own; utility .5 accuracy + .5 energy score, exploration 2.

    Round 1, client 0 alone: accuracy .8, energy score .6: utility .7.
    Round 2: {0, 1} has .7 + sqrt(2 ln 1 / 1) = .7; 2 and 3 have no play.
    Rounds 2, 3: 2 with .3, .3: .3; 3 fails: 0.
    Round 4: n = 3, sqrt(2 ln 3) = 1.4823: {0, 1} 2.182, 2 1.782, 3 1.482                                 -> 0 or 1
    It is 1, with utility .1: {0, 1} has (.7 + .1)/2 = .4 over 2 plays.
    Round 5: n = 4, sqrt(2 ln 4) = 1.6651: {0, 1} .4 + 1.6651/1.4142 = 1.577, 2 1.965, 3 1.665             -> 2
    """
    selector = build("lsh")
    selector.inform(np.arange(4), sketch=HASHES)
    play(selector, selector.select(np.array([0])), [0.8], [0.6])
    assert frequencies(frozen(selector, range(4)), 20).keys() == {frozenset({2}), frozenset({3})}
    play(selector, selector.select(np.array([2])), [0.3], [0.3])
    play(selector, selector.select(np.array([3])), [np.nan], [0.9])
    assert selector.select(np.arange(4))[0] in (0, 1)
    play(selector, selector.select(np.array([1])), [0.2], [0.0])
    np.testing.assert_allclose(selector._bounds(), [1.5774, 1.5774, 1.9651, 1.6651], atol=1e-4)
    assert selector.select(np.arange(4)).tolist() == [2]


def test_rounds_of_nccb_by_hand() -> None:
    """The same with two clusters, {0, 1} and {2, 3}, which are 4 and 3 bits apart and at most 1 within.

    Round 1, client 0: utility .7. Round 2: {2, 3} has no play: 2 or 3. Say 3, which fails: 0.
    Round 3: n = 2, sqrt(2 ln 2) = 1.1774: {0, 1} 1.877, {2, 3} 1.177; m = 3: 0, 1 and one of 2, 3.
    """
    for seed in range(5):
        selector = build("nccb", clusters=2, seed=seed, clients_per_round=3)
        selector.inform(np.arange(4), sketch=HASHES)
        play(selector, selector.select(np.array([0])), [0.8], [0.6])
        assert {2, 3} < set(selector.select(np.arange(4)).tolist())
        play(selector, selector.select(np.array([3])), [np.nan], [0.9])
        np.testing.assert_allclose(selector._bounds(), [1.8774, 1.8774, 1.1774, 1.1774], atol=1e-4)
        assert {0, 1} < set(selector.select(np.arange(4)).tolist())


@pytest.mark.parametrize(
    ("bits", "arms"), [(1, [{0, 1, 2, 3}]), (2, [{0, 1}, {2, 3}]), (3, [{0, 1}, {2}, {3}]), (99, [{0}, {1}, {2}, {3}])]
)
def test_arms_of_lsh_are_the_clients_whose_first_bits_are_equal(bits: int, arms: list[set[int]]) -> None:
    """Hashes 1000, 1001, 1110, 1100: one arm by the first bit, two by the first two, and so on.

    Each client is played once, with utility .1 to .4; an arm's bound is its mean + sqrt(2 ln 4 / its plays).
    """
    selector = build("lsh", bits=bits)
    selector.inform(np.arange(4), sketch=np.array([[1.0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 0], [1, 1, 0, 0]]))
    for k in range(4):
        play(selector, selector.select(np.array([k])), [0.1 * (k + 1)], [0.1 * (k + 1)])
    for arm in arms:
        bound = sum(0.1 * (k + 1) for k in arm) / len(arm) + math.sqrt(2 * math.log(4) / len(arm))
        assert selector._bounds()[sorted(arm)] == pytest.approx(bound)


def test_a_state_with_hashes_of_64_bits_is_continued() -> None:
    """All bits of a hash are kept, so that a state says the same whatever ``bits`` is."""
    hashes = np.random.default_rng(0).integers(0, 2, (5, SKETCH_BITS)).astype(np.float64)
    wide, narrow = build("lsh", bits=SKETCH_BITS), build("lsh")
    wide.inform(np.arange(5), sketch=hashes)
    narrow.load_state_dict(wide.state_dict())
    assert narrow.hashes.shape == (5, SKETCH_BITS)
    narrow.inform(np.array([5]), sketch=hashes[:1])
    assert narrow._groups()[0] == narrow._groups()[5]


@pytest.mark.parametrize(("weight", "utility"), [(0.0, 0.6), (0.25, 0.65), (1.0, 0.8)])
@BOTH
def test_the_utility_is_a_weighted_mean(name: str, weight: float, utility: float) -> None:
    selector = build(name, accuracy_weight=weight)
    play(selector, selector.select(np.array([0])), [0.8], [0.6])
    assert selector.state_dict()["reward_sum"].tolist() == [pytest.approx(utility)]


@BOTH
def test_hashes_are_asked_for_once_and_of_newcomers(name: str) -> None:
    selector = build(name)
    asked = selector.probe(np.arange(3))
    assert (asked.clients.tolist(), asked.columns) == ([0, 1, 2], ("sketch",))
    selector.inform(asked.clients, sketch=np.array([[1.0, 0], [0, 1], [np.nan, 1]]))
    assert selector.probe(np.arange(4)).clients.tolist() == [2, 3]
    assert selector.probe(np.arange(4)).clients.tolist() == [2, 3]
    assert selector.probe(np.arange(4)).clients.tolist() == [3]  # 2 was asked three times
    assert selector.probe(np.arange(4)) is None
    assert selector.select(np.arange(4)).size == 1  # without a hash they are groups of their own


@pytest.mark.parametrize("seed", range(4))
@BOTH
def test_every_choice_has_the_largest_bounds(name: str, seed: int) -> None:
    """60 rounds of random availability, failures, silent clients and newcomers, recounted from the first."""
    rng = np.random.default_rng(seed)
    extra = {"clusters": 3} if name == "nccb" else {}
    selector, oracle = build(name, clients_per_round=3, seed=seed, exploration=0.3, **extra), GroupOracle(0.3)
    hashes = rng.integers(0, 2, (4, 8))[rng.integers(0, 4, 10)].astype(np.float64)
    quality, known, decided = rng.random(10), set[int](), 0
    for number in range(60):
        available = np.flatnonzero(rng.random(7 if number < 20 else 10) < 0.8)
        if (asked := selector.probe(available)) is not None:
            silent = rng.random(asked.clients.size) < 0.3
            selector.inform(asked.clients, sketch=np.where(silent[:, None], np.nan, hashes[asked.clients]))
            known |= set(asked.clients[~silent].tolist())
        chosen = selector.select(available)
        labels = selector.state_dict()["cluster"] if name == "nccb" else [tuple(bits) for bits in hashes]
        groups = defaultdict[Any, list[int]](list)
        for k in range(selector.num_clients + 10):
            if k in known:
                groups[labels[k]].append(k)
            elif k < 10:
                groups[f"client {k}"].append(k)
        assert oracle.right(chosen.tolist(), available.tolist(), list(groups.values()))
        decided += len(chosen) < available.size
        accuracy = quality[chosen] * rng.random(chosen.size)
        accuracy[rng.random(chosen.size) < 0.2] = np.nan
        play(selector, chosen, accuracy, quality[chosen])
        for k, value in zip(chosen.tolist(), accuracy.tolist(), strict=True):
            oracle.plays.append((k, 0.0 if math.isnan(value) else (value + quality[k]) / 2))
    assert decided > 40


@pytest.mark.parametrize("seed", range(10))
def test_clusters_are_those_of_k_means_with_hamming_distance(seed: int) -> None:
    """Three hashes of 12 bits that differ in 8 (two times 4 bits), three copies each with one bit flipped.

    The clusters are the three, whatever the first centre. On any hashes each is at its nearest centre, and each centre
    is its hashes' majority.
    """
    rng = np.random.default_rng(seed)
    hashes = np.repeat(np.array([[0] * 12, [1] * 8 + [0] * 4, [0] * 4 + [1] * 8]), 3, axis=0)
    hashes[np.arange(9), rng.integers(0, 12, 9)] ^= 1
    order = rng.permutation(9)
    found = cluster(hashes[order].astype(bool), 3, rng)
    assert len(set(found.tolist())) == len({(int(g), int(k) // 3) for g, k in zip(found, order, strict=True)}) == 3

    hashes = rng.integers(0, 2, (30, 10))
    found = cluster(hashes.astype(bool), 4, rng)
    centres = {own: centre(hashes[found == own].tolist()) for own in found.tolist()}
    for one, own in zip(hashes.tolist(), found.tolist(), strict=True):
        assert hamming(tuple(one), centres[own]) == min(hamming(tuple(one), other) for other in centres.values())


def test_fewer_different_hashes_than_clusters() -> None:
    found = cluster(np.array([[1, 0], [1, 0], [0, 1]], dtype=bool), 5, np.random.default_rng(0))
    assert found[0] == found[1] != found[2]


def test_newcomers_hashes_cluster_everybody_again_and_plays_move_along() -> None:
    """0 and 1 are near each other until 2 and 3 come, each near to one of them: with two clusters {0, 2}, {1, 3}."""
    selector = build("nccb", clusters=2)
    selector.inform(np.arange(2), sketch=np.array([[1.0] * 6 + [0] * 6, [0.0] * 6 + [1] * 6]))
    play(selector, selector.select(np.array([0])), [0.4], [0.4])
    before = selector.state_dict()["cluster"].tolist()
    assert before[0] != before[1]
    selector.inform(np.array([2, 3]), sketch=np.array([[1.0] * 7 + [0] * 5, [0.0] * 7 + [1] * 5]))
    assert selector.select(np.arange(4))[0] in (1, 3)
    after = selector.state_dict()["cluster"].tolist()
    assert after[0] == after[2] != after[1] == after[3]
    np.testing.assert_allclose(selector._bounds(), [0.4, np.inf, 0.4, np.inf])
