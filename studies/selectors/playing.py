"""Simulation of the missing runs, in one or several processes, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cells import Cell
from runs import COLUMNS, KEY, RunRow, row_values

from fedsel_flwr.simulations.comparisons.cluster import Cluster
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.reproductions.rows import Rows

GROUP = 8
"""Largest number of runs of a seed that a process simulates before it takes others."""


def open_rows(path: Path) -> Rows:
    """Open the CSV file of the comparison."""
    return Rows(path, COLUMNS, KEY)


def play(plan: Sequence[Cell], path: Path, workers: int | None, where: RayResources | None = None) -> bool:
    """Simulate the runs without a row, and add a row when a run is finished.

    Runs of the same world and seed share a process if they can, because they share the data. On a cluster, each run is
    a task.

    Args:
        plan: The runs.
        path: The CSV file.
        workers: Number of processes, or of runs on the cluster. If None, 1, or as many as the cluster has room for.
        where: The cluster; None for this machine.

    Returns:
        Whether all runs are finished; False after Ctrl-C.
    """
    rows = open_rows(path)
    missing = [cell for cell in plan if not rows.done(cell.fingerprint)]
    print(f"{len(plan) - len(missing)} of {len(plan)} runs are finished", flush=True)
    seeds = [list(group) for _, group in groupby(missing, key=lambda cell: (cell.scenario.name, cell.scenario.seed))]
    groups = [seed[first : first + GROUP] for seed in seeds for first in range(0, len(seed), GROUP)]
    try:
        if where is not None:
            _on_cluster(missing, path, where, workers)
        elif workers in (None, 1) or len(groups) < 2:
            for group in groups:
                _play_group(group, path)
        else:
            _in_processes(groups, path, workers)
    except KeyboardInterrupt:
        return False
    return True


def _on_cluster(cells: Sequence[Cell], path: Path, where: RayResources, workers: int | None) -> None:
    """Simulate runs on the nodes of a cluster. This machine reads the data, and adds the rows."""
    rows, names = open_rows(path), [f"{one.scenario.name}, seed {one.scenario.seed}: {one.label}" for one in cells]
    for cell in cells:
        cell.check_data()
    scenarios = [cell.scenario for cell in cells]
    with closing(Cluster(where, workers, scenarios=scenarios).map(_simulate_on_node, cells, names)) as ended:
        for index, row in ended:
            rows.add(row_values(row))
            print(f"{names[index]} took {row.run_s:.0f} s", flush=True)


def _simulate_on_node(cell: Cell, _shared: None, _report: Any) -> RunRow:
    return cell.simulate()


def _in_processes(groups: Sequence[Sequence[Cell]], path: Path, workers: int | None) -> None:
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
        cell.check_data()
        row = cell.simulate()
        rows.add(row_values(row))
        print(f"{cell.scenario.name}, seed {cell.scenario.seed}: {cell.label} took {row.run_s:.0f} s", flush=True)
