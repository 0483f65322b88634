"""Up to a million virtual clients in one process: ``python benchmarks/many_clients.py --data-dir DIR``.

Each client holds 120 examples of Fashion-MNIST, drawn from its own stream when it trains; 1,000 of them train in a
round (MLP 784-64-30-10, one pass, batches of 10), for 20 rounds of the vectorized engine. One command measures BSFL
with 10,000, 100,000 and 1,000,000 clients, and then every selector with the largest number that it can play. Each run
has a process of its own, so that its peak of memory is its own. A run that takes more than 8 GB, or more processor time
than ``--limit-s``, ends, and the selector is tried with a tenth of the clients.

Writes many_clients.csv (a row a run) and many_clients.md beside itself. With ``--keep``, runs that the CSV file holds
are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
PARTS = ("selection and roll call", "training", "rows, delays, metrics", "reading replies", "mean",
         "report and history", "test")  # fmt: skip
FIELDS = (
    "clients", "cohort", "selector", "rounds", "start_s", "first_s", "round_s", "low_s", "high_s", "total_s", "wall_s",
    "first_wall_s", "round_wall_s", "peak_mb", "kept_mb", "probed", "available", "asked", "accuracy", "reason",
    "threads", *PARTS,
)  # fmt: skip
LIMIT_MB = 8 * 1024
EVERYBODY = {"capped fedcs": {"selectors.fedcs.clients_per_round": None}}
"""Names of selectors with other parameters than the scenario's; None stands for the cohort."""


def overrides(args: argparse.Namespace, clients: int, selector: str) -> dict[str, Any]:
    """The scenario's keys of one run."""
    cohort = min(args.cohort, clients)
    own = {key: cohort if value is None else value for key, value in EVERYBODY.get(selector, {}).items()}
    name = selector.split()[-1]
    if name in ("power-of-choice", "cpow-d", "rpow-d"):
        own[f"selectors.{name}.candidates"] = min(2 * cohort, clients)
    return {
        "num_clients": clients, "clients_per_round": cohort, "rounds": args.rounds, "selector": name,
        "partition.kind": "sampled", "partition.examples_per_client": 120, "training.batch_size": 10,
        "training.local_epochs": 1, "data.data_dir": args.data_dir, **own,
    }  # fmt: skip


def play(args: argparse.Namespace, clients: int, selector: str) -> dict[str, Any]:
    """Play one run in this process, and return its row of the CSV file."""
    import numpy as np
    import torch
    from part_times import timed

    from fedsel_flwr.clients.batched import BatchedTrainer
    from fedsel_flwr.errors import FedSelError
    from fedsel_flwr.rounds.core import SelectionCore
    from fedsel_flwr.rounds.history import RoundRecord
    from fedsel_flwr.simulations import vectorized
    from fedsel_flwr.simulations.engine import simulate
    from fedsel_flwr.simulations.scenario_files import load_scenario
    from fedsel_flwr.simulations.worlds.world import World, world_of

    logging.disable(logging.WARNING)  # some clients come too late in every round
    begin, wall = time.process_time(), time.perf_counter()
    row: dict[str, Any] = {"clients": clients, "selector": selector, "threads": torch.get_num_threads(), "rounds": 0}
    where = zip(PARTS, (
        (SelectionCore, "choose"), (BatchedTrainer, "train"), (vectorized.InProcessClients, "train"),
        (SelectionCore, "collect"), (vectorized, "aggregate"), (SelectionCore, "finish"), (World, "test"),
    ), strict=True)  # fmt: skip
    records: list[RoundRecord] = []
    try:
        scenario = load_scenario("fashion-500", overrides(args, clients, selector))
        row["cohort"] = scenario.clients_per_round
        world_of(scenario)
        row["start_s"] = time.process_time() - begin
        seconds = timed(dict(where), time.process_time)
        spent, walls = [time.process_time()], [time.perf_counter()]

        def on_round(record: RoundRecord) -> None:
            spent.append(time.process_time())
            walls.append(time.perf_counter())
            records.append(record)
            row["kept_mb"] = psutil.Process().memory_info().rss / 2**20
            print(f"round {record.round:>3} {spent[-1] - spent[-2]:7.2f} s  {row['kept_mb']:7.0f} MB  accuracy "
                  f"{record.accuracy:.4f}  probed {record.num_probed:,}  asked {record.num_selected:,}",
                  flush=True)  # fmt: skip

        simulate(scenario, engine="vectorized", on_round=on_round)
    except (FedSelError, MemoryError) as error:
        return row | {"reason": f"{type(error).__name__}: {error}", "rounds": len(records)}
    seconds[PARTS[2]] = np.subtract(seconds[PARTS[2]], seconds[PARTS[1]]).tolist()
    later = slice(1, None) if len(records) > 1 else slice(None)
    each, rounds = np.diff(spent)[later], np.diff(walls)
    return row | {
        "rounds": len(records), "first_s": spent[1] - spent[0], "round_s": float(np.median(each)),
        "low_s": each.min(), "high_s": each.max(), "total_s": spent[-1] - begin, "wall_s": walls[-1] - wall,
        "first_wall_s": rounds[0], "round_wall_s": float(np.median(rounds[later])),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "probed": max(record.num_probed for record in records), "asked": max(one.num_selected for one in records),
        "available": max(record.num_available for record in records), "accuracy": records[-1].accuracy,
        **{name: 1000 * float(np.median(seconds[name][later])) for name in PARTS},
    }  # fmt: skip


