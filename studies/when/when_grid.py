"""The grid of ``when.py``: fleets, selectors and seeds, and the row of each run.

A run has 1,000 rounds. Its first 20, 100, 300 and 1,000 rounds are the cells with 1, 5, 15 and 50 plays of each client.
One row of the CSV file is a run. Its fingerprint names all that the row depends on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from when_fleet import DEADLINE_S, EXAMPLES, PAYLOAD_BITS, Fleet, Times, draw_times, run

from fedsel_flwr.rounds.fingerprints import fingerprint
from fedsel_flwr.simulations.reproductions.rows import Rows

KEY = ("clients", "per_round", "spread", "noise", "selector", "seed")
SPREADS, NOISES, COHORTS = (0.0, 0.2, 0.4, 0.78, 1.2), (0.1, 0.4, 1.0), ((100, 5), (500, 25))
PLAYS = (1, 5, 15, 50)
"""Mean number of plays of a client: rounds x cohort / clients."""
SEEDS = 20
RANDOM, GROUPS = "random", "sorted-groups"
FLEET_REVISION = 1
"""Raise this number when the latencies or the two references change."""
REVISIONS = {"": 1, "random": 2, "bsfl": 1, "cs-ucb": 1, "oort": 1, "tifl": 1}
"""Raise a selector's number when its numbers change; its rows are then run again."""
MIN_LATENCY_S = 4.0
"""tau_min of the scenario ``phones``."""


@dataclass(frozen=True)
class Variant:
    """A selector with its parameters; sorted groups have no selector's name."""

    label: str
    name: str = ""
    params: dict[str, Any] = field(default_factory=dict)


def variants() -> list[Variant]:
    """Return the references, then the selectors: the paper's exploration and clock, and the others."""
    clocks: dict[str, dict[str, Any]] = {"bsfl": {"min_latency": MIN_LATENCY_S}, "cs-ucb": {"max_latency": DEADLINE_S}}
    found = [Variant(RANDOM, RANDOM), Variant(GROUPS)]
    for name, clock in clocks.items():
        for word, given in (("", clock), (" auto", dict.fromkeys(clock, "auto"))):
            found += [
                Variant(f"{name}{word}" + (f" {exploration:g}" if exploration != 1.0 else ""), name,
                        {**given, "exploration": exploration})
                for exploration in (1.0, 0.3, 0.1)
            ]  # fmt: skip
    return [*found, Variant("oort", "oort"), Variant("tifl", "tifl")]


@dataclass(frozen=True)
class Grid:
    """All runs, in the order of the simulation: every fleet with the first seed, then with the next seed.

    Args:
        fleets: The fleets.
        plays: Plays of a client, ascending; the largest sets the length of a run.
        seeds: Number of seeds, from 1.
    """

    fleets: Sequence[Fleet]
    plays: Sequence[int]
    seeds: int

    def runs(self) -> Iterator[tuple[Fleet, int, Variant]]:
        """Yield fleet, seed and variant of each run."""
        for seed, fleet in itertools.product(range(1, self.seeds + 1), self.fleets):
            for variant in variants():
                yield fleet, seed, variant

    def fingerprint(self, fleet: Fleet, variant: Variant, seed: int) -> str:
        """Return a digest of what a row depends on."""
        return fingerprint(
            fleet=asdict(fleet), phones=[EXAMPLES, PAYLOAD_BITS, DEADLINE_S], plays=list(self.plays), seed=seed,
            variant=asdict(variant), revisions=[FLEET_REVISION, REVISIONS[variant.name]],
        )  # fmt: skip

    def missing(self, rows: Rows) -> list[tuple[Fleet, int, list[Variant]]]:
        """Return the runs without a row, by fleet and seed."""
        found = []
        for (seed, fleet), group in itertools.groupby(self.runs(), key=lambda one: (one[1], one[0])):
            wanted = [v for _, _, v in group if not rows.done(self.fingerprint(fleet, v, seed))]
            if wanted:
                found.append((fleet, seed, wanted))
        return found


def key_of(fleet: Fleet, variant: Variant, seed: int) -> tuple[object, ...]:
    """Return the values of the columns that name a run."""
    return (fleet.clients, fleet.per_round, fleet.spread, fleet.noise, variant.label, seed)


def columns(plays: Sequence[int]) -> list[str]:
    """Return the columns of the CSV file."""
    own = [f"{figure}_{count}" for count in plays for figure in ("seconds", "late", "jain")]
    return [*KEY, "fingerprint", "latency_spread", "latency_noise", *own, "cpu_s"]


def rows_of(grid: Grid, fleet: Fleet, seed: int, wanted: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """Run variants on a fleet, and yield their rows."""
    start = time.process_time()
    times = draw_times(fleet, seed, grid.plays[-1] * fleet.cycle)
    for variant in wanted:
        row: dict[str, Any] = dict(zip(KEY, key_of(fleet, variant, seed), strict=True))
        row["fingerprint"] = grid.fingerprint(fleet, variant, seed)
        row |= figures(times, variant, seed, grid.plays)
        row["cpu_s"] = f"{time.process_time() - start:.2f}"
        start = time.process_time()
        yield row


def figures(times: Times, variant: Variant, seed: int, plays: Sequence[int]) -> dict[str, str]:
    """Return the figures of a run, rounded to 5 digits.

    The seconds of random and of sorted groups are expected values over all rounds. The row of random has the spread and
    the noise of the latencies too.
    """
    fleet = times.fleet
    found: dict[str, float | None] = {"latency_spread": None, "latency_noise": None}
    if variant.label == RANDOM:
        found |= dict(zip(found, times.components(), strict=True))
    course = run(times, variant.name, variant.params, seed) if variant.name else None
    expected = {RANDOM: times.random_s, GROUPS: times.groups_s}.get(variant.label)
    known = expected() if expected else None
    for count in plays:
        seconds, late, jain = course.figures(count, fleet) if course else (np.nan, np.nan, 1.0)
        if known is not None:
            seconds = late = known
        found |= {f"seconds_{count}": seconds, f"late_{count}": late, f"jain_{count}": jain}
    return {name: "" if value is None else f"{round(value, 6):.5g}" for name, value in found.items()}


def make_grid(smoke: bool, seeds: int | None) -> Grid:
    """Return the grid of the page, or a small one."""
    if smoke:
        return Grid([Fleet(20, 4, spread, 0.4) for spread in (0.0, 0.78)], (1, 5), seeds or 2)
    fleets = [Fleet(*cohort, spread, noise) for cohort in COHORTS for spread in SPREADS for noise in NOISES]
    return Grid(fleets, PLAYS, seeds or SEEDS)
