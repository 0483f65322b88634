"""Verdict of a comparison: whether each selector reaches the target sooner than the reference, and by how much.

The primary outcome is the time to the target. All other figures are secondary and not corrected. The word for a
selector is the first that applies (:func:`choose_word`). Below six pairs it is always *not settled*, and the numbers
are for orientation only: with few pairs a single accident of the data would settle the question too often.

1. If any run of the selector or the reference never reached the target, the exact sign test decides between *sooner*,
   *later* and *not settled*. There is no ratio, and a pair within the margin is a tie. A selector that reaches the
   target on fewer seeds than the reference is never called sooner. A selector that reaches it on more seeds is never
   called later.
2. *No difference*, if the whole interval of the time ratio is within [1 / margin, margin].
3. *Sooner* or *later*, if the p-value is at most .05 after Holm's correction over all selectors. The size of the
   difference does not matter.
4. *Not settled*, with the number of seeds at which the expected interval would meet 2 or 3 (:func:`seeds_to_settle`).

The time to the target is the rounds to the target times the seconds per round until then. Therefore the logs of these
two ratios add up to the log of the time ratio, and the verdict shows where a gain comes from. Joules are split in the
same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedsel_flwr.report.paired import CONFIDENCE, PairedEffect, Values, collect, holm, paired_effects, sign_test
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.summary import RunSummary, SelectorRow, aggregate, decimals_of, describe_optimism

Word = Literal["sooner", "later", "no difference", "not settled", "reference"]

MARGIN = 1.05
"""Largest ratio without practical difference; the smallest is 1 / MARGIN."""
LEVEL = 0.05
"""Largest probability of any "sooner" or "later" if no selector differs and the logs of ratios are not skewed; see
benchmarks/intervals.md for others. "No difference" is not corrected."""
LEAST_PAIRS = 6
"""Number of pairs below which no verdict is given."""
MAX_SEEDS = 1000
"""Largest number of seeds that is suggested."""
FEW_SEEDS = 10
"""Number of seeds below which a verdict that is not settled names the usual number."""
ENDS = {"time_to_target_s": "simulated_s", "energy_to_target_j": "energy_j"}
"""Figure until the target -> the same figure at the end of the run."""
SIDE_FIGURES = ("accuracy", "worst_tenth", "jain", "asked_per_round")
"""Figures in which a faster selector may be worse. The verdict names the figures that differ."""


@dataclass(frozen=True, kw_only=True)
class SelectorVerdict:
    """Verdict on one selector.

    Attributes:
        selector: Name of the selector.
        word: The verdict on the time to the target.
        p: The p-value of the time, after Holm's correction over all selectors; 1 if it cannot be computed.
        time: Effect on the simulated seconds to the target.
        rounds: Effect on the rounds to the target.
        seconds_per_round: Effect on the seconds per round until the target.
        energy: Effect on the joules to the target.
        joules_per_round: Effect on the joules per round until the target.
        sides: Effects on the figures of :data:`SIDE_FIGURES`.
        seeds: For "not settled", the number of seeds that would probably settle the question; None if it is unknown or
            above :data:`MAX_SEEDS`.
    """

    selector: str
    word: Word
    p: float
    time: PairedEffect
    rounds: PairedEffect
    seconds_per_round: PairedEffect
    energy: PairedEffect
    joules_per_round: PairedEffect
    sides: tuple[PairedEffect, ...]
    seeds: int | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict of a comparison.

    Attributes:
        sentence: The verdict in words, one line per selector.
        reference: The selector that the others are compared with.
        selectors: Verdict on each of the other selectors.
        profile: Target accuracy -> effects on the time to this target, one per selector (secondary, not corrected).
    """

    sentence: str
    reference: str
    selectors: list[SelectorVerdict]
    profile: dict[float, list[PairedEffect]] = field(default_factory=dict)


