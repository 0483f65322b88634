"""Comparison of all selectors in three worlds, as page, CSV files and pictures.

    python benchmarks/selectors --data-dir DIR                             # everything: many core-hours
    python benchmarks/selectors --data-dir DIR --worlds shards --seeds 20  # one world
    python benchmarks/selectors --data-dir DIR --parts frontier            # seconds against joules
    python benchmarks/selectors --page-only                                # the page from the stored rows, without data
    python benchmarks/selectors --smoke                                    # small test with handwritten digits

Each finished run is a row of docs/results/selectors-runs.csv. The command simulates only the runs without a row, so an
interrupted command continues. Then it writes the page.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Set before NumPy and torch are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
# Last, so that no file of this folder hides a module of another package.
sys.path.append(str(HERE.parent))

from cells import Cell  # noqa: E402
from lineup import (  # noqa: E402
    CONTROL_SEEDS,
    FRONTIER_SEEDS,
    TABLE_SEEDS,
    WORLDS,
    Entry,
    control_entries,
    entry_scenario,
    frontier_entries,
    table_entries,
    world_file,
)
from playing import play  # noqa: E402

from fedsel_flwr.selectors import names  # noqa: E402
from fedsel_flwr.simulations import load_scenario  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "results" / "selectors.md"
PARTS = ("table", "controls", "frontier")
WITH_CONTROLS = "shards"
"""The world of the controls and the frontier."""
SMOKE = {
    "data.dataset": "digits", "num_clients": 20, "clients_per_round": 3, "rounds": 8, "target_accuracy": 0.4,
    "data.validation_fraction": 0.1, "training.local_steps": 5, "training.learning_rate": 0.2,
}  # fmt: skip


def main() -> None:
    """Simulate what is missing, then write the page."""
    args = _arguments()
    common = SMOKE if args.smoke else {"data.data_dir": args.data_dir} if args.data_dir else {}
    plan = [cell for world in args.worlds for cell in cells(world, args, common)]
    # The sort is stable: one seed of each world comes first, then the next seed.
    plan.sort(key=lambda cell: cell.scenario.seed)
    start = time.monotonic()
    if not args.page_only and not play(plan, args.rows, args.workers):
        sys.exit("interrupted: run the same command again to continue")
    print(f"{len(plan)} runs; {time.monotonic() - start:.0f} s")


def cells(world: str, args: argparse.Namespace, common: Mapping[str, Any]) -> list[Cell]:
    """Return every run of a world.

    Args:
        world: Name of the world.
        args: The command's arguments.
        common: Scenario keys that differ from the world's file in every run.
    """
    scenario = load_scenario(world_file(world), common)
    entries: dict[str, Entry] = {}

    def add(found: list[Entry]) -> None:
        # An entry of two parts runs on the larger number of seeds.
        for entry in found:
            if entry.label not in entries or entries[entry.label].seeds < entry.seeds:
                entries[entry.label] = entry

    if "table" in args.parts:
        add(table_entries(scenario, args.seeds or (2 if args.smoke else TABLE_SEEDS), args.selectors))
    if world == WITH_CONTROLS and not args.smoke:
        if "controls" in args.parts:
            add(control_entries(min(CONTROL_SEEDS, args.seeds or CONTROL_SEEDS)))
        if "frontier" in args.parts:
            add(frontier_entries(scenario, min(FRONTIER_SEEDS, args.seeds or FRONTIER_SEEDS)))
    return [
        Cell(entry_scenario(world, entry, seed, common), entry.label)
        for entry in entries.values()
        for seed in range(1, entry.seeds + 1)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("FEDSEL_DATA", "")
    parser.add_argument("--data-dir", default=folder, help="folder of the data; default: FEDSEL_DATA")
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--parts", nargs="*", default=["table", "controls"], choices=list(PARTS))
    parser.add_argument("--selectors", nargs="*", default=[], choices=list(names()))
    parser.add_argument("--seeds", type=int, help="number of seeds; default: 20, with --smoke 2")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--rows", type=Path, help="CSV file of the runs; default: docs/results/selectors-runs.csv")
    parser.add_argument("--page", type=Path, help="default: docs/results/selectors.md")
    parser.add_argument("--page-only", action="store_true", help="simulate nothing")
    parser.add_argument("--smoke", action="store_true", help="digits, 20 clients, 8 rounds; needs --page")
    args = parser.parse_args()
    if args.smoke and not args.page:
        parser.error("--smoke needs --page FILE, because its page must not replace the real one")
    args.page = args.page or PAGE
    args.rows = args.rows or args.page.with_name(f"{args.page.stem}-runs.csv")
    return args


if __name__ == "__main__":
    main()
