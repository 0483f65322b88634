"""Playing what was not played yet, in several processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby
from multiprocessing import get_context

from cells import Cell


def play(plan: Sequence[Cell], workers: int) -> bool:
    """Play what was not; the runs of one world and seed in one process, as they share its data."""
    open_cells = [cell for cell in plan if not cell.done]
    groups = [
        list(group) for _, group in groupby(open_cells, key=lambda cell: (cell.scenario.name, cell.scenario.seed))
    ]
    if not groups:
        return True
    print(f"{len(plan) - len(open_cells)} of {len(plan)} runs are there", flush=True)
    try:
        if workers == 1:
            for group in groups:
                _play_group(group)
        else:
            _in_processes(groups, workers)
    except KeyboardInterrupt:
        return False
    return True


def _in_processes(groups: Sequence[Sequence[Cell]], workers: int) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(_play_group, group) for group in groups]):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _play_group(group: Sequence[Cell]) -> None:
    for cell in group:
        took = cell.play()
        print(f"{cell.scenario.name}, seed {cell.scenario.seed}: {cell.label} took {took:.0f} s", flush=True)
