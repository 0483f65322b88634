"""Slow, plain-Python readings of the papers that judge a selector's choices; here CS-UCB, BSFL, and the world around.

Nothing is kept but the complete history: plays, means and bounds are counted again from the first round at every
question, and every set of clients is enumerated. Numbers in brackets are the papers' equations.

References:
    Xia et al. (2020), Multi-Armed Bandit Based Client Scheduling for Federated Learning.
    Ben Ami, Cohen, Zhao (2023), Client Selection for Generalization in Accelerated Federated Learning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from fedsel_flwr.selectors import RoundReport

TOLERANCE = 1e-9


@dataclass
class PastRound:
    """One round: who could be asked, and (client, completed, latency) of everyone who was reported."""

    available: list[int]
    rows: list[tuple[int, bool, float]] = field(default_factory=list)


class Judge:
    """What :func:`follow` asks of an oracle."""

    m: int
    max_latency = 5.0
    sizes: Any = None  # by client
    decided = 0  # rounds in which at least one choice would have been wrong
    state: Mapping[str, Any]  # the selector's, after its choice or its update

    def meet(self, num_clients: int, rng: np.random.Generator) -> None:
        """Draw what the clients are like."""

    def tell(self, selector: Any, clients: list[int], rng: np.random.Generator) -> None:
        """Inform the selector about clients that come, or come again: of their sizes, if they have any."""
        if self.sizes is not None:
            selector.inform(np.array(clients), num_examples=np.array([self.sizes[client] for client in clients]))

    def forget(self, client: int) -> None:
        """Take the client's next appearance for that of a newcomer."""

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        """Open the next round and say what is wrong with this choice; '' if nothing is."""
        raise NotImplementedError

    def columns(self, clients: np.ndarray, completed: np.ndarray, t: int, rng: np.random.Generator) -> dict[str, Any]:
        """Draw the report's other columns."""
        return {}

    def observe(self, report: Any) -> None:
        """Record what came back from the round judged last."""
        raise NotImplementedError

    def fault_in_state(self) -> str:
        """Say what is wrong with the state after an update; '' if nothing is."""
        return ""


