"""A fleet of phones without training: latencies of all rounds, seconds of random selection and sorted groups, one run.

The phones are those of the scenario ``phones``: 14 MB received and sent, and a deadline of 60 s. Each phone trains on
30 examples a round, and has a network of its own. ``spread`` is the standard deviation of the log of the computing
speed between phones. The networks' standard deviations change in proportion, so that 0.78 gives the measured phones and
0 gives equal phones. ``noise`` is the coefficient of variation of a phone's network from round to round.

``when.py`` runs the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import gammaln

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.device import PROBE_BITS, mean_latencies
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.streams import streams
from fedsel_flwr.report import jain_index
from fedsel_flwr.selectors import RoundReport, create
from fedsel_flwr.theory import sorted_groups

EXAMPLES = 30
"""Examples that a phone trains on in a round; a median phone needs 5 s."""
PAYLOAD_BITS = 8 * 14e6
DEADLINE_S = 60.0
MEASURED = PhoneModel.compute_log_sd
"""The spread of the measured phones."""


@dataclass(frozen=True)
class Fleet:
    """Phones and the size of a cohort.

    Args:
        clients: Number of phones.
        per_round: Size of the cohort.
        spread: Standard deviation of the log of the computing speed between phones.
        noise: Coefficient of variation of a phone's network from round to round.
    """

    clients: int
    per_round: int
    spread: float
    noise: float

    @property
    def cycle(self) -> int:
        """Number of rounds in which each client could be selected once."""
        return self.clients // self.per_round

    def phones(self, seed: int) -> PhoneModel:
        """Return the system model of a seed."""
        scale = self.spread / MEASURED
        return PhoneModel(
            num_clients=self.clients,
            seed=seed,
            examples=np.full(self.clients, EXAMPLES),
            payload_bits=PAYLOAD_BITS,
            max_latency_s=DEADLINE_S,
            compute_log_sd=self.spread,
            download_log_sd=scale * PhoneModel.download_log_sd,
            upload_log_sd=scale * PhoneModel.upload_log_sd,
            network_round_cv=self.noise,
        )


@lru_cache(maxsize=2)
def normals(seed: int, clients: int, rounds: int) -> tuple[FloatArray, FloatArray]:
    """Return the standard normal draws behind :meth:`PhoneModel.draws`, which do not depend on spread and noise.

    Returns:
        Draws of the phones, shape (clients, 3), and of the phones in rounds 1, 2, ..., shape (rounds, clients, 3).
    """
    ids = range(clients)
    own = np.array([stream.standard_normal(3) for stream in streams(seed, "phone", ids)])
    now = np.empty((rounds, clients, 3))
    for number in range(rounds):
        now[number] = [stream.standard_normal(3) for stream in streams(seed, "phone-round", ids, number + 1)]
    return own, now


@dataclass(frozen=True)
class Times:
    """Latencies of a fleet in all rounds.

    Attributes:
        fleet: The fleet.
        latency: Seconds before the deadline limits them, shape (rounds, clients).
        probe: Seconds that a probe of all clients for their accuracy takes in each round, shape (rounds,).
        mean: True mean latency of each client, limited by the deadline, shape (clients,).
        deadline_s: Deadline of a round, seconds.
    """

    fleet: Fleet
    latency: FloatArray
    probe: FloatArray
    mean: FloatArray
    deadline_s: float = DEADLINE_S

    @property
    def capped(self) -> FloatArray:
        """Latencies, at most the deadline."""
        return np.minimum(self.latency, self.deadline_s)

    def random_s(self) -> float:
        """Return the expected seconds a round of random selection: the mean over the rounds and all cohorts."""
        n, m = self.fleet.clients, self.fleet.per_round
        rank = np.arange(m, n + 1)
        # The client with the k-th smallest latency is the slowest of C(k - 1, m - 1) of the C(n, m) cohorts.
        log_share = _log_choose(rank - 1, m - 1) - _log_choose(n, m)
        return float((np.sort(self.capped, axis=1)[:, m - 1 :] @ np.exp(log_share)).mean())

    def groups_s(self) -> float:
        """Return the seconds a round of sorted groups: the mean over the rounds and all groups."""
        groups = np.array(sorted_groups(self.mean, self.fleet.per_round))
        return float(self.capped[:, groups].max(axis=2).mean())

    def components(self) -> tuple[float, float]:
        """Return spread and noise as ``fedsel advise`` defines them.

        The spread is the standard deviation of the clients' mean log seconds, without the part that the noise adds. The
        noise is the standard deviation of one client's log seconds.
        """
        logs = np.log(self.latency)
        within = float(logs.var(axis=0, ddof=1).mean())
        between = float(logs.mean(axis=0).var(ddof=1)) - within / len(logs)
        return float(np.sqrt(max(0.0, between))), float(np.sqrt(within))


def draw_times(fleet: Fleet, seed: int, rounds: int, passes: FloatArray | float = 1.0) -> Times:
    """Draw the latencies of rounds 1 to ``rounds``, equal to those of :meth:`PhoneModel.draws` up to rounding.

    Args:
        fleet: The fleet.
        seed: Seed of the latencies.
        rounds: Number of rounds.
        passes: Forward passes of a probe over the examples of a round, shape (clients,). By default, a client has as
            many test examples as it trains on in a round.
    """
    phones = fleet.phones(seed)
    own, now = normals(seed, fleet.clients, rounds)
    between = [phones.compute_log_sd, -phones.download_log_sd, -phones.upload_log_sd]
    within = [_log_sd(phones.compute_round_cv), -_log_sd(fleet.noise), -_log_sd(fleet.noise)]
    medians = np.array([
        phones.seconds_per_example * EXAMPLES,
        PAYLOAD_BITS / 8 / phones.download_bytes_per_s,
        PAYLOAD_BITS / 8 / phones.upload_bytes_per_s,
    ])  # fmt: skip
    parts = np.exp(now * within)
    parts *= medians * np.exp(own * between)
    # A probe costs the download, forward passes (each a third of training) and the upload of a number.
    asked = parts[..., 0] * (np.asarray(passes) / 3) + parts @ [0.0, 1.0, PROBE_BITS / PAYLOAD_BITS]
    probe = np.minimum(asked, DEADLINE_S).max(axis=1)
    return Times(fleet, parts.sum(axis=2), probe, mean_latencies(phones))


@dataclass(frozen=True)
class Course:
    """A run of a selector.

    Attributes:
        seconds: Seconds of each round, probes included, shape (rounds,).
        cohorts: Clients of each round, shape (rounds, per_round).
    """

    seconds: FloatArray
    cohorts: IntArray

    def figures(self, plays: int, fleet: Fleet) -> tuple[float, float, float]:
        """Return seconds a round, seconds a round in the last half, and Jain's index of the selections.

        Args:
            plays: Mean number of plays of a client, which sets the number of first rounds that count.
            fleet: The fleet. The last half is rounded up to whole cycles of the fleet.
        """
        seconds = self.seconds[: plays * fleet.cycle]
        counts = np.bincount(self.cohorts[: len(seconds)].ravel(), minlength=fleet.clients)
        late = seconds[plays // 2 * fleet.cycle :]
        return float(seconds.mean()), float(late.mean()), jain_index(counts)


def run(times: Times, name: str, params: Mapping[str, Any], seed: int) -> Course:
    """Run a selector over all rounds, with all clients available.

    No client trains. All clients report the same loss, which falls with the root of the round as in training, and the
    same accuracy.

    Args:
        times: The latencies.
        name: Name of the selector.
        params: Parameters of the selector, except the size of the cohort.
        seed: Seed of the selector.
    """
    fleet, rounds = times.fleet, len(times.latency)
    selector = create(name, clients_per_round=fleet.per_round, seed=seed, **params)
    everyone, capped = np.arange(fleet.clients), times.capped
    selector.inform(everyone, num_examples=np.full(fleet.clients, float(EXAMPLES)))
    seconds, cohorts = np.zeros(rounds), np.empty((rounds, fleet.per_round), dtype=np.int64)
    for number in range(rounds):
        probe = selector.probe(everyone)
        if probe is not None:
            answers = {column: np.full(fleet.clients, 0.5) for column in probe.columns}
            selector.inform(everyone, **answers)
            seconds[number] += times.probe[number]
        chosen = selector.select(everyone)
        latency, done = capped[number, chosen], times.latency[number, chosen] <= times.deadline_s
        loss = np.where(done, (number + 1) ** -0.5, np.nan)
        columns = {"rms_loss": loss} if "rms_loss" in selector.needs else {}
        selector.observe(RoundReport(clients=chosen, completed=done, latency=latency, **columns))
        seconds[number] += latency.max()
        cohorts[number] = chosen
    return Course(seconds, cohorts)


def _log_choose(n: IntArray | int, k: int) -> FloatArray:
    return np.asarray(gammaln(np.asarray(n) + 1) - gammaln(k + 1) - gammaln(np.asarray(n) - k + 1))


def _log_sd(variation: float) -> float:
    return float(np.sqrt(np.log1p(variation**2)))