def verdict(
    summaries: Sequence[RunSummary],
    reference: str,
    target_accuracy: float,
    shared: str = " and partitions",
    *,
    times: Mapping[float, Values] | None = None,
    margin: float = MARGIN,
) -> Verdict:
    """Compare every selector with the reference, on the seeds that both ran.

    Args:
        summaries: Runs of at least two selectors, including the reference.
        reference: Name of the selector to compare with.
        target_accuracy: The target that the summaries refer to, a fraction in (0, 1].
        shared: Common parts of the runs on a seed, as words that continue the sentence.
        times: Target accuracy -> seconds until each run reached this target, for the profile.
        margin: Ratios between 1 / margin and margin count as no difference; above 1.

    Returns:
        The verdict: words, figures and profile.

    Raises:
        ParameterError: There is nothing to compare, or :func:`~fedsel_flwr.report.paired.paired_effects` refuses the
            runs.
    """

    def effects(figure: str) -> list[PairedEffect]:
        ends = collect(summaries, ENDS[figure]) if figure in ENDS else None
        return paired_effects(collect(summaries, figure), reference, figure, ends=ends, margin=margin)

    primary = effects("time_to_target_s")
    corrected = holm([effect.p for effect in primary])
    parts = {
        "rounds": effects("rounds_to_target"), "seconds_per_round": effects("seconds_per_round"),
        "energy": effects("energy_to_target_j"), "joules_per_round": effects("joules_per_round"),
    }  # fmt: skip
    sides = [effects(name) for name in SIDE_FIGURES]
    found = []
    for i, (time, p) in enumerate(zip(primary, corrected, strict=True)):
        word = choose_word(time, p, margin)
        # The factor by which Holm multiplied this p-value; for p = 0 or 1, the number of selectors, the largest factor.
        factor = p / time.p if time.p > 0 and p < 1 else len(primary)
        seeds = seeds_to_settle(time, factor, margin) if word == "not settled" else None
        secondary = {name: part[i] for name, part in parts.items()}
        own = SelectorVerdict(
            selector=time.selector, word=word, p=p, time=time, **secondary, sides=tuple(side[i] for side in sides),
            seeds=seeds,
        )  # fmt: skip
        found.append(own)
    lengths = collect(summaries, "simulated_s")
    profile = {
        target: paired_effects(values, reference, "time_to_target_s", ends=lengths, margin=margin)
        for target, values in (times or {}).items()
    }
    (row,) = aggregate(summary for summary in summaries if summary.selector == reference)
    sentence = _describe(row, f"{100 * target_accuracy:g} % accuracy", shared, found, margin)
    return Verdict(sentence=sentence, reference=reference, selectors=found, profile=profile)


def choose_word(time: PairedEffect, p: float, margin: float = MARGIN) -> Word:
    """Choose the word for a selector.

    Args:
        time: Effect on the time to the target.
        p: Its p-value after Holm's correction.
        margin: Ratios between 1 / margin and margin count as no difference.

    Returns:
        The first word that applies, in the order of this module's docstring.
    """
    if time.pairs < LEAST_PAIRS:
        return "not settled"
    if time.censored:
        lead = time.reached - time.reference_reached
        if p <= LEVEL and time.sooner > time.later and lead >= 0:
            return "sooner"
        return "later" if p <= LEVEL and time.sooner < time.later and lead <= 0 else "not settled"
    if time.is_within(margin):
        return "no difference"
    if p <= LEVEL:
        return "sooner" if time.estimate < 1 else "later"
    return "not settled"


