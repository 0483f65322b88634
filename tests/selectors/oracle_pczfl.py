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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.selectors.oracles import TOLERANCE, World

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

    def twin(self, other: Ball) -> bool:
        """Tell whether another ball is the same in everything: then they are equal in every digit."""
        return (self.centre, self.radius, self.rewards) == (other.centre, other.radius, other.rewards)


def average(points: Sequence[Point]) -> Point:
    """Return the mean of some points."""
    return tuple(sum(values) / len(points) for values in zip(*points, strict=True))


class PCZFLOracle:
    """Algorithm 1 with warm-up and cap."""

    def __init__(self, uncertainty: float, *, warmup_rounds: int = 0, clients_per_round: int | None = None) -> None:
        """Start before round 1 with one ball over everything."""
        self.coefficient = uncertainty
        self.warmup_rounds = warmup_rounds
        self.cap = clients_per_round
        self.t = 0
        self.balls = [Ball(centre=(0.5, 0.5), radius=1.0, prior=(0.0, 0.0))]
        self.context: dict[int, Point] = {}
        self.chosen: dict[int, list[int]] = {}  # chosen ball -> its selected clients, of the round judged last
        self.shared = 0  # rounds in which a client was in two domains
        self.decided = 0  # rounds in which somebody had to stay out
        self.ambiguous = 0

    def inform(self, clients: Iterable[int], accuracy: Iterable[float], energy_score: Iterable[float]) -> None:
        """Place clients that have no model yet."""
        for client, *context in zip(clients, accuracy, energy_score, strict=True):
            self.context[int(client)] = tuple(map(float, context))

    def domain(self, ball: Ball, client: int) -> bool:
        """Tell whether a client is in a ball and in no strictly smaller one (2)."""
        where = self.context[client]
        smaller = [other for other in self.balls if other.radius < ball.radius]
        for other in [ball, *smaller]:
            self.close_call |= abs(math.dist(where, other.centre) - other.radius) <= TOLERANCE
        inside = [other for other in [ball, *smaller] if math.dist(where, other.centre) <= other.radius]
        return inside == [ball]

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
        if self.t <= self.warmup_rounds:
            self.ambiguous += self.close_call
            return relevant
        scores = {i: self.significance(self.balls[i]) for i in relevant}
        dominated = {}
        for i in relevant:
            rivals = [scores[j] for j in relevant if j != i and not self.balls[i].twin(self.balls[j])]
            surely = any(all(a < b - TOLERANCE for a, b in zip(scores[i], rival, strict=True)) for rival in rivals)
            maybe = any(all(a <= b + TOLERANCE for a, b in zip(scores[i], rival, strict=True)) for rival in rivals)
            dominated[i] = any(
                all(a <= b for a, b in zip(scores[i], rival, strict=True)) and scores[i] != rival for rival in rivals
            )
            self.close_call |= surely != maybe
        self.ambiguous += self.close_call
        return {i: clients for i, clients in relevant.items() if not dominated[i]}

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        """Open the next round and say what is wrong with this choice; '' if nothing is."""
        self.t += 1
        front = self.front(available)
        candidates = {client for clients in front.values() for client in clients}
        size = len(candidates)
        if self.cap is not None and self.t > self.warmup_rounds:
            size = min(self.cap, size)
        self.decided += len(candidates) < len(available)
        self.chosen = {}
        for i, clients in front.items():
            if selected := [client for client in clients if client in chosen]:
                self.chosen[i] = selected
        if len(chosen) != size or len(set(chosen)) != size or not set(chosen) <= candidates:
            doubt = " (rounding may decide: choose another seed)" if self.close_call else ""
            return f"{sorted(chosen)} is not {size} of {sorted(candidates)}, on the front {sorted(front)}{doubt}"
        return ""

    def observe(
        self,
        clients: Sequence[int],
        completed: Sequence[bool],
        accuracy: Sequence[float],
        energy_score: Sequence[float],
    ) -> None:
        """Zoom, update the chosen balls in order of creation, then move the clients that answered."""
        new = {
            int(client): (float(a), float(e))
            for client, done, a, e in zip(clients, completed, accuracy, energy_score, strict=True)
            if done
        }
        for i in sorted(self.chosen):
            ball = self.balls[i]
            answered = [client for client in sorted(self.chosen[i]) if client in new]
            if not answered:
                continue
            if self.ripe(ball):
                self.balls.append(self.child(ball, [self.context[client] for client in answered]))
            ball.rewards.append(average([new[client] for client in answered]))
        self.context.update(new)
        self.chosen = {}

    def ripe(self, ball: Ball) -> bool:
        """Tell whether u_B <= r_B, with the count before this round."""
        return ball.uncertainty(self.coefficient) <= ball.radius

    def child(self, ball: Ball, contexts: Sequence[Point]) -> Ball:
        """Return the ball of half the radius around the context nearest to the mean; contexts by client index."""
        middle = average(contexts)
        distances = [math.dist(context, middle) for context in contexts]
        centre = next(c for c, d in zip(contexts, distances, strict=True) if d <= min(distances) + TOLERANCE)
        return Ball(centre=centre, radius=ball.radius / 2, prior=centre)

    def zooms(self) -> int:
        """Return how many balls were added."""
        return len(self.balls) - 1

    def fault_in_state(self, state: Mapping[str, Any]) -> str:
        """Look for every ball's numbers, in order of creation, in the state, whatever the keys; '' if all are there."""
        wanted = {"radius": [ball.radius for ball in self.balls], "plays": [len(ball.rewards) for ball in self.balls]}
        for j in range(2):
            wanted[f"centre[{j}]"] = [ball.centre[j] for ball in self.balls]
            wanted[f"mean[{j}]"] = [ball.mean[j] for ball in self.balls]
        columns = []
        for value in map(np.asarray, state.values()):
            if value.dtype.kind in "iuf" and 1 <= value.ndim <= 2 and len(value) >= len(self.balls):
                columns += list(np.atleast_2d(value[: len(self.balls)].T))
        for name, numbers in wanted.items():
            if not any(np.allclose(column, numbers, rtol=0, atol=TOLERANCE) for column in columns):
                return f"no column of the state holds the balls' {name} {numbers}"
        return ""


