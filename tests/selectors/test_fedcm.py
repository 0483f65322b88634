"""FedCM's two samplers against rounds worked by hand and against a plain reading of Kim et al. (2020)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import RoundReport, create
from tests.selectors.oracle_fedcm import FedCMTSOracle, FedCMUCBOracle, chances, follow
from tests.selectors.oracles import World

ROUNDS = 150


def build(name: str = "fedcm-ucb", **parameters: Any) -> Any:
    """Make a sampler by its name."""
    return create(name, **{"clients_per_round": 2, "seed": 0} | parameters)


def play(selector: Any, available: list[int], kept: tuple[int, ...] = (), failed: tuple[int, ...] = ()) -> set[int]:
    """Choose, then report who was kept and who failed; returns the choice."""
    chosen = selector.select(np.array(available, dtype=np.int64))
    completed = ~np.isin(chosen, failed)
    latency = np.where(completed, 1.0, 5.0)
    selector.observe(
        RoundReport(clients=chosen, completed=completed, latency=latency, kept=completed & np.isin(chosen, kept))
    )
    return set(chosen.tolist())


def with_means(mean: list[float], **parameters: Any) -> Any:
    """Make fedcm-ucb with these initial draws in place of its own."""
    selector = build(**parameters)
    selector.inform(np.arange(len(mean)))
    selector.load_state_dict(selector.state_dict() | {"mean": np.array(mean)})
    return selector


def test_ucb_rounds_by_hand() -> None:
    """Three clients, one a round; the initial draws are (0, 1, 0), so a = (1, 1, 1), mean = (0, 1, 0).

    Round 1, ln 1 = 0: the means decide                                                            -> 1, kept
        mean_1 = (1*1 + 1)/2 = 1, a_1 = 2
    Round 2, 3 ln 2/2 = 1.0397: (sqrt(1.0397) = 1.0197, 1 + sqrt(1.0397/2) = 1.7210, 1.0197)       -> 1, not kept
        mean_1 = (2*1 + 0)/3 = .6667, a_1 = 3
    Round 3, 3 ln 3/2 = 1.6479: (1.2837, .6667 + sqrt(1.6479/3) = 1.4078, 1.2837)                  -> 1, fails
        mean_1 = (3*.6667 + 0)/4 = .5, a_1 = 4: a failure is a play with r = 0
    Round 4, 3 ln 4/2 = 2.0794, client 2 away: (1.4420, .5 + sqrt(2.0794/4) = 1.2210)              -> 0, kept
        mean_0 = (1*0 + 1)/2 = .5, a_0 = 2
    Round 5, 3 ln 5/2 = 2.4142: (.5 + 1.0987 = 1.5987, .5 + .7769 = 1.2769, 1.5538)                -> 0, not kept
        mean_0 = (2*.5 + 0)/3 = .3333, a_0 = 3
    Round 6, 3 ln 6/2 = 2.6876: (.3333 + .9465 = 1.2798, .5 + .8197 = 1.3197, 1.6394)              -> 2
    """
    for seed in range(10):
        selector = with_means([0.0, 1.0, 0.0], clients_per_round=1, seed=seed)
        everyone = [0, 1, 2]
        assert play(selector, everyone, kept=(1,)) == {1}
        assert play(selector, everyone) == {1}
        assert play(selector, everyone, failed=(1,)) == {1}
        np.testing.assert_allclose(selector.state_dict()["mean"], [0, 0.5, 0], atol=1e-12)
        np.testing.assert_array_equal(selector.state_dict()["plays"], [1, 4, 1])
        assert play(selector, [1, 0], kept=(0,)) == {0}
        assert play(selector, everyone) == {0}
        np.testing.assert_allclose(selector.state_dict()["mean"], [1 / 3, 0.5, 0], atol=1e-12)
        assert play(selector, everyone) == {2}


@pytest.mark.parametrize(("before", "expected"), [(11, 0), (12, 1)])
def test_the_bonus_by_hand(before: int, expected: int) -> None:
    """Client 0 has a = 5, mean 1 (always kept), client 1 a = 2, mean .5; the choice depends on the round alone.

    Round 11: 3 ln 11/2 = 3.5968: 1 + sqrt(.7194) = 1.8482 against .5 + sqrt(1.7984) = 1.8411               -> 0
    Round 12: 3 ln 12/2 = 3.7274: 1 + sqrt(.7455) = 1.8634 against .5 + sqrt(1.8637) = 1.8652               -> 1
    (2 ln t/a takes 1 in round 11, as ln(t+1) does; ln t/a takes 0 in round 12, as ln(t-1) does.)
    """
    selector = with_means([1.0, 1.0], clients_per_round=1)
    for _ in range(4):
        play(selector, [0], kept=(0,))
    play(selector, [1])
    for _ in range(before - 6):
        selector.select(np.array([0]))  # never observed: the round counts, the choice does not
    np.testing.assert_array_equal(selector.state_dict()["plays"], [5, 2])
    assert selector.round == before - 1
    assert selector.select(np.arange(2)).tolist() == [expected]


@pytest.mark.parametrize("inform", [True, False], ids=["informed", "seen"])
@pytest.mark.parametrize("seed", range(4))
def test_ucb_takes_the_largest_indices(seed: int, inform: bool) -> None:
    """Random availability, failures, unreported rounds, newcomers and returning strangers."""
    selector, oracle = build(seed=seed), FedCMUCBOracle(2)
    if inform:
        selector.inform(np.arange(7))
    world = World(num_clients=7, newcomers={0: 20, 5: 60})
    assert follow(selector, oracle, RoundReport, world=world, rounds=ROUNDS, seed=seed, forget_every=35) == []
    assert oracle.decided > ROUNDS / 2


def test_initial_means_are_fair_coins_drawn_once() -> None:
    """1,000 clients: about half start at 1 (4 standard deviations are 63); telling of them again changes nothing."""
    selector = build()
    selector.inform(np.arange(1000))
    first = selector.state_dict()["mean"]
    assert set(first.tolist()) == {0.0, 1.0}
    assert abs(first.sum() - 500) < 63
    selector.inform(np.arange(1100))
    selector.select(np.arange(1100))
    np.testing.assert_array_equal(selector.state_dict()["mean"][:1000], first)
    selector.forget(np.arange(1000))
    selector.inform(np.arange(1000))
    again = selector.state_dict()["mean"][:1000]
    assert abs(np.count_nonzero(again != first) - 500) < 63  # strangers: new draws, of which half differ
    np.testing.assert_array_equal(selector.state_dict()["plays"], np.ones(1100))


@pytest.mark.parametrize("name", ["fedcm-ucb", "fedcm-ts"])
def test_first_choice_favours_no_index(name: str) -> None:
    """Two clients, 400 seeds: each is first about 200 times (4 sd = 40); ties by index would give UCB's first 300."""
    first = Counter(int(build(name, clients_per_round=1, seed=seed).select(np.arange(2))[0]) for seed in range(400))
    assert abs(first[0] - 200) < 40


