"""FedCS against rounds by hand and against every set of clients and every way to part it into waves."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors.fedcs import FedCS
from fedsel_flwr.wireless import round_time
from tests.selectors.rounds import play, report

build = partial(FedCS, deadline=4.0, seed=0)


def measured(seconds: dict[int, float], **parameters: Any) -> FedCS:
    """Everybody has been measured."""
    selector = build(**parameters)
    while (selector.state_dict()["measured_in"] == 0).sum() or not selector.round:
        play(selector, sorted(seconds), seconds)
    return selector


def slowest_parting(seconds: Iterable[float], channels: int) -> float:
    """The longest round of these clients over all orders in which they may be served."""
    return max(round_time(list(order), channels) for order in permutations(seconds))


def test_rounds_by_hand() -> None:
    """Five clients, deadline 4 s; latencies 1, 4, 6, 2, 1.5 s.

    Round 1: nobody was measured                                                    -> everybody
    Round 2: a channel for each: 1, 4, 2, 1.5 are within 4 s                        -> 0, 1, 3, 4
        client 1 takes 5 s this time, 4.5 s in the mean
    Round 3                                                                         -> 0, 3, 4
        client 3 fails for the first time: its estimate stays 2 s
    Round 4, only 1, 2, 3 are there: client 3 alone fits                            -> 3
        it fails again (60 s): (2 + 2 + 60)/3 = 21.3 s
    Round 5, only 1, 2, 3 are there: nobody fits, 1 is the quickest with 4.5 s      -> 1
        it takes 2.5 s: 11.5/3 = 3.8 s
    Round 6                                                                         -> 0, 1, 4
    """
    seconds = {0: 1.0, 1: 4.0, 2: 6.0, 3: 2.0, 4: 1.5}
    for seed in range(5):
        selector = build(seed=seed)
        assert play(selector, [0, 1, 2, 3, 4], seconds) == [0, 1, 2, 3, 4]
        assert play(selector, [0, 1, 2, 3, 4], seconds | {1: 5.0}) == [0, 1, 3, 4]
        assert play(selector, [0, 1, 2, 3, 4], {0: 1.0, 4: 1.5}) == [0, 3, 4]
        assert play(selector, [1, 2, 3], {}) == [3]
        assert play(selector, [1, 2, 3], seconds | {1: 2.5}) == [1]
        assert play(selector, [0, 1, 2, 3, 4], seconds) == [0, 1, 4]


@pytest.mark.parametrize("channels", [None, 1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_as_many_as_fit_by_enumeration(channels: int | None, seed: int) -> None:
    """Six clients: no larger set meets the deadline in every order of service, and the chosen one does."""
    rng = np.random.default_rng([seed, channels or 0])
    seconds = {k: float(s) for k, s in enumerate(rng.choice([0.5, 1.0, 1.5, 2.0, 3.0, 5.0], 6))}
    deadline = float(rng.choice([2.0, 4.0, 6.0, 9.0]))
    chosen = measured(seconds, deadline=deadline, channels=channels).select(np.arange(6)).tolist()
    sets = [members for size in range(1, 7) for members in combinations(seconds.values(), size)]
    size = max((len(one) for one in sets if slowest_parting(one, channels or 6) <= deadline), default=0)
    assert len(chosen) == max(1, size)
    if size:
        assert slowest_parting([seconds[k] for k in chosen], channels or 6) <= deadline


def test_the_first_rounds_measure_one_wave_each() -> None:
    """Nine clients, three channels: 3 strangers in round 1, then 3 more beside those that fit, then the last 3.

    A cap takes the quickest.
    """
    seconds = dict.fromkeys(range(9), 1.0)
    selector = build(deadline=0.5, channels=3)
    new = []
    seen: set[int] = set()
    for _ in range(4):
        chosen = set(play(selector, range(9), seconds))
        new.append(len(chosen - seen))
        seen |= chosen
    assert new == [3, 3, 3, 0]
    assert len(play(build(clients_per_round=2, channels=3), range(9), seconds)) == 2
    assert measured({0: 3.0, 1: 1.0, 2: 2.0, 3: 0.5}, clients_per_round=2).select(np.arange(4)).tolist() == [1, 3]


def test_an_estimate_grows_old() -> None:
    """Client 1 fails in rounds 1 and 2 and is asked again refresh_rounds + 1 later; what was before counts no more."""
    selector = build(refresh_rounds=5)
    for _ in range(2):
        assert play(selector, [0, 1], {0: 1.0}) == [0, 1]
    assert [play(selector, [0, 1], {0: 1.0, 1: 1.0}) for _ in range(7)] == [[0]] * 5 + [[0, 1]] * 2


def test_spares_are_measured_or_raise_their_estimate() -> None:
    """Of four spares 0 answers after 3 s: mean (1 + 3)/2 = 2 s; 1 to 3 have not answered within 2.5 s.

    Client 1 had 2 s: now 2.5 s. Client 2 had 3 s and keeps them. Client 3 had no estimate: 2.5 s, which its first
    measurement (6 s) replaces. Nobody's estimate falls, and none of them failed.
    """
    selector = measured({0: 1.0, 1: 2.0, 2: 3.0})
    selector.select(np.arange(4))
    selector.observe(report(range(4), {0: 3.0}, late=2.5, spare=[True] * 4))
    assert selector.state_dict()["latency"].tolist() == [2.0, 2.5, 3.0, 2.5]
    assert selector.state_dict()["failures"].tolist() == [0] * 4
    assert play(selector, [3], {3: 6.0}) == [3]
    assert selector.state_dict()["latency"].tolist() == [2.0, 2.5, 3.0, 6.0]
