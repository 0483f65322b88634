"""What a checkpoint costs: ``python benchmarks/checkpoints.py --folder-on-disk DIR``.

Rounds of the core with models of an MLP 784-64-30-10: 25 of 500 clients, 25 and 1,000 of 100,000. Nobody trains; the
clients' models are given. After each round its checkpoint is written, as the strategies write it: journal and one
file, each synced to the disk, and the one before the last three removed. Writes checkpoints.md and checkpoints.csv
beside itself: milliseconds of a checkpoint, of its parts and of the round without training, and the share of a round on
Ray.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server.strategy import FedAdam, FedAvg
from part_times import timed

from fedsel_flwr.rounds import checkpoints
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.models import Arrays, ModelStack
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.simulations.vectorized import aggregate
from fedsel_flwr.strategies import BSFL

SHAPES = ((64, 784), (64,), (30, 64), (30,), (10, 30), (10,))
"""The MLP 784-64-30-10."""
CASES = (("FedAvg", 500, 25), ("FedAdam", 500, 25), ("FedAdam", 100_000, 25), ("FedAvg", 100_000, 1_000))
"""The base strategy, clients, and how many of them are asked in a round."""
PARTS: dict[str, tuple[Any, str]] = {
    "state": (SelectionCore, "state_dict"), "files": (checkpoints, "write_checkpoint"), "syncs": (os, "fsync"),
    "packing": (checkpoints, "pack_state"), "removal": (checkpoints.Checkpoints, "_prune"),
}  # fmt: skip
COLUMNS = ("base", "clients", "asked", "checkpoint_ms", "worst_ms", *(f"{part}_ms" for part in PARTS), "round_ms",
           "kilobytes", "ray_share")  # fmt: skip


class Clients:
    """Clients that answer at once.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self.nodes = [str(k) for k in range(count)]

    def introduce(self, nodes: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Say who they are."""
        return {node: {"client_id": int(node), "num_examples": 100 + int(node) % 50} for node in nodes}, []

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> dict[str, Any]:
        """Nobody is asked anything."""
        return {}


def measured(base: str, clients: int, asked: int, rounds: int, disk: Path, parts: dict[str, list[float]]) -> list[Any]:
    """One row of the table."""
    generator = np.random.default_rng(0)
    model: Arrays = [generator.normal(size=shape).astype(np.float32) for shape in SHAPES]
    stack = ModelStack([np.stack([array + 0.01 * k for k in range(asked)]) for array in model])
    inner = FedAvg() if base == "FedAvg" else FedAdam(initial_parameters=ndarrays_to_parameters(list(model)))
    if base == "FedAdam":
        inner.m_t, inner.v_t = [0.1 * array for array in model], [array**2 for array in model]
    strategy = BSFL(inner, clients_per_round=asked, min_latency=0.1, max_latency=5.0, seed=0, checkpoint_dir=disk)
    fleet, core = Clients(clients), strategy.core
    round_s, checkpoint_s, spent = list[float](), list[float](), defaultdict[str, list[float]](list)
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        chosen = core.choose(fleet.nodes, model, fleet, number)
        replies = {
            node: Reply(num_examples=100, metrics={"latency_s": 0.1 + (int(node) * number) % 37 / 10, "energy_j": 1.5})
            for node in chosen
        }
        outcome = core.collect(replies, stack)
        after = core.finish(aggregate(strategy.base, number, outcome))
        model = model if after is None else list(after)
        trained = time.perf_counter()
        parts.clear()
        strategy.round_trained(number, model)
        ended = time.perf_counter()
        strategy.round_ended(number, 0.5, 0.5)
        if number > min(4, rounds - 1):  # the roll call is over, and there are old ones to be removed
            round_s.append(trained - start)
            checkpoint_s.append(ended - trained)
            for name in PARTS:
                spent[name].append(sum(parts[name]))
    size = sum(path.stat().st_size for path in disk.glob(f"round-{rounds:06d}.*")) / 1000
    row = [base, clients, asked, np.median(checkpoint_s), max(checkpoint_s), *(np.median(spent[p]) for p in PARTS)]
    return [*row[:3], *(round(1000 * float(value), 2) for value in (*row[3:], np.median(round_s))), round(size)]


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder-on-disk", type=Path, default=None, help="where checkpoints go; else a temporary one")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--ray-round-s", type=float, default=0.65, help="seconds of a round on Ray to compare with")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent, help="where the page goes")
    parser.add_argument("--note", default="", help="what the page is to say of the measurement")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    parts, rows = timed(PARTS), list[list[Any]]()
    for base, clients, asked in CASES:
        with tempfile.TemporaryDirectory(dir=args.folder_on_disk) as name:
            row = measured(base, clients, asked, args.rounds, Path(name) / "run", parts)
        rows.append([*row, f"{row[3] / 1000 / args.ray_round_s:.2%}"])
        print(*rows[-1], flush=True)
    with (args.folder / "checkpoints.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    lines = [
        "# What a checkpoint costs\n\n",
        f"Written by `python benchmarks/checkpoints.py`: median of {args.rounds} rounds, BSFL, MLP 784-64-30-10. A\n"
        "checkpoint is the journal and one file, each synced to the disk, and the removal of an old one;\n"
        "its parts are given beside it (packing is part of the files, most syncs are part of them, that of the\n"
        "journal is part of the state). The round is that of the core without training; the share is that of a round\n"
        f"on Ray of {args.ray_round_s} s. Machine: {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}{args.note and '; '}{args.note}.\n\n",
        f"| {' | '.join(column.replace('_ms', ', ms').replace('_', ' ') for column in COLUMNS)} |\n",
        f"|{' --- |' * 3}{' ---: |' * (len(COLUMNS) - 3)}\n",
        *(f"| {' | '.join(f'{one:,}' if isinstance(one, int) else str(one) for one in row)} |\n" for row in rows),
    ]
    (args.folder / "checkpoints.md").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
