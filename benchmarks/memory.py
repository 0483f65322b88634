"""Memory of a long simulation, round by round: ``python benchmarks/memory.py fashion-500 --data-dir DIR``.

Prints, for each round, the seconds it took and the resident memory of this process, of Ray's actors and of Ray's own
processes; then the growth after round 10.
"""

from __future__ import annotations

import argparse
import os
import time

import psutil

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.shutdown import end_descendants
from fedsel_flwr.strategies import RoundRecord


def resident_mb() -> tuple[float, float, float]:
    """This process, Ray's actors, Ray's own processes."""
    me = psutil.Process()
    actors = other = 0.0
    for process in me.children(recursive=True):
        try:
            size = process.memory_info().rss / 2**20
            if process.name().startswith("ray::"):
                actors += size
            else:
                other += size
        except psutil.NoSuchProcess:
            continue
    return me.memory_info().rss / 2**20, actors, other


def main() -> None:
    """Run the scenario and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="?", default="fashion-500")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    scenario = load_scenario(args.scenario, {"data.data_dir": args.data_dir, "rounds": args.rounds})
    rows: list[tuple[float, float, float]] = []
    last = time.monotonic()

    def on_round(record: RoundRecord) -> None:
        nonlocal last
        now = time.monotonic()
        rows.append(resident_mb())
        driver, actors, ray = rows[-1]
        print(
            f"round {record.round:3d}  {now - last:6.2f} s  driver {driver:7.1f} MB  actors {actors:7.1f} MB  "
            f"ray {ray:7.1f} MB  accuracy {record.accuracy:.4f}  "
            f"completed {record.num_completed}/{record.num_selected}",
            flush=True,
        )
        last = now

    start = time.monotonic()
    result = simulate(scenario, on_round=on_round)
    end_descendants()
    print(f"{len(result.history.rounds)} rounds in {time.monotonic() - start:.1f} s")
    print(f"problems: {dict(result.history.problem_counts())}")
    if len(rows) > 10:
        for name, first, final in zip(("driver", "actors", "ray"), rows[9], rows[-1], strict=True):
            print(
                f"{name}: {first:.1f} MB after round 10, {final:.1f} MB at the end, {100 * (final / first - 1):+.1f} %"
            )


if __name__ == "__main__":
    main()
