"""Verdict of a comparison: paired differences to a reference, and one sentence on time and energy to the target.

The same seed gives every selector the same data, phones and channels. The time to a target varies more between two
seeds than between two selectors, so that the means of two selectors say little. Their difference on one seed says more:
with d_1 … d_n the differences to the reference, the interval is

    mean(d) ± t_{n-1, (1 + confidence) / 2} · sd(d) / √n,

Student's, which holds for differences that are about normal. If a run never reached the target, its difference is
unknown. Leaving it out would favour the selector that failed: there is then no interval, only the counts.

Among several selectors that are compared with one reference, some look different by chance. Holm's correction keeps
the probability of any such error below 1 - confidence. The p-values in ascending order are multiplied by n, n - 1, … 1,
each at least as large as the one before. A selector differs if its corrected p-value is at most 1 - confidence. The
intervals are pointwise: they are not corrected.

References: Student, "The Probable Error of a Mean", Biometrika 6, 1908. S. Holm, "A Simple Sequentially Rejective
Multiple Test Procedure", Scandinavian Journal of Statistics 6, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.summary import RunSummary, Spread, aggregate, decimals_of

Figure = Literal[
    "accuracy", "time_to_target_s", "energy_to_target_j", "energy_j", "jain", "failed_clients", "simulated_s"
]


CONFIDENCE = 0.95
"""Of the intervals, and of the verdict."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Difference in one figure between a selector and the reference, over the seeds that both ran.

    Attributes:
        selector: Name of the selector.
        reference: Name of the reference.
        figure: A field of ``RunSummary``.
        mean: Mean of selector minus reference; NaN if a pair lacks a value.
        low: Lower end of the interval; NaN if a pair lacks a value, or with fewer than two pairs.
        high: Upper end.
        confidence: Of the interval.
        p: Of the paired t-test that there is no difference, after Holm's correction over the selectors compared at the
            same time; NaN without an interval.
        pairs: Seeds that both ran.
        reached: Of these, the seeds on which the selector has a finite value.
        reference_reached: Of these, the seeds on which the reference has one.
        reference_mean: Mean of the reference over the pairs; NaN if one lacks a value.
        differences: Selector minus reference, one per pair; NaN if one of the two has no finite value.
    """

    selector: str
    reference: str
    figure: Figure
    mean: float
    low: float
    high: float
    confidence: float
    p: float
    pairs: int
    reached: int
    reference_reached: int
    reference_mean: float
    differences: tuple[float, ...]

    @property
    def differs(self) -> bool:
        """Whether the difference is significant at ``confidence``, after Holm's correction."""
        return self.p <= 1 - self.confidence


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Attributes:
        sentence: The verdict in one sentence.
        times: Differences of the simulated seconds to the target.
        energies: Differences of the joules to the target.
    """

    sentence: str
    times: list[PairedDifference]
    energies: list[PairedDifference]


def verdict(
    summaries: Sequence[RunSummary], reference: str, target_accuracy: float, shared: str = " and partitions"
) -> Verdict:
    """Compare every selector with the reference, on the seeds that both ran.

    Differences that are not significant after Holm's correction over the selectors are reported as "no difference".

    Args:
        summaries: Runs of at least two selectors, one of them the reference.
        reference: Name of the selector to compare with.
        target_accuracy: The target that the summaries refer to, a fraction in (0, 1].
        shared: What runs on the same seed have in common, as words that continue the sentence.

    Returns:
        The sentence and its figures.

    Raises:
        ParameterError: There is nothing to compare, or :func:`paired_differences` refuses the runs.
    """
    times = paired_differences(summaries, reference, "time_to_target_s", CONFIDENCE)
    energies = paired_differences(summaries, reference, "energy_to_target_j", CONFIDENCE)
    (own,) = aggregate(summary for summary in summaries if summary.selector == reference)
    seeds, goal = own.seeds, f"{100 * target_accuracy:g} % accuracy"
    if own.time_to_target_s.count == seeds:
        energy = f" and {_amount(own.energy_to_target_j)} J" if own.energy_to_target_j.count == seeds else ""
        opening = f"{reference} takes {_amount(own.time_to_target_s)} s{energy} to {goal}"
    else:
        opening = f"{reference} reaches {goal} on {own.time_to_target_s.count} of {seeds} seeds"
    clauses = [_clause(time, energy) for time, energy in zip(times, energies, strict=True)]
    same = f"on the same {seeds} seeds{shared}"
    if seeds == 1:
        same = "on the same seed and partition (one seed gives no interval)"
    elif any(math.isfinite(time.low) for time in times):
        same += f", with {100 * CONFIDENCE:g} % intervals,"
    return Verdict(f"{opening}; {same} " + ", ".join(clauses) + ".", times, energies)


def paired_differences(
    summaries: Iterable[RunSummary], reference: str, figure: Figure, confidence: float = 0.95
) -> list[PairedDifference]:
    """Compare every selector with a reference in one figure.

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
            raise ParameterError(
                f"Selector {summary.selector!r} has two runs on seed {summary.seed}. Give one run per seed."
            )
        own[summary.seed] = float(getattr(summary, figure))
    if reference not in values:
        raise ParameterError(f"The reference {reference!r} has no run. Choose one of: {', '.join(values) or 'none'}.")
    found = [
        _difference(selector, own, reference, values[reference], figure, confidence)
        for selector, own in values.items()
        if selector != reference
    ]
    corrected = holm([difference.p for difference in found])
    return [replace(difference, p=p) for difference, p in zip(found, corrected, strict=True)]


