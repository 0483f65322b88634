"""Paired effects: differences between a selector and a reference that ran on the same seeds.

The same seed gives every selector the same data, phones and channels. Times, joules and rounds are multiplicative: a
slow network makes every selector slower by about the same factor. Therefore they are compared as ratios. Let d_1 ...
d_n be the logs of the ratios to the reference, one per seed. The ratio and its interval are

    exp(mean(d) ± t_{n-1, (1 + confidence) / 2} · sd(d) / √n).

This is Student's interval, which assumes normal d. A selector that is mostly slightly faster and rarely much slower has
skewed d, and Student's test then sees a difference too often. Therefore the interval is the union of Student's and of
one that is adjusted for skewness, and the p-value is the larger of both, and at least 2^(1-n): few values, or equal
ones, say too little about the spread (:func:`paired_interval`, :func:`paired_p`).
Accuracies, Jain's index and numbers of clients are compared as differences, in the same way without logs. The spread of
a selector uses only this selector's differences. A spread that is moderated towards the other selectors, as in limma,
gives narrower intervals. However, such intervals cover the truth too rarely if a selector varies more than the others.
See docs/comparing.md.

A run that never reached the target has an infinite time and no ratio. If its pair were left out, the selector that
failed would benefit. In this case the exact sign test compares the pairs. A run that did not reach the target loses
against any time up to its own end. Against a later time the pair is a tie, because the run may have stopped earlier
only because its rounds were shorter. Two runs that did not reach the target are a tie too.

References: Student, "The Probable Error of a Mean", Biometrika 6, 1908. N. J. Johnson, "Modified t Tests and Confidence
Intervals for Asymmetrical Populations", Journal of the American Statistical Association 73, 1978. P. Hall, "On the
Removal of Skewness by Transformation", Journal of the Royal Statistical Society B 54, 1992. W. J. Dixon and A. M. Mood,
"The Statistical Sign Test", Journal of the American Statistical Association 41, 1946. S. Holm, "A Simple Sequentially
Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.summary import RunSummary

CONFIDENCE = 0.95
"""Confidence of the intervals."""
RATIOS = frozenset({
    "time_to_target_s", "energy_to_target_j", "rounds_to_target", "seconds_per_round", "joules_per_round", "energy_j",
    "simulated_s", "megabytes_down", "megabytes_up",
})  # fmt: skip
"""Figures of a run that are compared as ratios. All other figures are compared as differences."""
Values = Mapping[str, Mapping[int, float]]
"""Selector -> seed -> value of one figure; infinity if the target was never reached, NaN if the value is unknown."""


@dataclass(frozen=True, kw_only=True)
class PairedEffect:
    """Effect of a selector on one figure: its ratio to the reference, or their difference, over their common seeds.

    Attributes:
        selector: Name of the selector.
        reference: Name of the reference.
        figure: A field of :class:`~fedsel_flwr.report.RunSummary`.
        is_ratio: Whether the figure is compared as a ratio.
        estimate: Geometric mean of the ratios, or mean of the differences; NaN if a pair lacks a value.
        low: Lower end of the interval; NaN if a pair lacks a value, or with fewer than two pairs.
        high: Upper end of the interval; NaN as for ``low``.
        deviation: Sample standard deviation of the logs of the ratios, or of the differences; NaN as for ``low``.
        p: Two-sided p-value before correction. It comes from :func:`paired_p`, or from the sign test if a run never
            reached the target. NaN with fewer than two pairs, or if a value is unknown.
        pairs: Number of seeds that both ran.
        reached: Number of these seeds on which the selector has a finite value.
        reference_reached: Number of these seeds on which the reference has a finite value.
        sooner: Number of pairs in which the selector's value is smaller by more than the margin.
        later: Number of pairs in which the selector's value is larger by more than the margin.
        reference_mean: Mean of the reference over the pairs; NaN if a pair lacks a value.
        values: The ratios or differences, one per pair; NaN if one of the two runs has no finite value.
        seeds: The seed of each pair, in the order of ``values``.
    """

    selector: str
    reference: str
    figure: str
    is_ratio: bool
    estimate: float
    low: float
    high: float
    deviation: float
    p: float
    pairs: int
    reached: int
    reference_reached: int
    sooner: int
    later: int
    reference_mean: float
    values: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def censored(self) -> bool:
        """Whether a pair has no ratio: a run never reached the target, or took no time. Then the sign test decides."""
        return math.isnan(self.estimate)

    @property
    def differs(self) -> bool:
        """Whether the interval excludes equality."""
        equal = 1.0 if self.is_ratio else 0.0
        return self.low > equal or self.high < equal

    def is_within(self, margin: float) -> bool:
        """Return whether the whole interval of a ratio is within [1 / margin, margin]."""
        return self.low >= 1 / margin and self.high <= margin


def reference_band(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the range of the ratio that the reference would have to itself, on as many other seeds.

    Let s be the standard deviation of the logs of the n values. The log of the ratio of two geometric means of n
    independent runs has the standard error s sqrt(2 / n). The band is exp(± t_{2(n-1)} s sqrt(2 / n)). A comparison on
    the same seeds varies less, because the part that the seeds have in common cancels.

    Args:
        values: A figure of the reference, one per seed.
        confidence: Share of the ratios that fall into the band.

    Returns:
        Lower and upper end; NaN with fewer than two values, or if a value is not finite and positive.

    Examples:
        >>> low, high = reference_band([100, 110, 90, 105])
        >>> round(low, 2), round(high, 2)
        (0.86, 1.16)
    """
    given = np.asarray(values, dtype=np.float64)
    n = len(given)
    if n < 2 or not (np.isfinite(given) & (given > 0)).all():
        return math.nan, math.nan
    t = load_optional("scipy.stats").t.ppf((1 + confidence) / 2, 2 * (n - 1))
    width = float(t * np.log(given).std(ddof=1) * math.sqrt(2 / n))
    return math.exp(-width), math.exp(width)


