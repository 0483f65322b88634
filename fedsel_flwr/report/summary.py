"""Numbers that summarize a run, and their mean and spread over the seeds of one selector."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedsel_flwr.errors import ParameterError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fedsel_flwr.rounds.history import History, RoundRecord

SMOOTHED = 5
"""Measured rounds whose mean accuracy has to reach the target."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in one line: one selector, one seed.

    Attributes:
        selector: Name of the selector.
        seed: Seed of the run.
        accuracy: Last measured test accuracy, a fraction; NaN if it was never measured.
        time_to_target_s: Simulated seconds until the target was reached (:func:`reaching`); infinity if never.
        energy_to_target_j: Energy until then, in joules; infinity if never.
        energy_j: Energy of the whole run, in joules.
        jain: Jain index of the clients' selection counts; NaN if nobody was selected.
        failed_clients: Selections that did not end in a usable model.
        simulated_s: Simulated length of the whole run, in seconds.
    """

    selector: str
    seed: int
    accuracy: float
    time_to_target_s: float
    energy_to_target_j: float
    energy_j: float
    jain: float
    failed_clients: int
    simulated_s: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation of one figure over seeds.

    Attributes:
        mean: Mean over the seeds that have a finite value; NaN if none has.
        deviation: Sample standard deviation (divisor n - 1) over the same seeds; NaN for fewer than two.
        count: Number of seeds with a finite value.
        total: Number of seeds.
    """

    mean: float
    deviation: float
    count: int
    total: int


@dataclass(frozen=True, kw_only=True)
class SelectorRow:
    """All runs of one selector: each figure of ``RunSummary`` as a ``Spread`` over the seeds."""

    selector: str
    seeds: int
    accuracy: Spread
    time_to_target_s: Spread
    energy_to_target_j: Spread
    energy_j: Spread
    jain: Spread
    failed_clients: Spread
    simulated_s: Spread


def jain_index(counts: ArrayLike) -> float:
    """Measure how evenly something is shared: 1 is perfectly even, 1/n is one client taking everything.

    Args:
        counts: Non-negative amounts, one per client, shape (n,).

    Returns:
        (sum x)^2 / (n sum x^2); NaN if there are no clients or all amounts are 0.

    Raises:
        ParameterError: If ``counts`` is not a vector of finite, non-negative numbers.

    References:
        R. Jain, D. Chiu, W. Hawe. "A Quantitative Measure of Fairness and Discrimination for Resource Allocation in
        Shared Computer Systems." DEC Research Report TR-301, 1984.

    Examples:
        >>> jain_index([4, 2, 0, 0])
        0.45
    """
    x = np.asarray(counts, dtype=np.float64)
    if x.ndim != 1 or not np.isfinite(x).all() or (x < 0).any():
        raise ParameterError(
            "jain_index expects a vector of finite counts that are 0 or more; "
            f"it got shape {x.shape}. Pass one number per client."
        )
    squares = float(x @ x)
    return float(x.sum()) ** 2 / (x.size * squares) if squares > 0 else math.nan


def smoothed(accuracies: ArrayLike) -> NDArray[np.float64]:
    """Average each measured accuracy with those before it: the last five, or all of them while there are fewer.

    From round to round a measured accuracy goes up and down, and a single lucky round is no arrival.

    Args:
        accuracies: Measured ones in order, finite, shape (n,).

    Returns:
        Shape (n,).

    Examples:
        >>> smoothed([0.2, 0.4, 0.6, 0.6, 0.7, 0.7]).round(2).tolist()
        [0.2, 0.3, 0.4, 0.45, 0.5, 0.6]
    """
    values = np.asarray(accuracies, dtype=np.float64)
    return np.array([values[max(0, i + 1 - SMOOTHED) : i + 1].mean() for i in range(len(values))])


def reaching(rounds: Sequence[RoundRecord], target_accuracy: float) -> RoundRecord | None:
    """Find the first round at which the mean of the last five measured accuracies (:func:`smoothed`) is the target.

    Args:
        rounds: The rounds of a run, in order.
        target_accuracy: Accuracy to be reached, a fraction in (0, 1].

    Returns:
        The round; None if there is none.
    """
    measured = [record for record in rounds if math.isfinite(record.accuracy)]
    means = smoothed([record.accuracy for record in measured])
    return next((record for record, mean in zip(measured, means, strict=True) if mean >= target_accuracy), None)


def summarize(history: History, *, selector: str, seed: int, num_clients: int, target_accuracy: float) -> RunSummary:
    """Summarize one run.

    Args:
        history: What happened in the run.
        selector: Name of the selector, for the table.
        seed: Seed of the run.
        num_clients: Number of clients of the federation, those never selected included.
        target_accuracy: Test accuracy to be reached, a fraction in (0, 1].

    Returns:
        The summary; a run without rounds has no accuracy (NaN), 0 joules and 0 seconds.

    Raises:
        ParameterError: If ``target_accuracy`` is not a fraction.
    """
    check_target(target_accuracy)
    measured = [r for r in history.rounds if math.isfinite(r.accuracy)]
    last = history.rounds[-1] if history.rounds else None
    reached = reaching(history.rounds, target_accuracy)
    return RunSummary(
        selector=selector,
        seed=seed,
        accuracy=measured[-1].accuracy if measured else math.nan,
        time_to_target_s=reached.simulated_s if reached else math.inf,
        energy_to_target_j=reached.total_energy_j if reached else math.inf,
        energy_j=last.total_energy_j if last else 0.0,
        jain=jain_index(history.selection_counts(num_clients)),
        failed_clients=sum(r.num_selected - r.num_completed for r in history.rounds),
        simulated_s=last.simulated_s if last else 0.0,
    )


def aggregate(summaries: Iterable[RunSummary]) -> list[SelectorRow]:
    """Join the runs of each selector.

    Args:
        summaries: Runs in any order.

    Returns:
        One row per selector, in the order in which the selectors first appear. The time to target is the mean over
        the seeds that reached it: its ``count`` says how many did.
    """
    runs: dict[str, list[RunSummary]] = {}
    for summary in summaries:
        runs.setdefault(summary.selector, []).append(summary)
    return [
        SelectorRow(
            selector=selector,
            seeds=len(group),
            accuracy=_spread([s.accuracy for s in group]),
            time_to_target_s=_spread([s.time_to_target_s for s in group]),
            energy_to_target_j=_spread([s.energy_to_target_j for s in group]),
            energy_j=_spread([s.energy_j for s in group]),
            jain=_spread([s.jain for s in group]),
            failed_clients=_spread([s.failed_clients for s in group]),
            simulated_s=_spread([s.simulated_s for s in group]),
        )
        for selector, group in runs.items()
    ]


def check_target(target_accuracy: float) -> None:
    """Refuse a target accuracy that is not a fraction.

    Args:
        target_accuracy: The value to check.

    Raises:
        ParameterError: If it is not in (0, 1].
    """
    if not 0 < target_accuracy <= 1:
        raise ParameterError(
            f"target_accuracy must be a fraction above 0 and at most 1; it is {target_accuracy!r}. Write 80 % as 0.8."
        )


def _spread(values: Sequence[float]) -> Spread:
    finite = np.asarray([v for v in values if math.isfinite(v)], dtype=np.float64)
    return Spread(
        mean=float(finite.mean()) if finite.size else math.nan,
        deviation=float(finite.std(ddof=1)) if finite.size > 1 else math.nan,
        count=int(finite.size),
        total=len(values),
    )
