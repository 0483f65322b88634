"""Up to a million virtual clients in one process: ``python benchmarks/many_clients.py --data-dir DIR``.

Each client holds 120 examples of Fashion-MNIST, drawn from its own stream when it trains; 1,000 of them train in a
round (MLP 784-64-30-10, one pass, batches of 10), for 20 rounds of the vectorized engine. One command measures BSFL
with 10,000, 100,000 and 1,000,000 clients, and then every selector with the largest number that it can play. Each run
has a process of its own, so that its peak of memory is its own. A run that takes more than 8 GB, or more processor time
than ``--limit-s``, ends, and the selector is tried with about a third of the clients (300,000, 100,000, 30,000, ...).

Writes many_clients.csv (a row a run) to its own folder, and prints its tables. With ``--keep``, runs that the CSV file
has are not repeated. Without it, they are; ``--keep --selectors`` without names only prints the tables again.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import platform
import re
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
LIMIT_MB, LIMIT_ROUND_S, LIMIT_KB = 8 * 1024, 3.0, 8.0
CAPPED = {"capped fedcs": {"selectors.fedcs.clients_per_round": None}}
"""Names of selectors with other parameters than the scenario's; None stands for the cohort."""

ASKS = {
    "divfl": "the gradient of every client, once",
    "fedcor": "the loss of every client, in each round of the warm-up",
    "fedcs": "every client that is expected to reply before the deadline trains",
    "gpfl": "every client trains in round 1, and the server keeps every update of this round",
    "local-accuracy": "the accuracy of every client, in each round",
    "lsh": "a hash of the data of every client, once",
    "nccb": "a hash of the data of every client, once",
    "pczfl": "every client in the selected balls trains; at first, one ball has all clients",
    "tifl": "the accuracy of every client, in every 20th round",
}
"""What the selectors ask of every client that cannot play with any number of clients."""
SIMULATED = """## How so many clients fit

- The clients share the rows of Fashion-MNIST. A client has 120 rows, and its own random stream draws their indices
  when the client trains (`partition.kind = "sampled"`). No client has a copy of its examples.
- Latencies, joules and failures are drawn when a client trains or answers a probe. Each client has its own random
  stream for each purpose and round, so the numbers do not depend on when they are drawn.
- What the server knows of all clients is in arrays with a column for each quantity, for example the number of
  examples, and in the ids and connections of the roster.
- The history has a record for each selected client of a round, not for each client.

The model is an MLP 784-64-30-10. A client trains for one pass, in batches of 10. The scenario is `fashion-500` with
other numbers, {rounds} rounds of the vectorized engine, seed 1.
"""


def overrides(args: argparse.Namespace, clients: int, selector: str) -> dict[str, Any]:
    """The scenario's keys of one run."""
    cohort = min(args.cohort, clients)
    own = {key: cohort if value is None else value for key, value in CAPPED.get(selector, {}).items()}
    name = selector.split()[-1]
    if name in ("power-of-choice", "cpow-d", "rpow-d"):
        own[f"selectors.{name}.candidates"] = min(2 * cohort, clients)
    return {
        "num_clients": clients, "clients_per_round": cohort, "rounds": args.rounds, "selector": name,
        "partition.kind": "sampled", "partition.examples_per_client": 120, "training.batch_size": 10,
        "training.local_epochs": 1, "data.data_dir": args.data_dir, **own,
    }  # fmt: skip


class TooLongError(Exception):
    """A run that would take more than the limit of processor time."""


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
            whole = spent[-1] - begin + (args.rounds - len(records)) * (spent[-1] - spent[-2])
            if len(records) == 2 and whole > args.limit_s:
                raise TooLongError(f"more than {args.limit_s:,.0f} s ({whole:,.0f} s, by its second round)")

        simulate(scenario, engine="vectorized", on_round=on_round)
    except TooLongError as error:
        return row | {"reason": str(error), "rounds": len(records)}
    except (FedSelError, MemoryError, RuntimeError) as error:
        # torch has no error of its own for too little memory.
        if not isinstance(error, FedSelError | MemoryError) and "memory" not in str(error):
            raise
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
        command = [sys.executable, __file__, "--one", str(clients), selector, str(answer), "--data-dir", args.data_dir]
        command += ["--cohort", str(args.cohort), "--rounds", str(args.rounds), "--limit-s", str(args.limit_s)]
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
            child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            used, times = process.memory_info().rss / 2**20, process.cpu_times()
            if used > LIMIT_MB or times.user + times.system > limit_s:
                child.kill()
                child.wait()
                return f"more than {LIMIT_MB // 1024} GB" if used > LIMIT_MB else f"more than {limit_s:,.0f} s"
        else:
            return ""