def measure(args: argparse.Namespace, clients: int, selector: str) -> dict[str, Any]:
    """Play one run in a process of its own, which ends at the limit of memory or of processor time."""
    print(f"--- {selector}, {clients:,} clients", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--one", str(clients), selector, str(answer), "--data-dir", args.data_dir,
                   "--cohort", str(args.cohort), "--rounds", str(args.rounds)]  # fmt: skip
        child = subprocess.Popen(command)
        reason = _watch(child, args.limit_s)
        if answer.exists():
            return dict(json.loads(answer.read_text(encoding="utf-8")))
    if child.returncode == -signal.SIGINT or not reason:
        raise SystemExit(f"the run ended with status {child.returncode}")
    return {"clients": clients, "cohort": min(args.cohort, clients), "selector": selector, "reason": reason}


def _watch(child: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a process; end it at a limit, and return which one, else an empty text."""
    process = psutil.Process(child.pid)
    while True:
        try:
            child.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            used, times = process.memory_info().rss / 2**20, process.cpu_times()
            if used > LIMIT_MB or times.user + times.system > limit_s:
                child.kill()
                child.wait()
                return f"more than {LIMIT_MB // 1024} GB" if used > LIMIT_MB else f"more than {limit_s:,.0f} s"
        else:
            return ""


def main() -> None:
    """Measure every run that is missing, and write the CSV file and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="", help="where the data set lies; else FEDSEL_DATA")
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--selector", default="bsfl", help="the selector of the table of sizes")
    parser.add_argument("--selectors", nargs="*", help="the selectors of the second table; default: all")
    parser.add_argument("--limit-s", type=float, default=3_600.0, help="processor time after which a run ends")
    parser.add_argument("--keep", action="store_true", help="do not repeat the runs in the CSV file")
    parser.add_argument("--folder", type=Path, default=HERE, help="where CSV file and page go")
    parser.add_argument("--note", default="", help="what the page is to say of the measurement")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        clients, selector, answer = args.one
        row = play(args, int(clients), selector)
        Path(answer).write_text(json.dumps(row, default=float), encoding="utf-8")
        return
    path = args.folder / "many_clients.csv"
    rows: list[dict[str, Any]] = []
    if args.keep and path.exists():
        with path.open(encoding="utf-8") as file:
            rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    from fedsel_flwr.selectors import names

    selectors = [*names(), *EVERYBODY] if args.selectors is None else args.selectors
    found = {(int(row["clients"]), row["selector"]): row for row in rows}

    def of(clients: int, selector: str) -> dict[str, Any]:
        if (clients, selector) not in found:
            found[clients, selector] = measure(args, clients, selector)
            with path.open("w", encoding="utf-8", newline="") as file:
                table = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
                table.writeheader()
                table.writerows({key: _short(value) for key, value in row.items()} for row in found.values())
        return found[clients, selector]

    sizes = [of(clients, args.selector) for clients in sorted(args.clients)]
    tried: list[list[dict[str, Any]]] = []
    for selector in selectors:
        clients = max(args.clients)
        tried.append([of(clients, selector)])
        while tried[-1][-1].get("reason") and clients // 10 >= args.cohort:
            clients //= 10
            tried[-1].append(of(clients, selector))
    text = page(args, sizes, tried)
    (args.folder / "many_clients.md").write_text(text, encoding="utf-8")
    print(text)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def page(args: argparse.Namespace, sizes: Sequence[dict[str, Any]], tried: Sequence[Sequence[dict[str, Any]]]) -> str:
    """The page's text, from the rows of the sizes, and of each selector's attempts."""
    largest = max(args.clients)
    lines = [
        f"# {', '.join(f'{k:,}' for k in sorted(args.clients))} clients, {args.cohort:,} a round\n\n",
        "Written by `python benchmarks/many_clients.py`; every figure stands in [many_clients.csv](many_clients.csv).\n"
        "Each client holds 120 rows of Fashion-MNIST, drawn by index from its own stream when it trains, so clients\n"
        f"share the data set's rows. MLP 784-64-30-10, one pass, batches of 10, {args.rounds} rounds of the\n"
        f"vectorized engine, seed 1. Each run has a process of its own. Machine: {platform.machine()},\n"
        f"{os.cpu_count()} cores, Python {platform.python_version()}{args.note and '; '}{args.note}.\n\n",
        "Seconds are seconds of the processor, of all threads, unless \"wall\" is said. \"Kept\" is the resident\n"
        "memory after the last round, \"peak\" the largest of the run; both with Python, torch and the data set.\n\n",
        f"## {args.selector}, by number of clients\n\n",
        "| clients | loading, s | first round, s | a round, s (median) | smallest to largest | wall, s (median) | "
        "all rounds, wall s | kept, MB | peak, MB | peak, kB a client |\n",
        "| ---: |" + " ---: |" * 9 + "\n",
    ]  # fmt: skip
    for row in sizes:
        at = {key: float(row[key]) for key in FIELDS if key not in ("selector", "reason") and row.get(key)}
        lines.append(
            f"| {int(row['clients']):,} | {at['start_s']:.1f} | {at['first_s']:.2f} | {at['round_s']:.2f} | "
            f"{at['low_s']:.2f} to {at['high_s']:.2f} | {at['round_wall_s']:.2f} | {at['wall_s']:.0f} | "
            f"{at['kept_mb']:,.0f} | {at['peak_mb']:,.0f} | {1024 * at['peak_mb'] / at['clients']:.1f} |\n"
        )
    lines.append("\n## Growth\n\nWhat one more client costs, between two sizes:\n\n")
    lines.append("| from | to | kept, kB | peak, kB | first round, microseconds | a round, microseconds |\n")
    lines.append("| ---: |" + " ---: |" * 5 + "\n")
    for before, after in pairwise(sizes):
        more = int(after["clients"]) - int(before["clients"])
        kept, peak, first, each = (
            factor * (float(after[key]) - float(before[key])) / more
            for key, factor in (("kept_mb", 1024.0), ("peak_mb", 1024.0), ("first_s", 1e6), ("round_s", 1e6))
        )
        lines.append(f"| {int(before['clients']):,} | {int(after['clients']):,} | {kept:.2f} | {peak:.2f} | "
                     f"{first:.2f} | {each:.2f} |\n")  # fmt: skip
    heads = " | ".join(f"{int(row['clients']):,}" for row in sizes)
    lines.append(f"\n## Parts of a round\n\nMedians of the rounds after the first, ms:\n\n| part | {heads} |\n")
    lines.append("| --- |" + " ---: |" * len(sizes) + "\n")
    for name in PARTS:
        lines.append(f"| {name} | " + " | ".join(f"{float(row[name]):.1f}" for row in sizes) + " |\n")
    if tried:
        lines.append(f"\n## Every selector, {args.rounds} rounds\n\n")
        lines.append(_selectors(tried, largest, args.limit_s))
    return "".join(lines)


