"""Memory of a long run in the vectorized engine: ``python benchmarks/long_run.py --rounds 10000 --selector cs-ucb``.

1,000 clients with linear models on synthetic examples, 10 of them a round; the history goes to a run folder. Prints the
resident memory of this process as the run goes on, and its growth from a tenth of the rounds to the end.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path

import psutil

from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.strategies import RoundRecord


def resident_mb() -> float:
    """Of this process."""
    return float(psutil.Process().memory_info().rss) / 2**20


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--selector", default="cs-ucb")
    parser.add_argument("--in-memory", action="store_true", help="no run folder: the whole history stays in memory")
    args = parser.parse_args()
    scenario = load_scenario(
        "smoke",
        {
            "engine": "vectorized", "selector": args.selector, "rounds": args.rounds, "evaluation_every": 100,
            "num_clients": args.clients, "clients_per_round": 10, "data.dataset": "synthetic-regression",
            "data.synthetic_examples": 4 * args.clients, "model.name": "linear",
        },
    )  # fmt: skip
    start, tenth, marks = time.monotonic(), max(1, args.rounds // 10), dict[int, float]()

    def on_round(record: RoundRecord) -> None:
        if record.round % tenth == 0:
            marks[record.round] = resident_mb()
            seconds = time.monotonic() - start
            print(f"round {record.round:6d}  {seconds:7.1f} s  {marks[record.round]:7.1f} MB", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        kept = None if args.in_memory else Path(folder) / "run"
        result = simulate(scenario, folder=kept, on_round=on_round)
        gc.collect()
        after = resident_mb()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 2**20
    first, last = marks[tenth], marks[args.rounds]
    grown, at_last = (100 * (size / first - 1) for size in (last, after))
    print(f"{args.selector}: after round {tenth} {first:.1f} MB, after round {args.rounds} {last:.1f} MB "
          f"({grown:+.2f} %), after the run {after:.1f} MB ({at_last:+.2f} %)")  # fmt: skip
    counts = result.history.selection_counts(args.clients)
    print(f"history: {len(result.history.rounds)} rounds, {len(result.history.clients)} clients' records, "
          f"selected {counts.sum()} times; folder {size:.1f} MB; {time.monotonic() - start:.1f} s in all")  # fmt: skip


if __name__ == "__main__":
    main()