def collect(summaries: Iterable[RunSummary], figure: str) -> dict[str, dict[int, float]]:
    """Collect one figure of all runs, by selector and seed.

    Args:
        summaries: Runs in any order, one for each selector and seed.
        figure: A field of :class:`~fedsel_flwr.report.RunSummary`.

    Raises:
        ParameterError: A selector ran twice on a seed.
    """
    values: dict[str, dict[int, float]] = {}
    for summary in summaries:
        own = values.setdefault(summary.selector, {})
        if summary.seed in own:
            raise ParameterError(
                f"Selector {summary.selector!r} has two runs on seed {summary.seed}. Give one run per seed."
            )
        own[summary.seed] = float(getattr(summary, figure))
    return values


def paired_effects(
    values: Values,
    reference: str,
    figure: str,
    *,
    ends: Values | None = None,
    margin: float = 1.0,
    confidence: float = CONFIDENCE,
    is_ratio: bool | None = None,
) -> list[PairedEffect]:
    """Compare every selector with a reference in one figure.

    Args:
        values: The figure of each run (:func:`collect`).
        reference: Name of the selector to compare with.
        figure: Name of the figure.
        ends: Time or energy of each run at its end, in the unit of the figure. An infinite value is larger than all
            values up to this end. If None, an infinite value is larger than all values.
        margin: Ratios of a pair between 1 / margin and margin count as ties in the sign test.
        confidence: Confidence of the interval, in (0, 1).
        is_ratio: Whether ratios are used instead of differences. If None, the figure decides (:data:`RATIOS`).

    Returns:
        One effect for each selector except the reference, in the order of ``values``.

    Raises:
        ParameterError: The reference has no run, or a selector shares no seed with it.
        RunError: SciPy is not installed.

    Examples:
        >>> times = {"bsfl": {1: 80.0, 2: 90.0, 3: 60.0}, "random": {1: 100.0, 2: 100.0, 3: 80.0}}
        >>> (effect,) = paired_effects(times, "random", "time_to_target_s")
        >>> print(f"{effect.estimate:.3f} ({effect.low:.3f} to {effect.high:.3f}), p = {effect.p:.3f}")
        0.814 (0.647 to 1.604), p = 0.250
    """
    if reference not in values:
        raise ParameterError(f"The reference {reference!r} has no run. Choose one of: {', '.join(values) or 'none'}.")
    is_ratio = figure in RATIOS if is_ratio is None else is_ratio

    def effect(selector: str) -> PairedEffect:
        seeds = sorted(values[selector].keys() & values[reference].keys())
        if not seeds:
            raise ParameterError(f"{selector!r} and {reference!r} have no seed in common. Run both on the same seeds.")
        mine, theirs = (np.array([values[name][seed] for seed in seeds]) for name in (selector, reference))
        own_ends, their_ends = (
            np.array([ends[name][seed] if ends else math.inf for seed in seeds]) for name in (selector, reference)
        )
        both = np.isfinite(mine) & np.isfinite(theirs)
        if is_ratio:
            both &= (mine > 0) & (theirs > 0)
        # Effects add on this scale. Infinities and zeros are set to NaN first, because they would raise warnings.
        effects = np.where(both, mine, np.nan), np.where(both, theirs, np.nan)
        scaled = np.log(effects[0]) - np.log(effects[1]) if is_ratio else effects[0] - effects[1]
        gap = margin if is_ratio else 1.0
        # An infinite value is larger than the other value if that is not later than the end of the run.
        sooner = int((np.where(np.isinf(theirs), mine <= their_ends, mine * gap < theirs) & np.isfinite(mine)).sum())
        later = int((np.where(np.isinf(mine), theirs <= own_ends, theirs * gap < mine) & np.isfinite(theirs)).sum())
        low = high = deviation = p = math.nan
        if len(seeds) > 1 and both.all():
            low, high = map(float, paired_interval(scaled, confidence))
            p = float(paired_p(scaled))
            deviation = float(scaled.std(ddof=1))
        elif len(seeds) > 1 and not (np.isnan(mine) | np.isnan(theirs)).any():
            p = sign_test(sooner, later)
        back = np.exp if is_ratio else np.asarray
        return PairedEffect(
            selector=selector, reference=reference, figure=figure, is_ratio=is_ratio,
            estimate=float(back(scaled.mean())), low=float(back(low)), high=float(back(high)), deviation=deviation, p=p,
            pairs=len(seeds), reached=int(np.isfinite(mine).sum()), reference_reached=int(np.isfinite(theirs).sum()),
            sooner=sooner, later=later, values=tuple(back(scaled).tolist()), seeds=tuple(seeds),
            reference_mean=float(theirs.mean()) if np.isfinite(theirs).all() else math.nan,
        )  # fmt: skip

    return [effect(selector) for selector in values if selector != reference]