def _selectors(tried: Sequence[Sequence[dict[str, Any]]], largest: int, limit_s: float) -> str:
    lines = [
        f"Tried with {largest:,} clients, then with a tenth, and so on, until a run keeps within "
        f"{LIMIT_MB // 1024} GB and {limit_s:,.0f} s.\n\n",
        "| selector | clients | rounds | most asked to train | most probed | first round, s | a round, s (median) | "
        "largest later round, s | peak, MB | with ten times as many |\n",
        "| --- |" + " ---: |" * 8 + " --- |\n",
    ]
    for attempts in tried:
        row = attempts[-1]
        why = attempts[-2]["reason"] if len(attempts) > 1 else ""
        if row.get("reason"):
            lines.append(f"| {row['selector']} | none |" + " |" * 7 + f" {_told(row['reason'])} |\n")
            continue
        lines.append(
            f"| {row['selector']} | {int(row['clients']):,} | {int(row['rounds'])} | {int(row['asked']):,} | "
            f"{int(float(row.get('probed') or 0)):,} | {float(row['first_s']):.1f} | {float(row['round_s']):.2f} | "
            f"{float(row['high_s']):.2f} | {float(row['peak_mb']):,.0f} | {_told(why)} |\n"
        )
    return "".join(lines)


def _told(reason: str) -> str:
    """The first sentence of a reason, without what would break a table."""
    return reason.partition(". ")[0].replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    main()