def main() -> None:
    """Measure every run that is missing, write the CSV file, and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="", help="where the data set lies; else FEDSEL_DATA")
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--selector", default="bsfl", help="the selector of the table of sizes")
    parser.add_argument("--selectors", nargs="*", help="the selectors to measure; default: all")
    parser.add_argument("--limit-s", type=float, default=600.0, help="processor time after which a run ends")
    parser.add_argument("--keep", action="store_true", help="do not repeat the runs in the CSV file")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the CSV file goes")
    parser.add_argument("--note", default="", help="what the report is to say of the measurement")
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

    every = [*names(), *CAPPED]
    found = {(int(row["clients"]), row["selector"]): row for row in rows}

    def of(clients: int, selector: str) -> dict[str, Any]:
        if (clients, selector) not in found:
            found[clients, selector] = measure(args, clients, selector)
            with path.open("w", encoding="utf-8", newline="") as file:
                table = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
                table.writeheader()
                table.writerows({key: _short(value) for key, value in row.items()} for row in found.values())
        return found[clients, selector]

    sizes = sorted(args.clients)
    if any((clients, args.selector) not in found for clients in sizes):
        # The first process compiles the training loops, and stores them for the others. It is not measured.
        measure(argparse.Namespace(**vars(args) | {"rounds": 1}), sizes[0], args.selector)
    for clients in sizes:
        of(clients, args.selector)
    for selector in every if args.selectors is None else args.selectors:
        clients = sizes[-1]
        while of(clients, selector).get("reason") and fewer(clients) >= args.cohort:
            clients = fewer(clients)
        row = of(clients, selector)
        if not row.get("reason") and float(row["round_s"]) > LIMIT_ROUND_S and clients > sizes[0]:
            # Whether the clients who are only there cost the time, or those who train.
            of(sizes[0], selector)
    # The report has every selector that was measured, in this call or in an earlier one.
    tried = [
        sorted((row for row in found.values() if row["selector"] == selector), key=lambda row: -int(row["clients"]))
        or [{"clients": 0, "selector": selector, "reason": "not measured"}]
        for selector in every
    ]
    print(report(args, [found[clients, args.selector] for clients in sizes], tried))


def fewer(clients: int) -> int:
    """The next smaller size: 300,000 after 1,000,000, then 100,000, 30,000, and so on."""
    below = int(10 ** (len(str(clients)) - 1))
    return 3 * below if clients > 3 * below else below if clients > below else 3 * below // 10


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def report(args: argparse.Namespace, sizes: Sequence[dict[str, Any]], tried: Sequence[Sequence[dict[str, Any]]]) -> str:
    """The tables, from the rows of the sizes, and of each selector's attempts."""
    largest = int(sizes[-1]["clients"])
    lines = [
        f"# Up to {largest:,} virtual clients, {args.cohort:,} in a round\n\n",
        "Written by `python benchmarks/many_clients.py`. Every figure is in [many_clients.csv](many_clients.csv).\n"
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, {sizes[-1]['threads']} thread(s), Python "
        f"{platform.python_version()}.{args.note and ' '}{args.note}\n\n",
        "Each run has a process of its own. Seconds are seconds of the processor, unless \"wall\" is said.\n"
        "*Peak* is the largest resident memory of the process, with Python, torch and the data set.\n\n",
        SIMULATED.format(rounds=args.rounds),
        f"\n## {args.selector}, by number of clients\n\n",
        "| clients | start, s | first round, s | a later round, s (median) | smallest to largest | wall, s (median) | "
        "peak, MB | peak, kB for each client |\n",
        "| ---: |" + " ---: |" * 7 + "\n",
    ]  # fmt: skip
    for row in sizes:
        at = {key: float(row[key]) for key in FIELDS if key not in ("selector", "reason") and row.get(key)}
        lines.append(
            f"| {int(row['clients']):,} | {at['start_s']:.1f} | {at['first_s']:.2f} | {at['round_s']:.2f} | "
            f"{at['low_s']:.2f} to {at['high_s']:.2f} | {at['round_wall_s']:.2f} | "
            f"{at['peak_mb']:,.0f} | {1024 * at['peak_mb'] / at['clients']:.1f} |\n"
        )
    lines.append(_growth(sizes))
    heads = " | ".join(f"{int(row['clients']):,}" for row in sizes)
    lines.append(f"\n## Parts of a round\n\nMedians of the rounds after the first, ms:\n\n| part | {heads} |\n")
    lines.append("| --- |" + " ---: |" * len(sizes) + "\n")
    for name in PARTS:
        lines.append(f"| {name} | " + " | ".join(f"{float(row[name]):.1f}" for row in sizes) + " |\n")
    if tried:
        lines.append(_selectors(tried, largest, args))
    return "".join(lines)


