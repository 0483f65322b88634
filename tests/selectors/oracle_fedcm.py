"""Slow, plain-Python readings of FedCM-UCB and FedCM-TS that judge a selector's choices.

Nothing is kept but every reward of every client; means, posteriors and bounds are counted again at each question. What
is drawn at random is judged, not copied: the initial means of FedCM-UCB are read from the selector's state once, when a
client is registered (each has to be 0 or 1). Of FedCM-TS the posteriors have to be exact in every round; how often they
give each choice is got by integration.

References:
    Kim et al. (2020), Accurate and Fast Federated Learning via Combinatorial Multi-Armed Bandits, Algorithms 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from tests.selectors.oracles import TOLERANCE, Judge, misplaced


class FedCMOracle(Judge):
    """What both samplers share: every reward of every client, and the round number."""

    def __init__(self, clients_per_round: int) -> None:
        self.m = clients_per_round
        self.t = 0
        self.rewards: dict[int, list[int]] = {}

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


class FedCMUCBOracle(FedCMOracle):
    """Kim et al., Algorithm 2, all indices refreshed every round."""

    def __init__(self, clients_per_round: int) -> None:
        super().__init__(clients_per_round)
        self.initial: dict[int, float] = {}

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
