"""Differences between selectors, paired by seed: the same seed is the same data, phones and channels.

Between two seeds the time to a target differs more than between two selectors, so the means of two selectors say
little. Their difference on one seed does: with d_1 … d_n the differences to the reference, the interval is

    mean(d) ± t_{n-1, (1 + confidence) / 2} · sd(d) / √n,

Student's, which holds for differences that are about normal. Where a run never reached the target, a difference is not
known and leaving it out would favour whoever failed: there is no interval then, only the counts.

Reference: Student, "The Probable Error of a Mean", Biometrika 6, 1908.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.files import load_optional
from fedsel_flwr.report.summary import RunSummary

Figure = Literal[
    "accuracy", "time_to_target_s", "energy_to_target_j", "energy_j", "jain", "failed_clients", "simulated_s"
]


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """One figure of one selector against the reference, over the seeds that both ran.

    Attributes:
        selector: Name of the selector.
        reference: Name of the selector that it is compared with.
        figure: What is compared, a field of ``RunSummary``.
        mean: Mean of selector minus reference; NaN where a pair lacks a value.
        low: Lower end of the interval; NaN where a pair lacks a value, or with fewer than two pairs.
        high: Upper end.
        confidence: Of the interval.
        pairs: Seeds that both ran.
        reached: Of these, the seeds on which the selector has a finite value.
        reference_reached: Of these, the seeds on which the reference has one.
        reference_mean: Mean of the reference over the pairs; NaN where one lacks a value.
        differences: Selector minus reference, a pair each; NaN where one of the two has no finite value.
    """

    selector: str
    reference: str
    figure: Figure
    mean: float
    low: float
    high: float
    confidence: float
    pairs: int
    reached: int
    reference_reached: int
    reference_mean: float
    differences: tuple[float, ...]

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def paired_differences(
    summaries: Iterable[RunSummary], reference: str, figure: Figure, confidence: float = 0.95
) -> list[PairedDifference]:
    """Compare every selector with a reference.

    Args:
        summaries: Runs in any order, one for each selector and seed.
        reference: Name of the selector to compare with.
        figure: What to compare.
        confidence: Of the interval, in (0, 1).

    Returns:
        One difference for each other selector, in the order in which the selectors first appear.

    Raises:
        ParameterError: The reference has no run, a selector ran twice on a seed or shares none with the reference.
        RunError: scipy is not installed.
    """
    values: dict[str, dict[int, float]] = {}
    for summary in summaries:
        own = values.setdefault(summary.selector, {})
        if summary.seed in own:
            raise ParameterError(f"Runs are paired by seed, but {summary.selector!r} has two of seed {summary.seed}.")
        own[summary.seed] = float(getattr(summary, figure))
    if reference not in values:
        raise ParameterError(f"The reference {reference!r} has no run; there are {', '.join(values) or 'none at all'}.")
    return [
        _difference(selector, own, reference, values[reference], figure, confidence)
        for selector, own in values.items()
        if selector != reference
    ]


def student_interval(differences: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Return Student's interval of the mean of normal differences.

    Args:
        differences: Shape (n,), n at least 2.
        confidence: Of the interval, in (0, 1).

    Returns:
        The ends.

    Example:
        >>> [round(end, 3) for end in student_interval(np.array([1.0, 2.0, 3.0]))]  # 2 ± 4.303 · 1 / √3
        [-0.484, 4.484]
    """
    mean, n = float(differences.mean()), len(differences)
    quantile = float(load_optional("scipy.stats").t.ppf((1 + confidence) / 2, n - 1))
    half = quantile * float(differences.std(ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def _difference(
    selector: str,
    own: dict[int, float],
    reference: str,
    others: dict[int, float],
    figure: Figure,
    confidence: float,
) -> PairedDifference:
    seeds = sorted(own.keys() & others.keys())
    if not seeds:
        raise ParameterError(f"Runs are paired by seed, but {selector!r} and {reference!r} have no seed in common.")
    mine, theirs = np.array([own[seed] for seed in seeds]), np.array([others[seed] for seed in seeds])
    both = np.isfinite(mine) & np.isfinite(theirs)
    differences = np.where(both, mine, math.nan) - theirs
    low, high = student_interval(differences, confidence) if both.all() and len(seeds) > 1 else (math.nan, math.nan)
    return PairedDifference(
        selector=selector,
        reference=reference,
        figure=figure,
        mean=float(differences.mean()),
        low=low,
        high=high,
        confidence=confidence,
        pairs=len(seeds),
        reached=int(np.isfinite(mine).sum()),
        reference_reached=int(np.isfinite(theirs).sum()),
        reference_mean=float(theirs.mean()) if both.all() else math.nan,
        differences=tuple(differences.tolist()),
    )