def student_interval(differences: FloatArray, confidence: float = 0.95) -> tuple[float, float]:
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


def student_p(differences: FloatArray) -> float:
    """Return the two-sided p-value of the paired t-test; 0 for equal differences, 1 if they are all 0.

    Args:
        differences: Shape (n,), n at least 2.

    Example:
        >>> round(student_p(np.array([1.0, 2.0, 3.0])), 4)
        0.0742
    """
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    # Equal differences have no spread, and t would be infinite or 0/0.
    if error == 0:
        return float(differences[0] == 0)
    return 2 * float(load_optional("scipy.stats").t.sf(abs(float(differences.mean())) / error, len(differences) - 1))


def holm(p: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons (Holm), in the given order; NaN is skipped and not counted.

    >>> [round(value, 3) for value in holm([0.01, 0.04, 0.03, 0.005])]
    [0.03, 0.06, 0.06, 0.02]
    """
    corrected = list(p)
    order = sorted((i for i in range(len(p)) if not math.isnan(p[i])), key=lambda i: p[i])
    least = 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - place) * p[i]))
        corrected[i] = least
    return corrected


def _difference(
    selector: str,
    own: dict[int, float],
    reference: str,
    others: dict[int, float],
    figure: Figure,
    confidence: float,
) -> PairedDifference:
    """Return the paired difference of two selectors, each given as seed -> value; ``p`` is not corrected yet."""
    seeds = sorted(own.keys() & others.keys())
    if not seeds:
        raise ParameterError(f"{selector!r} and {reference!r} have no seed in common. Run both on the same seeds.")
    mine, theirs = np.array([own[seed] for seed in seeds]), np.array([others[seed] for seed in seeds])
    both = np.isfinite(mine) & np.isfinite(theirs)
    # NaN first: infinity (target never reached) minus infinity would be NaN with a warning.
    differences = np.where(both, mine, math.nan) - theirs
    low = high = p = math.nan
    if both.all() and len(seeds) > 1:
        (low, high), p = student_interval(differences, confidence), student_p(differences)
    return PairedDifference(
        selector=selector,
        reference=reference,
        figure=figure,
        mean=float(differences.mean()),
        low=low,
        high=high,
        confidence=confidence,
        p=p,
        pairs=len(seeds),
        reached=int(np.isfinite(mine).sum()),
        reference_reached=int(np.isfinite(theirs).sum()),
        reference_mean=float(theirs.mean()) if both.all() else math.nan,
        differences=tuple(differences.tolist()),
    )


def _clause(time: PairedDifference, energy: PairedDifference) -> str:
    """Return the part of the verdict's sentence about one selector."""
    if math.isnan(time.mean):
        return f"{time.selector} reaches it on {time.reached} of {time.pairs} (a difference cannot be given)"
    parts = [_size(time, "s")]
    if not math.isnan(energy.mean):
        parts.append(_size(energy, "J"))
    return f"{time.selector} takes " + " and ".join(parts)


def _size(d: PairedDifference, unit: str) -> str:
    """Return the size of a difference in words, with its interval and whether it is significant."""
    digits = decimals_of(d.reference_mean)
    size = f"{abs(d.mean):.{digits}f} {unit} {'less' if d.mean < 0 else 'more'}"
    if math.isnan(d.low):
        return size
    ends = f"{d.low:+.{digits}f} to {d.high:+.{digits}f} {unit}"
    if d.differs:
        return f"{size} ({ends})"
    if d.low <= 0 <= d.high:
        return f"{size} ({ends}: no difference)"
    return f"{size} ({ends}, but among so many selectors p = {d.p:.2f}: no difference)"


def _amount(spread: Spread) -> str:
    return f"{spread.mean:.{decimals_of(spread.mean)}f}"
