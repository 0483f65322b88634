"""A slow, plain-Python reading of GPFL that judges a selector's choices.

Nothing is kept but the complete history; every reward of every client in every round is counted again from the first
round at each question. Numbers in brackets are the paper's equations.

The paper is silent about a round that is never observed (nobody available, or no report): three readings are followed
at once, and a selector has to stay with one of them (`Idle`).

References:
    GPFL: A Gradient Projection-Based Client Selection Framework for Efficient Federated Learning, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from tests.selectors.oracle_fedcm import misplaced
from tests.selectors.oracles import TOLERANCE, World

LIMIT = 50.0  # of an exponent in (8)


class Idle(Enum):
    """What a round without a report adds to the mean of rewards."""

    NOTHING = "a reward of 0"
    STANDING = "the rewards (5) as they stand"
    UNCOUNTED = "nothing: the mean is over observed rounds"


@dataclass
class PastRound:
    """One round: (client, completed, projection) of everyone reported, and the new global model's scores."""

    rows: list[tuple[int, bool, float]] = field(default_factory=list)
    accuracy: float | None = None  # None: never observed
    loss: float = math.nan


class GPFLOracle:
    """Algorithm 1 with GPCB (6) deciding."""

    def __init__(
        self,
        clients_per_round: int,
        total_rounds: int,
        *,
        rho: float = 1.0,
        loss_sign: str = "corrected",
        exploration: float | None = None,
    ) -> None:
        """Start before round 1."""
        self.m = clients_per_round
        self.total_rounds = total_rounds
        self.rho = rho
        self.exploration = exploration
        self.loss_sign = loss_sign
        self.rounds: list[PastRound] = []
        self.registered: set[int] = set()
        self.left: dict[int, int] = {}  # the new name of a forgotten client -> the index in `rounds` where it is gone
        self.alive = set(Idle)
        self.decided = 0

    def inform(self, clients: Iterable[int]) -> None:
        """Register clients."""
        self.registered.update(map(int, clients))

    def forget(self, client: int) -> None:
        """Take the client's next appearance for that of a newcomer; its past stays in the past rewards of others."""
        self.registered.discard(client)
        ghost = -1 - len(self.left)
        self.left[ghost] = len(self.rounds)
        for past in self.rounds:
            past.rows = [(ghost if row[0] == client else row[0], *row[1:]) for row in past.rows]

    def observe(
        self,
        clients: Sequence[int],
        completed: Sequence[bool],
        projection: Sequence[float],
        accuracy: float,
        loss: float,
    ) -> None:
        """Record what came back from the round judged last."""
        past = self.rounds[-1]
        past.rows = [(int(k), bool(d), float(c)) for k, d, c in zip(clients, completed, projection, strict=True)]
        past.accuracy, past.loss = accuracy, loss

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

    def rewards(self, idle: Idle) -> dict[int, float]:
        """Return the mean over past rounds of mu_k."""
        latest: dict[int, float] = {}
        total = dict.fromkeys(self.registered, 0.0)
        counted = 0
        for index, past in enumerate(self.rounds):
            observed = past.accuracy is not None
            counted += observed or idle is not Idle.UNCOUNTED
            if not observed and idle is not Idle.STANDING:
                continue
            done = {client: projection for client, completed, projection in past.rows if completed}
            latest = {k: c for k, c in (latest | done).items() if index < self.left.get(k, math.inf)}
            highest = max(latest.values(), default=0.0)
            weights = {client: math.exp(c - highest) for client, c in latest.items()}
            for client, weight in weights.items():
                if client not in self.registered:
                    continue
                reward = weight / sum(weights.values())  # (5)
                total[client] += reward * (self.factor(index) if client in done else 1.0)  # (8)
        return {client: value / max(counted, 1) for client, value in total.items()}

    def scores(self, available: Sequence[int], idle: Idle) -> dict[int, float]:
        """Return the GPCB (6) for the round after the recorded ones."""
        t = len(self.rounds) + 1
        mean = self.rewards(idle)
        n = sum(self.plays(client) for client in self.registered)
        result = {}
        for client in available:
            plays = self.plays(client)
            bonus = math.sqrt(2 * math.log(n) / plays) if plays else math.inf
            alpha = self.rho * t / self.total_rounds if self.exploration is None else self.exploration  # (7), Fig. 7a
            result[client] = mean[client] + alpha * bonus if plays else math.inf
        return result

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        """Open the next round and say what is wrong with this choice; '' if nothing is."""
        available = [int(client) for client in available]
        self.inform(available)
        if not self.rounds:  # initialization
            self.rounds.append(PastRound())
            return "" if sorted(chosen) == sorted(available) else f"round 1 takes {sorted(available)}, not {chosen}"
        faults = {}
        idled = any(past.accuracy is None for past in self.rounds)  # else the readings agree
        readings = sorted(self.alive, key=lambda idle: idle.name) if idled else [Idle.NOTHING]
        for idle in readings:
            scores = self.scores(available, idle)
            if fault := misplaced(scores, chosen, self.m):
                faults[idle] = f"{idle.value}: {fault}"
        self.decided += len(scores) > self.m and max(scores.values()) - min(scores.values()) > TOLERANCE
        self.rounds.append(PastRound())
        if set(readings) == set(faults):
            return "; ".join(faults.values())
        self.alive -= set(faults)
        return ""


def follow(
    selector: Any,
    oracle: GPFLOracle,
    make_report: Any,
    *,
    world: World,
    rounds: int,
    seed: int,
    forget_every: int = 0,
    spread: float = 1.0,
) -> list[str]:
    """Let the oracle judge every round of a selector; returns the rounds it faults.

    Clients' projections differ and drift; the global accuracy stays as it was in half of the rounds and may fall.
    """
    rng = np.random.default_rng(seed)
    level = rng.normal(0, spread, world.num_clients)
    accuracy, loss = 0.1, 2.3
    faults = []
    for t in range(1, rounds + 1):
        if forget_every and t % forget_every == 0:
            leaver = int(rng.integers(1, world.num_clients))
            selector.forget(np.array([leaver]))
            oracle.forget(leaver)
        available = world.available(t, oracle.m, rng)
        if t == 1 or (len(available) == 0 and world.unreported == 0):  # somebody is there in a world of reports
            available = np.arange(1, 6)
        chosen = selector.select(available)
        if fault := oracle.explain(available.tolist(), np.asarray(chosen).tolist()):
            faults.append(f"round {t}: {fault}")
        if len(chosen) == 0 or (t > 1 and rng.random() < world.unreported):
            continue
        clients = rng.permutation(chosen)
        completed = rng.random(len(clients)) >= world.failure
        projection = np.where(completed, level[clients] + rng.normal(0, spread / 2, len(clients)), np.nan)
        if completed.any() and t > 1:
            accuracy += round(float(rng.normal(0.005, 0.03)), 2) if rng.random() < 0.5 else 0.0
            loss = 0.1 + abs(loss + float(rng.normal(-0.02, 0.5)))
        latency = np.where(completed, world.latency(len(clients), rng), 5.0)
        scalars = {"global_accuracy": accuracy, "global_loss": loss}
        selector.observe(
            make_report(clients=clients, completed=completed, latency=latency, projection=projection, **scalars)
        )
        oracle.observe(clients.tolist(), completed.tolist(), projection.tolist(), accuracy, loss)
    return faults
