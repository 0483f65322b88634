"""FedCM's two samplers against rounds worked by hand and against a plain reading of Kim et al. (2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import create
from tests.selectors import rounds
from tests.selectors.oracle_draws import frequencies, p_value
from tests.selectors.oracles import TOLERANCE, Judge, World, follow, misplaced


@dataclass
class FedCMOracle(Judge):
    """What slow readings of both samplers share: every reward of every client, and the round number.

    Means, posteriors and bounds are counted again at each question. What is drawn at random is judged, not copied: the
    initial means of FedCM-UCB are read from the selector's state once, when a client is registered (each has to be 0 or
    1). Of FedCM-TS the posteriors have to be exact in every round; how often they give each choice is got by
    integration.
    """

    m: int
    t: int = 0
    rewards: dict[int, list[int]] = field(default_factory=dict)

    def meet(self, num_clients: int, rng: np.random.Generator) -> None:
        self.quality = rng.permutation(np.linspace(0.1, 0.9, num_clients))

    def forget(self, client: int) -> None:
        self.rewards.pop(client, None)

    def columns(self, clients: np.ndarray, completed: np.ndarray, t: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"kept": completed & (rng.random(len(clients)) < self.quality[clients])}

    def observe(self, report: Any) -> None:
        """Record r_k = 1 if FedCA kept the model of client k, else 0, also if it failed."""
        for client, reward in zip(report.clients.tolist(), report.kept.tolist(), strict=True):
            self.rewards[client].append(int(reward))

    def register(self, client: int) -> str:
        """Take in a client that the selector has registered since the last round; '' if it is as a newcomer."""
        self.rewards[client] = []
        return ""

    def scores(self, available: Sequence[int]) -> dict[int, float]:
        raise NotImplementedError

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        self.t += 1
        new = [k for k in np.flatnonzero(self.state["registered"]).tolist() if k not in self.rewards]
        faults = [fault for fault in map(self.register, new) if fault]
        scores = self.scores(available)
        self.decided += len(scores) > self.m
        return "; ".join(faults) or misplaced(scores, chosen, self.m) or self.fault_in_state()


@dataclass
class FedCMUCBOracle(FedCMOracle):
    """Kim et al., Algorithm 2, all indices refreshed every round."""

    initial: dict[int, float] = field(default_factory=dict)

    def register(self, client: int) -> str:
        self.rewards[client], self.initial[client] = [], float(self.state["mean"][client])
        fair = self.initial[client] in (0.0, 1.0) and self.state["plays"][client] == 1
        return "" if fair else f"client {client} does not start at a = 1 and 0 or 1"

    def count(self, client: int) -> int:
        """Return a_k, which starts at 1."""
        return 1 + len(self.rewards[client])

    def mean(self, client: int) -> float:
        """Return mean_k: the initial draw counts as one observation, since a_k starts at 1."""
        return (self.initial[client] + sum(self.rewards[client])) / self.count(client)

    def scores(self, available: Sequence[int]) -> dict[int, float]:
        """Return mean_k + sqrt(3 ln t / (2 a_k))."""
        return {k: self.mean(k) + math.sqrt(3 * math.log(self.t) / (2 * self.count(k))) for k in available}

    def fault_in_state(self) -> str:
        for client in self.rewards:
            plays, mean = self.state["plays"][client], self.state["mean"][client]
            if plays != self.count(client) or abs(mean - self.mean(client)) > TOLERANCE:
                return f"client {client} has (a, mean) = {plays, mean}"
        return ""


class FedCMTSOracle(FedCMOracle):
    """Kim et al., Algorithm 3, all draws made anew every round, from Beta(1, 1)."""

    def scores(self, available: Sequence[int]) -> dict[int, float]:
        """Anybody may be chosen."""
        return dict.fromkeys(available, 0.0)

    def fault_in_state(self) -> str:
        for client, rewards in self.rewards.items():
            held = (self.state["successes"][client], self.state["failures"][client])
            if held != (1 + sum(rewards), 1 + len(rewards) - sum(rewards)):
                return f"client {client} holds {held}"
        return ""


def beta_cdf(alpha: int, beta: int, x: np.ndarray) -> np.ndarray:
    """Return P(Beta(alpha, beta) <= x): alpha or more successes in alpha + beta - 1 trials."""
    n = alpha + beta - 1
    return np.sum([math.comb(n, j) * x**j * (1 - x) ** (n - j) for j in range(alpha, n + 1)], axis=0)


def chances(posteriors: Mapping[int, tuple[int, int]], m: int, cells: int = 400) -> dict[frozenset[int], float]:
    """Return the probability of each set of m to hold the m largest of one draw per posterior.

    P(min over the set > max over the others) = integral of the others' distribution over the law of the set's minimum.
    """
    x = np.linspace(0, 1, cells + 1)
    below = {client: beta_cdf(*posterior, x) for client, posterior in posteriors.items()}
    result = {}
    for members in combinations(sorted(posteriors), m):
        above = np.prod([1 - below[client] for client in members], axis=0)
        others = np.prod([np.ones_like(x)] + [below[k] for k in posteriors if k not in members], axis=0)
        result[frozenset(members)] = float(np.sum((above[:-1] - above[1:]) * (others[1:] + others[:-1]) / 2))
    total = sum(result.values())
    assert abs(total - 1) < 1e-3, f"the grid is too coarse: probabilities add up to {total}"
    return {members: p / total for members, p in result.items()}


ROUNDS = 150
build = partial(create, clients_per_round=2, seed=0)


def play(selector: Any, available: list[int], kept: tuple[int, ...] = (), failed: tuple[int, ...] = ()) -> set[int]:
    """Choose, then report who was kept and who failed; returns the choice."""
    chosen = selector.select(np.array(available))
    selector.observe(rounds.report(chosen, failed=failed, kept=np.isin(chosen, list(set(kept) - set(failed)))))
    return set(chosen.tolist())


def known(name: str, clients_per_round: int, seed: int, **own: list[Any]) -> Any:
    """A selector with this state by client in place of its own."""
    selector = build(name, clients_per_round=clients_per_round, seed=seed)
    selector.inform(np.arange(len(next(iter(own.values())))))
    selector.load_state_dict(selector.state_dict() | own)
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
        selector = known("fedcm-ucb", 1, seed, mean=[0.0, 1.0, 0.0])
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


@pytest.mark.parametrize("inform", [True, False], ids=["informed", "seen"])
@pytest.mark.parametrize("name", ["fedcm-ucb", "fedcm-ts"])
@pytest.mark.parametrize("seed", range(2))
def test_the_oracle_finds_no_fault(seed: int, name: str, inform: bool) -> None:
    """Random availability, failures, unreported rounds, newcomers and returning strangers.

    UCB takes the largest indices; TS has exact posteriors in every round.
    """
    selector, oracle = build(name, seed=seed), (FedCMUCBOracle if name == "fedcm-ucb" else FedCMTSOracle)(2)
    if inform:
        selector.inform(np.arange(6))
    world = World(num_clients=6, newcomers={0: 20, 5: 60})
    assert follow(selector, oracle, world=world, rounds=ROUNDS, seed=seed, forget_every=35) == []
    assert oracle.decided > ROUNDS / 2


def test_initial_means_are_fair_coins_drawn_once() -> None:
    """1,000 clients: about half start at 1 (4 standard deviations are 63); telling of them again changes nothing."""
    selector = build("fedcm-ucb")
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


FIVE = [(5, 2), (1, 4), (7, 7), (2, 1), (1, 1)]


@pytest.mark.parametrize(
    ("m", "posteriors"),
    [(1, [(3, 1), (1, 1)]), (1, [(1, 3), (1, 1)]), (1, [(4, 3), (1, 1)]), (1, FIVE), (2, FIVE), (3, FIVE)],
)
def test_ts_frequencies(m: int, posteriors: list[tuple[int, int]]) -> None:
    """Successes and failures by client: every set of m as often as independent draws of the posteriors give it.

    Nothing is observed meanwhile, so that posteriors stay; and no choice remembers the one before: pairs of choices
    are as often equal as independent ones.
    """
    successes, failures = zip(*posteriors, strict=True)
    selector = known("fedcm-ts", m, m, successes=list(successes), failures=list(failures))
    odds = chances(dict(enumerate(posteriors)), m)
    choices = [frozenset(selector.select(np.arange(len(posteriors))).tolist()) for _ in range(4000)]
    assert p_value(frequencies(iter(choices).__next__, 4000), odds) > 1e-3
    twice, repeated = sum(a == b for a, b in pairwise(choices)), 4000 * sum(p * p for p in odds.values())
    assert abs(twice - repeated) < 6 * np.sqrt(repeated)
