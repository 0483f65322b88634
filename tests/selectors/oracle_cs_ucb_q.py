"""A slow, plain-Python reading of CS-UCB-Q that judges a selector's choices; queues are counted from their start.

Where the paper leaves two readings open, both are followed at once: a selector has to stay with one of them.

- A round that is never observed is "taken as never made": b = 0 for everybody, so every queue grows by c (`drift`), or
  the step (27) of that round is left out.
- Where c follows from data sizes and a newcomer changes their sum, the step from t - 1 to t takes the c of round
  t - 1 or that of round t.

References:
    Xia et al. (2020), Multi-Armed Bandit Based Client Scheduling for Federated Learning, Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tests.selectors.oracles import Oracle, PastRound


@dataclass(frozen=True, order=True)
class Reading:
    """One way to read (27) where the paper is silent."""

    drift: bool  # unobserved rounds let the queues grow
    later: bool  # the step from t - 1 to t takes the fairness of round t


class CSUCBQOracle(Oracle):
    """Xia et al., Algorithm 2: the set that maximizes (28)."""

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
        """Start before round 1; c is `fairness`, else it follows from `sizes`, else from equal sizes."""
        super().__init__(clients_per_round, max_latency)
        self.beta = queue_weight
        self.fairness = fairness
        self.sizes = sizes
        self.scale = fairness_scale
        self.first: dict[int, int] = {}  # client -> the first round in which it is registered
        self.played: dict[int, set[int]] = {}  # observed round -> who was played in it, failed or not
        self.rewards: dict[int, list[float]] = {}
        laters = (False,) if fairness is not None else (False, True)
        self.alive = {Reading(drift=drift, later=later) for drift, later in product((True, False), laters)}
        self.reading = Reading(drift=True, later=False)

    def inform(self, clients: Iterable[int]) -> None:
        """Register clients from the next round on."""
        for client in clients:
            self.informed.add(int(client))
            self.first.setdefault(int(client), len(self.rounds) + 1)

    def observe(self, clients: Sequence[int], completed: Sequence[bool], latency: Sequence[float]) -> None:
        """Record what came back from the round judged last."""
        super().observe(clients, completed, latency)
        self.played[len(self.rounds)] = {int(client) for client in clients}
        for client, done, seconds in self.rounds[-1].rows:
            self.rewards.setdefault(client, []).append(self.reward(done, seconds))

    def reward(self, completed: bool, latency: float) -> float:
        """Return r_k = 1 - min(tau_k, tau_max)/tau_max; 0 for a failed client."""
        return 1 - min(latency, self.max_latency) / self.max_latency if completed else 0.0

    def share(self, client: int, t: int) -> float:
        """Return c_k as it is known in round t: given, or phi m s_k/sum(s) over the clients registered by then."""
        if self.fairness is not None:
            return self.fairness[client]
        roster = [k for k, first in self.first.items() if first <= t]
        sizes = self.sizes or dict.fromkeys(roster, 1.0)
        share = self.scale * self.m * sizes[client] / sum(sizes[k] for k in roster)
        if share >= 1:
            raise AssertionError("the cap below 1 is not one number; choose sizes that stay below it")
        return share

    def queue(self, client: int) -> float:
        """Return D_k at the beginning of the open round (27), from the client's first round on."""
        length = 0.0
        for t in range(self.first[client], len(self.rounds)):
            if t not in self.played and not self.reading.drift:
                continue
            played = client in self.played.get(t, ())  # b_k(t)
            share = self.share(client, t + 1 if self.reading.later else t)
            length = max(length + share - played, 0.0)  # (27)
        return length

    def terms(self, client: int) -> tuple[float, ...]:
        """Return what a client adds to the sum in (28)."""
        rewards = self.rewards.get(client, [])
        optimistic = 1.0
        if rewards:
            bonus = math.sqrt(2 * math.log(len(self.rounds)) / len(rewards))
            optimistic = min(sum(rewards) / len(rewards) + bonus, 1.0)  # (26)
        return ((1 - self.beta) * optimistic + self.beta * self.queue(client),)  # (28)

    def score(self, members: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        """Return the sum of (28)."""
        return (sum(value for (value,) in members),)

    def explain(self, available: Sequence[int], chosen: Sequence[int]) -> str:
        """Judge by every reading that was followed so far; '' if one of them is still followed."""
        for client in available:
            self.first.setdefault(int(client), len(self.rounds) + 1)
        decided = self.decided
        faults: dict[Reading, str] = {}
        for reading in sorted(self.alive):
            self.reading, self.decided = reading, decided
            if fault := super().explain(available, chosen):
                faults[reading] = f"{reading}: {fault}"
            self.rounds.pop()
        self.rounds.append(PastRound(available=[int(client) for client in available]))
        if self.alive == set(faults):
            return "; ".join(faults.values())
        self.alive -= set(faults)
        return ""


class Arrivals:
    """A selector whose clients are told, with their sizes, just before the round in which they may first appear."""

    def __init__(self, selector: Any, oracle: CSUCBQOracle, arrivals: Mapping[int, int]) -> None:
        """Tell client k before round `arrivals[k]`."""
        self.selector, self.oracle, self.arrivals = selector, oracle, arrivals

    def select(self, available: np.ndarray) -> np.ndarray:
        """Tell who arrives now, then choose."""
        t = len(self.oracle.rounds) + 1
        if arriving := [client for client, first in self.arrivals.items() if first == t]:
            assert self.oracle.sizes is not None
            sizes = np.array([self.oracle.sizes[client] for client in arriving])
            self.selector.inform(np.array(arriving), num_examples=sizes)
            self.oracle.inform(arriving)
        return np.asarray(self.selector.select(available))

    def observe(self, report: Any) -> None:
        """Pass on what came back."""
        self.selector.observe(report)
