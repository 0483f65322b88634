"""GPFL against rounds worked by hand and against a plain recount of the whole history, (5)-(8) of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import create
from tests.selectors import rounds
from tests.selectors.oracles import TOLERANCE, Judge, World, follow, misplaced

LIMIT = 50.0  # of an exponent in (8)


@dataclass
class PastRound:
    """One round: (client, completed, projection) of everyone reported, and the new global model's scores."""

    rows: list[tuple[int, bool, float]] = field(default_factory=list)
    accuracy: float | None = None  # None: never observed
    loss: float = math.nan


@dataclass
class GPFLOracle(Judge):
    """A slow reading of Algorithm 1 with GPCB (6) deciding; numbers in brackets are the paper's equations.

    It keeps the history, and counts every reward again from the first round at each question. The paper is silent about
    a round that is never observed (nobody available, or no report): the rewards (5) stand, as in the selector.
    """

    m: int
    total_rounds: int
    rho: float = 1.0
    loss_sign: str = "corrected"
    exploration: float | None = None
    spread: float = 1.0  # of the clients' projections, which differ and drift
    rounds: list[PastRound] = field(default_factory=list)
    registered: set[int] = field(default_factory=set)
    left: dict[int, int] = field(default_factory=dict)  # new name of a forgotten client -> where in `rounds` it ends
    accuracy: float = 0.1
    loss: float = 2.3

    def meet(self, num_clients: int, rng: np.random.Generator) -> None:
        self.level = rng.normal(0, self.spread, num_clients)

    def forget(self, client: int) -> None:
        """Forget it; its past stays in the past rewards of others."""
        self.registered.discard(client)
        ghost = -1 - len(self.left)
        self.left[ghost] = len(self.rounds)
        for past in self.rounds:
            past.rows = [(ghost if row[0] == client else row[0], *row[1:]) for row in past.rows]

    def columns(self, clients: np.ndarray, completed: np.ndarray, t: int, rng: np.random.Generator) -> dict[str, Any]:
        """The global accuracy stays as it was in half of the rounds, and may fall."""
        projection = self.level[clients] + rng.normal(0, self.spread / 2, len(clients))
        if completed.any() and t > 1:
            self.accuracy += round(float(rng.normal(0.005, 0.03)), 2) if rng.random() < 0.5 else 0.0
            self.loss = 0.1 + abs(self.loss + float(rng.normal(-0.02, 0.5)))
        scores = {"global_accuracy": self.accuracy, "global_loss": self.loss}
        return {"projection": np.where(completed, projection, np.nan), **scores}

    def observe(self, report: Any) -> None:
        past = self.rounds[-1]
        columns = (report.clients, report.completed, report.projection)
        past.rows = list(zip(*(column.tolist() for column in columns), strict=True))
        past.accuracy, past.loss = report.global_accuracy, report.global_loss

    def plays(self, client: int) -> int:
        """Return n_k: the rounds in which a client was reported, completed or not."""
        return sum(row[0] == client for past in self.rounds for row in past.rows)

    def factor(self, index: int) -> float:
        """Return the factor of (8) for the clients that completed a round."""
        now = self.rounds[index]
        before = [past for past in self.rounds[:index] if past.accuracy is not None]
        if not before:
            return 1.0
        assert now.accuracy is not None
        assert before[-1].accuracy is not None
        if now.accuracy != before[-1].accuracy:
            return 2 * math.exp(max(-LIMIT, min(LIMIT, now.accuracy - before[-1].accuracy)))
        fall = before[-1].loss - now.loss
        return math.exp(max(-LIMIT, min(LIMIT, fall if self.loss_sign == "corrected" else -fall)))

    def rewards(self) -> dict[int, float]:
        """Return the mean over past rounds of mu_k."""
        latest: dict[int, float] = {}
        total = dict.fromkeys(self.registered, 0.0)
        for index, past in enumerate(self.rounds):
            done = {client: projection for client, completed, projection in past.rows if completed}
            latest = {k: c for k, c in (latest | done).items() if index < self.left.get(k, math.inf)}
            highest = max(latest.values(), default=0.0)
            weights = {client: math.exp(c - highest) for client, c in latest.items()}
            for client in weights.keys() & self.registered:
                reward = weights[client] / sum(weights.values())  # (5)
                total[client] += reward * (self.factor(index) if client in done else 1.0)  # (8)
        return {client: value / max(len(self.rounds), 1) for client, value in total.items()}

    def scores(self, available: Sequence[int]) -> dict[int, float]:
        """Return the GPCB (6) for the round after the recorded ones."""
        t = len(self.rounds) + 1
        mean = self.rewards()
        n = sum(self.plays(client) for client in self.registered)
        alpha = self.rho * t / self.total_rounds if self.exploration is None else self.exploration  # (7), Fig. 7a
        result = {}
        for client in available:
            plays = self.plays(client)
            result[client] = mean[client] + alpha * math.sqrt(2 * math.log(n) / plays) if plays else math.inf
        return result

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        self.registered.update(available)
        scores = self.scores(available) if self.rounds else dict.fromkeys(available, math.inf)
        m = self.m if self.rounds else len(available)  # initialization takes everyone
        self.decided += len(scores) > m and max(scores.values()) - min(scores.values()) > TOLERANCE
        self.rounds.append(PastRound())
        return misplaced(scores, chosen, m)


