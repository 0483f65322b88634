"""Compare the predictions of ``fedsel advise`` with real runs: ``python benchmarks/advising.py``.

For each scenario and seed, the program runs random selection and five other selectors for 300 rounds. It gives
``fedsel advise`` only the run with random selection. The CSV file then has, for each selector, the predicted and the
real mean seconds per round, without the time of probes, and the predicted saving with its interval. The row "sorted
groups" has the ceiling: its real value comes from the latencies of the scenario's system model, drawn for every client
in 400 rounds. FedCS is not compared, because its runs select more clients than the prediction.

The CSV file is benchmarks/advising.csv. ``--table`` prints its means over the seeds; docs/comparing.md sums them up.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.report import Advice, advise
from fedsel_flwr.report.components import Interval
from fedsel_flwr.simulations import compare, load_scenario
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.theory import sorted_groups

ROWS = Path(__file__).with_suffix(".csv")
SCENARIOS = ("phones", "digits")
SELECTORS = ("random", "bsfl", "cs-ucb", "cs-ucb-q", "tifl", "oort")
GROUPS = "sorted groups"
FIELDS = ("scenario", "seed", "selector", "predicted_s", "real_s", "saving", "saving_low", "saving_high")
DRAWN_ROUNDS = 400


def real_ceiling(scenario: str, seed: int) -> float:
    """Seconds per round of sorted groups, by the true mean latencies."""
    system = World(load_scenario(scenario, {"seed": seed})).system
    everyone = list(range(system.num_clients))
    drawn = np.array([
        [one.download_s + one.compute_s + one.upload_s for one in system.draws(everyone, number)]
        for number in range(1, DRAWN_ROUNDS + 1)
    ])  # fmt: skip
    drawn = np.minimum(drawn, system.max_latency_s)
    groups = sorted_groups(mean_latencies(system), load_scenario(scenario).clients_per_round)
    return float(np.mean([drawn[:, group].max(axis=1).mean() for group in groups]))


def rows_of(scenario: str, seed: int, rounds: int) -> Iterator[dict[str, object]]:
    """The rows of a scenario and a seed."""
    with tempfile.TemporaryDirectory() as folder:
        runs = compare(
            load_scenario(scenario, {"rounds": rounds}), list(SELECTORS), seeds=[seed], folder=folder, quiet=True
        )
        predicted = advise(Path(folder) / f"random-seed{seed}", rounds=rounds)
    real = {
        run.selector: float(np.mean([one.round_s - one.probe_s for one in run.history.rounds])) for run in runs.runs
    }
    yield from rows_from(scenario, seed, predicted, real | {GROUPS: real_ceiling(scenario, seed)})


def rows_from(scenario: str, seed: int, predicted: Advice, real: Mapping[str, float]) -> Iterator[dict[str, object]]:
    """The rows of a scenario and a seed, from the prediction and the real seconds per round of each selector."""
    savings = {one.selector: one.final for one in predicted.selectors} | {GROUPS: predicted.ceiling}
    for name in (*SELECTORS, GROUPS):
        saving = savings.get(name, Interval(estimate=0.0, low=0.0, high=0.0))
        seconds = predicted.random_s.estimate * (1 - saving.estimate)
        values = (seconds, real[name], saving.estimate, saving.low, saving.high)
        yield dict(zip(FIELDS, (scenario, seed, name, *(f"{value:.5g}" for value in values)), strict=True))


def table(path: Path = ROWS) -> str:
    """The page's table: mean seconds and savings over the seeds, and how many intervals contain the real saving."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    usual = {(row["scenario"], row["seed"]): float(row["real_s"]) for row in rows if row["selector"] == "random"}
    lines = [
        "| scenario | selector | predicted, s | real, s | predicted saving | real saving | real saving on each seed "
        "| intervals that contain it |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (scenario, selector), grouped in itertools.groupby(
        sorted(rows, key=lambda row: (SCENARIOS.index(row["scenario"]), (*SELECTORS, GROUPS).index(row["selector"]))),
        key=lambda row: (row["scenario"], row["selector"]),
    ):
        group = list(grouped)
        guess, real = (np.array([float(row[name]) for row in group]) for name in FIELDS[3:5])
        digits = 1 if real.mean() > 10 else 2
        cells = [scenario, selector, f"{guess.mean():.{digits}f}", f"{real.mean():.{digits}f}"]
        if selector == "random":
            cells += ["-"] * 4
        else:
            saved = 1 - real / [usual[scenario, row["seed"]] for row in group]
            predicted, low, high = (np.array([float(row[name]) for row in group]) for name in FIELDS[5:])
            cells += [f"{100 * predicted.mean():.0f} %", f"{100 * saved.mean():.0f} %"]
            cells += [", ".join(f"{100 * one:.0f}" for one in saved) + " %"]
            cells += [f"{((low <= saved) & (saved <= high)).sum()} of {len(group)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the rows, or print the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--table", action="store_true", help="only print the table of the page")
    args = parser.parse_args()
    if not args.table:
        with args.out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            for scenario, seed in itertools.product(SCENARIOS, range(1, args.seeds + 1)):
                writer.writerows(rows_of(scenario, seed, args.rounds))
    print(table(args.out), end="")


if __name__ == "__main__":
    main()
