"""Values of parameters: the fastest of eight settings, on seeds that the tables never evaluate.

A value that a publication has for the world's number of clients and cohort comes first; it stands in the world's
scenario file, with its source. Every other selector whose publication leaves a parameter open has a grid here. A
selector without either has no such parameter, and runs as published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from cells import Cell
from lineup import Entry, entry_scenario, world_file
from runs import RunRow, parse_row

from fedsel_flwr.selectors.registry import describe
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.reproductions.rows import Rows

SEEDS = (101, 102, 103)
"""Seeds of the tuning."""
ROUNDS = {"trace": 500}
"""World -> rounds of a tuning run, if fewer than those of the world. `random` needs 283 of the 1,000 in world (c)."""
Grid = Mapping[str, tuple[str, tuple[float, ...]]]
"""Selector -> its main parameter, and eight settings of it."""
_EVERYWHERE: Grid = {
    "cs-ucb-q": ("queue_weight", (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)),
    "lsh": ("bits", (2, 3, 4, 5, 6, 8, 10, 12)),
    "nccb": ("clusters", (2, 3, 4, 5, 6, 8, 10, 15)),
    "oort": ("penalty", (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)),
    "pczfl": ("uncertainty", (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)),
    "pisces": ("exploration_min", (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)),
    "tifl": ("tiers", (2, 3, 4, 5, 6, 8, 10, 20)),
}
_PHONES: Grid = {
    "bsfl": ("min_latency", (2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0)),
    "fedcs": ("deadline", (15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 100.0, 120.0)),
}
_CANDIDATES = ("candidates", (12, 15, 20, 30, 50, 80, 120, 200))
GRIDS: Mapping[str, Grid] = {
    "shards": {**_EVERYWHERE, **_PHONES},
    "cell": {
        **_EVERYWHERE,
        "bsfl": ("min_latency", (0.0125, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)),
        "fedcs": ("deadline", (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)),
    },
    "trace": {
        **_EVERYWHERE,
        **_PHONES,
        "active-fl": ("dropped", (0.0, 0.25, 0.5, 0.6, 0.75, 0.85, 0.9, 0.95)),
        "cpow-d": _CANDIDATES,
        "fedcor": ("beta", (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)),
        "gpfl": ("rho", (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)),
        "power-of-choice": _CANDIDATES,
        "rpow-d": _CANDIDATES,
    },
}
"""World -> its grids. No publication has the 704 clients of world (c)."""


def tuning_cells(world: str, common: Mapping[str, Any], chosen: list[str]) -> dict[tuple[str, float], list[Cell]]:
    """Return the runs of the tuning: selector and setting -> a run for each seed.

    Args:
        world: Name of the world.
        common: Scenario keys that differ from the world's file in every run.
        chosen: Names of selectors. If empty: all.
    """
    found = {}
    for selector, (parameter, settings) in GRIDS[world].items():
        for setting in settings if selector in chosen or not chosen else ():
            values = {f"selectors.{selector}.{parameter}": setting}
            values |= {"rounds": ROUNDS[world]} if world in ROUNDS else {}
            entry = Entry(f"{selector} {parameter}={setting:g}", selector, len(SEEDS), values)
            scenarios = [entry_scenario(world, entry, seed, common) for seed in SEEDS]
            found[selector, setting] = [Cell(scenario, entry.label) for scenario in scenarios]
    return found


def tried(world: str, common: Mapping[str, Any], rows: Rows) -> dict[str, dict[float, list[RunRow]]]:
    """Return the tuning's rows: selector -> setting -> rows, for selectors whose tuning is complete."""
    found: dict[str, dict[float, list[RunRow]]] = {}
    for (selector, setting), cells in tuning_cells(world, common, []).items():
        own = [parse_row(row) for row in rows.select(cell.fingerprint for cell in cells)]
        found.setdefault(selector, {})[setting] = own
    return {one: runs for one, runs in found.items() if all(len(rows) == len(SEEDS) for rows in runs.values())}


def figures(rows: list[RunRow]) -> tuple[int, float, float]:
    """Return the misses of a setting, the geometric mean of its seconds to the target, and its accuracy at the end.

    The mean is infinite if a run missed the target.
    """
    seconds = [row.time_to_target_s for row in rows]
    missed = sum(not math.isfinite(s) for s in seconds)
    return missed, float(np.exp(np.mean(np.log(seconds)))), float(np.mean([row.accuracy_last10 for row in rows]))


def best(runs: Mapping[float, list[RunRow]]) -> float:
    """Return the setting that reached the target on most seeds; of these, the fastest by its geometric mean.

    If no setting reached it on all seeds, the accuracy at the end decides instead of the time.
    """

    def key(setting: float) -> tuple[int, float]:
        missed, seconds, accuracy = figures(runs[setting])
        return missed, -accuracy if missed else seconds

    return min(runs, key=key)


def tuned_values(world: str, common: Mapping[str, Any], rows: Rows) -> dict[str, dict[str, Any]]:
    """Return the scenario keys that the tuning changes: selector -> keys.

    A setting that is the default, or that the world's file has, changes nothing, so the runs with it keep their rows.
    """
    found = {}
    for selector, runs in tried(world, common, rows).items():
        parameter, setting = GRIDS[world][selector][0], best(runs)
        default = next(one.get("default") for one in describe(selector)["parameters"] if one["name"] == parameter)
        own = load_scenario(world_file(world), common).selectors.get(selector, {})
        if own.get(parameter, default) != setting:
            found[selector] = {f"selectors.{selector}.{parameter}": setting}
    return found