@pytest.mark.parametrize("name", ["fedcm-ucb", "fedcm-ts"])
def test_needs_the_filter(name: str) -> None:
    """Without the column `kept` a report is refused by name; the column is all that is needed."""
    selector = build(name)
    assert selector.needs - {"latency"} == {"kept"}
    chosen = selector.select(np.arange(4))
    with pytest.raises(ValueError, match="kept"):
        selector.observe(RoundReport(clients=chosen, completed=[True, True], latency=[1.0, 1.0]))


# ---- Thompson sampling ---------------------------------------------------------------------------------------------


def teach(selector: Any, client: int, kept: int, lost: int) -> None:
    """Let a client be kept and lost so often, every second loss a failure."""
    for _ in range(kept):
        play(selector, [client], kept=(client,))
    for number in range(lost):
        play(selector, [client], failed=(client,) if number % 2 else ())


def frequencies(selector: Any, num_clients: int, rounds: int) -> tuple[Counter[frozenset[int]], int]:
    """Choose without observing, so that posteriors stay; returns how often each set came, and how often twice."""
    choices = [frozenset(selector.select(np.arange(num_clients)).tolist()) for _ in range(rounds)]
    return Counter(choices), sum(a == b for a, b in pairwise(choices))


@pytest.mark.parametrize(("kept", "lost", "p"), [(2, 0, 3 / 4), (0, 2, 1 / 4), (3, 2, 4 / 7)])
def test_ts_chances_by_hand(kept: int, lost: int, p: float) -> None:
    """Client 1 was never played: theta_1 is uniform, so client 0 wins with E[theta_0] = alpha/(alpha + beta).

    Kept twice: Beta(3, 1), 3/4. Lost twice: Beta(1, 3), 1/4. Kept 3 times, lost twice: Beta(4, 3), 4/7.
    4,000 rounds: 4.5 standard deviations are at most .0356.
    """
    selector = build("fedcm-ts", clients_per_round=1)
    teach(selector, 0, kept, lost)
    counts, _ = frequencies(selector, 2, 4000)
    assert abs(counts[frozenset({0})] / 4000 - p) < 4.5 * np.sqrt(p * (1 - p) / 4000)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_ts_frequencies(m: int) -> None:
    """Five posteriors, sets of m: every set as often as independent draws give it, and no memory of the last round."""
    lessons = {0: (4, 1), 1: (0, 3), 2: (6, 6), 3: (1, 0), 4: (0, 0)}
    selector = build("fedcm-ts", clients_per_round=m, seed=m)
    for client, (kept, lost) in lessons.items():
        teach(selector, client, kept, lost)
    odds = chances({client: (1 + kept, 1 + lost) for client, (kept, lost) in lessons.items()}, m)
    rounds = 6000
    counts, twice = frequencies(selector, 5, rounds)
    for members, p in odds.items():
        assert abs(counts[members] - rounds * p) < 4.5 * np.sqrt(rounds * p * (1 - p)) + 1, sorted(members)
    repeated = sum(p * p for p in odds.values())
    assert abs(twice - rounds * repeated) < 6 * np.sqrt(rounds * repeated)


