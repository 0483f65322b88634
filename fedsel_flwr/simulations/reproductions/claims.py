"""Verdict on a figure: does the paper's claim hold in our runs?

Each check of a figure compares two arms on the same seeds, as logs of ratios or as differences. Its p-values and its
interval of 95 % are those of a comparison (:mod:`fedsel_flwr.report.paired`), so that fewer than six seeds settle
nothing. If a run does not reach the accuracy of ``rounds_to``, the sign test decides. A check has the first of these
words that applies:

==============  =======================================================================================================
reproduced      The claimed direction is shown: the interval excludes the null on the claimed side. And the size is the
                paper's: the paper's number is in the interval, or the estimate is within 20 % of it. If the paper gives
                no number, the direction is the whole claim. A claim of equality is shown if the interval is inside the
                margin.
direction only  Only the direction is shown.
not seen        With the reason "contrary", the opposite is shown (of equality: a difference beyond the margin). With
                the reason "no difference", the whole interval is inside the margin: the smaller of 5 % of the right arm
                and half the paper's gap.
not settled     None of these.
==============  =======================================================================================================

A figure's claim is the conjunction of its checks. It is shown if all of them are, each at the level .05. This needs no
correction: if any part of the claim is wrong, its own check passes with about this probability (an intersection-union
test; see benchmarks/intervals.md for skewed data). The opposite is different, because one check is enough for it.
Therefore Holm's method corrects the p-values of "contrary" and "no difference" of all checks of a figure together.

So a figure has the worst word of its checks: "not seen" before "not settled" before "direction only". Two words take
precedence. A figure is ``not run`` if runs are missing. It is ``setting not given`` if two readings have different
words. Beside the word, the verdict counts the parts of the claim that are shown by themselves, after Holm's correction
over these parts.

References: R. L. Berger, "Multiparameter Hypothesis Testing and Acceptance Sampling", Technometrics 24, 1982. S. Holm,
see :mod:`fedsel_flwr.report.paired`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedsel_flwr.report.paired import PairedEffect, holm, paired_effects, paired_p
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
"""Largest p-value that counts."""
TOLERANCE = 0.2
"""Largest relative distance between our estimate and the paper's number."""
MAX_SEEDS = 1000
"""Largest number of seeds that is suggested; above it, the number is infinite."""
ROUNDING = 1e-12
"""Share of the arms' means below which a difference is one of rounding."""
FEWEST_SEEDS = 8
"""Number of seeds below which the spread is too uncertain for :func:`_seeds_needed`."""
CHECK_COLUMNS = (
    "figure", "verdict", "claim", "reading", "check", "part_shown", "outcome", "left", "relation", "right",
    "compared_as", "left_mean", "right_mean", "estimate", "low", "high", "paper", "p", "seeds", "word", "reason",
    "seeds_needed", "seeds_needed_low", "seeds_needed_high",
)  # fmt: skip
"""Columns of the table of checks. The interval is ``low`` to ``high``. ``p`` belongs to the claim. ``part_shown`` says
whether this part of the claim, a check with all its cells and pairs, is shown after Holm's correction."""
UNKNOWN = (math.nan, math.nan, math.nan)
Lookup = Callable[[str, str, str], Mapping[int, float]]
"""Function of outcome, arm and cell -> the value of each seed."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a comparison.

    Attributes:
        comparison: The comparison.
        effect: The paired effect of the two arms.
        left: Mean of the left arm.
        right: Mean of the right arm, or the number.
        p: p-value of the claim.
        word: The word.
        reason: For "not seen", "contrary" or "no difference".
        is_part_shown: Whether the part of the claim to which the comparison belongs is shown by itself.
        seeds_needed: For "not settled", estimate, lower and upper end of the number of seeds whose interval would be as
            narrow as the margin; NaN if it is unknown.
    """

    comparison: Comparison
    effect: PairedEffect
    left: float
    right: float
    p: float = 1.0
    word: Word = "not settled"
    reason: str = ""
    is_part_shown: bool = False
    seeds_needed: tuple[float, float, float] = UNKNOWN

    @property
    def margin(self) -> float:
        """Largest effect that counts as none: a log ratio or a difference."""
        one, margin, paper = self.comparison, self.comparison.check.margin, self.comparison.paper
        if one.check.relation == "equal":
            return math.log1p(margin) if one.is_ratio else margin
        small = math.log1p(margin) if one.is_ratio else margin * abs(self.right)
        return small if paper is None else min(small, abs(math.log(paper) if one.is_ratio else paper) / 2)

    def facts(self) -> dict[str, Any]:
        """Return the finding's columns of :data:`CHECK_COLUMNS`. Unknown numbers are empty."""
        check, one = self.comparison.check, self.comparison
        seeds = dict(zip(("seeds_needed", "seeds_needed_low", "seeds_needed_high"), self.seeds_needed, strict=True))
        numbers = {
            "left_mean": self.left, "right_mean": self.right, "estimate": self.effect.estimate, "low": self.effect.low,
            "high": self.effect.high, "paper": one.paper, "p": self.p, **seeds,
        }  # fmt: skip
        return {
            "reading": check.reading, "check": check.says, "part_shown": self.is_part_shown, "outcome": check.outcome,
            "left": one.left, "relation": check.relation, "right": one.right,
            "compared_as": "ratio" if one.is_ratio else "difference", "seeds": self.effect.pairs, "word": self.word,
            "reason": self.reason,
            **{name: "" if value is None or math.isnan(value) else f"{value:.4g}" for name, value in numbers.items()},
        }  # fmt: skip


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

    @property
    def parts_shown(self) -> tuple[int, int]:
        """Number of parts of the claim that are shown by themselves, and number of parts."""
        parts = {id(one.comparison.check): one.is_part_shown for one in self.findings}
        return sum(parts.values()), len(parts)

    @property
    def seeds_needed(self) -> tuple[float, float, float]:
        """For "not settled", the largest number of seeds that an open check needs, with its interval."""
        needed = [one.seeds_needed for one in self.findings if one.word == "not settled"]
        return max(needed) if self.word == "not settled" and not np.isnan(needed).any() else UNKNOWN


