"""Rounds until every client was chosen once: ``python benchmarks/coverage.py --data-dir DIR`` (GPFL, Fig. 4).

Runs the scenario gpfl-fashion under gpfl and random with several seeds and prints, for each, the round (initialization
excluded) in which the last client was chosen for the first time, and the accuracy. The paper: about 50 rounds against
about 100.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.processes import end_descendants
from fedsel_flwr.simulations.scenario_files import load_scenario


def main() -> None:
    """Run both with each seed and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    for seed, selector in itertools.product(range(1, args.seeds + 1), ("gpfl", "random")):
        overrides = {"selector": selector, "data.data_dir": args.data_dir, "rounds": args.rounds, "seed": seed}
        scenario = load_scenario("gpfl-fashion", overrides)
        history = simulate(scenario).history
        skipped = 1 if selector == "gpfl" else 0
        seen: set[str] = set()
        counts = []
        for round in range(1 + skipped, args.rounds + 1):
            seen |= {row.client_id for row in history.clients if row.round == round}
            counts.append(len(seen))
        done = next((i + 1 for i, count in enumerate(counts) if count == scenario.num_clients), None)
        curve = {i: counts[i - 1] for i in (10, 20, 50, 100) if i <= len(counts)}
        print(
            f"seed {seed}, {selector}: every client chosen after {done or f'more than {len(counts)}'} rounds; "
            f"clients seen after rounds {curve}; accuracy after {args.rounds} rounds "
            f"{history.rounds[-1].accuracy:.4f}",
            flush=True,
        )
    end_descendants()


if __name__ == "__main__":
    main()
