"""Verdict on a figure: does the paper's claim hold in our runs?

Each check of a figure compares two arms on the same seeds. Ratios are compared as logs, with Student's interval of 95 %
and the paired t-test (:mod:`fedsel_flwr.report.paired`). Holm's method corrects the p-values of all checks of a figure.
A check then has the first of these words that applies:

==============  =======================================================================================================
reproduced      The null is excluded in the claimed direction, and the size is the paper's: the paper's number is in
                the interval, or the estimate is within 20 % of it. If the paper gives no number, the direction is the
                whole claim. A claim of equality holds if the interval is inside the margin.
direction only  Only the direction holds.
not seen        The interval excludes the claim. It is on the other side of the null. Or it is inside the margin of
                equality, and holds the null, but not the paper's number; in a shortened run, this excludes nothing,
                because a difference may still grow. A claim of equality is excluded if the interval is outside the
                margin.
not settled     The interval holds both.
==============  =======================================================================================================

A figure has the worst word of its checks: "not seen" before "not settled" before "direction only". Two words take
precedence. A figure is ``not run`` if runs are missing. It is ``setting not given`` if two readings have different
words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.report.paired import holm, student_interval, student_p
from fedsel_flwr.simulations.reproductions.paper_figure import ArmName, Comparison, PaperFigure

Word = Literal[
    "not run", "setting not given", "reproduced", "direction only", "not seen", "not settled", "illustration"
]
WORST_FIRST: tuple[Word, ...] = ("not seen", "not settled", "direction only", "reproduced")
LEVEL = 0.05
"""Largest p-value, after Holm's correction, that excludes the null."""
TOLERANCE = 0.2
"""Largest relative distance between our estimate and the paper's number."""
MAX_SEEDS = 1000
"""Largest number of seeds that is suggested."""
Lookup = Callable[[str, str, str], Mapping[int, float]]
"""Function of outcome, arm and cell -> the value of each seed."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a comparison.

    Attributes:
        comparison: The comparison.
        estimate: Geometric mean of the ratios, or mean of the differences.
        low: Lower end of the interval; NaN with fewer than two seeds.
        high: Upper end of the interval.
        p: Two-sided p-value after Holm's correction; NaN for a claim of equality.
        left: Mean of the left arm.
        right: Mean of the right arm, or the number.
        seeds: Number of seeds.
        word: The word.
        seeds_needed: For "not settled", the number of seeds that would probably do; None if it is unknown or above
            :data:`MAX_SEEDS`.
    """

    comparison: Comparison
    estimate: float
    low: float
    high: float
    p: float
    left: float
    right: float
    seeds: int
    word: Word = "not settled"
    seeds_needed: int | None = None


@dataclass(frozen=True, kw_only=True)
class FigureVerdict:
    """Verdict on a figure.

    Attributes:
        word: The verdict.
        findings: Results of all comparisons.
        readings: Reading -> its word, if there is more than one.
    """

    word: Word
    findings: tuple[Finding, ...] = ()
    readings: Mapping[str, Word] | None = None


def judge(figure: PaperFigure, values: Lookup) -> FigureVerdict:
    """Judge the claim of a figure whose runs are all there.

    Args:
        figure: The figure.
        values: Function that returns the outcomes.

    Returns:
        The verdict.
    """
    if figure.illustration:
        return FigureVerdict(word="illustration")
    raw = [_measure(one, values) for one in figure.comparisons()]
    findings: list[Finding] = []
    words: dict[str, Word] = {}
    for reading in figure.readings:
        own = [pair for pair in raw if pair[0].comparison.check.reading in ("", reading)]
        corrected = holm([finding.p for finding, _ in own if finding.comparison.check.relation != "equal"])
        remaining, count = iter(corrected), len(corrected)
        judged = []
        for finding, effects in own:
            p = math.nan if finding.comparison.check.relation == "equal" else next(remaining)
            # The factor by which Holm multiplied this p-value; the number of checks if it cannot be computed.
            factor = p / finding.p if finding.p > 0 and p < 1 else count
            judged.append(_with_word(replace(finding, p=p), effects, figure.shortened != "", factor))
        words[reading] = min((one.word for one in judged), key=WORST_FIRST.index)
        findings += [one for one in judged if one.comparison.check.reading == reading or reading == figure.readings[0]]
    if len(set(words.values())) > 1:
        return FigureVerdict(word="setting not given", findings=tuple(findings), readings=words)
    several = words if len(words) > 1 else None
    return FigureVerdict(word=next(iter(words.values())), findings=tuple(findings), readings=several)


def _values(arm: ArmName, outcome: str, values: Lookup) -> dict[int, float]:
    """Return the outcome of an arm, or the difference of two arms, for each seed."""
    first, *rest = (values(outcome, name, arm.cell) for name in arm.arms)
    return {seed: value - sum(other[seed] for other in rest) for seed, value in first.items()}


