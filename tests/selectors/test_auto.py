"""Numbers that fit by themselves: ``min_latency="auto"`` of BSFL, ``max_latency="auto"`` of CS-UCB and CS-UCB-Q.

The brute force keeps every play and scales all of them at every question. If the number that was taken is that of a
selector with a fixed one, both choose the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import BSFL, create
from tests.selectors.oracles import BSFLOracle, CSUCBOracle, World, follow
from tests.selectors.rounds import report

AUTO: dict[str, dict[str, Any]] = {
    "bsfl": {"min_latency": "auto"},
    "cs-ucb": {"max_latency": "auto"},
    "cs-ucb-q": {"max_latency": "auto"},
}
Plays = list[tuple[int, bool, float]]  # client, completed, seconds


class AutoBSFLOracle(BSFLOracle):
    """tau_min is the tenth percentile of the clients' mean seconds; before there is one, failures count alike.

    A play counts as at least the tau_min after its round, and a client's fastest one as at least the present tau_min.
    """

    def shortest(self, rounds: int) -> float:
        """tau_min after so many rounds of the history."""
        done: dict[int, list[float]] = {}
        for past in self.rounds[:rounds]:
            for who, good, seconds in past.rows:
                done.setdefault(who, []).extend([seconds] * good)
        means = sorted(sum(each) / len(each) for each in done.values() if each)
        return means[math.floor(0.1 * (len(means) - 1))] if means else math.inf

    def observations(self, client: int) -> list[float]:
        """As many speeds as plays, with the mean that the client has now."""
        plays: list[float] = []
        fastest = None
        for number, past in enumerate(self.rounds, start=1):
            for who, good, seconds in past.rows:
                if who == client:
                    cut = self.shortest(number)
                    plays.append(max(seconds, cut if cut < math.inf else 0.0))
                    if good and (fastest is None or plays[-1] < plays[fastest]):
                        fastest = len(plays) - 1
        self.min_latency = now = self.shortest(len(self.rounds))
        if fastest is not None:
            plays[fastest] = max(plays[fastest], now)
        speed = 1.0 if now == math.inf else min(1.0, sum(now / seconds for seconds in plays) / max(len(plays), 1))
        return [speed] * len(plays)


class AutoCSUCBOracle(CSUCBOracle):
    """tau_max is just above the slowest play that completed in the whole history; a failure is worth -1."""

    def reward(self, completed: bool, latency: float) -> float:
        done = [seconds for past in self.rounds for _, good, seconds in past.rows if good]
        return 1 - latency / np.nextafter(max(done), math.inf) if completed else -1.0


@pytest.mark.parametrize(("grid", "seed"), [((), 0), ((), 1), ((0.1, 0.5, 1.0, 2.5), 2)])
@pytest.mark.parametrize("name", ["bsfl", "cs-ucb"])
def test_every_choice_maximizes(name: str, grid: tuple[float, ...], seed: int) -> None:
    """Random availability, failures, unreported rounds and two newcomers, against all subsets."""
    world = World(num_clients=6, newcomers={0: 30, 5: 60}, grid=grid)
    more = {"alpha": 0.5} if name == "bsfl" else {}
    selector: Any = create(name, clients_per_round=2, seed=seed, **AUTO[name], **more)
    bsfl = AutoBSFLOracle(2, 3.0, min_latency=math.inf, alpha=0.5, beta=1)
    oracle: Any = bsfl if name == "bsfl" else AutoCSUCBOracle(2, 3.0)
    assert follow(selector, oracle, world=world, rounds=100, seed=3000 + seed) == []
    assert oracle.decided > 50
    if name == "bsfl":
        assert selector.min_latency_now == pytest.approx(oracle.shortest(100), rel=1e-12)


def scores(selector: Any) -> np.ndarray:
    """Mean speeds or rewards of the clients that were observed."""
    played = selector._plays > 0
    if isinstance(selector, BSFL):
        return np.asarray(selector._speeds(played))
    return np.asarray(selector._rewards()[played])


@pytest.mark.parametrize("name", AUTO)
def test_choices_are_those_of_the_fixed_number(name: str) -> None:
    """Times by client and round; nobody fails. All first plays are the fastest or the slowest there will be.

    Client 0 always takes the shortest time, so that the mean of the fastest client stays at 1 s. So "auto" has the
    fixed number as soon as it chooses by scores.
    """
    times = np.random.default_rng(6).uniform(1.0, 8.0, (7, 400))
    times[0] = 1.0
    fixed = {"bsfl": {"min_latency": 1.0}}.get(name, {"max_latency": np.nextafter(8.0, math.inf)})
    pair = [create(name, clients_per_round=2, seed=3, **params) for params in (AUTO[name], fixed)]
    seen: set[int] = set()
    for number in range(400):
        chosen = [selector.select(np.arange(7)) for selector in pair]
        assert chosen[0].tolist() == chosen[1].tolist()
        latency = times[chosen[0], number]
        latency[[k not in seen for k in chosen[0].tolist()]] = 1.0 if name == "bsfl" else 8.0
        seen |= set(chosen[0].tolist())
        for selector in pair:
            selector.observe(report(chosen[0], latency))
    assert len(seen) == 7
    numbers = [getattr(selector, f"{key}_now") for selector in pair for key in AUTO[name]]
    assert numbers == [next(iter(fixed.values()))] * 2


UCB = ["cs-ucb", "cs-ucb-q"]
HAND: list[Plays] = [[(0, True, 2.0), (1, True, 8.0)], [(0, True, 4.0), (1, False, 60.0)]]
USUAL: list[Plays] = [[(0, True, 2.0), (1, True, 4.0), (2, True, 8.0)]] * 10
ODD: Plays = [(2, True, 0.001)]


@pytest.mark.parametrize(
    ("names", "rounds", "now", "expected"),
    [
        # Mean seconds 3 and 8: the play of 2 s counts as 3 s: (1 + 3/4)/2 and (3/8 + 1/20)/2.
        (["bsfl"], HAND, 3.0, [0.875, 0.2125]),
        # With client 2: (1/2 + 1/4)/2, (1/8 + 1/60)/2 and 1.
        (["bsfl"], [*HAND, [(2, True, 1.0)]], 1.0, [0.375, (1 / 8 + 1 / 60) / 2, 1.0]),
        # (.75 + .5)/2 and (0 - 1)/2, as a failure is worth -1; at 16 s (.875 + .75)/2, (.5 - 1)/2 and 0.
        (UCB, HAND, 8.0, [0.625, -0.5]),
        (UCB, [*HAND, [(2, True, 16.0)]], 16.0, [0.8125, -0.25, 0.0]),
        # An outlier is forgotten: client 2's mean is 7.27 s, and the odd play counts as 2 s: (10 * .25 + 1)/11.
        (["bsfl"], [ODD], 0.001, [1.0]),
        (["bsfl"], [ODD, *USUAL], 2.0, [1.0, 0.5, 3.5 / 11]),
        (["bsfl"], [*USUAL, ODD], 2.0, [1.0, 0.5, 3.5 / 11]),
        # One client of eleven reports 1 ms for ever: tau_min is the mean of the next one.
        (["bsfl"], [[(k, True, k or 0.001) for k in range(11)]] * 5, 1.0, [1.0, *(1.0 / k for k in range(1, 11))]),
        # An answer in no time leaves the scores finite.
        (["bsfl"], [[(0, True, 0.0), (1, True, 2.0)]], 1e-6, [1.0, 0.5e-6]),
        (UCB, [[(0, True, 0.0), (1, True, 0.0)]], 5e-324, [1.0, 1.0]),
    ],
)
def test_scores_by_hand(names: list[str], rounds: list[Plays], now: float, expected: list[float]) -> None:
    for name in names:
        selector: Any = create(name, clients_per_round=11, seed=0, **AUTO[name])
        selector.inform(np.arange(11))
        for plays in rounds:
            clients, completed, seconds = map(np.array, zip(*plays, strict=True))
            selector.observe(report(clients, seconds, failed=clients[~completed]))
        (parameter,) = AUTO[name]
        assert getattr(selector, f"{parameter}_now") == pytest.approx(now, rel=1e-15)
        assert scores(selector) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", AUTO)
def test_before_anybody_completed_all_are_alike(name: str) -> None:
    """Nothing is known then: those not asked yet go first, then at random; nothing is infinite or NaN."""
    selector = create(name, clients_per_round=2, seed=1, **AUTO[name])
    for _ in range(10):
        chosen = selector.select(np.arange(6))
        selector.observe(report(chosen, 60.0, failed=chosen))
    assert np.ptp(scores(selector)) == 0.0
    assert np.isfinite(scores(selector)).all()
    assert selector.state_dict()["plays"].min() > 0
    selector.observe(report([0], 3.0))
    assert np.argmax(scores(selector)) == 0 or name != "bsfl"


@pytest.mark.parametrize("name", AUTO)
def test_who_is_forgotten_no_longer_counts(name: str) -> None:
    """Client 0 was the fastest (.5 s), client 1 the slowest (30 s): without them the others' 2 and 4 s say it."""
    selector: Any = create(name, clients_per_round=2, seed=1, **AUTO[name])
    selector.inform(np.arange(4))
    selector.observe(report(range(4), [0.5, 30.0, 2.0, 4.0]))
    selector.forget(np.array([0, 1]))
    now = selector.min_latency_now if name == "bsfl" else selector.max_latency_now
    assert now == (2.0 if name == "bsfl" else np.nextafter(4.0, math.inf))
    assert scores(selector) == pytest.approx([1.0, 0.5] if name == "bsfl" else [0.5, 0.0], abs=1e-15)


@pytest.mark.parametrize("name", AUTO)
def test_what_is_neither_a_number_nor_auto_is_refused(name: str) -> None:
    (parameter,) = AUTO[name]
    for wrong in ("Auto", "", 0, 0.0, -1.0, None, math.nan, math.inf, True, b"auto"):
        with pytest.raises(ParameterError, match=rf'{parameter} must be .*"auto"'):
            create(name, clients_per_round=2, **{parameter: wrong})
