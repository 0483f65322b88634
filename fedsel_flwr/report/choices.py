"""Choices alone: selectors select from drawn latencies, and no client trains.

A round lasts as long as its slowest client. Let X_1 <= ... <= X_n be the seconds of all n clients in a round. If all
cohorts of m clients are equally likely, the slowest client of the cohort is that of X_k with the probability

    p_k = binom(k - 1, m - 1) / binom(n, m),    so a round of random selection lasts sum of p_k X_k on average.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsel_flwr.checks import AUTO, BoolArray, FloatArray, IntArray
from fedsel_flwr.report.latencies import SELECTORS
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.selectors import RoundReport, Selector, create
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.theory import sorted_groups

NEUTRAL = {"local_accuracy": 0.5}
"""Column -> its value for every client, because only latencies and sizes are modelled."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A modelled fleet.

    Attributes:
        log_means: Each client's mean log seconds, shape (num_clients,).
        noise: Standard deviation of each client's log seconds, shape (num_clients,).
        shape: Quantiles of the noise divided by its standard deviation, ascending, shape (quantiles,).
        max_latency: Seconds at which a latency is cut off; infinity if nothing is cut off.
        failure_rate: Probability that a client fails for a reason other than time.
        num_examples: Number of examples of each client, shape (num_clients,).
    """

    log_means: FloatArray
    noise: FloatArray
    shape: FloatArray
    max_latency: float
    failure_rate: float
    num_examples: FloatArray

    @property
    def longest(self) -> float:
        """Seconds that a failed client counts; a finite number even if nothing is cut off."""
        if math.isfinite(self.max_latency):
            return self.max_latency
        return float(np.exp((self.log_means + self.shape[-1] * self.noise).max()))

    def draw(self, rounds: int, generator: np.random.Generator) -> tuple[FloatArray, BoolArray]:
        """Draw the seconds of every client in every round, and whether the client completes.

        Args:
            rounds: Number of rounds.
            generator: Generator of the draws.

        Returns:
            Seconds, shape (rounds, num_clients), and whether the client completes, same shape.
        """
        size = rounds, self.log_means.size
        # Between two quantiles, the noise is uniform.
        place = generator.uniform(0.0, len(self.shape) - 1.0, size)
        seconds = np.exp(self.log_means + self.noise * np.interp(place, np.arange(len(self.shape)), self.shape))
        completed = (seconds < self.max_latency) & (generator.uniform(size=size) >= self.failure_rate)
        return np.where(completed, seconds, self.longest), completed


def random_seconds(seconds: FloatArray, clients_per_round: int) -> float:
    """Return the mean seconds of a round if all cohorts of this size are equally likely.

    Args:
        seconds: Seconds of every client in every round, shape (rounds, num_clients).
        clients_per_round: Number of clients of a round; all, if there are fewer.
    """
    n = seconds.shape[1]
    m, k = min(clients_per_round, n), np.arange(1, n + 1)
    logs = [load_optional("scipy.special").gammaln(each) for each in (k, np.maximum(k - m, 0) + 1, n + 1, n - m + 1)]
    # log of (k - 1)! / (k - m)! and of n! / (n - m)!, whose ratio times m is p_k.
    chance = np.where(k >= m, m * np.exp(logs[0] - logs[1] - logs[2] + logs[3]), 0.0)
    return float((np.sort(seconds, axis=1) @ chance).mean())


def sorted_seconds(seconds: FloatArray, log_means: FloatArray, clients_per_round: int) -> float:
    """Return the mean seconds of a round of sorted groups (:func:`~fedsel_flwr.theory.sorted_groups`).

    Args:
        seconds: Seconds of every client in every round, shape (rounds, num_clients).
        log_means: Each client's mean log seconds, by which the groups are sorted, shape (num_clients,).
        clients_per_round: Number of clients of a round.
    """
    groups = sorted_groups(log_means, clients_per_round)
    return float(np.mean([seconds[:, group].max(axis=1).mean() for group in groups]))


def selector_parameters(
    name: str, fleet: Fleet, clients_per_round: int, own: Mapping[str, Any], deadline: float
) -> dict[str, Any]:
    """Return the parameters of a selector: those of the scenario, else what a deployment gets by default.

    Args:
        name: Name of the selector.
        fleet: The fleet. Its numbers of examples replace the value "sizes".
        clients_per_round: Number of clients of a round.
        own: The selector's parameters in the scenario; empty without a scenario.
        deadline: FedCS's deadline without a scenario, s.

    Returns:
        The parameters, without the seed.
    """
    cls = selector_class(name)
    accepted = inspect.signature(cls).parameters
    defaults = {"min_latency": AUTO, "max_latency": AUTO, "deadline": deadline}
    params = defaults | dict(own) | {"clients_per_round": clients_per_round}
    sizes = dict(enumerate(fleet.num_examples.tolist()))
    for key in cls.by_client & params.keys():
        # Values for named clients do not fit clients that are drawn from the model.
        params[key] = sizes if params[key] == "sizes" else None
    return {key: value for key, value in params.items() if key in accepted}


def draw_available(
    counts: IntArray, selections: IntArray, rounds: int, generator: np.random.Generator
) -> list[IntArray]:
    """Draw the available clients of each round.

    If clients are absent, some of them are absent more often. Suppose that random selection selected client i n_i
    times in T rounds, with the mean n and the variance v over the clients. If all clients were equally often available,
    v would be n (1 - n / T). The rates of the clients have the gamma distribution with the mean 1 and the variance
    1 / r, with r = n² / (v - n (1 - n / T)). The rate of client i is drawn from its distribution given n_i, which is
    Gamma(r + n_i, r + n). If v is too small, all rates are equal.

    Args:
        counts: Number of available clients in the rounds of the history, in order, shape (T,). They are repeated if the
            prediction has more rounds. If there are none, every client is available in every round.
        selections: Number of rounds in which each client was selected, shape (num_clients,).
        rounds: Number of rounds.
        generator: Generator of the draws.

    Returns:
        The available clients of each round, ascending, at least one. Client i is available with the probability
        rate · count / num_clients, at most 1.
    """
    num_clients = len(selections)
    if not len(counts) or counts.min() >= num_clients:
        return [np.arange(num_clients)] * rounds
    mean = float(selections.mean())
    excess = float(selections.var()) - mean * (1.0 - min(1.0, mean / len(counts)))
    rates = np.ones(num_clients)
    if excess > 0:
        shape = mean**2 / excess
        rates = generator.gamma(shape + selections) / (shape + mean)
    missing = generator.random((rounds, num_clients)) - np.resize(counts, rounds)[:, None] * rates / num_clients
    missing[np.arange(rounds), missing.argmin(axis=1)] = -1.0
    return [np.flatnonzero(each < 0) for each in missing]


def select_rounds(
    selector: Selector,
    seconds: FloatArray,
    completed: BoolArray,
    available: Sequence[IntArray],
    columns: Mapping[str, FloatArray],
) -> BoolArray:
    """Run a selector on drawn latencies. Probes cost no time.

    Args:
        selector: A new selector.
        seconds: Seconds of every client in every round, shape (rounds, num_clients).
        completed: Whether the client completes, same shape.
        available: The available clients of each round.
        columns: Column -> its value for each client, shape (num_clients,), in probes and replies.

    Returns:
        Whether each client was selected, shape (rounds, num_clients).
    """
    chosen = np.zeros(seconds.shape, dtype=np.bool_)
    for t, here in enumerate(available):
        request = selector.probe(here)
        if request is not None:
            selector.inform(request.clients, **{name: columns[name][request.clients] for name in request.columns})
        clients = selector.select(here)
        replies: dict[str, Any] = {name: columns[name][clients] for name in selector.needs & columns.keys()}
        selector.observe(
            RoundReport(clients=clients, completed=completed[t, clients], latency=seconds[t, clients], **replies)
        )
        chosen[t, clients] = True
    return chosen


def run_selectors(
    fleet: Fleet,
    clients_per_round: int,
    seed: int,
    parameters: Mapping[str, Mapping[str, Any]],
    available: Sequence[IntArray],
) -> tuple[float, FloatArray, dict[str, BoolArray]]:
    """Run random selection and all selectors of :data:`SELECTORS` on the same drawn latencies.

    Args:
        fleet: The fleet.
        clients_per_round: Number of clients of a round.
        seed: Seed of the latencies and of the selectors.
        parameters: Selector -> its parameters in the scenario.
        available: The available clients of each round.

    Returns:
        Mean seconds of a round if all cohorts are equally likely; seconds of every client in every round, shape
        (rounds, num_clients); and selector -> whether each client was selected, same shape.
    """
    seconds, completed = fleet.draw(len(available), np.random.default_rng([seed, 1]))
    usual = random_seconds(seconds, clients_per_round)
    everyone = np.arange(len(fleet.log_means))
    columns = {name: np.full(len(everyone), value) for name, value in NEUTRAL.items()}
    columns["num_examples"] = fleet.num_examples
    found = {}
    for name in ("random", *SELECTORS):
        params = selector_parameters(name, fleet, clients_per_round, parameters.get(name, {}), usual)
        selector = create(name, **params, seed=seed)
        selector.inform(everyone, num_examples=fleet.num_examples)
        found[name] = select_rounds(selector, seconds, completed, available, columns)
    return usual, seconds, found
