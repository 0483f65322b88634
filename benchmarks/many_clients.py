"""100,000 virtual clients in one process: ``python benchmarks/many_clients.py --data-dir DIR``.

Each client holds 120 examples of Fashion-MNIST, drawn from its own stream when it trains; 1,000 of them train in a
round (MLP 784-64-30-10, one pass, batches of 10), for 20 rounds of the vectorized engine. Writes many_clients.md beside
itself: seconds to start, for the first roll call and a round, what of a round is not training, and the memory.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import resource
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from part_times import timed

from fedsel_flwr.clients.batched import BatchedTrainer
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.simulations import vectorized
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World, world_of

PARTS = {
    "selection and roll call": (SelectionCore, "choose"), "training": (BatchedTrainer, "train"),
    "rows, delays, metrics": (vectorized.InProcessClients, "train"), "reading replies": (SelectionCore, "collect"),
    "mean": (vectorized, "aggregate"), "report and history": (SelectionCore, "finish"), "test": (World, "test"),
}  # fmt: skip


def main() -> None:
    """Run, print each round, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="", help="where the data set lies; else FEDSEL_DATA")
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--selector", default="bsfl")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent, help="where the page goes")
    parser.add_argument("--note", default="", help="what the page is to say of the measurement")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # some clients come too late in every round
    begin = time.perf_counter()
    scenario = load_scenario("fashion-500", {
        "num_clients": args.clients, "clients_per_round": args.cohort, "rounds": args.rounds, "selector": args.selector,
        "partition.kind": "sampled", "partition.examples_per_client": 120, "training.batch_size": 10,
        "training.local_epochs": 1, "data.data_dir": args.data_dir,
    })  # fmt: skip
    world_of(scenario)
    start_s = time.perf_counter() - begin
    seconds, ends, me = timed(PARTS), [time.perf_counter()], psutil.Process()
    rows: list[tuple[RoundRecord, float]] = []

    def on_round(record: RoundRecord) -> None:
        ends.append(time.perf_counter())
        rows.append((record, me.memory_info().rss / 2**20))
        print(f"round {record.round:>3} {ends[-1] - ends[-2]:6.2f} s  {rows[-1][1]:7.0f} MB  accuracy "
              f"{record.accuracy:.4f}  completed {record.num_completed}/{record.num_selected}", flush=True)  # fmt: skip

    simulate(scenario, engine="vectorized", on_round=on_round)
    seconds["rows, delays, metrics"] = np.subtract(seconds["rows, delays, metrics"], seconds["training"]).tolist()
    rounds, peak = np.diff(ends), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    later = slice(1, None) if len(rows) > 1 else slice(None)
    each = rounds[later]
    lines = [
        f"# {args.clients:,} clients, {args.cohort:,} a round\n\n",
        "Written by `python benchmarks/many_clients.py`. Each client holds 120 indices of Fashion-MNIST, drawn from\n"
        f"its own stream; MLP 784-64-30-10, one pass, batches of 10; {args.selector}, {args.rounds} rounds of the\n"
        f"vectorized engine. Machine: {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__} on "
        f"{torch.get_num_threads()} thread(s), Python {platform.python_version()}{args.note and '; '}{args.note}.\n\n",
        f"- {args.rounds} rounds in {ends[-1] - ends[0]:.1f} s, after {start_s:.1f} s of loading data and model\n",
        f"- the first round, with the roll call: {rounds[0]:.2f} s\n",
        f"- a round: median {np.median(each):.2f} s ({each.min():.2f} to {each.max():.2f})\n",
        f"- memory: {rows[0][1]:,.0f} MB after round 1, {rows[-1][1]:,.0f} MB at the end, {peak:,.0f} MB at the peak\n",
        f"- accuracy on the test set after the last round: {rows[-1][0].accuracy:.4f}\n\n",
        "| part of a round | median, ms | share |\n| --- | ---: | ---: |\n",
    ]
    medians = {name: float(np.median(seconds[name][later])) for name in PARTS}
    for name, value in sorted(medians.items(), key=lambda item: -item[1]):
        lines.append(f"| {name} | {1000 * value:.1f} | {value / sum(medians.values()):.1%} |\n")
    (args.folder / "many_clients.md").write_text("".join(lines), encoding="utf-8")
    print("".join(lines))


if __name__ == "__main__":
    main()
