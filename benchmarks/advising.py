"""Calibrate and test the intervals of ``fedsel advise``: ``python benchmarks/advising.py PART``.

Each part draws fleets, gives ``fedsel advise`` the run with random selection, and compares the predicted savings with
real ones: those of a run of the selector and a run of random selection in the rounds that follow. Fleets 1 to 20 are
the calibration and fleets 21 to 30 the test, each with three seeds and four selectors. The part ``scenarios`` does the
same with whole simulations: the scenarios ``phones`` and ``digits``, each with three seeds, in the same rounds.

The fleets break the model of the prediction on purpose (:data:`RANGES`, :class:`DrawnFleet`).

A *deviation* is the error of the log ratio of seconds, divided by the half-width of its interval before calibration.
The factor :data:`~fedsel_flwr.report.advice.CALIBRATION` is the 19th of the 20 fleets' own 90 % quantiles.

The CSV file is benchmarks/advising.csv, and docs/comparing.md has its table (``table``).
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray
from fedsel_flwr.report import Advice, advise
from fedsel_flwr.report.advice import CALIBRATION
from fedsel_flwr.report.choices import select_rounds
from fedsel_flwr.report.latencies import Latencies
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations import compare, load_scenario

ROWS = Path(__file__).with_suffix(".csv")
FLEETS = {"calibration": range(1, 21), "test": range(21, 31)}
SEEDS = (1, 2, 3)
SELECTORS: dict[str, dict[str, Any]] = {
    "bsfl": {"min_latency": "auto"}, "cs-ucb": {"max_latency": "auto"}, "cs-ucb-q": {"max_latency": "auto"}, "tifl": {},
}  # fmt: skip
SCENARIOS = ("phones", "digits")
FIELDS = ("part", "fleet", "seed", "selector", "saving", "low", "high", "real", "deviation")
RANGES = {
    "clients": (20, 200),  # uniform in logs
    "share": (0.05, 0.5),  # of the clients, in a round
    "rounds": (200, 500),  # of the history, and of the prediction
    "spread": (0.1, 0.7),  # standard deviation of the clients' log speeds
    "size_effect": (0.0, 1.0),  # exponent of a client's number of examples in its seconds
    "slow_share": (0.0, 0.4),  # share of slow phones
    "slow_factor": (1.5, 4.0),  # of their seconds
    "together": (0.0, 0.4),  # standard deviation of the log of a factor that all slow phones share in a round
    "noise": (0.05, 0.4),  # median over the clients of the standard deviation of their log seconds
    "memory": (0.0, 0.95),  # correlation of consecutive rounds, of the shared factor and of half of the noise
    "drift": (0.0, 0.3),  # standard deviation of the change of a client's log speed in half of all rounds
    "absence": (0.0, 0.4),  # mean share of the rounds in which a client is absent
    "cut_off": (0.95, 0.995),  # quantile of all seconds at which a latency is cut off
    "failures": (0.0, 0.03),  # share of failures for another reason
}


class DrawnFleet:
    """A fleet in all rounds of its history and of its prediction."""

    def __init__(self, number: int, seed: int) -> None:
        generator = np.random.default_rng([51, number])
        one = {name: float(generator.uniform(*ends)) for name, ends in RANGES.items()}
        n = round(math.exp(generator.uniform(*np.log(RANGES["clients"]))))
        self.seed, self.rounds = seed, int(one["rounds"])
        self.clients_per_round = max(2, round(one["share"] * n))
        generator = np.random.default_rng([52, number, seed])
        size = 2 * self.rounds, n
        slow = generator.random(n) < one["slow_share"]
        self.num_examples = np.ceil(100 * np.exp(0.6 * generator.standard_normal(n)))
        means = math.log(10) + one["spread"] * generator.standard_normal(n) + slow * math.log(one["slow_factor"])
        means += one["size_effect"] * np.log(self.num_examples / 100)
        noise = one["noise"] * np.exp(0.4 * generator.standard_normal(n))
        quick, lasting = generator.standard_normal(size), correlated(size, one["memory"], generator)
        shared = slow * one["together"] * correlated((size[0], 1), one["memory"], generator)
        drift = one["drift"] * np.linspace(-1, 1, size[0])[:, None] * generator.standard_normal(n)
        seconds = np.exp(means + noise * math.sqrt(0.5) * (quick + lasting) + shared + drift)
        self.max_latency = float(np.quantile(seconds, one["cut_off"]))
        self.late = seconds >= self.max_latency
        self.completed = ~self.late & (generator.random(size) >= one["failures"])
        self.seconds = np.where(self.completed, seconds, self.max_latency)
        rates = np.clip(1 - one["absence"] * 2 * generator.random(n), 0.2, 1.0)
        self.present = generator.random(size) < rates

    def play(self, selector: str, half: slice, **params: Any) -> BoolArray:
        """Run a selector in these rounds; return whether each client was selected, shape (rounds, clients)."""
        chooser = create(selector, clients_per_round=self.clients_per_round, seed=self.seed, **params)
        chooser.inform(np.arange(len(self.num_examples)), num_examples=self.num_examples)
        columns = {"num_examples": self.num_examples, "local_accuracy": np.full(len(self.num_examples), 0.5)}
        available = [np.flatnonzero(present) for present in self.present[half]]
        return select_rounds(chooser, self.seconds[half], self.completed[half], available, columns)

    def history(self) -> Latencies:
        """The rows of random selection in the first half of the rounds."""
        half = slice(self.rounds)
        chosen = self.play("random", half)
        rows = chosen & (self.completed[half] | self.late[half])
        _, client = np.nonzero(rows)
        return Latencies(
            client=client, seconds=self.seconds[half][rows], censored=self.late[half][rows],
            fleet=np.zeros(len(self.num_examples), dtype=np.int64), num_clients=len(self.num_examples),
            clients_per_round=self.clients_per_round, max_latency=self.max_latency, rounds=self.rounds,
            failed=int((chosen & ~rows).sum()), num_examples=self.num_examples,
            num_available=self.present[half].sum(axis=1),
        )  # fmt: skip

    def real(self) -> dict[str, float]:
        """Mean seconds of a round of each selector in the second half of the rounds."""
        half = slice(self.rounds, None)
        played = {name: self.play(name, half, **SELECTORS.get(name, {})) for name in ("random", *SELECTORS)}
        return {name: float(np.where(one, self.seconds[half], 0).max(axis=1).mean()) for name, one in played.items()}


def correlated(size: tuple[int, int], memory: float, generator: np.random.Generator) -> FloatArray:
    """Standard normal values, of which those of consecutive rounds have this correlation, shape (rounds, n)."""
    found = generator.standard_normal(size)
    for t in range(1, size[0]):
        found[t] = memory * found[t - 1] + math.sqrt(1 - memory**2) * found[t]
    return found


def rows_of_fleet(part: str, number: int, seed: int) -> Iterator[dict[str, object]]:
    """The rows of a drawn fleet and a seed."""
    fleet = DrawnFleet(number, seed)
    yield from rows_from(part, number, seed, advise(fleet.history()), fleet.real())


def rows_of_scenario(scenario: str, seed: int) -> Iterator[dict[str, object]]:
    """The rows of a scenario and a seed, whose runs are whole simulations. Probes do not count."""
    with tempfile.TemporaryDirectory() as folder:
        runs = compare(
            load_scenario(scenario, {"rounds": 300}), ["random", *SELECTORS], seeds=[seed], folder=folder, quiet=True
        )
        predicted = advise(Path(folder) / f"random-seed{seed}", rounds=300)
    real = {
        run.selector: float(np.mean([one.round_s - one.probe_s for one in run.history.rounds])) for run in runs.runs
    }
    yield from rows_from("scenarios", scenario, seed, predicted, real)


def rows_from(
    part: str, fleet: int | str, seed: int, predicted: Advice, real: Mapping[str, float]
) -> Iterator[dict[str, object]]:
    """A row for each selector, from the prediction and the real seconds of a round."""
    for one in predicted.selectors:
        if one.selector in SELECTORS:
            saving, saved = one.final, 1 - real[one.selector] / real["random"]
            half = (math.log1p(-saving.low) - math.log1p(-saving.high)) / 2 / CALIBRATION
            deviation = (math.log1p(-saved) - math.log1p(-saving.estimate)) / half
            values = (saving.estimate, saving.low, saving.high, saved, deviation)
            yield dict(
                zip(FIELDS, (part, fleet, seed, one.selector, *(f"{value:.5g}" for value in values)), strict=True)
            )


def read_rows() -> list[dict[str, str]]:
    """The stored rows."""
    if not ROWS.is_file():
        return []
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def factor(rows: list[dict[str, str]]) -> float:
    """The 19th of the 20 fleets' own 90 % quantiles: of 12 deviations, the 11th."""
    own = defaultdict[str, list[float]](list)
    for row in rows:
        if row["part"] == "calibration":
            own[row["fleet"]].append(abs(float(row["deviation"])))
    quantiles = sorted(float(np.quantile(one, 0.9, method="higher")) for one in own.values())
    return quantiles[max(0, math.ceil(0.95 * len(quantiles)) - 1)]