def _pairs(comparison: Comparison, values: Lookup) -> tuple[FloatArray, FloatArray]:
    """Return the values of the left and the right arm on their common seeds."""
    outcome = comparison.check.outcome
    left = _values(comparison.left, outcome, values)
    if not isinstance(comparison.right, ArmName):
        own = np.array(list(left.values()))
        return own, np.full(len(own), comparison.right)
    right = _values(comparison.right, outcome, values)
    seeds = sorted(left.keys() & right.keys())
    return np.array([left[seed] for seed in seeds]), np.array([right[seed] for seed in seeds])


def _measure(comparison: Comparison, values: Lookup) -> tuple[Finding, FloatArray]:
    """Return the estimate with its interval and its p-value before correction, and the effect of each seed."""
    left, right = _pairs(comparison, values)
    with np.errstate(divide="ignore", invalid="ignore"):
        effects = np.asarray(np.log(left) - np.log(right) if comparison.is_ratio else left - right)
    back = math.exp if comparison.is_ratio else float
    known = len(effects) > 1 and bool(np.isfinite(effects).all())
    low, high = student_interval(effects) if known else (math.nan, math.nan)
    finding = Finding(
        comparison=comparison,
        estimate=back(float(effects.mean())),
        low=back(low),
        high=back(high),
        p=student_p(effects) if known else math.nan,
        left=float(left.mean()),
        right=float(right.mean()),
        seeds=len(effects),
    )
    return finding, effects


def _with_word(finding: Finding, effects: FloatArray, is_shortened: bool, factor: float) -> Finding:
    """Return the finding with its word, and with the seeds that would settle it."""
    word = _word(finding, is_shortened)
    if is_shortened and word == "reproduced":
        word = "direction only"
    needed = _seeds_needed(finding, effects, factor) if word == "not settled" else None
    return replace(finding, word=word, seeds_needed=needed)


def _word(finding: Finding, is_shortened: bool) -> Word:
    check, is_ratio = finding.comparison.check, finding.comparison.is_ratio
    if math.isnan(finding.low):
        return "not settled"
    null = 1.0 if is_ratio else 0.0
    within = (1 / (1 + check.margin), 1 + check.margin) if is_ratio else (-check.margin, check.margin)
    inside = within[0] <= finding.low and finding.high <= within[1]
    if check.relation == "equal":
        outside = finding.high < within[0] or finding.low > within[1]
        return "reproduced" if inside else "not seen" if outside else "not settled"
    claimed, against = finding.high < null, finding.low > null
    if check.relation == "above":
        claimed, against = against, claimed
    if claimed and finding.p <= LEVEL:
        return "reproduced" if _has_paper_size(finding) else "direction only"
    paper = finding.comparison.paper
    # In a shortened run, a difference that is small so far may still grow.
    holds_claim = claimed or is_shortened or (paper is not None and finding.low <= paper <= finding.high)
    # The margin of a difference has the unit of the outcome, so that only a ratio can be too small to matter.
    return "not seen" if against or (inside and is_ratio and not holds_claim) else "not settled"


def _has_paper_size(finding: Finding) -> bool:
    """Return whether the size is the paper's, if the paper gives one."""
    paper = finding.comparison.paper
    if paper is None:
        return True
    near = abs(finding.estimate - paper) <= TOLERANCE * abs(paper)
    return near or finding.low <= paper <= finding.high


def _seeds_needed(finding: Finding, effects: FloatArray, factor: float) -> int | None:
    """Return the number of seeds at which the same mean and spread would settle the check."""
    if len(effects) < 3 or not np.isfinite(effects).all():
        return None
    from scipy.stats import t

    check, size, deviation = finding.comparison.check, abs(float(effects.mean())), float(effects.std(ddof=1))
    seeds = np.arange(len(effects) + 1, MAX_SEEDS + 1)
    if deviation == 0:
        return None
    error = deviation / np.sqrt(seeds)
    if check.relation == "equal":
        margin = math.log(1 + check.margin) if finding.comparison.is_ratio else check.margin
        settled = seeds[np.abs(size - margin) >= t.ppf(0.975, seeds - 1) * error]
    else:
        settled = seeds[factor * 2 * t.sf(size / error, seeds - 1) <= LEVEL]
    return int(settled[0]) if settled.size else None


def describe_words(words: Sequence[Word]) -> str:
    """Count words, for example "3 reproduced, 1 not seen".

    >>> describe_words(["reproduced", "not seen", "reproduced"])
    '2 reproduced, 1 not seen'
    """
    order: tuple[Word, ...] = ("reproduced", "direction only", "not seen", "not settled", "setting not given",
                               "not run", "illustration")  # fmt: skip
    return ", ".join(f"{words.count(word)} {word}" for word in order if word in words)