def _growth(sizes: Sequence[dict[str, Any]]) -> str:
    """What one more client costs, and whether the limits hold."""
    lines = [
        "\n## Growth\n\nThe cost of one more client, between two sizes. A value below 0 is noise:\n\n",
        "| from | to | peak, kB | first round, microseconds | a later round, microseconds |\n",
        "| ---: |" + " ---: |" * 4 + "\n",
    ]

    def more(key: str, factor: float, before: dict[str, Any], after: dict[str, Any]) -> float:
        return factor * (float(after[key]) - float(before[key])) / (int(after["clients"]) - int(before["clients"]))

    pairs = [*pairwise(sizes), *([(sizes[0], sizes[-1])] if len(sizes) > 2 else [])]
    for pair in pairs:
        lines.append(
            f"| {int(pair[0]['clients']):,} | {int(pair[1]['clients']):,} | {more('peak_mb', 1024.0, *pair):.2f} | "
            f"{more('first_s', 1e6, *pair):.1f} | {more('round_s', 1e6, *pair):.2f} |\n"
        )
    last = sizes[-1]
    clients, peak, each = int(last["clients"]), float(last["peak_mb"]), float(last["round_s"])
    limits = (
        ("peak of memory", peak / 1024, LIMIT_MB / 1024, "GB"), ("a later round (median)", each, LIMIT_ROUND_S, "s"),
        ("peak for each client", 1024 * peak / clients, LIMIT_KB, "kB"),
    )  # fmt: skip
    lines.append(f"\nThe limits of this package for {clients:,} clients:\n\n| quantity | measured | limit | within |\n")
    lines.append("| --- | ---: | ---: | --- |\n")
    for name, value, limit, unit in limits:
        lines.append(f"| {name} | {value:.2f} {unit} | {limit:g} {unit} | {'yes' if value <= limit else 'NO'} |\n")
    return "".join(lines)


def _selectors(tried: Sequence[Sequence[dict[str, Any]]], largest: int, args: argparse.Namespace) -> str:
    """The selectors that play with the largest number of clients, and those that do not."""
    lines = [
        f"\n## Selectors that play {args.rounds} rounds with {largest:,} clients\n\n",
        "*Selected* and *probed* are the largest numbers of clients in one round.\n\n",
        "If a later round takes more than "
        f"{LIMIT_ROUND_S:g} s, the last column has the time with {min(args.clients):,} clients. The difference is the\n"
        "cost of the clients that are not in the cohort.\n\n"
        "| selector | selected | probed | first round, s | a later round, s (median) | largest later round, s | "
        f"peak, MB | a later round with {min(args.clients):,} clients, s |\n| --- |" + " ---: |" * 7 + "\n",
    ]
    for attempts in tried:
        if not (row := attempts[0]).get("reason") and int(row["clients"]) == largest:
            slow = float(row["round_s"]) > LIMIT_ROUND_S and len(attempts) > 1
            few = f"{float(attempts[-1]['round_s']):.2f}" if slow else ""
            if float(row["round_s"]) > LIMIT_ROUND_S and not slow:
                few = "not measured"
            lines.append(f"| {row['selector']} | {_costs(row)} | {few} |\n")
    lines.append("\n## Selectors that ask or sketch every client\n\n")
    lines.append(
        f"The largest number of clients with which {args.rounds} rounds took at most {LIMIT_MB // 1024} GB of memory "
        f"and {args.limit_s:,.0f} s of the\nprocessor. The last column has the reason why the next larger number "
        'failed. "Not measured" means that no larger\nnumber was tried.\n\n'
    )
    lines.append("| selector | what it asks | largest number of clients | selected | probed | first round, s | a later "
                 "round, s (median) | largest later round, s | peak, MB | with more clients |\n")  # fmt: skip
    lines.append("| --- | --- |" + " ---: |" * 7 + " --- |\n")
    for attempts in tried:
        if attempts[0].get("reason") or int(attempts[0]["clients"]) < largest:
            # The attempts go from many clients to few. The smallest number may have been played for comparison.
            place = next((i for i, row in enumerate(attempts) if not row.get("reason")), len(attempts) - 1)
            last, failed = attempts[place], bool(attempts[place].get("reason"))
            size = f"less than {int(last['clients']):,}" if failed else f"{int(last['clients']):,}"
            costs = " | ".join([""] * 6) if failed else _costs(last)
            why = last if failed else attempts[place - 1] if place else {}
            more = f"{int(why['clients']):,}: {_told(why['reason'])}" if why else "not measured"
            if not int(last["clients"]):
                size, more = "not measured", ""
            lines.append(f"| {last['selector']} | {ASKS.get(last['selector'], '')} | {size} | {costs} | {more} |\n")
    return "".join(lines)


def _costs(row: dict[str, Any]) -> str:
    return (
        f"{int(float(row['asked'])):,} | {int(float(row.get('probed') or 0)):,} | {float(row['first_s']):.1f} | "
        f"{float(row['round_s']):.2f} | {float(row['high_s']):.2f} | {float(row['peak_mb']):,.0f}"
    )


def _told(reason: str) -> str:
    """The first sentence of a reason, without what would break a table."""
    if array := re.search(r"allocate (\d+) bytes", reason):
        return f"more than {LIMIT_MB // 1024} GB (one array of {int(array[1]) / 2**30:,.0f} GB)"
    return reason.partition(". ")[0].replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    main()
