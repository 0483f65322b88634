"""What failures and spares do to selectors: ``python benchmarks/failures.py``.

Fleets of 100 synthetic clients, nobody trains. A client fails by chance in any round ("10 % fail"), or never answers
("1 dead"). Each row is the mean over the seeds; the columns are a fleet without failures, and the fleet that the row
names. The percentile of the chosen is 0 for the client with the least to learn from, 1 for the one with the most; at
random it is .5. In the rows with spares a round asks 13 clients and keeps the 10 that answer first.

The last rows have 20 clients, 5 a round, and ask what "auto" learns compared with a number of seconds: the regret of
2,000 rounds if 5 of 20 clients of 10 s are dead, and the seconds a round over the genie in the last quarter of 12,000
rounds if everybody who is chosen in round 30 answers in 1 ms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.selectors import RoundReport, Selector, create

K, M = 100, 10
MAX_LATENCY = 60.0
EVERYBODY = np.arange(K)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The clients and how they fail.

    Args:
        latency: Seconds of each client, shape (K,).
        loss: Loss of each client, shape (K,), by which a selector may choose.
        failure: Chance that a client which is not dead fails in a round.
        dead: Whether a client never answers, shape (K,).
        spares: The share by which a round asks more clients than it keeps.
        silent: Whether spares have not answered when the round ends; else their answers come late.
    """

    latency: FloatArray
    loss: FloatArray
    failure: float = 0.0
    dead: BoolArray | None = None
    spares: float = 0.0
    silent: bool = False

    def report(self, selector: Selector, chosen: IntArray, rng: np.random.Generator) -> tuple[RoundReport, IntArray]:
        """What a strategy would tell the selector of a round, and the clients that were used."""
        completed = rng.random(chosen.size) >= self.failure
        if self.dead is not None:
            completed &= ~self.dead[chosen]
        latency = np.where(completed, self.latency[chosen], MAX_LATENCY)
        told: dict[str, BoolArray] = {}
        used = completed
        if self.spares:
            late = np.argsort(latency, kind="stable")[M:]
            spare = np.zeros(chosen.size, dtype=np.bool_)
            spare[late] = completed[late]
            used = completed & ~spare
            if "spare" not in selector.needs:
                completed, latency = used, np.where(used, latency, MAX_LATENCY)
            else:
                told["spare"] = spare
                if self.silent:
                    completed, latency = used, np.where(spare, latency[used].max(), latency)
        loss = np.where(completed, self.loss[chosen], np.nan)
        report = RoundReport(clients=chosen, completed=completed, latency=latency, loss=loss, rms_loss=loss, **told)
        return report, chosen[used]

    def percentile(self) -> FloatArray:
        """The rank of each client's loss in [0, 1], shape (K,)."""
        return np.argsort(np.argsort(self.loss)) / (K - 1)


class Played(NamedTuple):
    """What happened, round by round: who was chosen, and who was used."""

    chosen: list[IntArray]
    used: list[IntArray]


def play(selector: Selector, fleet: Fleet, rounds: int, rng: np.random.Generator) -> Played:
    """Play rounds; probes for losses are answered by everybody."""
    selector.plan_rounds(over_selection=fleet.spares)
    selector.inform(EVERYBODY, num_examples=np.full(K, 100.0))
    played = Played([], [])
    for _ in range(rounds):
        if (question := selector.probe(EVERYBODY)) is not None and "loss" in question.columns:
            selector.inform(question.clients, loss=fleet.loss[question.clients])
        chosen = selector.select(EVERYBODY)
        report, used = fleet.report(selector, chosen, rng)
        selector.observe(report)
        played.chosen.append(chosen)
        played.used.append(used)
    return played


class Row(NamedTuple):
    """A line of the table.

    Args:
        title: What is measured.
        run: Seed and whether there are failures -> the figure.
    """

    title: str
    run: Callable[[int, bool], float]


def oort(spread: float, failure: float, dead: int) -> Callable[[int, bool], float]:
    """Mean utility percentile of the live clients that Oort chooses in rounds 61 to 150."""

    def run(seed: int, failing: bool) -> float:
        rng = np.random.default_rng(seed)
        fleet = Fleet(latency=np.ones(K), loss=2.3 * np.exp(spread * rng.normal(size=K)))
        if failing:
            fleet = replace(fleet, failure=failure, dead=dead > EVERYBODY)
        selector = create("oort", clients_per_round=M, first_percentile=100.0, pacer_step=10**6, seed=seed)
        late = play(selector, fleet, 150, rng).chosen[60:]
        return float(np.mean([fleet.percentile()[chosen[chosen >= dead]].mean() for chosen in late]))

    return run