class Crowd(World):
    """Somebody is there in round 1, and in every round if all are reported."""

    def available(self, t: int, m: int, rng: np.random.Generator) -> np.ndarray:
        available = super().available(t, m, rng)
        return np.arange(1, 6) if t == 1 or not (available.size or self.unreported) else available


build = partial(create, "gpfl", clients_per_round=3, total_rounds=120, seed=0)


def play(selector: Any, available: Sequence[int], projections: dict[int, float], accuracy: float, loss: float) -> Any:
    """Choose and report projections, NaN for a failure; returns the choice."""
    told = {k: projection for k, projection in projections.items() if not math.isnan(projection)}
    columns = {"projection": told, "global_accuracy": accuracy, "global_loss": loss}
    return set(rounds.play(selector, available, dict.fromkeys(told, 1.0), late=5.0, **columns))


def test_rounds_by_hand() -> None:
    """Three clients, one a round, T = 10, rho = 1, corrected sign. Scores: mean + t/10 sqrt(2 ln n/n_k).

    Round 1: everyone; c = (0, ln 2, ln 3), so ctilde = (1/6, 2/6, 3/6); A = .1, F = 2.3, no factor.
    Round 2: mean (.1667, .3333, .5), bonus .2 sqrt(2 ln 3) = .2965 for all                                      -> 2
        c_2 = 0: ctilde = (.25, .5, .25); A as before, F falls to 1.3: mu_2 = .25 e^1 = .6796; n = (1, 1, 2)
    Round 3: mean (.2083, .4167, .5898) + (.4995, .4995, .3532) = (.7079, .9162, .9430)                          -> 2
        It fails: C kept, mu = (.25, .5, .25) without a factor; n = (1, 1, 3)
    Round 4: mean (.2222, .4444, .4765) + (.7176, .7176, .4143) = (.9399, 1.1621, .8909)                         -> 1
        c_1 = ln 6: ctilde = (.125, .75, .125); A rises to .3: mu_1 = .75 * 2 e^.2 = 1.8321; n = (1, 2, 3)
    Round 5: mean (.1979, .7914, .3886) + (.9465, .6693, .5465) = (1.1444, 1.4606, .9351)                        -> 1
        c_1 = ln 2: ctilde = (.25, .5, .25); A falls to .25: still amplified, mu_1 = .5 * 2 e^-.05 = .9512
    Round 6, 1 away: mean (.2083, ., .3609) + (1.1837, ., .6834) = (1.3920, ., 1.0443)                           -> 0
    """
    for seed in range(10):
        selector = build(clients_per_round=1, total_rounds=10, seed=seed)
        everyone = [0, 1, 2]
        assert play(selector, everyone, {0: 0.0, 1: math.log(2), 2: math.log(3)}, 0.1, 2.3) == {0, 1, 2}
        assert play(selector, everyone, {2: 0.0}, 0.1, 1.3) == {2}
        assert play(selector, everyone, {2: math.nan}, 0.1, 1.3) == {2}
        assert play(selector, everyone, {1: math.log(6)}, 0.3, 1.2) == {1}
        assert play(selector, everyone, {1: math.log(2)}, 0.25, 1.3) == {1}
        assert selector.select(np.array([0, 2])).tolist() == [0]