@dataclass
class Oracle(Judge):
    """What CS-UCB and BSFL share: the history, K, n_k and sample means."""

    m: int
    max_latency: float
    informed: set[int] = field(default_factory=set, init=False)
    rounds: list[PastRound] = field(default_factory=list, init=False)

    def inform(self, clients: Iterable[int]) -> None:
        self.informed.update(int(client) for client in clients)

    def observe(self, report: Any) -> None:
        rows = zip(report.clients.tolist(), report.completed.tolist(), report.latency.tolist(), strict=True)
        self.rounds[-1].rows = list(rows)

    def registered(self) -> set[int]:
        """Everyone informed or ever seen in `available`, this round included."""
        return self.informed.union(*(past.available for past in self.rounds))

    def observations(self, client: int) -> list[float]:
        """All rewards of one client, in order; their number is n_k, since a failure is a play."""
        return [self.reward(done, seconds) for past in self.rounds for who, done, seconds in past.rows if who == client]

    def reward(self, completed: bool, latency: float) -> float:
        """Return the number that one row adds to its client's mean."""
        raise NotImplementedError

    def terms(self, client: int) -> tuple[float, ...]:
        """Return what one client brings to this round's objective, counted from the whole history."""
        raise NotImplementedError

    def score(self, members: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        """Return a set's objective from its members' terms: larger is better, the first number counts most."""
        raise NotImplementedError

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        self.rounds.append(PastRound(available=[int(client) for client in available]))
        size = min(self.m, len(available))
        if (fault := miscounted(chosen, available, size)) or size == 0:
            return fault
        terms = {client: self.terms(client) for client in available}
        sets = combinations(sorted(available), size)
        scores = {members: self.score([terms[client] for client in members]) for members in sets}
        best_set = max(scores, key=lambda members: scores[members])
        self.decided += any(not as_good(score, scores[best_set]) for score in scores.values())
        mine = scores[tuple(sorted(int(client) for client in chosen))]
        if as_good(mine, scores[best_set]):
            return ""
        return f"{sorted(chosen)} scores {mine}, but {list(best_set)} scores {scores[best_set]}"


def as_good(mine: tuple[float, ...], best: tuple[float, ...]) -> bool:
    """Compare lexicographically; numbers within the tolerance are equal, and inf equals inf."""
    for one, other in zip(mine, best, strict=True):
        if one == other or abs(one - other) <= TOLERANCE:
            continue
        return one > other
    return True


class CSUCBOracle(Oracle):
    """Xia et al., Algorithm 1 and (18): unplayed clients first, then the largest sum of bounds."""

    def reward(self, completed: bool, latency: float) -> float:
        """Return r_k = 1 - min(tau_k, tau_max)/tau_max; 0 for a failed client."""
        return 1 - min(latency, self.max_latency) / self.max_latency if completed else 0.0

    def ideal_opening(self) -> bool:
        """Tell whether this is one of the ceil(K/m) opening rounds, with everyone available in all of them."""
        everyone = self.registered()
        always = all(set(past.available) == everyone for past in self.rounds)
        return always and len(self.rounds) <= math.ceil(len(everyone) / self.m)

    def terms(self, client: int) -> tuple[float, ...]:
        """Return (1, 0) for an infinite bound and (0, the bound of (18)) for a finite one."""
        rewards = self.observations(client)
        if not rewards:
            return (1.0, 0.0)
        t = len(self.rounds)
        bound = sum(rewards) / len(rewards) + math.sqrt((self.m + 1) * math.log(t) / len(rewards))  # (18)
        return (0.0, 0.0 if self.ideal_opening() else bound)

    def score(self, members: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        """Count infinite bounds, then sum the finite ones; the ideal opening tops up with anyone."""
        return (sum(unplayed for unplayed, _ in members), sum(bound for _, bound in members))


@dataclass(kw_only=True)
class BSFLOracle(Oracle):
    """Ben Ami et al., Algorithm 1: the set that maximizes (13)."""

    min_latency: float
    alpha: float
    beta: int
    data_weights: Sequence[float] | None = None

    def reward(self, completed: bool, latency: float) -> float:
        """Return the speed tau_min/tau_k, at most 1; a failed client took tau_max."""
        return min(1.0, self.min_latency / (latency if completed else self.max_latency))

    def bound(self, client: int) -> float:
        """Return ucb(k, t-1) of (9), as it stood at the end of the round before."""
        speeds = self.observations(client)
        if not speeds:
            return math.inf
        return sum(speeds) / len(speeds) + math.sqrt((self.m + 1) * math.log(len(self.rounds) - 1) / len(speeds))

    def generalization(self, client: int) -> float:
        """Return g_k of (3) or (4)."""
        everyone = self.registered()
        if self.data_weights is None:
            target = self.m / len(everyone)
        else:
            target = self.m * self.data_weights[client] / sum(self.data_weights[k] for k in everyone)
        gap = target - len(self.observations(client)) / len(self.rounds)
        return math.copysign(abs(gap) ** self.beta, gap) if gap else 0.0

    def terms(self, client: int) -> tuple[float, ...]:
        return (self.bound(client), self.generalization(client))

    def score(self, members: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        bounds, generalization = zip(*members, strict=True)
        return (objective(range(len(members)), bounds, generalization, self.m, self.alpha),)


def objective(
    members: Iterable[int], ucb: Sequence[float], generalization: Sequence[float], m: int, alpha: float
) -> float:
    """Return min of ucb plus alpha/m times the sum of g over the members (13); inf if every ucb is."""
    chosen = [int(index) for index in members]
    return min(ucb[index] for index in chosen) + alpha / m * sum(generalization[index] for index in chosen)


def enumerate_best(ucb: Sequence[float], generalization: Sequence[float], m: int, alpha: float) -> float:
    """Return the largest value of (13) over all sets of min(m, number of clients) clients."""
    sets = combinations(range(len(ucb)), min(m, len(ucb)))
    return max(objective(members, ucb, generalization, m, alpha) for members in sets)


@dataclass(frozen=True, kw_only=True)
class World:
    """Clients that come, go, fail and are slow, at random."""

    num_clients: int
    newcomers: dict[int, int] = field(default_factory=dict)  # client -> first round in which it may be available
    presence: float = 0.75  # chance of one client in an ordinary round
    failure: float = 0.2
    unreported: float = 0.1  # chance that a round is never observed
    grid: tuple[float, ...] = ()  # latencies to draw from (many ties); else continuous

    def available(self, t: int, m: int, rng: np.random.Generator) -> np.ndarray:
        """Draw who can be asked in round t, in any order: nobody, fewer than m, some, or everyone."""
        here = [client for client in range(self.num_clients) if t >= self.newcomers.get(client, 1)]
        kind = rng.random()
        if self.presence == 1 or kind > 0.8:
            size = len(here)
        elif kind < 0.05:
            size = 0
        elif kind < 0.15:
            size = int(rng.integers(1, m))
        else:
            size = int(rng.binomial(len(here), self.presence))
        return rng.permutation(np.array(here))[:size]

    def latency(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draw what the clients would take, in seconds."""
        return rng.choice(self.grid, size) if self.grid else 0.05 / rng.uniform(0.02, 1.2, size)


def miscounted(chosen: Sequence[int], available: Iterable[int], size: int) -> str:
    """Say that `chosen` are not so many different available clients; '' if they are."""
    right = len(chosen) == len(set(chosen)) == size and set(chosen) <= set(available)
    return "" if right else f"{list(chosen)} is not {size} different clients of {sorted(available)}"


def misplaced(scores: Mapping[int, float], chosen: Sequence[int], m: int) -> str:
    """Say why `chosen` are not m clients of the largest scores (all, if there are fewer); '' if they are."""
    if fault := miscounted(chosen, scores, min(m, len(scores))):
        return fault
    for inside in chosen:
        for outside in set(scores) - set(chosen):
            low, high = scores[inside], scores[outside]
            if low != high and high - low > TOLERANCE * max(1.0, abs(low), abs(high) if math.isfinite(high) else 1.0):
                return f"client {inside} at {low} was chosen before client {outside} at {high}"
    return ""


def follow(selector: Any, oracle: Judge, *, world: World, rounds: int, seed: int, forget_every: int = 0) -> list[str]:
    """Let the oracle judge every round and update of a selector; returns what it faults.

    Now and then a client is forgotten and comes again.
    """
    rng, faults = np.random.default_rng(seed), []
    oracle.meet(world.num_clients, rng)
    for t in range(1, rounds + 1):
        coming = [k for k in range(world.num_clients) if world.newcomers.get(k, 1) == t]
        if forget_every and t % forget_every == 0:
            leaver = int(rng.integers(1, world.num_clients))
            selector.forget(np.array([leaver]))
            oracle.forget(leaver)
            coming += [leaver] * (leaver not in coming)
        if coming:
            oracle.tell(selector, coming, rng)
        available = world.available(t, oracle.m, rng)
        chosen = selector.select(available)
        oracle.state = selector.state_dict()
        if fault := oracle.explain(available.tolist(), chosen.tolist()):
            faults.append(f"round {t}: {fault}")
        if (rng.random() < world.unreported and t > 1) or not len(chosen):
            continue
        clients = rng.permutation(chosen)
        completed = rng.random(len(clients)) >= world.failure
        latency = np.where(completed, world.latency(len(clients), rng), oracle.max_latency)
        columns = oracle.columns(clients, completed, t, rng)
        report = RoundReport(clients=clients, completed=completed, latency=latency, **columns)
        selector.observe(report)
        oracle.observe(report)
        oracle.state = selector.state_dict()
        if fault := oracle.fault_in_state():
            faults.append(f"after round {t}: {fault}")
    return faults