def paired_interval(
    differences: FloatArray, confidence: float = CONFIDENCE, *, skewed: bool = True
) -> tuple[FloatArray, FloatArray]:
    """Return the union of Student's interval of a mean and of Johnson's, which is adjusted for skewness.

    Let κ be the sample skewness, and x the distance of the mean from its true value, in standard deviations. Johnson's
    statistic is t = √n (x + κ/(6n) + κ x²/3). It does not grow with x everywhere, so that its interval may have two
    parts. Hall adds κ² x³/27. Then t = √n (((1 + κ x/3)³ - 1)/κ + κ/(6n)) grows with x, and its interval is

        mean - sd · 3 (∛(1 + κ (y - κ/(6n))) - 1) / κ,    y = ± t_{n-1, (1 + confidence) / 2} / √n.

    Args:
        differences: The differences, shape (..., n), n at least 2. With n = 2 there is no skewness.
        confidence: Confidence of each of the two intervals, in (0, 1).
        skewed: Whether the differences may be skewed. If False, the interval is Student's.

    Returns:
        The lower and the upper ends, each of shape (...).

    Examples:
        >>> low, high = paired_interval(np.array([1.0, 2.0, 3.0]))  # symmetric: Student's
        >>> round(float(low), 3), round(float(high), 3)
        (-0.484, 4.484)
        >>> low, high = paired_interval(np.array([1.0, 1.0, 1.0, 2.0]))  # Student's upper end is 2.046
        >>> round(float(low), 3), round(float(high), 3)
        (0.454, 2.997)
    """
    mean, sd, skewness = _moments(differences, skewed=skewed)
    n = differences.shape[-1]
    y = load_optional("scipy.stats").t.ppf((1 + confidence) / 2, n - 1) / math.sqrt(n)
    up, down = _cubic_root(y, skewness, n), _cubic_root(-y, skewness, n)
    return mean - sd * np.maximum(y, up), mean - sd * np.minimum(-y, down)