def table(rows: list[dict[str, str]]) -> str:
    """Savings inside their intervals, errors and half-widths, for each part, fleet and selector."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        scenario = row["part"] == "scenarios"
        groups[row["fleet"] if scenario else row["part"], "all"].append(row)
        groups[row["fleet"] if scenario else row["part"], row["selector"]].append(row)
    lines = [
        "| fleets | selector | inside | fewest in a fleet | mean error, points | mean of errors with their signs | "
        "median half-width, points |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (part, selector), own in groups.items():
        inside = np.array([abs(float(row["deviation"])) <= CALIBRATION for row in own])
        fleets = np.array([row["fleet"] for row in own])
        fewest = min(int(inside[fleets == one].sum()) for one in set(fleets.tolist()))
        error = np.array([100 * (float(row["saving"]) - float(row["real"])) for row in own])
        half = np.median([50 * (float(row["high"]) - float(row["low"])) for row in own])
        each = len(own) // len(set(fleets.tolist()))
        lines.append(
            f"| {part} | {selector} | {inside.sum()} of {len(own)} | {fewest} of {each} | {np.abs(error).mean():.1f} | "
            f"{error.mean():+.1f} | {half:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Play the fleets of a part that have no rows, or print the factor or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*FLEETS, "scenarios", "factor", "table"])
    part = parser.parse_args().part
    rows = read_rows()
    done = {(row["part"], row["fleet"], row["seed"]) for row in rows}
    for fleet in SCENARIOS if part == "scenarios" else FLEETS.get(part, ()):
        for seed in SEEDS:
            if (part, str(fleet), str(seed)) not in done:
                found = rows_of_scenario(fleet, seed) if isinstance(fleet, str) else rows_of_fleet(part, fleet, seed)
                rows += [{key: str(value) for key, value in row.items()} for row in found]
                with ROWS.open("w", encoding="utf-8", newline="") as file:
                    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
    print(f"factor {factor(rows):.3f}\n" if part == "factor" else table(rows), end="")


if __name__ == "__main__":
    main()
