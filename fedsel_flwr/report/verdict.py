"""The verdict on a comparison: one sentence on time and energy to the target, against a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedsel_flwr.report.paired import PairedDifference, paired_differences
from fedsel_flwr.report.summary import RunSummary, Spread, aggregate, decimals_of

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Verdict:
    """What a comparison found.

    Attributes:
        sentence: In words.
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

    What cannot be told from chance, with Holm's correction over the selectors, is told as "no difference"; the
    intervals stand each for itself.

    Args:
        summaries: Runs of at least two selectors, one of them the reference.
        reference: Name of the selector to compare with.
        target_accuracy: The target that the summaries refer to, a fraction in (0, 1].
        shared: What the runs on the same seeds share besides them, in words, as the sentence continues.

    Returns:
        The sentence and its figures.

    Raises:
        ParameterError: There is nothing to compare, or as
            :func:`~fedsel_flwr.report.paired.paired_differences` says.
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


def _clause(time: PairedDifference, energy: PairedDifference) -> str:
    if math.isnan(time.mean):
        return f"{time.selector} reaches it on {time.reached} of {time.pairs} (a difference cannot be given)"
    told = [_part(time, "s")]
    if not math.isnan(energy.mean):
        told.append(_part(energy, "J"))
    return f"{time.selector} takes " + " and ".join(told)


def _part(d: PairedDifference, unit: str) -> str:
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