def verdict_of(figure: PaperFigure, results: Results) -> FigureVerdict:
    """Return the verdict on a figure: "not run" if a run is missing."""
    if not figure.illustration and (figure.left_out or results.missing):
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
    findings = [_measure(one, values) for one in figure.comparisons()]
    shown = [_claim_p(one) for one in findings]
    parts: dict[int, float] = {}
    for one, p in zip(findings, shown, strict=True):
        part = id(one.comparison.check)
        parts[part] = max(p, parts.get(part, 0.0))
    own_level = dict(zip(parts, holm(list(parts.values())), strict=True))
    # One correction for all readings, because all of them are looked at.
    against = [_reasons(one) for one in findings]
    corrected = iter(holm([p for reasons in against for p in reasons.values()]))
    for i, (one, reasons) in enumerate(zip(findings, against, strict=True)):
        seen = [reason for reason, p in zip(reasons, corrected, strict=False) if p <= LEVEL]
        word: Word = "not seen" if seen else "not settled"
        if shown[i] <= LEVEL:
            word = "reproduced" if _has_paper_size(one) and not figure.shortened else "direction only"
        findings[i] = replace(
            one, p=shown[i], word=word, reason=seen[0] if word == "not seen" else "",
            is_part_shown=own_level[id(one.comparison.check)] <= LEVEL,
            seeds_needed=_seeds_needed(one) if word == "not settled" else UNKNOWN,
        )  # fmt: skip
    words = dict[str, Word]()
    for reading in figure.readings:
        own = [one.word for one in findings if one.comparison.check.reading in (EVERY, reading)]
        words[reading] = min(own, key=WORST_FIRST.index)
    word = next(iter(words.values())) if len(set(words.values())) == 1 else "setting not given"
    # Each reading is a block of the table. Checks of all readings come first.
    findings.sort(key=lambda one: (EVERY, *figure.readings).index(one.comparison.check.reading))
    return FigureVerdict(word=word, findings=tuple(findings), readings=words if len(words) > 1 else None)


