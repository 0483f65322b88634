"""Slow, plain-Python readings of FedCM-UCB and FedCM-TS that judge a selector's choices.

Nothing is kept but every reward of every client; means, posteriors and bounds are counted again at each question.
What is drawn at random is not copied but judged: the initial means of FedCM-UCB are read from the selector's state
once, when a client is registered (each has to be 0 or 1); a choice of FedCM-TS has a probability, got by integration,
and a run's choices may not be more or less surprising, all in all, than draws from the posteriors would be.

State keys that this needs: `registered`, `mean` and `plays` of fedcm-ucb, `successes` and `failures` of fedcm-ts (with
the prior's 1 in them or without: both are read).

References:
    Kim et al. (2020), Accurate and Fast Federated Learning via Combinatorial Multi-Armed Bandits, Algorithms 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from tests.selectors.oracles import TOLERANCE, World


def misplaced(scores: Mapping[int, float], chosen: Sequence[int], m: int) -> str:
    """Say why `chosen` are not m clients of the largest scores (all, if there are fewer); '' if they are."""
    size = min(m, len(scores))
    if len(chosen) != size or len(set(chosen)) != size or not set(chosen) <= set(scores):
        return f"{list(chosen)} is not {size} different clients of {sorted(scores)}"
    for inside in chosen:
        for outside in set(scores) - set(chosen):
            low, high = scores[inside], scores[outside]
            if low != high and high - low > TOLERANCE * max(1.0, abs(low), abs(high) if math.isfinite(high) else 1.0):
                return f"client {inside} at {low} was chosen before client {outside} at {high}"
    return ""


class FedCMOracle:
    """What both samplers share: every reward of every client, and the round number."""

    def __init__(self, clients_per_round: int) -> None:
        """Start before round 1, with no client registered."""
        self.m = clients_per_round
        self.t = 0
        self.rewards: dict[int, list[int]] = {}
        self.decided = 0  # rounds in which at least one set would have been wrong

    def forget(self, client: int) -> None:
        """Take the client's next appearance for that of a newcomer."""
        self.rewards.pop(client, None)

    def observe(self, clients: Sequence[int], kept: Sequence[bool]) -> None:
        """Record r_k = 1 if FedCA kept the model of client k, else 0, also if it failed."""
        for client, reward in zip(clients, kept, strict=True):
            self.rewards[int(client)].append(int(reward))

    def open(self, state: Mapping[str, Any]) -> list[int]:
        """Begin a round; returns the clients that are registered since the last one."""
        self.t += 1
        registered = np.flatnonzero(state["registered"]).tolist()
        new = [client for client in registered if client not in self.rewards]
        self.rewards.update({client: [] for client in new})
        return new

    def explain(self, state: Mapping[str, Any], available: Sequence[int], chosen: Sequence[int]) -> str:
        """Open a round with the state after the choice and say what is wrong with that choice; '' if nothing is."""
        raise NotImplementedError

    def fault_in_state(self, state: Mapping[str, Any]) -> str:
        """Say what is wrong with the state after an update; '' if nothing is."""
        raise NotImplementedError


class FedCMUCBOracle(FedCMOracle):
    """Kim et al., Algorithm 2, all indices refreshed every round."""

    def __init__(self, clients_per_round: int) -> None:
        """Start before round 1."""
        super().__init__(clients_per_round)
        self.initial: dict[int, float] = {}

    def forget(self, client: int) -> None:
        """Take the client's next appearance for that of a newcomer, with a new draw."""
        super().forget(client)
        self.initial.pop(client, None)

    def count(self, client: int) -> int:
        """Return a_k, which starts at 1."""
        return 1 + len(self.rewards[client])

    def mean(self, client: int) -> float:
        """Return mean_k: the initial draw counts as one observation, since a_k starts at 1."""
        return (self.initial[client] + sum(self.rewards[client])) / self.count(client)

    def index(self, client: int) -> float:
        """Return mean_k + sqrt(3 ln t / (2 a_k))."""
        return self.mean(client) + math.sqrt(3 * math.log(self.t) / (2 * self.count(client)))

    def explain(self, state: Mapping[str, Any], available: Sequence[int], chosen: Sequence[int]) -> str:
        """Judge the choice by the largest indices."""
        for client in self.open(state):
            self.initial[client] = float(state["mean"][client])
            if self.initial[client] not in (0.0, 1.0) or state["plays"][client] != 1:
                return f"client {client} starts at a = {state['plays'][client]}, mean {self.initial[client]}"
        scores = {int(client): self.index(client) for client in available}
        self.decided += len(scores) > self.m and max(scores.values()) - min(scores.values()) > TOLERANCE
        return misplaced(scores, chosen, self.m) or self.fault_in_state(state)

    def fault_in_state(self, state: Mapping[str, Any]) -> str:
        """Compare a_k and mean_k of every client."""
        for client in self.rewards:
            mine = (self.count(client), self.mean(client))
            theirs = (state["plays"][client], state["mean"][client])
            if mine[0] != theirs[0] or abs(mine[1] - theirs[1]) > TOLERANCE:
                return f"client {client} has (a, mean) = {theirs}, should have {mine}"
        return ""


