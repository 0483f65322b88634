"""What one liar gains: ``python benchmarks/liars.py``.

Twenty synthetic clients, five a round, 200 rounds, nobody trains. One client, who is ordinary otherwise, tells one lie
in everything that it reports. The table has the share of the rounds that it gets, for each selector with the lie that
gains most; "honest" is the share of the same client without a lie. The last columns have ``max_participation=0.5``,
``max_examples="auto"``, and both. "least" is the smallest share of another client, without and with both.
Each figure is the mean over the seeds.

A second table is about Oort alone, of which one lie moves the ranking of all others: 200 clients, 10 a round.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.rounds.eligibility import Participation
from fedsel_flwr.rounds.registration import MEDIAN_MULTIPLE
from fedsel_flwr.selectors import Oort, RoundReport, Selector, create, names

K, M, ROUNDS, LIAR, CAP = 20, 5, 200, 7, 0.5
DIMENSION, BITS = 16, 64
EVERYBODY = np.arange(K)
LIES: dict[str, tuple[tuple[str, ...], float]] = {
    "huge loss": (("loss", "train_loss", "rms_loss"), 1e30),
    "many examples": (("num_examples",), 2.0**53),
    "low accuracy": (("local_accuracy",), 0.0),
    "high accuracy": (("local_accuracy",), 1.0),
    "tiny latency": (("latency",), 1e-3),
    "energy score 1": (("energy_score",), 1.0),
    "odd gradient": (("gradient",), 1e6),
    "odd sketch": (("sketch",), -1.0),
    "huge update": (("projection",), 1e6),
    "model fit to the server's examples": (("accuracy", "kept"), 1.0),
}
"""Lie -> the columns that it changes, and what they say: a value, or a factor of vectors."""
NONE = "none helps"


class Gain(NamedTuple):
    """What came of a lie: shares of the rounds."""

    liar: float
    least: float


class Fleet:
    """Ordinary clients, and one who lies.

    Args:
        lie: One of :data:`LIES`; empty: nobody lies.
        seed: Of what the clients are like.
        max_examples: Whether a claim counts as at most four times the median.
    """

    def __init__(self, lie: str, seed: int, *, max_examples: bool = False) -> None:
        rng = self._rng = np.random.default_rng(seed)
        self._lie = lie
        spread = {name: rng.normal(size=K) for name in ("latency", "loss", "accuracy", "energy")}
        for one in spread.values():
            one[LIAR] = 0.0  # in the middle of everything
        self._like: dict[str, Any] = {
            "latency": 3.0 * np.exp(0.4 * spread["latency"]),
            "loss": np.exp(0.3 * spread["loss"]),
            "local_accuracy": np.clip(0.7 + 0.08 * spread["accuracy"], 0.0, 1.0),
            "energy_score": np.clip(0.6 + 0.15 * spread["energy"], 0.0, 1.0),
            "num_examples": np.where(EVERYBODY == LIAR, 100, rng.integers(50, 151, K)).astype(float),
            "gradient": np.repeat(rng.normal(size=(5, DIMENSION)), K // 5, axis=0) + rng.normal(size=(K, DIMENSION)),
            "sketch": np.repeat(np.sign(rng.normal(size=(5, BITS))), K // 5, axis=0),
        }
        self._like["energy"] = 2.0 - self._like["energy_score"]
        self._like["rms_loss"] = self._like["train_loss"] = self._like["loss"]
        columns, value = LIES.get(lie, ((), 0.0))
        for name in set(columns) & self._like.keys():
            self._like[name] = self._like[name].copy()
            self._like[name][LIAR] = value * self._like[name][LIAR] if self._like[name].ndim == 2 else value
        if max_examples:
            claims = np.sort(self._like["num_examples"])
            self._like["num_examples"] = np.minimum(claims[(K - 1) // 2] * MEDIAN_MULTIPLE, self._like["num_examples"])

    def column(self, name: str, clients: IntArray, number: int) -> FloatArray:
        """What clients report of a column in a round."""
        value = self._like[name][clients]
        if name == "gradient":
            return np.asarray(value + self._rng.normal(size=value.shape))
        if name in ("sketch", "num_examples"):
            return np.asarray(value)
        noisy = value * np.exp(0.1 * self._rng.normal(size=clients.size))
        if name in ("loss", "train_loss", "rms_loss"):
            noisy = noisy * (0.3 + 0.7 * 0.98**number)
        if name in ("local_accuracy", "energy_score"):
            noisy = np.minimum(noisy, 1.0)
        lies = np.isin(clients, [LIAR]) & (name in LIES.get(self._lie, ((), 0.0))[0])
        return np.where(lies, value, noisy)

    def report(self, selector: Selector, chosen: IntArray, number: int) -> RoundReport:
        """A round in which everybody completes; what the server measures is noise around the run's progress."""
        told = sorted({"latency", *selector.needs} & self._like.keys())
        columns: dict[str, Any] = {name: self.column(name, chosen, number) for name in told}
        progress, rng = 1.0 - 0.98**number, self._rng
        columns["accuracy"] = np.clip(0.1 + 0.7 * progress + 0.05 * rng.normal(size=chosen.size), 0.0, 1.0)
        columns["projection"] = rng.normal(size=chosen.size)
        columns["kept"] = rng.random(chosen.size) < 0.7
        columns["update"] = rng.normal(size=(chosen.size, DIMENSION))
        lied, value = LIES.get(self._lie, ((), 0.0))
        for name in {"accuracy", "projection", "kept"} & {*lied}:
            columns[name][chosen == LIAR] = value
        columns |= {"global_accuracy": 0.1 + 0.7 * progress, "global_loss": 2.3 - 1.5 * progress}
        wanted = {name: value for name, value in columns.items() if name in selector.needs}
        return RoundReport(
            clients=chosen, completed=np.ones(chosen.size, dtype=np.bool_), **{"latency": columns["latency"]} | wanted
        )