class Replay:
    """A selector that does what an oracle of its own says: to try out the judge, and to be wrong on purpose."""

    def __init__(self, oracle: PCZFLOracle) -> None:
        """Wrap an oracle."""
        self.oracle = oracle

    def inform(self, clients: Any, *, accuracy: Any, energy_score: Any) -> None:
        """Pass on."""
        self.oracle.inform(clients, accuracy, energy_score)

    def forget(self, clients: Any) -> None:
        """Nothing to forget: the next context replaces the last."""

    def select(self, available: np.ndarray) -> np.ndarray:
        """Choose everyone in the domain of a front ball."""
        self.oracle.t += 1
        front = self.oracle.front(available.tolist())
        self.oracle.chosen = front
        return np.unique([client for clients in front.values() for client in clients]).astype(np.int64)

    def observe(self, report: Any) -> None:
        """Pass on."""
        self.oracle.observe(report.clients, report.completed, report.accuracy, report.energy_score)


@dataclass(frozen=True, kw_only=True)
class Clients:
    """What clients' models score: accuracy grows to a level of their own, energy is a draw plus this round's noise."""

    level: np.ndarray
    energy: np.ndarray
    energy_noise: float

    def rewards(self, clients: np.ndarray, t: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw the new accuracies and energy scores of round t."""
        accuracy = 0.1 + (self.level[clients] - 0.1) * (1 - np.exp(-t / 25)) + rng.normal(0, 0.02, len(clients))
        energy = self.energy[clients] + self.energy_noise * rng.uniform(-1, 1, len(clients))
        return np.clip(accuracy, 0.0, 1.0), np.clip(energy, 0.0, 1.0)


def follow(
    selector: Any,
    oracle: PCZFLOracle,
    make_report: Any,
    *,
    world: World,
    rounds: int,
    seed: int,
    energy_noise: float = 0.05,
    forget_every: int = 0,
    check_state: bool = False,
) -> list[str]:
    """Let the oracle judge every round of a selector; returns the rounds it faults."""
    rng = np.random.default_rng(seed)
    scores = Clients(
        level=rng.uniform(0.3, 0.9, world.num_clients),
        energy=rng.uniform(0.2, 0.95, world.num_clients),
        energy_noise=energy_noise,
    )
    faults = []

    def introduce(clients: list[int]) -> None:
        accuracy = rng.uniform(0.08, 0.12, len(clients))
        selector.inform(np.array(clients), accuracy=accuracy, energy_score=scores.energy[clients])
        oracle.inform(clients, accuracy, scores.energy[clients])

    for t in range(1, rounds + 1):
        if new := [k for k in range(world.num_clients) if world.newcomers.get(k, 1) == t]:
            introduce(new)
        if forget_every and t % forget_every == 0:
            leaver = int(rng.integers(1, world.num_clients))
            selector.forget(np.array([leaver]))
            introduce([leaver])
        available = world.available(t, 3, rng)
        chosen = selector.select(available)
        if fault := oracle.explain(available.tolist(), np.asarray(chosen).tolist()):
            faults.append(f"round {t}: {fault}")
        if rng.random() < world.unreported:
            continue
        clients = rng.permutation(chosen)
        completed = rng.random(len(clients)) >= world.failure
        accuracy, energy = scores.rewards(clients, t, rng)
        accuracy[~completed] = energy[~completed] = np.nan
        latency = np.where(completed, world.latency(len(clients), rng), 5.0)
        report = {"accuracy": accuracy, "energy_score": energy}
        selector.observe(make_report(clients=clients, completed=completed, latency=latency, **report))
        oracle.observe(clients.tolist(), completed.tolist(), accuracy.tolist(), energy.tolist())
        if check_state and (fault := oracle.fault_in_state(selector.state_dict())):
            faults.append(f"after round {t}: {fault}")
    return faults