@pytest.mark.parametrize(("sort_by", "expected"), [("score", {2}), ("projection", {1})])
def test_algorithm_1_sorts_by_the_latest_projection(sort_by: str, expected: set[int]) -> None:
    """Round 3 of the rounds above: C is then (0, ln 2, 0)."""
    selector = build(clients_per_round=1, total_rounds=10, sort_by=sort_by)
    play(selector, [0, 1, 2], {0: 0.0, 1: math.log(2), 2: math.log(3)}, 0.1, 2.3)
    assert play(selector, [0, 1, 2], {2: 0.0}, 0.1, 1.3) == {2}
    assert set(selector.select(np.arange(3))) == expected


@pytest.mark.parametrize(("change", "exponent"), [(100.0, 50), (49.0, 49), (51.0, 50), (-3.0, -3)])
def test_exponents_are_clipped_at_50(change: float, exponent: float) -> None:
    """One client: its softmax is 1. The loss falls by 100, 49, 51, or rises by 3: mu = 1, then e^50, e^49, e^50, e^-3.

    With the printed sign it has to rise for that. The same for A (out of its range, as no accuracy changes so much):
    2 e^50, ...
    """
    ways = ("corrected", 0.0, 200.0 - change, 1.0), ("paper", 0.0, 200.0 + change, 1.0), ("paper", change, 200.0, 2.0)
    for loss_sign, accuracy, loss, factor in ways:
        selector = build(clients_per_round=1, loss_sign=loss_sign)
        play(selector, [0], {0: 0.3}, 0.0, 200.0)
        play(selector, [0], {0: 0.3}, accuracy, loss)
        [total] = selector.state_dict()["reward_sum"]
        assert total == pytest.approx(1.0 + factor * math.exp(exponent), rel=1e-12)


@pytest.mark.parametrize("loss_sign", ["corrected", "paper"])
@pytest.mark.parametrize(
    ("own", "spread", "unreported", "seed"),
    [
        ({}, 1.0, 0, 0), ({}, 1.0, 0, 3), ({"rho": 0.0}, 0.1, 0, 0), ({"rho": 0.3}, 3.0, 0, 1),
        ({"rho": 5.0}, 20.0, 0, 2), ({"exploration": 0.0}, 3.0, 0, 1), ({"exploration": 0.2}, 3.0, 0, 1),
        ({"exploration": 2.0, "rho": 7.0}, 3.0, 0, 1), ({}, 1.0, 0.25, 0), ({}, 1.0, 0.25, 1),
    ],
)  # fmt: skip
def test_every_choice_has_the_largest_scores(
    own: dict[str, float], spread: float, unreported: float, seed: int, loss_sign: str
) -> None:
    """Random availability, failures, newcomers and returning strangers; accuracy changes in half of the rounds.

    Softmaxes from flat to sharp; with a fixed `exploration` (Fig. 7a) alpha of (6) is the same whatever rho. Where
    nobody was available, or nobody reported, the rewards that stand are followed throughout.
    """
    oracle = GPFLOracle(3, 200, loss_sign=loss_sign, spread=spread, **own)
    selector = build(loss_sign=loss_sign, total_rounds=200, seed=seed, **own)
    world = Crowd(num_clients=9, newcomers={0: 20, 6: 50}, unreported=unreported)
    assert follow(selector, oracle, world=world, rounds=120, seed=seed, forget_every=0 if unreported else 30) == []
    assert oracle.decided > (60 if unreported else 40)
