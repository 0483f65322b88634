"""A slow, plain-Python reading of PCZFL: a list of balls, each with every reward it ever got.

Domains, bounds, significance scores and fronts are computed anew at every question; numbers in brackets are the paper's
equations. Without a cap the choice is determined, so the oracle demands exactly that set of clients. Rounding may
decide where numbers are equal on paper (a context on a ball's edge, two balls with the same score): such rounds are
counted in `ambiguous`, and a world for a test is best one that has none.

References:
    Optimizing Federated Learning Client Selection via Multi-Objective Contextual Bandits (PCZFL), Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.selectors.oracles import TOLERANCE, Judge

Point = tuple[float, ...]


@dataclass
class Ball:
    """A closed ball and the mean rewards of its chosen rounds."""

    centre: Point
    radius: float
    prior: Point  # its mean before the first reward
    rewards: list[Point] = field(default_factory=list)

    @property
    def mean(self) -> Point:
        """Return the mean reward vector."""
        return average(self.rewards) if self.rewards else self.prior

    def uncertainty(self, coefficient: float) -> float:
        """Return u_B = sqrt(2 A / N_B)."""
        return math.sqrt(2 * coefficient / len(self.rewards)) if self.rewards else math.inf


def average(points: Sequence[Point]) -> Point:
    """Return the mean of some points."""
    return tuple(sum(values) / len(points) for values in zip(*points, strict=True))


class PCZFLOracle(Judge):
    """Algorithm 1 with warm-up and cap."""

    m = 3  # for the world: fewer may be there

    def __init__(
        self,
        uncertainty: float,
        *,
        warmup_rounds: int = 0,
        clients_per_round: int | None = None,
        energy_noise: float = 0.05,
    ) -> None:
        self.coefficient = uncertainty
        self.warmup_rounds = warmup_rounds
        self.cap = clients_per_round
        self.energy_noise = energy_noise
        self.t = 0
        self.balls = [Ball(centre=(0.5, 0.5), radius=1.0, prior=(0.0, 0.0))]
        self.context: dict[int, Point] = {}
        self.chosen: dict[int, list[int]] = {}  # chosen ball -> its selected clients, of the round judged last
        self.shared = 0  # rounds in which a client was in two domains
        self.ambiguous = 0

    def meet(self, num_clients: int, rng: np.random.Generator) -> None:
        """Accuracy grows to a level of each client's own, energy is a draw plus a round's noise."""
        self.level, self.energy = rng.uniform(0.3, 0.9, num_clients), rng.uniform(0.2, 0.95, num_clients)

    def tell(self, selector: Any, clients: list[int], rng: np.random.Generator) -> None:
        """Place clients that have no model yet."""
        accuracy, energy = rng.uniform(0.08, 0.12, len(clients)), self.energy[clients]
        selector.inform(np.array(clients), accuracy=accuracy, energy_score=energy)
        self.inform(dict(zip(clients, zip(accuracy.tolist(), energy.tolist(), strict=True), strict=True)))

    def inform(self, contexts: Mapping[int, Point]) -> None:
        self.context.update(contexts)

    def columns(self, clients: np.ndarray, completed: np.ndarray, t: int, rng: np.random.Generator) -> dict[str, Any]:
        accuracy = 0.1 + (self.level[clients] - 0.1) * (1 - np.exp(-t / 25)) + rng.normal(0, 0.02, len(clients))
        energy = self.energy[clients] + self.energy_noise * rng.uniform(-1, 1, len(clients))
        scores = {"accuracy": accuracy, "energy_score": energy}
        return {name: np.where(completed, np.clip(score, 0.0, 1.0), np.nan) for name, score in scores.items()}

    def domain(self, ball: Ball, client: int) -> bool:
        """Tell whether a client is in a ball and in no strictly smaller one (2)."""
        where = self.context[client]
        around = [ball, *(other for other in self.balls if other.radius < ball.radius)]
        self.close_call |= any(abs(math.dist(where, one.centre) - one.radius) <= TOLERANCE for one in around)
        return [one for one in around if math.dist(where, one.centre) <= one.radius] == [ball]

    def upper_bound(self, ball: Ball) -> Point:
        """Return mean + u_B + r_B (4)."""
        return tuple(mean + ball.uncertainty(self.coefficient) + ball.radius for mean in ball.mean)

    def significance(self, ball: Ball) -> Point:
        """Return r_B + the minimum over all balls of their bound and distance (5)."""
        ways = [
            [bound + math.dist(other.centre, ball.centre) for bound in self.upper_bound(other)] for other in self.balls
        ]
        return tuple(ball.radius + min(way[j] for way in ways) for j in range(len(ball.centre)))

    def front(self, available: Sequence[int]) -> dict[int, list[int]]:
        """Return the balls on the front (all relevant ones during warm-up), each with the clients in its domain."""
        self.close_call = False
        members = {i: [k for k in available if self.domain(ball, k)] for i, ball in enumerate(self.balls)}
        relevant = {i: clients for i, clients in members.items() if clients}
        everyone = [client for clients in relevant.values() for client in clients]
        self.shared += len(everyone) > len(set(everyone))
        dominated = dict.fromkeys(relevant, False)
        if self.t > self.warmup_rounds:
            scores = {i: self.significance(self.balls[i]) for i in relevant}
            for i, mine in scores.items():
                # Balls that are the same in everything are equal in every digit.
                rivals = [scores[j] for j in relevant if j != i and self.balls[i] != self.balls[j]]
                surely = any(all(a < b - TOLERANCE for a, b in zip(mine, one, strict=True)) for one in rivals)
                maybe = any(all(a <= b + TOLERANCE for a, b in zip(mine, one, strict=True)) for one in rivals)
                self.close_call |= surely != maybe
                dominated[i] = any(
                    all(a <= b for a, b in zip(mine, one, strict=True)) and mine != one for one in rivals
                )
        self.ambiguous += self.close_call
        return {i: clients for i, clients in relevant.items() if not dominated[i]}

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        self.t += 1
        front = self.front(available)
        candidates = {client for clients in front.values() for client in clients}
        size = len(candidates)
        if self.cap is not None and self.t > self.warmup_rounds:
            size = min(self.cap, size)
        self.decided += len(candidates) < len(available)
        kept = {i: [client for client in clients if client in chosen] for i, clients in front.items()}
        self.chosen = {i: clients for i, clients in kept.items() if clients}
        if len(chosen) != size or len(set(chosen)) != size or not set(chosen) <= candidates:
            doubt = " (rounding may decide: choose another seed)" if self.close_call else ""
            return f"{sorted(chosen)} is not {size} of {sorted(candidates)}, on the front {sorted(front)}{doubt}"
        return ""

    def observe(self, report: Any) -> None:
        """Zoom, update the chosen balls in order of creation, then move the clients that answered."""
        rows = zip(report.clients, report.completed, report.accuracy, report.energy_score, strict=True)
        new = {int(client): (float(a), float(e)) for client, done, a, e in rows if done}
        for i in sorted(self.chosen):
            ball = self.balls[i]
            answered = [client for client in sorted(self.chosen[i]) if client in new]
            if not answered:
                continue
            if ball.uncertainty(self.coefficient) <= ball.radius:  # with the count before this round
                self.balls.append(child(ball, [self.context[client] for client in answered]))
            ball.rewards.append(average([new[client] for client in answered]))
        self.context.update(new)
        self.chosen = {}

    def fault_in_state(self) -> str:
        """Compare every ball's numbers, in order of creation."""
        own = {
            "radius": [ball.radius for ball in self.balls],
            "ball_plays": [len(ball.rewards) for ball in self.balls],
            "centre": [ball.centre for ball in self.balls],
            "ball_mean": [ball.mean for ball in self.balls],
        }
        for key, numbers in own.items():
            held = self.state[key]
            if held.shape != np.shape(numbers) or not np.allclose(held, numbers, rtol=0, atol=TOLERANCE):
                return f"the state's {key} are not {numbers}"
        return ""


def child(ball: Ball, contexts: Sequence[Point]) -> Ball:
    """Return the ball of half the radius around the context nearest to the mean; contexts by client index."""
    middle = average(contexts)
    distances = [math.dist(context, middle) for context in contexts]
    centre = next(c for c, d in zip(contexts, distances, strict=True) if d <= min(distances) + TOLERANCE)
    return Ball(centre=centre, radius=ball.radius / 2, prior=centre)