def _cubic_root(y: float, skewness: FloatArray, n: int) -> FloatArray:
    """Return the x at which t / √n is y."""
    k = np.where(skewness == 0, 1e-200, skewness)
    inner = k * (y - k / (6 * n))
    # Near 1 a difference of a root and 1 has no digits left.
    small = np.expm1(np.log1p(np.clip(inner, -0.5, 0.5)) / 3)
    return np.asarray(3 * np.where(np.abs(inner) < 0.5, small, np.cbrt(1 + inner) - 1) / k)


def paired_p(differences: FloatArray, *, skewed: bool = True) -> FloatArray:
    """Return the largest of three two-sided p-values: of Student's and Johnson's test, and the smallest of signs.

    The smallest p-value of n signs is 2^(1-n). Above it, the p-value is at most 1 - confidence exactly if the interval
    of this confidence (:func:`paired_interval`) excludes 0.

    Args:
        differences: The differences, shape (..., n), n at least 2.
        skewed: Whether the differences may be skewed. If False, the p-value is Student's.

    Returns:
        The p-values, shape (...); 1 if all differences are 0.

    Examples:
        >>> round(float(paired_p(np.array([1.0, 2.0, 3.0, 2.0, 1.0, 3.0, 2.0, 2.0]))), 4)
        0.0078
        >>> float(paired_p(np.array([1.0, 1.0, 1.0])))
        0.25
    """
    mean, sd, skewness = _moments(differences, skewed=skewed)
    n = differences.shape[-1]
    # If the differences are equal, t would be infinite or 0/0.
    x = mean / np.where(sd == 0, 1.0, sd)
    adjusted = x + skewness / (6 * n) + skewness * x**2 / 3 + skewness**2 * x**3 / 27
    p = 2 * load_optional("scipy.stats").t.sf(math.sqrt(n) * np.minimum(np.abs(x), np.abs(adjusted)), n - 1)
    p = np.where(sd == 0, mean == 0, p)
    return np.asarray(np.maximum(p, 2.0 ** (1 - n)) if skewed else p, dtype=np.float64)


def _moments(differences: FloatArray, *, skewed: bool) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return mean, standard deviation and unbiased skewness; the latter two are 0 for equal differences.

    Without ``skewed``, the skewness is 0.
    """
    n = differences.shape[-1]
    mean = differences.mean(axis=-1)
    away = differences - mean[..., np.newaxis]
    # The mean of equal numbers may differ from them in its last digits.
    sd = np.where(np.ptp(differences, axis=-1) == 0, 0.0, differences.std(axis=-1, ddof=1))
    factor = n / ((n - 1) * (n - 2)) if n > 2 and skewed else 0.0
    return mean, sd, factor * ((away / np.where(sd == 0, math.inf, sd)[..., np.newaxis]) ** 3).sum(axis=-1)


def sign_test(sooner: int, later: int) -> float:
    """Return the exact two-sided p-value of the sign test; ties are left out.

    Args:
        sooner: Number of pairs in which the selector's value is smaller.
        later: Number of pairs in which the selector's value is larger.

    Examples:
        >>> sign_test(6, 0), sign_test(4, 1), sign_test(0, 0)
        (0.03125, 0.375, 1.0)
    """
    return float(load_optional("scipy.stats").binomtest(sooner, sooner + later).pvalue) if sooner + later else 1.0


def holm(p: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons by Holm's method; the order of the values stays the same.

    The values in ascending order are multiplied by n, n - 1, ... 1, and each result is at least as large as the one
    before. The probability of any wrong rejection is then at most the level. An unknown value (NaN) counts as 1, and
    counts in n, because that selector was compared too.

    Examples:
        >>> [round(value, 3) for value in holm([0.01, 0.04, 0.03, 0.005])]
        [0.03, 0.06, 0.06, 0.02]
        >>> [round(value, 4) for value in holm([0.0298, math.nan, math.nan])]
        [0.0894, 1.0, 1.0]
    """
    known = [1.0 if math.isnan(value) else value for value in p]
    corrected, least = list(known), 0.0
    for place, i in enumerate(sorted(range(len(known)), key=lambda i: known[i])):
        least = max(least, min(1.0, (len(known) - place) * known[i]))
        corrected[i] = least
    return corrected
