"""Shared by the theory tests: tables of latencies, and the run of a selector against one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import RoundReport, create

Play = Callable[..., np.ndarray]


@pytest.fixture(scope="session")
def play() -> Play:
    """Return the function that runs a selector and tells who was chosen."""

    def run(
        name: str,
        latency: np.ndarray,
        clients_per_round: int,
        *,
        seed: int = 1,
        available: np.ndarray | None = None,
        num_examples: np.ndarray | None = None,
        **parameters: Any,
    ) -> np.ndarray:
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

    return run


@pytest.fixture(scope="session")
def noisy() -> Callable[..., np.ndarray]:
    """Return the function that draws latencies, in s, whose reward at max_latency = 5 s has the given means."""

    def draw(mean_reward: np.ndarray, spread: float, rounds: int = 20_000) -> np.ndarray:
        """Draw 5 (1 - mean) s, times U(1 - spread, 1 + spread), of shape (rounds, K)."""
        noise = np.random.default_rng(3).uniform(1 - spread, 1 + spread, (rounds, mean_reward.size))
        return 5.0 * (1.0 - mean_reward) * noise

    return draw
