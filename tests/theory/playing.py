"""Shared by the theory tests: tables of latencies, policies without learning, and the run of a selector."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsel_flwr.selectors import RoundReport, create


def play(
    name: str, latency: np.ndarray, clients_per_round: int, *, seed: int = 1, available: np.ndarray | None = None,
    num_examples: np.ndarray | None = None, **parameters: Any,
) -> np.ndarray:  # fmt: skip
    """Run as many rounds as ``latency``, of shape (rounds, K), has rows; return the choices as booleans.

    A latency at or above the parameter max_latency is a failed client; ``available`` has the shape of the result.
    """
    selector = create(name, clients_per_round=clients_per_round, seed=seed, **parameters)
    everyone = np.arange(latency.shape[1])
    selector.inform(everyone, **({} if num_examples is None else {"num_examples": num_examples}))
    completed = latency < parameters.get("max_latency", np.inf)
    chosen = np.zeros(latency.shape, dtype=bool)
    for t in range(len(latency)):
        clients = selector.select(everyone if available is None else np.flatnonzero(available[t]))
        chosen[t, clients] = True
        selector.observe(RoundReport(clients=clients, completed=completed[t, clients], latency=latency[t, clients]))
    return chosen


def noisy(mean_reward: np.ndarray, spread: float, rounds: int = 20_000) -> np.ndarray:
    """Draw 5 (1 - mean) s, times U(1 - spread, 1 + spread), of shape (rounds, K): the means at max_latency = 5 s."""
    noise = np.random.default_rng(3).uniform(1 - spread, 1 + spread, (rounds, mean_reward.size))
    return 5.0 * (1.0 - mean_reward) * noise


def lowest_first(mean: np.ndarray, m: int, available: np.ndarray) -> np.ndarray:
    """The choices of a policy that takes the m available clients of the lowest means in every round."""
    chosen = np.zeros_like(available)
    for row, here in zip(chosen, available, strict=True):
        row[[k for k in np.argsort(mean) if here[k]][:m]] = True
    return chosen