def seeds_to_settle(time: PairedEffect, factor: float, margin: float = MARGIN) -> int | None:
    """Return the smallest number of seeds that would settle the question with the current estimate and spread.

    Use this number to plan a new comparison. If the current estimate were the truth, this number of new seeds would
    settle the question about half of the time. Do not add seeds to a comparison until it is settled, because that makes
    its p-values too small.

    Args:
        time: Effect on the time to the target.
        factor: Factor by which Holm's correction multiplies the p-value.
        margin: Ratios between 1 / margin and margin count as no difference.

    Returns:
        The number of seeds; None if it is above :data:`MAX_SEEDS` or unknown. It is unknown with fewer than three
        pairs, or if both selectors were sooner equally often.
    """
    if time.pairs < 3:
        return None
    if time.censored:
        if time.sooner == time.later:
            return None
        wins, losses = time.sooner / time.pairs, time.later / time.pairs
        for n in range(max(time.pairs + 1, LEAST_PAIRS), MAX_SEEDS + 1):
            if factor * sign_test(round(wins * n), round(losses * n)) <= LEVEL:
                return n
        return None
    t = load_optional("scipy.stats").t
    seeds, size = np.arange(max(time.pairs + 1, LEAST_PAIRS), MAX_SEEDS + 1), abs(math.log(time.estimate))
    error = time.deviation / np.sqrt(seeds)
    # Near 1 a new estimate is farther from 1 than this one. If the truth is 1, half of the estimates are this far.
    away = np.hypot(size, t.ppf(0.75, seeds - 1) * error)
    within = away + t.ppf((1 + CONFIDENCE) / 2, seeds - 1) * error <= math.log(margin)
    p = np.maximum(2 * t.sf(size / error, seeds - 1), 2.0 ** (1 - seeds))
    settled = seeds[within | (factor * p <= LEVEL)]
    return int(settled[0]) if settled.size else None


def _describe(own: SelectorRow, goal: str, shared: str, found: Sequence[SelectorVerdict], margin: float) -> str:
    """Return the verdict in words, one line per selector; ``own`` is the reference, and ``goal`` names the target."""
    reference, seeds = own.selector, own.seeds
    reached, mean = own.time_to_target_s, own.time_to_target_s.mean
    if reached.count == seeds:
        opening = f"{reference} reaches {goal} after {mean:,.{decimals_of(mean)}f} simulated seconds"
        opening += " on average." if seeds > 1 else "."
    else:
        opening = f"{reference} reaches {goal} on {reached.count} of {seeds} seeds."
    basis = f"on the same {seeds} seeds{shared}" if seeds > 1 else "on one seed, which gives no interval"
    lines = [f"{opening} Compared with {reference}, {basis}:", *(f"- {_clause(one, seeds, margin)}" for one in found)]
    if 1 < seeds < LEAST_PAIRS:
        lines.append(
            f"These numbers are for orientation only: a verdict needs at least {LEAST_PAIRS} seeds, and {FEW_SEEDS} "
            f"are usual (--seeds {FEW_SEEDS}). The 95 % intervals (in parentheses) are not corrected."
        )
    elif seeds > 1:
        over = f" after Holm's correction for {len(found)} selectors" if len(found) > 1 else ""
        lines.append(
            f'The verdict is about the time only. "Sooner" or "later" means that p is at most {LEVEL:g}{over}, even if '
            'the difference is small. "No difference" means that the whole interval of a selector\'s time is within '
            f"{100 * (margin - 1):.0f} % of the time of {reference}. All other numbers are secondary: their 95 % "
            "intervals (in parentheses) are not corrected, and about one in 20 intervals does not contain the true "
            "value."
        )
    if caution := describe_optimism([reference, *(one.selector for one in found)]):
        lines.append(caution)
    if LEAST_PAIRS <= seeds < FEW_SEEDS and any(one.word == "not settled" for one in found):
        lines.append(f"{seeds} seeds are few: {FEW_SEEDS} are usual. Plan {FEW_SEEDS} new ones, not more of the same.")
    return "\n".join(lines)


