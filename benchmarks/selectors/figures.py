"""From the runs of a scenario to the rows of its tables."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cells import Cell
from references import CHANCE, GENIE, GROUPS

from fedsel_flwr.report.paired import PairedEffect, collect, holm, paired_effects
from fedsel_flwr.report.summary import RunSummary, moving_average, summarize
from fedsel_flwr.report.verdict import LEVEL
from fedsel_flwr.rounds.history import History

REFERENCE = "random"
KNOWING = (GENIE, GROUPS, CHANCE)
"""Rows that are no contenders."""
COMPARED = ("accuracy_last10", "accuracy_at_s", "time_to_target_s", "energy_to_target_j")
"""The figures that are compared with random: times and joules as ratios, accuracies as differences."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much a selector differs from random in one figure.

    Attributes:
        mean: Change in percent for times and joules (-23 for a ratio of .77), difference for accuracies; NaN if a pair
            lacks a value.
        low: Lower end of the 95 % interval.
        high: Upper end.
        p: After Holm's correction over the selectors of the scenario.
        effect: What it was made of.
    """

    mean: float
    low: float
    high: float
    p: float
    effect: PairedEffect

    @classmethod
    def of(cls, effect: PairedEffect, p: float) -> Difference:
        """Express an effect as a change."""
        mean, low, high = effect.estimate, effect.low, effect.high
        if effect.is_ratio:
            mean, low, high = (100 * (ratio - 1) for ratio in (mean, low, high))
        return cls(mean=mean, low=low, high=high, p=p, effect=effect)

    @property
    def differs(self) -> bool:
        """Whether the difference is significant after Holm's correction."""
        return self.p <= LEVEL


@dataclass(frozen=True, kw_only=True)
class RunRow(RunSummary):
    """A run's figures, and those that only this comparison has.

    Attributes:
        scenario: Its name.
        rounds: How many there were.
        selections: Clients asked, in all rounds together.
        equal_s: The simulated seconds at which all runs of this seed are compared: the shortest run of a selector.
        accuracy_at_s: Mean of the last measured accuracies up to then, as many as count for the target.
        rounds_at_s: Rounds that were over by then.
        probe_s: Seconds a round that questions before the choice took.
        probe_j: Joules a round that they took.
        server_ms: Milliseconds of the processor a round: choosing, reading replies, measuring models, learning.
        run_s: Seconds of the processor that the whole run took.
    """

    scenario: str
    rounds: int
    selections: int
    equal_s: float
    accuracy_at_s: float
    rounds_at_s: int
    probe_s: float
    probe_j: float
    server_ms: float
    run_s: float


def run_rows(cells: Iterable[Cell]) -> list[RunRow]:
    """The figures of every run; all of one scenario."""
    read = [(cell, *cell.read()) for cell in cells]
    shortest: dict[int, float] = {}
    for cell, history, _ in read:
        if cell.label not in KNOWING:
            seed = cell.scenario.seed
            shortest[seed] = min(shortest.get(seed, math.inf), history.rounds[-1].simulated_s)
    return [_row(cell, history, cost, shortest[cell.scenario.seed]) for cell, history, cost in read]


def _row(cell: Cell, history: History, cost: Mapping[str, float], equal_s: float) -> RunRow:
    s, rounds = cell.scenario, history.rounds
    summary = summarize(
        history,
        selector=cell.label,
        seed=s.seed,
        num_clients=s.num_clients,
        target_accuracy=s.target_accuracy,
        target_rounds=s.target_rounds,
    )
    until = [record for record in rounds if record.simulated_s <= equal_s]
    measured = [record.accuracy for record in until if math.isfinite(record.accuracy)]
    return RunRow(
        **asdict(summary),
        scenario=s.name,
        rounds=len(rounds),
        selections=len(history.clients),
        equal_s=equal_s,
        accuracy_at_s=float(moving_average(measured, s.target_rounds)[-1]) if measured else math.nan,
        rounds_at_s=len(until),
        probe_s=float(np.mean([record.probe_s for record in rounds])),
        probe_j=float(np.mean([record.probe_j for record in rounds])),
        server_ms=cost["server_ms"],
        run_s=cost["run_s"],
    )


@dataclass(frozen=True, kw_only=True)
class SelectorFigures:
    """All runs of one selector in a scenario.

    Attributes:
        label: The selector's.
        rows: One a seed.
        against: Figure -> its difference to random; empty for random itself.
    """

    label: str
    rows: Sequence[RunRow]
    against: Mapping[str, Difference]

    def values(self, figure: str) -> list[float]:
        """The finite values of a figure, over the seeds."""
        return [v for row in self.rows if math.isfinite(v := float(getattr(row, figure)))]

    def mean(self, figure: str) -> float:
        """Their mean; NaN if there is none."""
        own = self.values(figure)
        return float(np.mean(own)) if own else math.nan

    def always(self, figure: str) -> bool:
        """Whether every seed has a finite value."""
        return len(self.values(figure)) == len(self.rows)

    def better(self, figure: str) -> bool:
        """Whether it differs from random to the good."""
        return self._differs(figure, 1)

    def worse(self, figure: str) -> bool:
        """Whether it differs from random to the bad."""
        return self._differs(figure, -1)

    def _differs(self, figure: str, sign: int) -> bool:
        found = self.against.get(figure)
        less_is_good = figure in ("time_to_target_s", "energy_to_target_j")
        return bool(found and found.differs and (-sign if less_is_good else sign) * found.mean > 0)


def selector_figures(rows: Sequence[RunRow]) -> dict[str, SelectorFigures]:
    """Label -> figures of one scenario; Holm's correction is over the selectors, the knowing rows stand beside."""
    labels = list(dict.fromkeys(row.selector for row in rows))
    against: dict[str, dict[str, Difference]] = {label: {} for label in labels}
    for figure in COMPARED:
        contenders = [row for row in rows if row.selector not in KNOWING]
        families = [contenders] + [[r for r in rows if r.selector in (REFERENCE, one)] for one in KNOWING]
        for family in families:
            if len({row.selector for row in family}) > 1:
                found = paired_effects(collect(family, figure), REFERENCE, figure)
                for effect, p in zip(found, holm([effect.p for effect in found]), strict=True):
                    against[effect.selector][figure] = Difference.of(effect, p)
    return {
        label: SelectorFigures(label=label, rows=[row for row in rows if row.selector == label], against=against[label])
        for label in labels
    }


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows of the same keys; numbers in the shortest form of six digits."""
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()})


def difference_rows(scenario: str, figures: Mapping[str, SelectorFigures]) -> list[dict[str, Any]]:
    """Every paired difference of a scenario, as rows of a CSV file."""
    return [
        {
            "scenario": scenario, "selector": label, "figure": figure, "difference": found.mean, "low": found.low,
            "high": found.high, "p": found.p, "seeds": found.effect.pairs, "seeds_with_value": found.effect.reached,
            "random_seeds_with_value": found.effect.reference_reached,
        }
        for label, own in figures.items()
        for figure, found in own.against.items()
    ]  # fmt: skip