def test_chances_of_the_oracle() -> None:
    """P(Beta(3, 1) > uniform) = 3/4; of four uniform draws each pair is on top once in six times."""
    odds = chances({0: (3, 1), 1: (1, 1)}, 1)
    assert odds[frozenset({0})] == pytest.approx(3 / 4, abs=1e-4)
    assert list(chances(dict.fromkeys(range(4), (1, 1)), 2).values()) == pytest.approx([1 / 6] * 6, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_ts_run(seed: int) -> None:
    """Posteriors exact in every round; choices no more and no less surprising than posterior sampling."""
    selector, oracle = build("fedcm-ts", seed=seed), FedCMTSOracle(2)
    world = World(num_clients=6, newcomers={0: 20, 5: 60})
    assert follow(selector, oracle, RoundReport, world=world, rounds=ROUNDS, seed=seed, forget_every=45) == []
    assert oracle.decided > ROUNDS / 2
    assert abs(oracle.deviation()) < 4


class Impostor:
    """Passes on everything to a sampler, but chooses by its own rule."""

    def __init__(self, selector: Any, rule: Any) -> None:
        """Wrap a selector; rule(state, available) -> scores."""
        self.selector, self.rule = selector, rule

    def __getattr__(self, name: str) -> Any:
        """Pass on."""
        return getattr(self.selector, name)

    def select(self, available: np.ndarray) -> np.ndarray:
        """Let the selector count the round, then choose otherwise."""
        self.selector.select(available)
        scores = self.rule(self.selector.state_dict(), available)
        return available[np.argsort(-scores, kind="stable")[:2]]


def test_the_oracles_can_say_no() -> None:
    """Greedy, random and a wrong bonus are faulted."""
    rng = np.random.default_rng(0)
    world = World(num_clients=6)
    rules = {
        "greedy": lambda state, k: (state["successes"][k] + 1) / (state["successes"] + state["failures"] + 2)[k],
        "random": lambda state, k: rng.random(len(k)),
    }
    for name, rule in rules.items():
        oracle = FedCMTSOracle(2)
        follow(Impostor(build("fedcm-ts"), rule), oracle, RoundReport, world=world, rounds=ROUNDS, seed=1)
        assert abs(oracle.deviation()) > 4, name
    ucb = Impostor(build(), lambda state, k: state["mean"][k] + np.sqrt(2 * np.log(state["round"]) / state["plays"][k]))
    assert follow(ucb, FedCMUCBOracle(2), RoundReport, world=world, rounds=ROUNDS, seed=1)