def _clause(one: SelectorVerdict, seeds: int, margin: float) -> str:
    """Return the sentences about one selector."""
    time, name = one.time, one.selector
    if time.pairs < seeds:
        name += f" (on {time.pairs} of these seeds)"
    if time.censored:
        others = f"{time.reference} on {time.reference_reached}"
        counts = f"reaches the target on {time.reached} of {time.pairs} seeds, {others}"
        if time.pairs < 2:
            return f"{name} {counts}."
        undecided = time.pairs - time.sooner - time.later
        ahead = f"sooner on {time.sooner}, later on {time.later}, undecided on {undecided}"
        return f"{name} {counts} ({ahead}; sign test, {_p(one.p)}): {one.word}{_seeds(one)}.{_sides(one)}"
    if math.isnan(time.low):
        return f"{name} needs {time.estimate:.2f} times the time: not settled by one seed.{_sides(one)}"
    if one.word == "no difference":
        head = f"{name}: no difference beyond {100 * (margin - 1):.0f} % in time ({_ratio(time)})"
    elif one.word == "not settled":
        head = f"{name} needs {time.estimate:.2f} times the time ({_range(time)}): not settled{_seeds(one)}"
    elif time.estimate >= 2:
        head = f"{name} takes {time.estimate:.1f} times as long ({_range(time)}): {one.word}"
    else:
        head = f"{name} reaches this accuracy {_change(time)} {one.word} ({_ends(time)})"
    parts = [("Seconds per round", one.seconds_per_round), ("Rounds", one.rounds)]
    if not math.isnan(one.energy.estimate):
        parts.append(("Joules", one.energy))
    return " ".join([f"{head}.", *(f"{what}: {_part(effect, margin)}." for what, effect in parts)]) + _sides(one)


def _change(effect: PairedEffect) -> str:
    """Format a ratio as a change: "23 %" for .77, "31 %" for 1.31."""
    return f"{100 * abs(effect.estimate - 1):.0f} %"


def _ends(effect: PairedEffect) -> str:
    """Format the ends of a ratio's interval as changes in the direction of the estimate, with the smaller change first.

    If an end is on the other side of 1, it has a minus sign.
    """
    sign = 1 if effect.estimate > 1 else -1
    first, last = sorted(100 * sign * (end - 1) for end in (effect.low, effect.high))
    return f"{first:.0f} to {last:.0f} %"


def _range(effect: PairedEffect) -> str:
    return f"{effect.low:.2f} to {effect.high:.2f}"


def _ratio(effect: PairedEffect) -> str:
    return f"{effect.estimate:.2f}, {_range(effect)}"


def _part(effect: PairedEffect, margin: float) -> str:
    """Describe one factor of the time, for example "27 % fewer (24 to 30 %)"."""
    if effect.is_within(margin):
        return f"equal within {100 * (margin - 1):.0f} % ({_ratio(effect)})"
    if not effect.differs:
        return f"{effect.estimate:.2f} times as many ({_range(effect)}, no clear change)"
    return f"{_change(effect)} {'fewer' if effect.estimate < 1 else 'more'} ({_ends(effect)})"


def _seeds(one: SelectorVerdict) -> str:
    """Return the number of seeds that a new comparison needs, as words that continue the sentence."""
    if one.seeds is None:
        unknown = one.time.pairs < 3 or one.time.censored
        return "" if unknown else f" (a new comparison would need more than {MAX_SEEDS} seeds)"
    return f" (a new comparison would need about {one.seeds} seeds)"


def _sides(one: SelectorVerdict) -> str:
    """Describe the side effects: always the accuracy, and each other figure if its interval excludes 0."""
    told = []
    for effect in one.sides:
        own, other = effect.reference_mean + effect.estimate, effect.reference_mean
        if math.isnan(effect.estimate):
            continue
        if effect.figure == "accuracy":
            told.append(f"Accuracy at the end: {_points(effect)}.")
        elif effect.differs and effect.figure == "worst_tenth":
            told.append(f"Accuracy of the worst tenth of the clients: {_points(effect)}.")
        elif effect.differs and effect.figure == "jain" and f"{own:.2f}" != f"{other:.2f}":
            told.append(f"Jain's index of participation: {own:.2f} ({one.time.reference}: {other:.2f}).")
        elif effect.differs and effect.figure == "asked_per_round" and f"{own:.1f}" != f"{other:.1f}":
            told.append(f"Clients asked per round: {own:.1f} ({one.time.reference}: {other:.1f}).")
    return "".join(f" {sentence}" for sentence in told)


def _points(effect: PairedEffect) -> str:
    """Format a difference in percentage points with its interval, for example "-0.4 points (-1.0 to +0.2)"."""
    ends = "" if math.isnan(effect.low) else f" ({100 * effect.low:+.1f} to {100 * effect.high:+.1f})"
    return f"{100 * effect.estimate:+.1f} points{ends}"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"