def selector_of(name: str, seed: int) -> Selector:
    """A selector of five clients a round; FedCS has a deadline that a third of them meet, PCZFL decides itself."""
    own: dict[str, dict[str, Any]] = {
        "bsfl": {"min_latency": 0.5},
        "cs-ucb": {"max_latency": 20.0},
        "cs-ucb-q": {"max_latency": 20.0},
        "gpfl": {"total_rounds": ROUNDS},
        "fedcs": {"deadline": 2.3, "clients_per_round": None},
        "pczfl": {"clients_per_round": None},
        "power-of-choice": {"candidates": 2 * M},
        "cpow-d": {"candidates": 2 * M},
        "rpow-d": {"candidates": 2 * M},
        "fedcor": {"warmup_rounds": 20},
    }
    return create(name, **{"clients_per_round": M, "seed": seed} | own.get(name, {}))


def play(name: str, lie: str, seed: int, *, cap: float | None = None, max_examples: bool = False) -> Gain:
    """Play 200 rounds and count who was chosen."""
    selector, guard = selector_of(name, seed), Participation(cap)
    fleet = Fleet(lie, seed, max_examples=max_examples)
    selector.inform(EVERYBODY, num_examples=fleet.column("num_examples", EVERYBODY, 0))
    selector.inform(EVERYBODY, energy_score=fleet.column("energy_score", EVERYBODY, 0), accuracy=np.full(K, 0.1))
    counts = np.zeros(K)
    for number in range(1, ROUNDS + 1):
        here = EVERYBODY[guard.eligible(EVERYBODY, int(selector.clients_per_round or 1))]
        if (question := selector.probe(here)) is not None:
            told = {one: fleet.column(_likeness(one), question.clients, number) for one in question.columns}
            selector.inform(question.clients, **told)
        chosen = selector.select(here)
        selector.observe(fleet.report(selector, chosen, number))
        guard.note(EVERYBODY, chosen)
        counts[chosen] += 1.0 / ROUNDS
    return Gain(liar=float(counts[LIAR]), least=float(np.delete(counts, LIAR).min()))


def _likeness(column: str) -> str:
    """The column of the fleet that answers a probe: a loss of one batch is like that of all of them."""
    return "loss" if column == "batch_loss" else column


def mean(name: str, lie: str, seeds: int, **guards: Any) -> Gain:
    """The mean over the seeds."""
    return Gain(*np.mean([play(name, lie, seed, **guards) for seed in range(seeds)], axis=0).tolist())


def best_lie(name: str, seeds: int) -> str:
    """The lie that brings the liar into most rounds."""
    return max(LIES, key=lambda lie: mean(name, lie, seeds).liar)


def row(name: str, seeds: int, lie: str | None = None) -> str:
    """A line of the table; a gain of less than .02 is chance."""
    lie = best_lie(name, seeds) if lie is None else lie
    honest, lying = mean(name, "", seeds), mean(name, lie, seeds)
    if lie == NONE or lying.liar < honest.liar + 0.02:
        lie, lying = NONE, honest
    capped, cut = mean(name, lie, seeds, cap=CAP), mean(name, lie, seeds, max_examples=True)
    both = mean(name, lie, seeds, cap=CAP, max_examples=True)
    shares = (honest.liar, lying.liar, capped.liar, cut.liar, both.liar, lying.least, both.least)
    return f"| {name} | {lie} | " + " | ".join([f"{share:.2f}" for share in shares]) + " |"


def oort_ranking(score_range: str, lie: float | None, seed: int) -> float:
    """Rank correlation of honest clients' rounds with their utility: 200 clients, 10 a round, 100 rounds of Oort.

    Args:
        score_range: Oort's.
        lie: What one client reports as its ``rms_loss`` in every round; None: nobody lies.
        seed: Of the clients' losses, the noise and the selector.
    """
    rng, everybody = np.random.default_rng(seed), np.arange(200)
    loss, latency = np.exp(0.5 * rng.normal(size=200)), np.exp(0.3 * rng.normal(size=200))
    selector, counts = Oort(clients_per_round=10, seed=seed, score_range=score_range), np.zeros(200)
    selector.inform(everybody, num_examples=np.full(200, 100.0))
    for _ in range(100):
        chosen = selector.select(everybody)
        told = loss[chosen] * np.exp(0.1 * rng.normal(size=chosen.size))
        if lie is not None:
            told[chosen == LIAR] = lie
        done = np.ones(chosen.size, dtype=np.bool_)
        selector.observe(RoundReport(clients=chosen, completed=done, latency=latency[chosen], rms_loss=told))
        counts[chosen] += 1
    return float(np.corrcoef(_ranks(np.delete(counts, LIAR)), _ranks(np.delete(loss, LIAR)))[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1 on; equal values have the mean of theirs."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[which])


def main() -> None:
    """Print both tables, as benchmarks/liars.md has them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print('| selector | its best lie | honest | lying | cap .5 | "auto" | both | least, lying | least, both |')
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in names():
        print(row(name, seeds), flush=True)
    print("\n| Oort's `score_range` | nobody lies | one `rms_loss` of 20 | of 1e30 |\n| --- | --- | --- | --- |")
    for way in ("paper", "clipped"):
        figures = [np.mean([oort_ranking(way, lie, seed) for seed in range(seeds)]) for lie in (None, 20.0, 1e30)]
        print(f'| `"{way}"` | ' + " | ".join([f"{figure:.2f}" for figure in figures]) + " |")


if __name__ == "__main__":
    main()