def active_fl(failure: float, *, valued: bool = False) -> Callable[[int, bool], float]:
    """Mean loss percentile that Active FL chooses in rounds 101 to 300; or the share of clients without a valuation."""

    def run(seed: int, failing: bool) -> float:
        rng = np.random.default_rng(seed)
        fleet = Fleet(latency=np.ones(K), loss=rng.gamma(2.0, 1.0, K), failure=failure * failing)
        selector = create("active-fl", clients_per_round=M, temperature=1.0, seed=seed)
        late = play(selector, fleet, 300, rng).chosen[100:]
        if valued:
            return float(np.isinf(selector.state_dict()["loss"]).mean())
        return float(np.mean([fleet.percentile()[chosen].mean() for chosen in late]))

    return run


def fedcs(failure: float) -> Callable[[int, bool], float]:
    """Clients that FedCS chooses a round in rounds 61 to 100; 50 meet the deadline."""

    def run(seed: int, failing: bool) -> float:
        rng = np.random.default_rng(seed)
        latency = rng.lognormal(1.0, 0.7, K)
        fleet = Fleet(latency=latency, loss=np.ones(K), failure=failure * failing)
        selector = create("fedcs", deadline=float(np.quantile(latency, 0.5)), seed=seed)
        return float(np.mean([chosen.size for chosen in play(selector, fleet, 100, rng).chosen[60:]]))

    return run


def tifl(failure: float) -> Callable[[int, bool], float]:
    """Share of the clients that TiFL, which chooses 5 a round, never chooses in rounds 61 to 300."""

    def run(seed: int, failing: bool) -> float:
        rng = np.random.default_rng(seed)
        fleet = Fleet(latency=rng.lognormal(1.0, 0.7, K), loss=np.ones(K), failure=failure * failing)
        selector = create("tifl", clients_per_round=5, seed=seed)
        late = np.concatenate(play(selector, fleet, 300, rng).chosen[60:])
        return float(np.mean(np.bincount(late, minlength=K) == 0))

    return run


def kept_percentile(name: str, *, silent: bool) -> Callable[[int, bool], float]:
    """Mean loss percentile of the clients that are kept in rounds 751 to 1,000, with spares."""

    def run(seed: int, failing: bool) -> float:
        rng = np.random.default_rng(seed)
        fleet = Fleet(latency=rng.uniform(2.0, 20.0, K), loss=rng.gamma(2.0, 1.0, K))
        if failing:
            fleet = replace(fleet, spares=0.3, silent=silent)
        own = {"temperature": 1.0} if name == "active-fl" else {}
        played = play(create(name, clients_per_round=M, seed=seed, **own), fleet, 1000, rng)
        return float(np.mean([fleet.percentile()[used].mean() for used in played.used[750:]]))

    return run


def tifl_spares(*, silent: bool) -> Callable[[int, bool], float]:
    """Share of the clients that TiFL never chooses in rounds 11 to 200, with spares."""

    def run(seed: int, failing: bool) -> float:
        rng = np.random.default_rng(seed)
        fleet = Fleet(latency=rng.lognormal(1.0, 0.7, K), loss=np.ones(K))
        if failing:
            fleet = replace(fleet, spares=0.3, silent=silent)
        late = np.concatenate(play(create("tifl", clients_per_round=M, seed=seed), fleet, 200, rng).chosen[10:])
        return float(np.mean(np.bincount(late, minlength=K) == 0))

    return run


def over_the_genie(
    selector: Selector, mean: FloatArray, spread: float, rounds: int, seed: int, *, dead: BoolArray, odd: int = 0
) -> FloatArray:
    """Seconds by which each round's slowest mean is above that of the best five clients, shape (rounds,).

    Args:
        selector: Chooses five clients a round.
        mean: Mean seconds of each client, shape (20,).
        spread: Standard deviation of the logarithm of a client's seconds.
        rounds: How many rounds.
        seed: Of the seconds.
        dead: Who never answers, shape (20,).
        odd: The round in which the chosen answer in 1 ms; 0 for none.
    """
    rng, everybody = np.random.default_rng(seed), np.arange(mean.size)
    truth = np.where(dead, MAX_LATENCY, mean)
    best, lost = np.sort(truth)[4], np.zeros(rounds)
    for number in range(1, rounds + 1):
        seconds = mean * np.exp(spread * rng.normal(size=mean.size))
        chosen = selector.select(everybody)
        latency = np.where(
            dead[chosen], MAX_LATENCY, 1e-3 if number == odd else np.minimum(seconds[chosen], MAX_LATENCY)
        )
        selector.observe(RoundReport(clients=chosen, completed=~dead[chosen], latency=latency))
        lost[number - 1] = truth[chosen].max() - best
    return lost


