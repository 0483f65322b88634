"""Synthetic histories of latencies with a known spread, noise and ceiling, made by a selector that really selects."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.report.choices import Fleet
from fedsel_flwr.report.latencies import Latencies
from fedsel_flwr.selectors import RoundReport, create


def latencies(
    client: Any, seconds: Any, censored: Any = None, number: int = 0, m: int = 1, max_latency: float = math.inf
) -> Latencies:
    """Rows as they would come from a file, of so many clients, ``m`` a round; by default of those that have a row."""
    number = number or int(max(client)) + 1
    return Latencies(
        client=np.array(client), seconds=np.array(seconds, dtype=np.float64), num_clients=number,
        censored=np.zeros(len(client), dtype=np.bool_) if censored is None else np.array(censored),
        fleet=np.zeros(number, dtype=np.int64), num_examples=np.full(number, np.nan), clients_per_round=m,
        max_latency=max_latency,
    )  # fmt: skip


def fleet(num_clients: int, spread: float, noise: float, max_latency: float = math.inf, seed: int = 0) -> Fleet:
    """A log-normal fleet with a median of 10 s, whose mean logs have exactly this standard deviation."""
    logs = np.random.default_rng(seed).standard_normal(num_clients)
    logs = (logs - logs.mean()) / logs.std()
    normal = np.sort(np.random.default_rng(1).standard_normal(20_001))
    return Fleet(
        log_means=math.log(10.0) + spread * logs, noise=np.full(num_clients, noise), shape=normal[::20],
        max_latency=max_latency, failure_rate=0.0, num_examples=np.ones(num_clients),
    )  # fmt: skip


def history(own: Fleet, selector: str, m: int, rounds: int, seed: int = 0, **params: Any) -> Latencies:
    """The rows that a selector sees; the latencies are drawn here, not by the code under test."""
    generator, chooser = np.random.default_rng(seed), create(selector, clients_per_round=m, seed=seed, **params)
    number = own.log_means.size
    client, seconds, censored = list[int](), list[float](), list[bool]()
    for _ in range(rounds):
        chosen = chooser.select(np.arange(number))
        drawn: FloatArray = np.exp(own.log_means[chosen] + own.noise[chosen] * generator.standard_normal(len(chosen)))
        late = drawn >= own.max_latency
        drawn = np.minimum(drawn, own.max_latency)
        chooser.observe(RoundReport(clients=chosen, completed=~late, latency=drawn))
        client += chosen.tolist()
        seconds += drawn.tolist()
        censored += late.tolist()
    return latencies(client, seconds, censored, number, m, own.max_latency)
