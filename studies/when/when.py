"""Measure when selection by latency pays, and by how much: ``docs/results/when.md`` with its CSV files and picture.

    python studies/when/when.py                  # 30 fleets, 16 selectors, 20 seeds; half an hour of one core
    python studies/when/when.py --seeds 3        # fewer seeds; a later command with more seeds runs only the others
    python studies/when/when.py --ray-address HOST:PORT  # each fleet and seed is a task on a Ray cluster
    python studies/when/when.py --page-only      # write the page again from the CSV files
    python studies/when/when.py --smoke          # two small fleets and two seeds, in the folder runs/when

The fleets of :mod:`when_grid` run without training. Then :mod:`when_checks` runs three of the fleets with training, and
the worlds of the comparison page without training. Each finished run is a row of a CSV file. A run that has its row is
not run again, so an interrupted command resumes. :mod:`when_page` writes the page from the rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported

import numpy as np
from when_checks import KNOWN_COLUMNS, KNOWN_KEY, PLAYS, POINTS, SEEDS, TRAINING_COLUMNS, TRAINING_KEY, known, train
from when_fleet import Fleet
from when_grid import KEY, Grid, Variant, columns, make_grid, rows_of
from when_page import machine_of, write_page

from fedsel_flwr.simulations.comparisons.cluster import Cluster
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, cluster_for_runs
from fedsel_flwr.simulations.reproductions.rows import Rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "when.md"
SMOKE_PAGE = Path("runs") / "when" / "when.md"


def simulate(grid: Grid, rows: Rows, workers: int | None, where: RayResources | None) -> None:
    """Run what is missing, in processes or on a Ray cluster, and append each row when its run has ended."""
    missing = grid.missing(rows)
    left = sum(len(wanted) for *_, wanted in missing)
    print(f"{left} runs to do", flush=True)
    if where is not None:
        names = [f"fleet {fleet.spread:g}/{fleet.noise:g}, seed {seed}" for fleet, seed, _ in missing]
        with closing(Cluster(where, workers).map(_rows_on_node, missing, names, grid)) as ended:
            for _, found in ended:
                for row in found:
                    rows.add(row)
        return
    if workers in (None, 1):
        for task in missing:
            for row in rows_of(grid, *task):
                rows.add(row)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for found in pool.map(_all_rows, itertools.repeat(grid), missing):
                for row in found:
                    rows.add(row)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _all_rows(grid: Grid, task: tuple[Fleet, int, list[Variant]]) -> list[dict[str, Any]]:
    return list(rows_of(grid, *task))


def _rows_on_node(task: tuple[Fleet, int, list[Variant]], grid: Grid, _report: Any) -> list[dict[str, Any]]:
    return _all_rows(grid, task)


def this_machine() -> str:
    """Return the description of this machine."""
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}"
    return f"{platform.machine()}, {os.cpu_count()} cores shared with other programs, {versions}"


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="number of seeds; default 20, with --smoke 2")
    parser.add_argument("--workers", type=int, help="processes, default 1; or tasks on the cluster at the same time")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="Ray cluster that runs the fleets without training")
    parser.add_argument("--smoke", action="store_true", help="two small fleets")
    parser.add_argument("--page", type=Path, help="default docs/results/when.md, with --smoke runs/when/when.md")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    args = parser.parse_args()
    where = cluster_for_runs(args.ray_address)
    page = args.page or (SMOKE_PAGE if args.smoke else PAGE)
    page.parent.mkdir(parents=True, exist_ok=True)
    grid, full = make_grid(args.smoke, args.seeds), make_grid(args.smoke, None)
    rows = Rows(page.with_suffix(".csv"), columns(grid.plays), KEY)
    trained = Rows(page.with_name(f"{page.stem}-training.csv"), TRAINING_COLUMNS, TRAINING_KEY)
    worlds = Rows(page.with_name(f"{page.stem}-known.csv"), KNOWN_COLUMNS, KNOWN_KEY)
    if not args.page_only:
        try:
            simulate(grid, rows, args.workers, where)
            if args.smoke:
                train(trained, grid.fleets[1:], 1, 2)
            else:
                train(trained, POINTS, PLAYS, SEEDS)
                known(worlds)
        except KeyboardInterrupt:
            sys.exit("Interrupted. Run the command again to resume.")
    for file in (rows, trained, worlds):
        if len(file):
            file.sort()
    machine = machine_of(page) if args.page_only and page.exists() else this_machine()
    write_page(page, full, rows, trained, worlds, machine)
    print(f"written: {page}")


if __name__ == "__main__":
    main()
