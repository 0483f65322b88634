"""Simulation of the missing runs, in one or several processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

from cells import Cell
from runs import COLUMNS, KEY, row_values

from fedsel_flwr.simulations.reproductions.rows import Rows


def open_rows(path: Path) -> Rows:
    """Open the CSV file of the comparison."""
    return Rows(path, COLUMNS, KEY)


def play(plan: Sequence[Cell], path: Path, workers: int) -> bool:
    """Simulate the runs without a row, and add a row when a run is finished.

    Runs of the same world and seed share a process, because they share the data.

    Args:
        plan: The runs.
        path: The CSV file.
        workers: Number of processes.

    Returns:
        Whether all runs are finished; False after Ctrl-C.
    """
    rows = open_rows(path)
    missing = [cell for cell in plan if not rows.done(cell.fingerprint)]
    print(f"{len(plan) - len(missing)} of {len(plan)} runs are finished", flush=True)
    groups = [list(group) for _, group in groupby(missing, key=lambda cell: (cell.scenario.name, cell.scenario.seed))]
    try:
        if workers == 1 or len(groups) < 2:
            for group in groups:
                _play_group(group, path)
        else:
            _in_processes(groups, path, workers)
    except KeyboardInterrupt:
        return False
    return True


def _in_processes(groups: Sequence[Sequence[Cell]], path: Path, workers: int) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(_play_group, group, path) for group in groups]):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _play_group(group: Sequence[Cell], path: Path) -> None:
    rows = open_rows(path)
    for cell in group:
        row = cell.simulate()
        rows.add(row_values(row))
        print(f"{cell.scenario.name}, seed {cell.scenario.seed}: {cell.label} took {row.run_s:.0f} s", flush=True)
