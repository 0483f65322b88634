"""Choices alone: selectors select from a modelled fleet, and no client trains.

A round lasts as long as its slowest client. Client i is done by t seconds with the probability F_i(t). A round with the
cohort S then lasts, on average,

    E[max] = integral over t of 1 - product over i in S of F_i(t),    t from 0 to max_latency.

For random selection, the product is averaged over all cohorts of m clients. For sorted groups
(:func:`~fedsel_flwr.theory.sorted_groups`), the integral is averaged over the groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedsel_flwr.checks import AUTO, BoolArray, FloatArray, IntArray
from fedsel_flwr.report.latencies import SELECTORS
from fedsel_flwr.selectors import RoundReport, Selector, create
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.theory import sorted_groups

TIMES = 256
"""Number of times at which the integral is evaluated."""
TINY = 1e-300
"""Smallest rate of availability, so that it has a logarithm."""
NEUTRAL = {"local_accuracy": 0.5, "rms_loss": 1.0, "num_examples": 1.0}
"""Column -> its value for every client, because only latencies are modelled."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A modelled fleet.

    Attributes:
        log_means: Each client's mean log seconds, shape (num_clients,).
        noise: Standard deviation of one client's log seconds.
        shape: Quantiles of the noise divided by its standard deviation, ascending, shape (quantiles,).
        max_latency: Seconds at which a latency is cut off; infinity if nothing is cut off.
        failure_rate: Probability that a client fails for a reason other than time.
        num_examples: Number of examples of each client, shape (num_clients,).
    """

    log_means: FloatArray
    noise: float
    shape: FloatArray
    max_latency: float
    failure_rate: float
    num_examples: FloatArray

    @property
    def longest(self) -> float:
        """Seconds that a failed client counts; a finite number even if nothing is cut off."""
        if math.isfinite(self.max_latency):
            return self.max_latency
        return float(np.exp(self.log_means.max() + self.shape[-1] * self.noise))

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

    @cached_property
    def done(self) -> tuple[FloatArray, FloatArray]:
        """Times, shape (TIMES,), and the probabilities F_i at these times, shape (num_clients, TIMES)."""
        low = self.log_means.min() + self.noise * self.shape[0]
        high = min(self.log_means.max() + self.noise * self.shape[-1], math.log(self.longest))
        logs = np.linspace(min(low, high - 0.1), high, TIMES)
        share = np.linspace(0.0, 1.0, len(self.shape))
        chance = np.interp((logs - self.log_means[:, None]) / self.noise, self.shape, share, left=0.0, right=1.0)
        return np.exp(logs), chance * (1.0 - self.failure_rate)

    def cohort_seconds(self, cohort: IntArray) -> float:
        """Return the mean seconds of a round with this cohort, indices of clients."""
        return self._mean_longest(self.done[1][cohort].prod(axis=0))

    def random_seconds(self, clients_per_round: int) -> float:
        """Return the mean seconds of a round if all cohorts of this size are equally likely."""
        done = self.done[1]
        m = min(clients_per_round, len(done))
        # Mean product over all cohorts of j of the first k clients, for j = 0 … m, client by client.
        mean = np.zeros((m + 1, TIMES))
        mean[0] = 1.0
        size = np.arange(1, m + 1)[:, None]
        for k, one in enumerate(done, start=1):
            share = np.minimum(size / k, 1.0)
            mean[1:] = (1.0 - share) * mean[1:] + share * one * mean[:-1]
        return self._mean_longest(mean[m])

    def sorted_seconds(self, clients_per_round: int) -> float:
        """Return the mean seconds of a round of sorted groups, which all have equal shares."""
        # All clients have the same noise, so the order of the mean latencies is that of the mean logs.
        return float(np.mean([self.cohort_seconds(one) for one in sorted_groups(self.log_means, clients_per_round)]))

    def _mean_longest(self, all_done: FloatArray) -> float:
        """Integrate 1 - P(all done by t); a client that is not done counts ``longest``."""
        times, late = self.done[0], 1.0 - all_done
        rest = (self.longest - times[-1]) * late[-1]
        return float(times[0] + np.sum((late[1:] + late[:-1]) / 2 * np.diff(times)) + rest)


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
    times, with the mean n and the variance v over the clients. The rates of the clients then have the gamma
    distribution with the shape r = n² / (v - n) and the mean 1. The rate of client i is drawn from its distribution
    given n_i, which is Gamma(r + n_i, r + n). If v is at most n, all rates are equal.

    Args:
        counts: Number of available clients in the rounds of the history, in order, shape (n,). They are repeated if the
            prediction has more rounds. If there are none, every client is available in every round.
        selections: Number of rounds in which each client was selected, shape (num_clients,).
        rounds: Number of rounds.
        generator: Generator of the draws.

    Returns:
        The available clients of each round, ascending.
    """
    num_clients = len(selections)
    if not len(counts) or counts.min() >= num_clients:
        return [np.arange(num_clients)] * rounds
    mean, excess = float(selections.mean()), float(selections.var() - selections.mean())
    rates = np.ones(num_clients)
    if excess > 0:
        shape = mean**2 / excess
        rates = generator.gamma(shape + selections) / (shape + mean)
    # The clients with the largest values of log rate plus Gumbel noise are a draw without replacement.
    logs = np.log(np.maximum(rates, TINY))
    return [
        np.sort(np.argsort(-(logs + generator.gumbel(size=num_clients)), kind="stable")[:size])
        for size in np.resize(counts, rounds).tolist()
    ]


