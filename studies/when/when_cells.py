"""Figures of a cell of ``when.py``: savings, shares of the ceiling and their intervals, over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats
from when_fleet import Fleet
from when_grid import GROUPS, RANDOM

from fedsel_flwr.checks import FloatArray

NEAR_ZERO = 0.03
"""A ceiling below this part of random's seconds has no shares."""
SPREAD, LOW_RATIO, HIGH_RATIO = 0.1, 0.6, 1.0
"""Limits of the rule: the spread, and the ratio of spread to noise, rounded to one decimal."""
Zone = Literal["above", "between", "below"]
"""Place of a fleet with respect to the limits of the rule."""


@dataclass(frozen=True)
class Estimate:
    """A number over the seeds with its 95 % interval; the ends are NaN with one seed."""

    value: float
    low: float
    high: float
    seeds: int

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


def ratio(above: FloatArray, below: FloatArray) -> Estimate:
    """Return the ratio of two sums over the seeds, with Student's interval of its linearization.

    Args:
        above: Numerators, shape (seeds,).
        below: Denominators, shape (seeds,).

    References:
        W. G. Cochran, Sampling Techniques, 3rd edition, 1977, section 6.3 (the ratio estimate).
    """
    n, value = len(above), float(above.sum() / below.sum())
    if n < 2:
        return Estimate(value, math.nan, math.nan, n)
    residual = above - value * below
    half = float(stats.t.ppf(0.975, n - 1) * residual.std(ddof=1) / math.sqrt(n) / abs(below.mean()))
    return Estimate(value, value - half, value + half, n)


def zone_of(spread: float, noise: float) -> Zone:
    """Return where a fleet lies with respect to the limits of the rule.

    Args:
        spread: Standard deviation of the clients' mean log seconds.
        noise: Standard deviation of one client's log seconds.

    Returns:
        "below" if the ratio of spread to noise is at most LOW_RATIO, "above" if the spread is at least SPREAD and the
        ratio at least HIGH_RATIO, and "between" otherwise.
    """
    quotient = round(spread / noise, 1) if noise > 0 else math.inf
    if quotient <= LOW_RATIO:
        return "below"
    return "above" if spread >= SPREAD and quotient >= HIGH_RATIO else "between"


class Results:
    """All rows of the grid, by fleet, selector and seed.

    Args:
        rows: Rows of the CSV file.
    """

    def __init__(self, rows: Iterable[Mapping[str, str]]) -> None:
        self._rows: dict[tuple[Fleet, str], dict[int, Mapping[str, str]]] = {}
        for row in rows:
            fleet = Fleet(int(row["clients"]), int(row["per_round"]), float(row["spread"]), float(row["noise"]))
            self._rows.setdefault((fleet, row["selector"]), {})[int(row["seed"])] = row

    def seeds(self, fleet: Fleet, selector: str) -> list[int]:
        """Return the seeds on which the selector and both references ran."""
        ran = [set(self._rows.get((fleet, label), {})) for label in (RANDOM, GROUPS, selector)]
        return sorted(set.intersection(*ran))

    def has(self, fleet: Fleet, selector: str) -> bool:
        """Return whether there is a seed."""
        return bool(self.seeds(fleet, selector))

    def values(self, fleet: Fleet, selector: str, column: str, seeds: Sequence[int]) -> FloatArray:
        """Return a column of a selector on these seeds."""
        rows = self._rows[fleet, selector]
        return np.array([float(rows[seed][column]) for seed in seeds])

    def random_s(self, fleet: Fleet) -> float:
        """Return the mean seconds a round of random selection."""
        return float(self._mean(fleet, RANDOM, self._first))

    def latency(self, fleet: Fleet) -> tuple[float, float]:
        """Return spread and noise of the latencies."""
        return self._mean(fleet, RANDOM, "latency_spread"), self._mean(fleet, RANDOM, "latency_noise")

    def zone(self, fleet: Fleet) -> Zone:
        """Return where this fleet lies with respect to the limits of the rule."""
        return zone_of(*self.latency(fleet))

    def ceiling(self, fleet: Fleet) -> Estimate:
        """Return the saving of sorted groups, as a part of random's seconds."""
        return self._saving(fleet, GROUPS, self._first)

    def saving(self, fleet: Fleet, selector: str, plays: int, *, late: bool = False) -> Estimate:
        """Return a selector's saving as a part of random's seconds; ``late``: in the last half of the rounds."""
        return self._saving(fleet, selector, f"{'late' if late else 'seconds'}_{plays}")

    def share(self, fleet: Fleet, selector: str, plays: int) -> Estimate | None:
        """Return a selector's saving as a part of the ceiling; None if the ceiling is near zero."""
        if self.ceiling(fleet).value < NEAR_ZERO:
            return None
        seeds = self.seeds(fleet, selector)
        random, groups = (self.values(fleet, label, self._first, seeds) for label in (RANDOM, GROUPS))
        return ratio(random - self.values(fleet, selector, f"seconds_{plays}", seeds), random - groups)

    def jain(self, fleet: Fleet, selector: str, plays: int) -> float:
        """Return Jain's index of the selections, mean over the seeds."""
        return self._mean(fleet, selector, f"jain_{plays}")

    @property
    def _first(self) -> str:
        """Return a column of seconds; a reference has the same seconds in all of them."""
        row = next(iter(next(iter(self._rows.values())).values()))
        return next(name for name in row if name.startswith("seconds_"))

    def _saving(self, fleet: Fleet, selector: str, column: str) -> Estimate:
        seeds = self.seeds(fleet, selector)
        random = self.values(fleet, RANDOM, column, seeds)
        return ratio(random - self.values(fleet, selector, column, seeds), random)

    def _mean(self, fleet: Fleet, selector: str, column: str) -> float:
        return float(self.values(fleet, selector, column, self.seeds(fleet, selector)).mean())