def _values(arm: ArmName, outcome: str, values: Lookup) -> dict[int, float]:
    """Return the outcome of an arm, or the difference of two arms, for each seed."""
    first, *rest = (values(outcome, name, arm.cell) for name in arm.arms)
    return {seed: value - sum(other[seed] for other in rest) for seed, value in first.items()}


def _measure(comparison: Comparison, values: Lookup) -> Finding:
    """Return the finding without its word."""
    outcome, other = comparison.check.outcome, comparison.right
    left = _values(comparison.left, outcome, values)
    right = _values(other, outcome, values) if isinstance(other, ArmName) else dict.fromkeys(left, other)
    (effect,) = paired_effects({"left": left, "right": right}, "right", outcome, is_ratio=comparison.is_ratio)
    means = [float(np.mean([own[seed] for seed in effect.seeds])) for own in (left, right)]
    return Finding(comparison=comparison, effect=effect, left=means[0], right=means[1])


def _p_beyond(finding: Finding, limit: float, *, above: bool) -> float:
    """Return the p-value of a mean above (or below) a limit; 1 if the mean of the runs is not, or if it is unknown."""
    effect = finding.effect
    if effect.censored and limit == 0:
        ahead = effect.later - effect.sooner
        return effect.p if ahead and (ahead > 0) == above else 1.0
    if math.isnan(effect.low):
        return 1.0
    d = np.array(effect.values)
    d = (np.log(d) if effect.is_ratio else d) - limit
    # A difference of decimal numbers such as 0.3 - 0.1 - 0.2 is not exactly 0.
    d[np.abs(d) < ROUNDING * np.abs([finding.left, finding.right]).max()] = 0.0
    return float(paired_p(d)) if (d.mean() > 0 if above else d.mean() < 0) else 1.0


def _p_within(finding: Finding) -> float:
    """Return the p-value of an effect inside the margin."""
    return max(_p_beyond(finding, -finding.margin, above=True), _p_beyond(finding, finding.margin, above=False))


def _claim_p(finding: Finding) -> float:
    relation = finding.comparison.check.relation
    return _p_within(finding) if relation == "equal" else _p_beyond(finding, 0.0, above=relation == "above")


def _reasons(finding: Finding) -> dict[str, float]:
    """Return reason for "not seen" -> its p-value."""
    relation, margin = finding.comparison.check.relation, finding.margin
    if relation == "equal":
        return {"contrary": min(_p_beyond(finding, margin, above=True), _p_beyond(finding, -margin, above=False))}
    return {"contrary": _p_beyond(finding, 0.0, above=relation == "below"), "no difference": _p_within(finding)}


def _has_paper_size(finding: Finding) -> bool:
    """Return whether the size is the paper's, if the paper gives one."""
    paper = finding.comparison.paper
    if paper is None:
        return True
    effect = finding.effect
    return abs(effect.estimate - paper) <= TOLERANCE * abs(paper) or effect.low <= paper <= effect.high


def _seeds_needed(finding: Finding) -> tuple[float, float, float]:
    """Return the number of seeds whose interval is as wide as the margins, from the spread and from its interval."""
    n, spread, margin = finding.effect.pairs, finding.effect.deviation, finding.margin
    if n < FEWEST_SEEDS or math.isnan(spread) or margin == 0:
        return UNKNOWN
    from scipy.stats import chi2, t

    seeds = np.arange(2, MAX_SEEDS + 1)
    half_width = t.ppf(0.975, seeds - 1) / np.sqrt(seeds)
    low, high = (spread * math.sqrt((n - 1) / chi2.ppf(level, n - 1)) for level in (0.975, 0.025))
    enough = [seeds[s * half_width <= margin] for s in (spread, low, high)]
    found, least, most = (float(one[0]) if one.size else math.inf for one in enough)
    return found, least, most


def describe_words(words: Sequence[Word]) -> str:
    """Count words, for example "3 reproduced, 1 not seen".

    >>> describe_words(["reproduced", "not seen", "reproduced"])
    '2 reproduced, 1 not seen'
    """
    return ", ".join(f"{words.count(word)} {word}" for word in VERDICTS if word in words)
