"""Effects in one world: verdicts, shares of the ceiling, and means over the seeds, computed from the rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from lineup import REFERENCE, REFERENCES
from references import GROUPS
from runs import RunRow

from fedsel_flwr.report.paired import PairedEffect, collect, paired_effects, paired_interval
from fedsel_flwr.report.verdict import ENDS, MARGIN, SelectorVerdict, verdict
from fedsel_flwr.simulations import Scenario

EQUAL_COHORT = 0.1
"""Largest relative difference of clients asked per round at which two selectors have equal cohorts."""

EQUAL_SHARES = 0.95
"""Jain's index of sorted groups from which their shares count as equal."""

WINDOW_LIMIT = 1.5
"""Rounds to the target, as a multiple of the first window's rounds, below which the window limits a row."""


@dataclass(frozen=True)
class Share:
    """Share of the ceiling that a selector reaches, with a 95 % interval; NaN if it is unknown.

    The ceiling is the saving of sorted groups: the share of random selection's seconds per round that they save.
    """

    estimate: float
    low: float
    high: float


class World:
    """Rows of one world, and what follows from them.

    Args:
        scenario: The scenario of the world.
        letter: Its letter on the page.
        rows: Rows of its runs, in any order.
        missing: Labels of the missing runs, one for each run.
        contenders: Labels that are compared with random selection, in one family of Holm's correction.
        controls: Labels of the controls.
        ablations: Labels of the rows that separate two causes. They are another family.

    Attributes:
        run_seconds: Processor time of every run, in seconds, including runs on seeds without random selection.
        rows: Label -> seed -> row, on the seeds of random selection.
    """

    def __init__(
        self,
        scenario: Scenario,
        letter: str,
        rows: Sequence[RunRow],
        missing: Sequence[str] = (),
        contenders: Sequence[str] = (),
        controls: Sequence[str] = (),
        ablations: Sequence[str] = (),
    ) -> None:
        self.scenario, self.letter, self.missing = scenario, letter, list(missing)
        self.run_seconds = [row.run_s for row in rows]
        self._planned = Counter([*(row.selector for row in rows), *missing])
        self._all_controls, self._all_ablations = set(controls), set(ablations)
        # Means and ratios must be over the same seeds. A seed without random selection has no ratios.
        seeds = {row.seed for row in rows if row.selector == REFERENCE}
        self.rows: dict[str, dict[int, RunRow]] = {}
        for row in rows:
            if row.seed in seeds:
                self.rows.setdefault(row.selector, {})[row.seed] = row
        self.contenders = [label for label in contenders if label in self.rows and label != REFERENCE]
        self.controls = [label for label in controls if label in self.rows]
        self.ablations = [label for label in ablations if label in self.rows]

    @property
    def complete(self) -> bool:
        """Whether random selection ran, so that other selectors can be compared with it."""
        return REFERENCE in self.rows

    @property
    def interim(self) -> bool:
        """Whether runs of the tables are missing, so that a verdict would be an early look at the result."""
        return any(label not in self._all_controls | self._all_ablations for label in self.missing)

    @property
    def interim_controls(self) -> bool:
        """Whether runs of the controls are missing."""
        return any(label in self._all_controls for label in self.missing)

    @property
    def interim_ablations(self) -> bool:
        """Whether runs of the rows that separate two causes are missing."""
        return any(label in self._all_ablations for label in self.missing)

    def common_seeds(self, *labels: str) -> list[int]:
        """Return the seeds on which all of the labels ran."""
        ran = [self.rows.get(label, {}).keys() for label in labels]
        return sorted(set.intersection(*map(set, ran))) if ran else []

    def planned(self, label: str) -> int:
        """Return the number of seeds of a label when no run is missing."""
        return self._planned[label]

    @property
    def target(self) -> str:
        """The target accuracy as text."""
        return f"{100 * self.scenario.target_accuracy:g} %"

    @cached_property
    def verdicts(self) -> dict[str, SelectorVerdict]:
        """Verdict on each label; contenders, controls, ablations and each reference are separate families."""
        families = [
            self.contenders,
            self.controls,
            self.ablations,
            *([label] for label in REFERENCES if label in self.rows),
        ]
        found: dict[str, SelectorVerdict] = {}
        for family in families:
            if family:
                rows = [*self.of(REFERENCE), *(row for label in family for row in self.of(label))]
                result = verdict(rows, REFERENCE, self.scenario.target_accuracy)
                found |= {one.selector: one for one in result.selectors}
        return found

    def of(self, label: str) -> list[RunRow]:
        """Return the rows of a label by seed."""
        return [self.rows[label][seed] for seed in sorted(self.rows.get(label, {}))]

    def mean(self, label: str, value: Callable[[RunRow], float], seeds: Iterable[int] | None = None) -> float:
        """Return the mean of a value over the seeds with a finite value; NaN if there are none.

        Args:
            label: The label.
            value: The value of a row.
            seeds: The seeds, on which the label ran. If None: all of its seeds.
        """
        values = [v for row in self._on(label, seeds) if math.isfinite(v := float(value(row)))]
        return float(np.mean(values)) if values else math.nan

    def geometric_mean(self, label: str, figure: str, seeds: Iterable[int] | None = None) -> float:
        """Return the geometric mean of a figure over the seeds; infinity if one of them is infinite.

        Args:
            label: The label.
            figure: Name of the figure.
            seeds: The seeds, on which the label ran. If None: all of its seeds.
        """
        return float(np.exp(np.mean([math.log(getattr(row, figure)) for row in self._on(label, seeds)])))

    def _on(self, label: str, seeds: Iterable[int] | None) -> list[RunRow]:
        return self.of(label) if seeds is None else [self.rows[label][seed] for seed in seeds]

    def reached(self, label: str) -> tuple[int, int]:
        """Return the number of seeds on which a label reached the target, and the number of its seeds."""
        rows = self.of(label)
        return sum(math.isfinite(row.time_to_target_s) for row in rows), len(rows)

    def missed(self, label: str) -> int:
        """Return the number of seeds on which a label missed the target."""
        reached, seeds = self.reached(label)
        return seeds - reached

    def limited_by_window(self, label: str) -> bool:
        """Return whether the window is a large part of the rounds to the target, which no run can then shorten."""
        s = self.scenario
        rounds = self.mean(label, lambda row: row.rounds_to_target)
        return rounds < WINDOW_LIMIT * s.target_rounds * s.evaluation_every

    def asked(self, label: str) -> float:
        """Return the mean number of clients asked per round."""
        return self.mean(label, lambda row: row.asked_per_round)

    def equal_cohort(self, label: str) -> bool:
        """Return whether a label asks as many clients per round as random selection."""
        return abs(self.asked(label) / self.asked(REFERENCE) - 1) <= EQUAL_COHORT

    def against(self, label: str, other: str, figure: str) -> PairedEffect | None:
        """Compare two labels on their common seeds; None if they have none."""
        if not self.rows.get(label, {}).keys() & self.rows.get(other, {}).keys():
            return None
        rows = [*self.of(label), *self.of(other)]
        ends = collect(rows, ENDS[figure]) if figure in ENDS else None
        (effect,) = paired_effects(collect(rows, figure), other, figure, ends=ends, margin=MARGIN)
        return effect

    @cached_property
    def ceiling(self) -> PairedEffect | None:
        """Ratio of the seconds per round of sorted groups to those of random selection; None without rows."""
        return self.round_ratio(GROUPS)

    @property
    def ceiling_holds(self) -> bool:
        """Whether sorted groups asked as many clients as random selection, with equal shares.

        If clients are absent, they cannot, and their saving is then no ceiling at equal shares.
        """
        return self.equal_cohort(GROUPS) and self.mean(GROUPS, lambda row: row.jain) >= EQUAL_SHARES

    def round_ratio(self, label: str) -> PairedEffect | None:
        """Compare the seconds per round of all rounds with random selection."""
        rows = {
            name: {s: r.simulated_s / r.rounds for s, r in self.rows.get(name, {}).items()}
            for name in (label, REFERENCE)
        }
        if not rows[label].keys() & rows[REFERENCE].keys():
            return None
        return paired_effects(rows, REFERENCE, "seconds_per_round")[0]

    def share(self, label: str) -> Share:
        """Compute the share of the ceiling that a label reaches, with a jackknife interval over the seeds."""
        seeds = sorted(self.rows.get(label, {}).keys() & self.rows.get(GROUPS, {}).keys() & self.rows[REFERENCE].keys())
        if not seeds:
            return Share(math.nan, math.nan, math.nan)
        logs = np.log([
            [self.rows[one][seed].simulated_s / self.rows[one][seed].rounds for seed in seeds]
            for one in (label, GROUPS, REFERENCE)
        ])  # fmt: skip
        return jackknife_share(logs[0] - logs[2], logs[1] - logs[2])


def jackknife_share(own: Iterable[float], groups: Iterable[float]) -> Share:
    """Return the share of the ceiling, with Student's interval of the jackknife's pseudo-values.

    Args:
        own: Log ratio of the selector's seconds per round to those of random selection, for each seed.
        groups: The same for sorted groups.

    References:
        R. G. Miller, "The Jackknife - a Review", Biometrika 61, 1974.

    >>> jackknife_share([math.log(0.7)] * 3, [math.log(0.6)] * 3)  # 0.3 / 0.4
    Share(estimate=0.75, low=0.75, high=0.75)
    """
    pairs = np.array([list(own), list(groups)])

    def share(some: np.ndarray) -> float:
        reduced = 1 - np.exp(some.mean(axis=1))
        return float(reduced[0] / reduced[1])

    n, whole = pairs.shape[1], share(pairs)
    if n < 3:
        return Share(whole, math.nan, math.nan)
    pseudo = np.array([n * whole - (n - 1) * share(np.delete(pairs, i, axis=1)) for i in range(n)])
    low, high = map(float, paired_interval(pseudo, skewed=False))
    return Share(round(whole, 12), round(low, 12), round(high, 12))
