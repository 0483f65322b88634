"""Comparison of all selectors in three worlds, as page, CSV files and pictures.

    python studies/selectors --data-dir DIR                             # everything: many core-hours
    python studies/selectors --data-dir DIR --worlds shards --seeds 20  # one world
    python studies/selectors --data-dir DIR --parts tuning              # only the settings of parameters
    python studies/selectors --data-dir DIR --worlds shards --parts frontier  # seconds against joules
    python studies/selectors --data-dir DIR --ray-address HOST:PORT     # each run is a task on a Ray cluster
    python studies/selectors --page-only                                # pages from the stored rows, without data
    python studies/selectors --smoke --page FILE                        # small test with handwritten digits

Each finished run is a row of docs/results/selectors-runs.csv. The command simulates only the runs without a row, so an
interrupted command continues. Then it writes docs/results/selectors.md and docs/results/joules.md from all rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

# Set before NumPy and torch are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from cells import Cell
from effects import World
from frontier import write_frontier
from lineup import (
    ABLATION_SEEDS,
    ABLATIONS,
    CONTROL_SEEDS,
    FRONTIER_SEEDS,
    WITH_CONTROLS,
    WORLDS,
    Entry,
    ablation_entries,
    control_entries,
    entry_scenario,
    frontier_entries,
    table_entries,
    world_file,
)
from page import write_page
from playing import open_rows, play
from runs import parse_row
from tuning import tried, tuned_values, tuning_cells

from fedsel_flwr.selectors import names
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.on_flower.ray_resources import cluster_for_runs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "selectors.md"
TUNING, FRONTIER = "tuning", "frontier"
PARTS = (TUNING, "table", "controls", FRONTIER)
SMOKE = {
    "data.dataset": "digits", "num_clients": 20, "clients_per_round": 3, "rounds": 8, "target_accuracy": 0.4,
    "data.validation_fraction": 0.1, "training.local_steps": 5, "training.learning_rate": 0.2,
}  # fmt: skip


def main() -> None:
    """Simulate what is missing, then write the pages from all rows."""
    args = _arguments()
    common = SMOKE if args.smoke else {"data.data_dir": args.data_dir} if args.data_dir else {}
    start = time.monotonic()
    if not args.page_only:
        where = cluster_for_runs(args.ray_address)
        # The tuning gives the parameters of the tables. The tables come before the frontier, and within them the first
        # seed of each world comes before the next seed.
        for some in ({TUNING}, {"table", "controls"}, {FRONTIER}):
            plan = [cell for world in args.worlds for cell in cells(world, some & set(args.parts), args, common)]
            plan.sort(key=lambda cell: cell.scenario.seed)
            if plan and not play(plan, args.rows, args.workers, where):
                sys.exit("interrupted: run the same command again to continue")
    if not args.smoke:
        # The pages always cover everything, even if the command simulated only a part.
        args = argparse.Namespace(**vars(args) | {"worlds": list(WORLDS), "seeds": None, "selectors": []})
    if args.rows.exists():
        # After an interruption, the rows of the last run are at the end of the file.
        open_rows(args.rows).sort()
    command = "python studies/selectors" + (" --smoke --page FILE" if args.smoke else " --data-dir DIR")
    read = [
        read_world(name, letter, ["table", "controls"], args, common)
        for letter, name in zip("abc", WORLDS, strict=True)
        if name in args.worlds
    ]
    tunings = {world.letter: tried(world.scenario.name, common, open_rows(args.rows)) for world in read}
    write_page(args.page, read, tunings, args.rows.name, command)
    if not args.smoke:
        world = read_world(WITH_CONTROLS, "a", [FRONTIER], args, common)
        command += f" --worlds {WITH_CONTROLS} --parts {FRONTIER}"
        write_frontier(args.page.with_name("joules.md"), world, args.rows.name, command, FRONTIER_SEEDS)
    print(f"{time.monotonic() - start:.0f} s; written: {args.page}")


def cells(world: str, parts: Collection[str], args: argparse.Namespace, common: Mapping[str, Any]) -> list[Cell]:
    """Return the runs of a world. The parameters of its tables follow from the rows of the tuning.

    Args:
        world: Name of the world.
        parts: Names of the parts.
        args: The command's arguments.
        common: Scenario keys that differ from the world's file in every run.
    """
    if TUNING in parts and not args.smoke:
        return [cell for runs in tuning_cells(world, common, args.selectors).values() for cell in runs]
    scenario, values = load_scenario(world_file(world), common), tuned_values(world, common, open_rows(args.rows))
    entries: list[Entry] = []
    if "table" in parts:
        entries += table_entries(scenario, args.seeds or (2 if args.smoke else WORLDS[world]), args.selectors)
    if world == WITH_CONTROLS and not args.smoke:
        if "controls" in parts:
            entries += control_entries(min(CONTROL_SEEDS, args.seeds or CONTROL_SEEDS))
            entries += ablation_entries(min(ABLATION_SEEDS, args.seeds or ABLATION_SEEDS))
        if FRONTIER in parts:
            entries += frontier_entries(scenario, min(FRONTIER_SEEDS, args.seeds or FRONTIER_SEEDS))
    return [
        Cell(entry_scenario(world, entry, seed, {**common, **values.get(entry.selector, {})}), entry.label)
        for entry in entries
        for seed in range(1, entry.seeds + 1)
    ]


def read_world(
    name: str, letter: str, parts: Sequence[str], args: argparse.Namespace, common: Mapping[str, Any]
) -> World:
    """Read the rows of a world that belong to some parts.

    Args:
        name: Name of the world.
        letter: Its letter on the page.
        parts: Names of the parts.
        args: The command's arguments.
        common: Scenario keys that differ from the world's file in every run.
    """
    scenario, rows = load_scenario(world_file(name), common), open_rows(args.rows)
    own = cells(name, parts, args, common)
    found = [parse_row(row) for row in rows.select(cell.fingerprint for cell in own)]
    missing = [cell.label for cell in own if not rows.done(cell.fingerprint)]
    contenders = [entry.label for entry in table_entries(scenario, 1) if entry.selector]
    controls = [entry.label for entry in control_entries(1)]
    return World(scenario, letter, found, missing, contenders, controls, list(ABLATIONS))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("FEDSEL_DATA", "")
    parser.add_argument("--data-dir", default=folder, help="folder of the data; default: FEDSEL_DATA")
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--selectors", nargs="*", default=[], choices=list(names()))
    parser.add_argument("--seeds", type=int, help="number of seeds; default: 20, with --smoke 2")
    parser.add_argument("--workers", type=int, help="number of processes, default 1; or of runs on the cluster")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="Ray cluster that executes the runs, each on a core")
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
