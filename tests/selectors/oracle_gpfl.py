"""A slow, plain-Python reading of GPFL that judges a selector's choices.

Nothing is kept but the complete history; every reward of every client in every round is counted again from the first
round at each question. Numbers in brackets are the paper's equations.

The paper is silent about a round that is never observed (nobody available, or no report): the rewards (5) stand, as in
the selector.

References:
    GPFL: A Gradient Projection-Based Client Selection Framework for Efficient Federated Learning, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.selectors.oracles import TOLERANCE, Judge, World, misplaced

LIMIT = 50.0  # of an exponent in (8)


@dataclass
class PastRound:
    """One round: (client, completed, projection) of everyone reported, and the new global model's scores."""

    rows: list[tuple[int, bool, float]] = field(default_factory=list)
    accuracy: float | None = None  # None: never observed
    loss: float = math.nan


class GPFLOracle(Judge):
    """Algorithm 1 with GPCB (6) deciding."""

    def __init__(
        self,
        clients_per_round: int,
        total_rounds: int,
        *,
        rho: float = 1.0,
        loss_sign: str = "corrected",
        exploration: float | None = None,
        spread: float = 1.0,
    ) -> None:
        self.m = clients_per_round
        self.total_rounds = total_rounds
        self.rho = rho
        self.exploration = exploration
        self.loss_sign = loss_sign
        self.spread = spread  # of the clients' projections, which differ and drift
        self.rounds: list[PastRound] = []
        self.registered: set[int] = set()
        self.left: dict[int, int] = {}  # the new name of a forgotten client -> the index in `rounds` where it is gone
        self.accuracy, self.loss = 0.1, 2.3

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
        past.rows = list(
            zip(report.clients.tolist(), report.completed.tolist(), report.projection.tolist(), strict=True)
        )
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
