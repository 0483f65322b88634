"""CS-UCB against a round worked by hand and against every subset, (18) of Xia et al. (2020)."""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.selectors import CSUCB
from tests.selectors.oracles import CSUCBOracle, World, follow
from tests.selectors.rounds import play

ROUNDS = 150


def test_rounds_by_hand() -> None:
    """Four clients, two a round, max_latency 10 s, so r = 1 - tau/10.

    Rounds 1, 2 (opening) play everyone once, whatever the order: client 0 takes 2 s (r .8), 1 takes 3 s (.7), 2 takes
    5 s (.5), 3 fails (0, and it counts as a play: unplayed, it would have to be asked in round 3).
    Round 3: n = 1 everywhere, so equal bonuses; the largest means are 0 and 1. They take 6.8 s (.32) and 9 s (.1):
    means .56 and .4, n = 2.
    Round 4: (m+1) ln t = 3 ln 4 = 4.1589; bonus sqrt(4.1589/2) = 1.4420 and sqrt(4.1589/1) = 2.0393.
        client 0: .56 + 1.4420 = 2.0020     client 1: .4 + 1.4420 = 1.8420
        client 2: .5 + 2.0393 = 2.5393      client 3: 0 + 2.0393 = 2.0393     -> {2, 3}
    (With ln 3, or m in place of m+1, or (26)'s 2 ln t, client 0 would beat client 3.)
    Client 2 takes 12 s (over the cap: r 0, mean .25), client 3 fails again (mean 0): n = 2 everywhere.
    Round 5: equal bonuses again, means .56, .4, .25, 0 -> {0, 1}.
    """
    for seed in range(20):
        selector = CSUCB(clients_per_round=2, max_latency=10.0, seed=seed)
        opening = [play(selector, range(4), {0: 2.0, 1: 3.0, 2: 5.0}, late=10.0) for _ in range(2)]
        assert sorted(opening[0] + opening[1]) == [0, 1, 2, 3]
        assert play(selector, range(4), {0: 6.8, 1: 9.0}) == [0, 1]
        assert play(selector, range(4), {2: 12.0}, late=10.0) == [2, 3]
        assert play(selector, range(4)) == [0, 1]


WORLDS = {
    "continuous": {"newcomers": {0: 40, 4: 90}},
    "ties": {"newcomers": {0: 40, 4: 90}, "grid": (0.1, 0.5, 1.0, 2.5)},
    "all there": {"presence": 1, "failure": 0.1, "unreported": 0},
}


@pytest.mark.parametrize(("num_clients", "m"), [(5, 2), (6, 3), (7, 2), (7, 3)])
@pytest.mark.parametrize(
    ("world", "inform"),
    [("continuous", True), ("continuous", False), ("ties", True), ("ties", False), ("all there", False)],
)
def test_every_choice_maximizes(world: str, inform: bool, num_clients: int, m: int) -> None:
    """Random availability, failures, unreported rounds and two newcomers, against all subsets.

    With all there it is the paper's ideal scenario: ceil(K/m) opening rounds, then (18).
    """
    selector, oracle = CSUCB(clients_per_round=m, max_latency=1.0, seed=m), CSUCBOracle(m, max_latency=1.0)
    if inform:
        selector.inform(np.arange(num_clients))
        oracle.inform(range(num_clients))
    fleet = World(num_clients=num_clients, **WORLDS[world])
    assert follow(selector, oracle, world=fleet, rounds=ROUNDS, seed=1000 + num_clients) == []
    assert oracle.decided > ROUNDS / 2


def test_last_opening_round_is_topped_up_at_random() -> None:
    """Algorithm 1, line 4: five clients, two a round; the third round is the last unplayed client and anyone else.

    Client k takes k/10 s, so (18) would always top up with the smallest index played.
    """
    pairs = set()
    for seed in range(200):
        selector = CSUCB(clients_per_round=2, max_latency=1.0, seed=seed)
        seconds = {k: k / 10 + 0.01 for k in range(5)}
        played = {k for _ in range(2) for k in play(selector, range(5), seconds)}
        chosen = play(selector, range(5), seconds)
        (last,) = set(range(5)) - played
        assert last in chosen
        pairs.add((last, sum(chosen) - last))
    assert pairs == {(last, other) for last in range(5) for other in range(5) if other != last}
