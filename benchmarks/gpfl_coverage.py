"""GPFL's Table II and Fig. 4, Fashion-MNIST, 2 shards a client: ``python benchmarks/gpfl_coverage.py --data-dir DIR``.

Runs the scenario gpfl-fashion under gpfl and random with several seeds. Prints for each the clients seen after 10, 20,
50 and 100 rounds and the round in which the last client was chosen for the first time (initialization excluded; the
paper: about 50 against about 100), and the accuracy as Table II has it: the mean over the last 10 rounds, +- the
largest deviation of one of them from it (the paper: .7780 +- .04 against .6001 +- .11). At the end the mean over the
seeds, +- the sample standard deviation (divisor n - 1).
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.shutdown import end_descendants
from fedsel_flwr.strategies import History

LAST = 10
"""Rounds at the end over which Table II takes the mean."""


def main() -> None:
    """Run both with each seed and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    found: dict[str, list[float]] = {"gpfl": [], "random": []}
    for seed, selector in itertools.product(range(1, args.seeds + 1), found):
        overrides = {"selector": selector, "data.data_dir": args.data_dir, "rounds": args.rounds, "seed": seed}
        scenario = load_scenario("gpfl-fashion", overrides)
        history = simulate(scenario).history
        counts = clients_seen(history, skipped=1 if selector == "gpfl" else 0)
        done = next((i + 1 for i, count in enumerate(counts) if count == scenario.num_clients), None)
        curve = {i: counts[i - 1] for i in (10, 20, 50, 100) if i <= len(counts)}
        mean, deviation = end_of([record.accuracy for record in history.rounds])
        found[selector].append(mean)
        print(
            f"seed {seed}, {selector}: clients seen after rounds {curve}, every client after "
            f"{done or f'more than {len(counts)}'} rounds; accuracy of the last {LAST} rounds of {args.rounds}: "
            f"{mean:.4f} +- {deviation:.4f}, of the last one {history.rounds[-1].accuracy:.4f}",
            flush=True,
        )
    for selector, means in found.items():
        spread = f" +- {statistics.stdev(means):.4f}" if len(means) > 1 else ""
        print(
            f"{len(means)} seeds, {selector}: accuracy of the last {LAST} rounds {statistics.fmean(means):.4f}{spread}"
        )
    end_descendants()


def clients_seen(history: History, skipped: int) -> list[int]:
    """How many clients were chosen at least once after round 1, 2, ... beyond the first ``skipped``."""
    seen: set[str] = set()
    counts = []
    for round in range(1 + skipped, len(history.rounds) + 1):
        seen |= {row.client_id for row in history.clients if row.round == round}
        counts.append(len(seen))
    return counts


def end_of(accuracies: list[float]) -> tuple[float, float]:
    """The mean over the last rounds, and the largest deviation of one of them from it."""
    last = accuracies[-LAST:]
    mean = statistics.fmean(last)
    return mean, max(abs(accuracy - mean) for accuracy in last)


if __name__ == "__main__":
    main()
