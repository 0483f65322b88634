"""Every selector in three worlds: Fashion-MNIST, 5 seeds, 300 rounds each, as page, CSV files and pictures.

    python benchmarks/selectors --data-dir DIR       # Fashion-MNIST, and FLASH's trace for the third world
    python benchmarks/selectors --smoke              # the handwritten digits, 20 clients, 8 rounds: does it run?

Runs are kept in runs/selectors, each under a digest of its scenario: what was played is not played again, and a command
that was cut off goes on with the run that it was in; the page is written when all are there. Two processes of one
thread each, unless --workers says otherwise.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy and torch come

import torch
from cells import Cell
from figures import KNOWING
from page import write_page
from playing import play

from fedsel_flwr.errors import FedSelError
from fedsel_flwr.selectors import names
from fedsel_flwr.simulations import Scenario, load_scenario
from fedsel_flwr.simulations.comparisons.contenders import runnable_selectors
from fedsel_flwr.simulations.worlds.availability import find_trace

HERE = Path(__file__).resolve().parent
WORLDS = ("shards", "cell", "trace")
PAGE = HERE.parents[1] / "docs" / "results" / "selectors.md"
SMOKE = {
    "data.dataset": "digits", "num_clients": 20, "clients_per_round": 3, "rounds": 8, "target_accuracy": 0.4,
    "data.validation_fraction": 0.1, "training.local_steps": 5, "training.learning_rate": 0.2,
}  # fmt: skip


def main() -> None:
    """Play what is missing, then write the page."""
    args = _arguments()
    given = {"data.data_dir": args.data_dir} if args.data_dir and not args.smoke else {}
    worlds, missing = [], {}
    for name in args.worlds:
        scenario = load_scenario(HERE / f"{name}.toml", given | (SMOKE if args.smoke else {}))
        try:
            if scenario.availability.kind == "trace":
                find_trace(scenario.availability.trace, scenario.data.data_dir or None)
        except FedSelError as error:
            missing[name] = str(error)
            print(f"{name} is left out: {error}", flush=True)
        else:
            worlds.append(scenario)
    left_out = {}
    plan: list[Cell] = []
    for scenario in worlds:
        able, left_out[scenario.name] = runnable_selectors(scenario)
        able = [name for name in able if name in args.selectors]
        plan += cells(scenario, [*able, *KNOWING], args.seeds, args.runs_dir)
    plan.sort(key=lambda cell: cell.scenario.seed)  # stable: a seed of each world, then the next seed

    def write() -> None:
        machine = (
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
            f"{torch.__version__}, {args.workers} processes{args.note and '; '}{args.note}"
        )
        command = "python benchmarks/selectors" + (" --smoke" if args.smoke else " --data-dir DIR")
        write_page(args.page, worlds, plan, missing, left_out, machine, command)

    start = time.monotonic()
    if not play(plan, args.workers):
        sys.exit("cut off: the same command goes on")
    write()
    print(f"{len(plan)} runs; {time.monotonic() - start:.0f} s; written: {args.page}")


def cells(scenario: Scenario, labels: Sequence[str], seeds: int, runs: Path) -> list[Cell]:
    """Every run of a world."""
    return [
        Cell(
            scenario.model_copy(update={"seed": seed, **({} if label in KNOWING else {"selector": label})}), label, runs
        )
        for seed in range(1, seeds + 1)
        for label in labels
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-dir", default=os.environ.get("FEDSEL_DATA", ""), help="holds the data; else FEDSEL_DATA"
    )
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--selectors", nargs="*", default=list(names()), choices=list(names()))
    parser.add_argument("--seeds", type=int, help="how many; default 5, with --smoke 2")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/selectors"))
    parser.add_argument("--page", type=Path, help="default docs/results/selectors.md, with --smoke in the runs' folder")
    parser.add_argument("--smoke", action="store_true", help="digits, 20 clients, 8 rounds, 2 seeds")
    parser.add_argument("--note", default="", help="what the page is to say of the machine")
    args = parser.parse_args()
    args.seeds = args.seeds or (2 if args.smoke else 5)
    args.page = args.page or (args.runs_dir / "smoke.md" if args.smoke else PAGE)
    return args


if __name__ == "__main__":
    main()