def dead_among_equals(name: str, max_latency: float | str) -> Callable[[int, bool], float]:
    """Regret of 2,000 rounds in seconds, where 5 of 20 clients of 10 s are dead."""

    def run(seed: int, failing: bool) -> float:
        own = {"fairness_scale": 0.1} if name == "cs-ucb-q" else {}
        selector = create(name, clients_per_round=5, max_latency=max_latency, seed=seed, **own)
        dead = (np.arange(20) < 5) & failing
        return float(over_the_genie(selector, np.full(20, 10.0), 0.0, 2000, seed, dead=dead).sum())

    return run


def after_an_outlier(min_latency: float | str) -> Callable[[int, bool], float]:
    """BSFL's seconds a round over the genie in the last 3,000 of 12,000 rounds."""

    def run(seed: int, failing: bool) -> float:
        selector = create("bsfl", clients_per_round=5, min_latency=min_latency, alpha=0.0, seed=seed)
        mean, nobody = np.random.default_rng(7).uniform(2.0, 20.0, 20), np.zeros(20, dtype=np.bool_)
        lost = over_the_genie(selector, mean, 0.15, 12_000, seed, dead=nobody, odd=30 * failing)
        return float(lost[-3000:].mean())

    return run


ROWS = (
    Row("Oort, losses within 5 %, 1 dead: percentile of the chosen", oort(0.05, 0.0, 1)),
    Row("Oort, losses spread by 1, 10 % fail: percentile of the chosen", oort(1.0, 0.1, 0)),
    Row("Active FL, 10 % fail: percentile of the chosen", active_fl(0.1)),
    Row("Active FL, 10 % fail: share without a valuation at the end", active_fl(0.1, valued=True)),
    Row("FedCS, 5 % fail: clients a round, rounds 61-100", fedcs(0.05)),
    Row("FedCS, 10 % fail: clients a round, rounds 61-100", fedcs(0.1)),
    Row("TiFL, 10 % fail: share never chosen again", tifl(0.1)),
    Row("Oort, spares that answer late: percentile of the kept", kept_percentile("oort", silent=False)),
    Row("Oort, spares that do not answer: percentile of the kept", kept_percentile("oort", silent=True)),
    Row("Active FL, spares that answer late: percentile of the kept", kept_percentile("active-fl", silent=False)),
    Row("Active FL, spares that do not answer: percentile of the kept", kept_percentile("active-fl", silent=True)),
    Row("TiFL, spares that answer late: share never chosen again", tifl_spares(silent=False)),
    Row("TiFL, spares that do not answer: share never chosen again", tifl_spares(silent=True)),
    Row("CS-UCB, auto, 5 of 20 dead: regret, s", dead_among_equals("cs-ucb", "auto")),
    Row("CS-UCB, 60 s, 5 of 20 dead: regret, s", dead_among_equals("cs-ucb", 60.0)),
    Row("CS-UCB-Q, auto, 5 of 20 dead: regret, s", dead_among_equals("cs-ucb-q", "auto")),
    Row("CS-UCB-Q, 60 s, 5 of 20 dead: regret, s", dead_among_equals("cs-ucb-q", 60.0)),
    Row("BSFL, auto, 1 ms in round 30: s a round over the genie", after_an_outlier("auto")),
    Row("BSFL, 2 s, 1 ms in round 30: s a round over the genie", after_an_outlier(2.0)),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    print(f"{'':66} {'no failures':>11} {'with them':>9}")
    for row in ROWS:
        without, with_them = (np.mean([row.run(seed, failing) for seed in range(seeds)]) for failing in (False, True))
        print(f"{row.title:66} {without:11.3f} {with_them:9.3f}", flush=True)


if __name__ == "__main__":
    main()
