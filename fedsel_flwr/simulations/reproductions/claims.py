"""Verdict on a figure: does the paper's claim hold in our runs?

Each check of a figure compares two arms on the same seeds. Ratios are compared as logs, with Student's interval of 95 %
and the paired t-test (:mod:`fedsel_flwr.report.paired`). Holm's method corrects the p-values of all checks of a figure.
A check then has the first of these words that applies:

==============  =======================================================================================================
reproduced      The null is excluded in the claimed direction, and the size is the paper's: the paper's number is in
                the interval, or the estimate is within 20 % of it. If the paper gives no number, the direction is the
                whole claim. A claim of equality holds if the interval is inside the margin.
direction only  Only the direction holds.
not seen        The interval excludes the claim, because it is on the other side of the null. A claim of equality is
                excluded if the interval is outside the margin.
not settled     The interval holds both, or the null is excluded only before Holm's correction.
==============  =======================================================================================================

A figure has the worst word of its checks: "not seen" before "not settled" before "direction only". Two words take
precedence. A figure is ``not run`` if runs are missing. It is ``setting not given`` if two readings have different
words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedsel_flwr.report.paired import PairedEffect, holm, paired_effects
from fedsel_flwr.simulations.reproductions.paper_figure import EVERY, ArmName, Comparison, PaperFigure
from fedsel_flwr.simulations.reproductions.rows import Results

Word = Literal[
    "not run", "setting not given", "reproduced", "direction only", "not seen", "not settled", "illustration"
]
VERDICTS: tuple[Word, ...] = (
    "reproduced", "direction only", "not seen", "not settled", "setting not given", "not run", "illustration",
)  # fmt: skip
"""In the order of the pages."""
WORST_FIRST: tuple[Word, ...] = ("not seen", "not settled", "direction only", "reproduced")
LEVEL = 0.05
"""Largest p-value, after Holm's correction, that excludes the null."""
TOLERANCE = 0.2
"""Largest relative distance between our estimate and the paper's number."""
MAX_SEEDS = 1000
"""Largest number of seeds that is suggested."""
CHECK_COLUMNS = (
    "figure", "verdict", "claim", "reading", "check", "outcome", "left", "relation", "right", "compared_as",
    "left_mean", "right_mean", "estimate", "low", "high", "paper", "p", "seeds", "word", "seeds_needed",
    "within_margin",
)  # fmt: skip
"""Columns of the table of checks. The interval is ``low`` to ``high``, and ``p`` is after Holm's correction."""
Lookup = Callable[[str, str, str], Mapping[int, float]]
"""Function of outcome, arm and cell -> the value of each seed."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a comparison.

    Attributes:
        comparison: The comparison.
        effect: The paired effect of the two arms.
        p: Two-sided p-value after Holm's correction; NaN for a claim of equality.
        left: Mean of the left arm.
        right: Mean of the right arm, or the number.
        word: The word.
        seeds_needed: For "not settled", the number of seeds that would probably do; infinity if it is above
            :data:`MAX_SEEDS`, NaN if it is unknown.
    """

    comparison: Comparison
    effect: PairedEffect
    p: float
    left: float
    right: float
    word: Word = "not settled"
    seeds_needed: float = math.nan

    @property
    def null(self) -> float:
        """The ratio, or the difference, of equal arms."""
        return 1.0 if self.comparison.is_ratio else 0.0

    @property
    def is_contrary(self) -> bool:
        """Whether the estimate is on the other side of the null than the claim; False for a claim of equality."""
        relation, estimate = self.comparison.check.relation, self.effect.estimate
        return estimate >= self.null if relation == "below" else relation == "above" and estimate <= self.null

    @property
    def is_small(self) -> bool:
        """Whether the whole interval of a ratio is inside the margin of equality."""
        return self.effect.is_ratio and self.effect.is_within(1 + self.comparison.check.margin)

    def facts(self) -> dict[str, Any]:
        """Return the finding's columns of :data:`CHECK_COLUMNS`. Unknown numbers are empty."""
        check, one = self.comparison.check, self.comparison
        numbers = {
            "left_mean": self.left, "right_mean": self.right, "estimate": self.effect.estimate, "low": self.effect.low,
            "high": self.effect.high, "paper": one.paper, "p": self.p, "seeds_needed": self.seeds_needed,
        }  # fmt: skip
        return {
            "reading": check.reading, "check": check.says, "outcome": check.outcome, "left": one.left,
            "relation": check.relation, "right": one.right, "compared_as": "ratio" if one.is_ratio else "difference",
            "seeds": self.effect.pairs, "word": self.word, "within_margin": self.is_small,
            **{name: "" if value is None or math.isnan(value) else f"{value:.4g}" for name, value in numbers.items()},
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FigureVerdict:
    """Verdict on a figure.

    Attributes:
        word: The verdict.
        findings: Results of all comparisons.
        readings: Reading -> its word, if there is more than one.
        seeds_needed: For "not settled", the number of seeds that would probably do; infinity if it is above
            :data:`MAX_SEEDS`, NaN if it is unknown.
    """

    word: Word
    findings: tuple[Finding, ...] = ()
    readings: Mapping[str, Word] | None = None
    seeds_needed: float = math.nan


def verdict_of(figure: PaperFigure, results: Results) -> FigureVerdict:
    """Return the verdict on a figure: "not run" if a run is missing."""
    if figure.illustration:
        return FigureVerdict(word="illustration")
    if figure.left_out or results.missing:
        return FigureVerdict(word="not run")
    return judge(figure, results.values)


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
    # One correction for all readings, because all of them are looked at.
    corrected = holm([finding.p for finding in raw if finding.comparison.check.relation != "equal"])
    remaining, count = iter(corrected), len(corrected)
    findings = []
    for finding in raw:
        p = math.nan if finding.comparison.check.relation == "equal" else next(remaining)
        # The factor by which Holm multiplied this p-value; the number of checks if it cannot be computed.
        factor = p / finding.p if finding.p > 0 and p < 1 else count
        finding = replace(finding, p=p)
        word = _word(finding)
        if figure.shortened and word == "reproduced":
            word = "direction only"
        seeds = _seeds_needed(finding, factor) if word == "not settled" else math.nan
        findings.append(replace(finding, word=word, seeds_needed=seeds))
    own = {
        reading: [one for one in findings if one.comparison.check.reading in (EVERY, reading)]
        for reading in figure.readings
    }
    words = {reading: min((one.word for one in found), key=WORST_FIRST.index) for reading, found in own.items()}
    several = words if len(words) > 1 else None
    word = next(iter(words.values())) if len(set(words.values())) == 1 else "setting not given"
    needed = [_seeds_of_figure([one for one in found if one.word == "not settled"]) for found in own.values()]
    seeds = float(np.max(needed)) if word == "not settled" else math.nan
    # Each reading is a block of the table. Checks of all readings come first.
    order = (EVERY, *figure.readings)
    findings.sort(key=lambda one: order.index(one.comparison.check.reading))
    return FigureVerdict(word=word, findings=tuple(findings), readings=several, seeds_needed=seeds)


def _seeds_of_figure(open_checks: Sequence[Finding]) -> float:
    """Return the number of seeds that would settle a figure whose other checks are settled; NaN if it is unknown.

    One check that turns into "not seen" is enough. If no estimate is contrary to the claim, every check is needed.
    """
    contrary = [one.seeds_needed for one in open_checks if one.is_contrary]
    return float(np.min(contrary) if contrary else np.max([one.seeds_needed for one in open_checks], initial=0.0))


def _values(arm: ArmName, outcome: str, values: Lookup) -> dict[int, float]:
    """Return the outcome of an arm, or the difference of two arms, for each seed."""
    first, *rest = (values(outcome, name, arm.cell) for name in arm.arms)
    return {seed: value - sum(other[seed] for other in rest) for seed, value in first.items()}


def _measure(comparison: Comparison, values: Lookup) -> Finding:
    """Return the finding with its p-value before correction."""
    outcome, other = comparison.check.outcome, comparison.right
    left = _values(comparison.left, outcome, values)
    right = _values(other, outcome, values) if isinstance(other, ArmName) else dict.fromkeys(left, other)
    (effect,) = paired_effects({"left": left, "right": right}, "right", outcome, is_ratio=comparison.is_ratio)
    return Finding(
        comparison=comparison,
        effect=effect,
        # Without an interval there is no t-test.
        p=math.nan if math.isnan(effect.low) else effect.p,
        left=float(np.mean([left[seed] for seed in effect.seeds])),
        right=float(np.mean([right[seed] for seed in effect.seeds])),
    )


def _word(finding: Finding) -> Word:
    check, low, high, null = finding.comparison.check, finding.effect.low, finding.effect.high, finding.null
    if math.isnan(low):
        return "not settled"
    if check.relation == "equal":
        margin = check.margin
        least, most = (1 / (1 + margin), 1 + margin) if finding.comparison.is_ratio else (-margin, margin)
        inside, outside = least <= low and high <= most, high < least or low > most
        return "reproduced" if inside else "not seen" if outside else "not settled"
    # An end at the null excludes the claim, because the claim is a strict inequality.
    claimed, against = (high < null, low >= null) if check.relation == "below" else (low > null, high <= null)
    if claimed and finding.p <= LEVEL:
        return "reproduced" if _has_paper_size(finding) else "direction only"
    return "not seen" if against else "not settled"


def _has_paper_size(finding: Finding) -> bool:
    """Return whether the size is the paper's, if the paper gives one."""
    paper = finding.comparison.paper
    if paper is None:
        return True
    effect = finding.effect
    return abs(effect.estimate - paper) <= TOLERANCE * abs(paper) or effect.low <= paper <= effect.high


def _seeds_needed(finding: Finding, factor: float) -> float:
    """Return the number of seeds at which the same mean and spread would settle the check.

    Args:
        finding: The finding.
        factor: Factor of Holm's correction. It counts only in the claimed direction, because an interval without
            correction excludes a claim.
    """
    effect = finding.effect
    if effect.pairs < 3 or math.isnan(effect.low):
        return math.nan
    from scipy.stats import t

    check, size = finding.comparison.check, abs(math.log(effect.estimate) if effect.is_ratio else effect.estimate)
    if effect.deviation == 0:
        return math.inf
    seeds = np.arange(effect.pairs + 1, MAX_SEEDS + 1)
    error = effect.deviation / np.sqrt(seeds)
    if check.relation == "equal":
        margin = math.log(1 + check.margin) if effect.is_ratio else check.margin
        settled = seeds[np.abs(size - margin) >= t.ppf(0.975, seeds - 1) * error]
    else:
        settled = seeds[(1 if finding.is_contrary else factor) * 2 * t.sf(size / error, seeds - 1) <= LEVEL]
    return float(settled[0]) if settled.size else math.inf


def describe_words(words: Sequence[Word]) -> str:
    """Count words, for example "3 reproduced, 1 not seen".

    >>> describe_words(["reproduced", "not seen", "reproduced"])
    '2 reproduced, 1 not seen'
    """
    return ", ".join(f"{words.count(word)} {word}" for word in VERDICTS if word in words)