def select_rounds(
    selector: Selector, fleet: Fleet, seconds: FloatArray, completed: BoolArray, available: Sequence[IntArray]
) -> tuple[FloatArray, IntArray]:
    """Run a selector on drawn latencies.

    The selector learns from the drawn latencies. The duration of a round is the mean for its cohort, so that chance
    in the drawn latencies affects the result only through the selections.

    Columns other than the latency have the same value for every client
    (:data:`NEUTRAL`), and probes cost no time.

    Args:
        selector: A new selector.
        fleet: The fleet.
        seconds: Seconds of every client in every round, shape (rounds, num_clients).
        completed: Whether the client completes, same shape.
        available: The available clients of each round.

    Returns:
        Mean seconds of each round's cohort, shape (rounds,). And the clients' number of selections after each round,
        shape (rounds, num_clients).
    """
    rounds, num_clients = seconds.shape
    selector.inform(np.arange(num_clients))
    taken, counts = np.zeros(rounds), np.zeros((rounds, num_clients), dtype=np.int64)
    for t in range(rounds):
        request = selector.probe(available[t])
        if request is not None:
            replies = {name: np.full(len(request.clients), NEUTRAL[name]) for name in request.columns}
            selector.inform(request.clients, **replies)
        chosen = selector.select(available[t])
        columns = {name: np.full(len(chosen), value) for name, value in NEUTRAL.items() if name in selector.needs}
        selector.observe(
            RoundReport(clients=chosen, completed=completed[t, chosen], latency=seconds[t, chosen], **columns)  # type: ignore[arg-type]
        )
        taken[t] = fleet.cohort_seconds(chosen)
        counts[t, chosen] = 1
    return taken, counts.cumsum(axis=0)


def run_selectors(
    fleet: Fleet,
    clients_per_round: int,
    seed: int,
    parameters: Mapping[str, Mapping[str, Any]],
    available: Sequence[IntArray],
) -> dict[str, tuple[FloatArray, IntArray]]:
    """Run random selection and all selectors of :data:`SELECTORS` on the same drawn latencies.

    Args:
        fleet: The fleet.
        clients_per_round: Number of clients of a round.
        seed: Seed of the latencies and of the selectors.
        parameters: Selector -> its parameters in the scenario.
        available: The available clients of each round.

    Returns:
        Selector -> seconds of each round and numbers of selections, as in :func:`select_rounds`.
    """
    drawn = fleet.draw(len(available), np.random.default_rng([seed, 1]))
    deadline = fleet.random_seconds(clients_per_round)
    found = {}
    for name in ("random", *SELECTORS):
        params = selector_parameters(name, fleet, clients_per_round, parameters.get(name, {}), deadline)
        found[name] = select_rounds(create(name, **params, seed=seed), fleet, *drawn, available)
    return found
