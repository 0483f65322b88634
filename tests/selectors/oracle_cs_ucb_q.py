"""A slow, plain-Python reading of CS-UCB-Q that judges a selector's choices; queues are counted from their start.

Where the paper leaves two readings open, this is the selector's: a round that is never observed serves nobody, so that
every queue grows by c; and the step from t - 1 to t takes the c of round t, if c follows from data sizes and a newcomer
changes their sum.

References:
    Xia et al. (2020), Multi-Armed Bandit Based Client Scheduling for Federated Learning, Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.selectors.oracles import CSUCBOracle


class CSUCBQOracle(CSUCBOracle):
    """Xia et al., Algorithm 2: the set that maximizes (28); c is `fairness`, else it follows from (equal) sizes."""

    def __init__(
        self,
        clients_per_round: int,
        max_latency: float,
        *,
        queue_weight: float,
        fairness: Mapping[int, float] | None = None,
        sizes: Mapping[int, float] | None = None,
        fairness_scale: float = 0.5,
    ) -> None:
        super().__init__(clients_per_round, max_latency)
        self.beta = queue_weight
        self.fairness = fairness
        self.sizes = sizes
        self.scale = fairness_scale
        self.first: dict[int, int] = {}  # client -> the first round in which it is registered
        self.played: dict[int, set[int]] = {}  # observed round -> who was played in it, failed or not
        self.rewards: dict[int, list[float]] = {}

    def inform(self, clients: Iterable[int]) -> None:
        """Register clients from the next round on."""
        for client in clients:
            self.first.setdefault(int(client), len(self.rounds) + 1)

    def tell(self, selector: Any, clients: list[int], rng: np.random.Generator) -> None:
        if self.sizes is not None:
            selector.inform(np.array(clients), num_examples=np.array([self.sizes[client] for client in clients]))
            self.inform(clients)

    def observe(self, report: Any) -> None:
        super().observe(report)
        self.played[len(self.rounds)] = set(report.clients.tolist())
        for client, done, seconds in self.rounds[-1].rows:
            self.rewards.setdefault(client, []).append(self.reward(done, seconds))

    def share(self, client: int, t: int) -> float:
        """Return c_k as it is known in round t: given, or phi m s_k/sum(s) over the clients registered by then."""
        if self.fairness is not None:
            return self.fairness[client]
        roster = [k for k, first in self.first.items() if first <= t]
        sizes = self.sizes or dict.fromkeys(roster, 1.0)
        share = self.scale * self.m * sizes[client] / sum(sizes[k] for k in roster)
        assert share < 1, "the cap below 1 is not one number; choose sizes that stay below it"
        return share

    def queue(self, client: int) -> float:
        """Return D_k at the beginning of the open round (27), from the client's first round on."""
        length = 0.0
        for t in range(self.first[client], len(self.rounds)):
            played = client in self.played.get(t, ())  # b_k(t)
            length = max(length + self.share(client, t + 1) - played, 0.0)  # (27)
        return length

    def terms(self, client: int) -> tuple[float, ...]:
        """Return what a client adds to the sum in (28)."""
        rewards, optimistic = self.rewards.get(client, []), 1.0
        if rewards:
            bonus = math.sqrt(2 * math.log(len(self.rounds)) / len(rewards))
            optimistic = min(sum(rewards) / len(rewards) + bonus, 1.0)  # (26)
        return ((1 - self.beta) * optimistic + self.beta * self.queue(client),)  # (28)

    def score(self, members: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return (sum(value for (value,) in members),)  # (28)

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        self.inform(available)
        return super().explain(available, chosen)