class FedCMTSOracle(FedCMOracle):
    """Kim et al., Algorithm 3, all draws made anew every round."""

    def __init__(self, clients_per_round: int) -> None:
        """Start before round 1."""
        super().__init__(clients_per_round)
        self.prior: int | None = None  # what the selector's state holds for a newcomer: 0 or 1
        self.surprise = 0.0
        self.variance = 0.0

    def posterior(self, client: int) -> tuple[int, int]:
        """Return (alpha_k, beta_k), from Beta(1, 1)."""
        wins = sum(self.rewards[client])
        return 1 + wins, 1 + len(self.rewards[client]) - wins

    def explain(self, state: Mapping[str, Any], available: Sequence[int], chosen: Sequence[int]) -> str:
        """Judge the form of the choice, and add up how surprising it is."""
        self.open(state)
        scores = dict.fromkeys(map(int, available), 0.0)
        if fault := misplaced(scores, chosen, self.m) or self.fault_in_state(state):
            return fault
        if len(scores) > self.m:
            odds = chances({client: self.posterior(client) for client in scores}, self.m)
            expected = -sum(p * math.log(p) for p in odds.values() if p > 0)
            self.surprise += -math.log(max(odds[frozenset(chosen)], 1e-12)) - expected
            self.variance += sum(p * math.log(p) ** 2 for p in odds.values() if p > 0) - expected**2
            self.decided += 1
        return ""

    def fault_in_state(self, state: Mapping[str, Any]) -> str:
        """Compare the posteriors of every client."""
        for client in self.rewards:
            alpha, beta = self.posterior(client)
            theirs = (state["successes"][client], state["failures"][client])
            if self.prior is None:
                self.prior = int(theirs[0] - alpha + 1)
            if self.prior not in (0, 1) or theirs != (alpha - 1 + self.prior, beta - 1 + self.prior):
                return f"client {client} holds {theirs}, its posterior is Beta{(alpha, beta)}"
        return ""

    def deviation(self) -> float:
        """Return how many standard deviations the run's surprise lies above that of posterior sampling."""
        return self.surprise / math.sqrt(self.variance)


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
    if abs(total - 1) > 1e-3:
        raise AssertionError(f"the grid is too coarse: probabilities add up to {total}")
    return {members: p / total for members, p in result.items()}


def follow(
    selector: Any, oracle: FedCMOracle, make_report: Any, *, world: World, rounds: int, seed: int, forget_every: int = 0
) -> list[str]:
    """Let the oracle judge every round and every update of a selector; returns the rounds it faults.

    The chance of being kept differs from client to client. Now and then a client is forgotten and comes again.
    """
    rng = np.random.default_rng(seed)
    quality = rng.permutation(np.linspace(0.1, 0.9, world.num_clients))
    faults = []
    for t in range(1, rounds + 1):
        if forget_every and t % forget_every == 0:
            leaver = int(rng.integers(world.num_clients))
            selector.forget(np.array([leaver]))
            oracle.forget(leaver)
        available = world.available(t, oracle.m, rng)
        chosen = selector.select(available)
        if fault := oracle.explain(selector.state_dict(), available.tolist(), np.asarray(chosen).tolist()):
            faults.append(f"round {t}: {fault}")
        if rng.random() < world.unreported:
            continue
        clients = rng.permutation(chosen)
        completed = rng.random(len(clients)) >= world.failure
        kept = completed & (rng.random(len(clients)) < quality[clients])
        latency = np.where(completed, world.latency(len(clients), rng), 5.0)
        selector.observe(make_report(clients=clients, completed=completed, latency=latency, kept=kept))
        oracle.observe(clients.tolist(), kept.tolist())
        if fault := oracle.fault_in_state(selector.state_dict()):
            faults.append(f"after round {t}: {fault}")
    return faults
