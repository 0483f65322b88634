"""Summaries of runs: the figures of one run, their mean and spread over seeds, and labels of a selector's settings.

A sweep runs a selector with several values of a parameter. Each setting has a row, whose label is the selector's label
and the values, such as "bsfl alpha=0.3". The notes on the number of settings use only these labels, so that runs from
folders have the same notes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.errors import ParameterError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fedsel_flwr.rounds.history import History, RoundRecord

TARGET_ROUNDS = 15
"""Default number of measured rounds whose mean accuracy must reach the target."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Figures of one run, that is, of one selector on one seed.

    Attributes:
        selector: Name of the selector.
        seed: Seed of the run.
        accuracy: Last measured test accuracy, a fraction; NaN if it was never measured.
        time_to_target_s: Simulated seconds until the target is reached (:func:`find_target_rounds`); infinity if never.
        energy_to_target_j: Energy until the target was reached, in joules; infinity if never.
        energy_j: Energy of the whole run, in joules.
        jain: Jain index of the clients' selection counts; NaN if no client was selected.
        failed_clients: Selections without a usable update in time. Spares of over-selection have not failed.
        simulated_s: Simulated length of the whole run, in seconds.
        loss: Last measured test loss; NaN if it was never measured.
        accuracy_last10: Mean test accuracy of the last ten measured rounds (GPFL's Table II).
        deviation_last10: Largest distance between one of these ten accuracies and their mean.
        accuracy_15: Mean test accuracy of the last ten measured rounds in the first 15 % of the rounds.
        accuracy_50: Mean test accuracy of the last ten measured rounds in the first half of the rounds.
        rounds_to_target: Rounds until the target was reached; infinity if never.
        rounds_to_all: Rounds until every client had been selected (GPFL's Fig. 4); infinity if some never were.
        score_energy: PCZFL's dimensionless energy: the sum of 1 - score over the selected clients that reported a
            score; NaN if no client did.
        asked_per_round: Mean number of clients per round that were asked to train; NaN if there was no round.
        seconds_per_round: Mean simulated seconds of the rounds until the target was reached; NaN if it never was.
            ``time_to_target_s`` is the product of this and ``rounds_to_target``.
        joules_per_round: Mean joules of the rounds until the target was reached; NaN if it never was.
        megabytes_down: Megabytes (10^6 bytes) of models sent to clients until the target was reached. Each client that
            was asked to train, or probed, counts one model. Infinity if the target was never reached, NaN if the size
            of a model is unknown.
        megabytes_up: Megabytes of updates that arrived in time until the target was reached; infinity and NaN as for
            ``megabytes_down``.
        worst_tenth: Mean accuracy of the final model for the tenth of the clients with the lowest accuracy; NaN if it
            was not measured. A client is measured on its test examples, or on the test set weighted by its classes
            (:func:`~fedsel_flwr.simulations.results.client_accuracies`).
        staleness: Mean number of steps of the server from sending the model to using the update, over the usable
            updates of buffered rounds; NaN in synchronous rounds.
        target_window: Number of measured rounds whose mean counted for the target, smaller than ``target_rounds`` if
            the run was too short.
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
    loss: float = math.nan
    accuracy_last10: float = math.nan
    deviation_last10: float = math.nan
    accuracy_15: float = math.nan
    accuracy_50: float = math.nan
    rounds_to_target: float = math.inf
    rounds_to_all: float = math.inf
    score_energy: float = math.nan
    asked_per_round: float = math.nan
    seconds_per_round: float = math.nan
    joules_per_round: float = math.nan
    megabytes_down: float = math.nan
    megabytes_up: float = math.nan
    worst_tenth: float = math.nan
    staleness: float = math.nan
    target_window: int = TARGET_ROUNDS


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and sample standard deviation of one figure over seeds.

    Attributes:
        mean: Mean over the seeds with a finite value; NaN if there is none. Also NaN if a value is infinite. In that
            case, a mean over the other runs would favour a selector that failed to reach the target.
        deviation: Sample standard deviation (divisor n - 1) over the same seeds; NaN for fewer than two seeds, or if
            the mean is NaN.
        count: Number of seeds with a finite value.
        total: Number of seeds.
        never: Number of seeds with an infinite value, because the target was not reached.
    """

    mean: float
    deviation: float
    count: int
    total: int
    never: int = 0


@dataclass(frozen=True, kw_only=True)
class SelectorRow:
    """Figures of one selector over the seeds. Each figure of ``RunSummary`` is an attribute with a ``Spread``.

    Attributes:
        selector: Name of the selector.
        seeds: Number of runs.
        figures: Figure -> its spread.
    """

    selector: str
    seeds: int
    figures: Mapping[str, Spread]

    def __getattr__(self, name: str) -> Spread:
        """Return the spread of a figure.

        Raises:
            AttributeError: There is no such figure.
        """
        if name not in FIGURES:
            raise AttributeError(f"a selector's row has the figures {', '.join(FIGURES)}, but no {name!r}")
        return self.figures[name]


FIGURES = tuple(field.name for field in fields(RunSummary) if field.name not in ("selector", "seed", "target_window"))
"""Figures of a run that are averaged over seeds."""
_SETTING = re.compile(r"(?P<selector>.+?)(?: \w+=\S+)+")


def jain_index(counts: ArrayLike) -> float:
    """Compute Jain's fairness index: 1 if all clients have equal shares, 1/n if one client has everything.

    Args:
        counts: Non-negative amounts, one per client, shape (n,).

    Returns:
        (sum x)^2 / (n sum x^2); NaN if there are no clients or all amounts are 0.

    Raises:
        ParameterError: ``counts`` is not a vector of finite, non-negative numbers.

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
            f"counts must be a vector of finite numbers of at least 0, got shape {x.shape}. Give one number per client."
        )
    squares = float(x @ x)
    return float(x.sum()) ** 2 / (x.size * squares) if squares > 0 else math.nan


def moving_average(accuracies: ArrayLike, window: int = TARGET_ROUNDS) -> NDArray[np.float64]:
    """Average each measured accuracy with the accuracies before it, at most ``window`` together.

    Accuracy fluctuates from round to round. Without the average, one lucky round would count as reaching the target.

    Args:
        accuracies: Measured accuracies in order, finite, shape (n,).
        window: Number of accuracies that are averaged. The first ones are averaged with all accuracies before them.

    Returns:
        The averages, shape (n,).

    Examples:
        >>> moving_average([0.2, 0.4, 0.6, 0.6, 0.7, 0.7], window=5).round(2).tolist()
        [0.2, 0.3, 0.4, 0.45, 0.5, 0.6]
    """
    values = np.asarray(accuracies, dtype=np.float64)
    return np.array([values[max(0, i + 1 - window) : i + 1].mean() for i in range(len(values))])


def find_target_rounds(
    rounds: Sequence[RoundRecord], targets: Sequence[float], window: int = TARGET_ROUNDS
) -> list[RoundRecord | None]:
    """Find the first round at which the mean of the last ``window`` measured accuracies reaches each target.

    Only full windows count. For a run with fewer measured rounds, the mean of all of them counts.

    Args:
        rounds: The rounds of a run, in order.
        targets: Target accuracies, fractions in (0, 1].
        window: Number of measured rounds in the mean.

    Returns:
        For each target, the round; None if there is no such round.
    """
    measured = [record for record in rounds if math.isfinite(record.accuracy)]
    full = min(window, len(measured))
    means = moving_average([record.accuracy for record in measured], full)
    # The first full window ends at index full - 1.
    pairs = list(zip(measured, means, strict=True))[max(0, full - 1) :]
    return [next((record for record, mean in pairs if mean >= target), None) for target in targets]


def summarize(
    history: History,
    *,
    selector: str,
    seed: int,
    num_clients: int,
    target_accuracy: float,
    target_rounds: int = TARGET_ROUNDS,
    model_bytes: tuple[float, float] = (math.nan, math.nan),
    client_accuracies: ArrayLike = (),
) -> RunSummary:
    """Summarize one run.

    Args:
        history: History of the run.
        selector: Name of the selector, for the table.
        seed: Seed of the run.
        num_clients: Number of clients of the federation, including clients that were never selected.
        target_accuracy: Target test accuracy, a fraction in (0, 1].
        target_rounds: Number of measured rounds whose mean accuracy must reach the target
            (:func:`find_target_rounds`).
        model_bytes: Bytes of a model sent to a client, and of an update sent back; NaN if unknown.
        client_accuracies: Accuracy of the final model for each client; NaN if unknown.

    Returns:
        The summary. A run without rounds has no accuracy (NaN), 0 joules and 0 seconds.

    Raises:
        ParameterError: ``target_accuracy`` is not a fraction.
    """
    check_target(target_accuracy)
    rounds = history.rounds
    measured, last = [r for r in rounds if math.isfinite(r.accuracy)], rounds[-1] if rounds else None
    (reached,) = find_target_rounds(rounds, [target_accuracy], target_rounds)
    last10, scores = _last_ten(rounds), np.array([row.energy_score for row in history.clients])
    never = ("time_to_target_s", "energy_to_target_j", "rounds_to_target", "megabytes_down", "megabytes_up")
    target: dict[str, Any] = dict.fromkeys(never, math.inf)
    if reached:
        until = [record for record in rounds if record.round <= reached.round]
        target = {
            "time_to_target_s": reached.simulated_s, "energy_to_target_j": reached.total_energy_j,
            "rounds_to_target": reached.round, "seconds_per_round": reached.simulated_s / reached.round,
            "joules_per_round": reached.total_energy_j / reached.round,
            "megabytes_down": sum(one.num_selected + one.num_probed for one in until) * model_bytes[0] / 1e6,
            "megabytes_up": sum(one.num_completed for one in until) * model_bytes[1] / 1e6,
        }  # fmt: skip
    return RunSummary(
        selector=selector, seed=seed, **target,
        accuracy=measured[-1].accuracy if measured else math.nan, loss=measured[-1].loss if measured else math.nan,
        energy_j=last.total_energy_j if last else 0.0, simulated_s=last.simulated_s if last else 0.0,
        jain=jain_index(history.selection_counts(num_clients)),
        failed_clients=sum(r.num_failed for r in rounds),
        accuracy_last10=float(last10.mean()) if last10.size else math.nan,
        deviation_last10=float(np.abs(last10 - last10.mean()).max()) if last10.size else math.nan,
        accuracy_15=_mean_until(rounds, 0.15), accuracy_50=_mean_until(rounds, 0.5),
        rounds_to_all=_rounds_to_all(history, num_clients),
        score_energy=float(np.nansum(1 - scores)) if np.isfinite(scores).any() else math.nan,
        asked_per_round=float(np.mean([r.num_selected for r in rounds])) if last else math.nan,
        worst_tenth=_worst_tenth(client_accuracies), staleness=mean_staleness(history),
        target_window=min(target_rounds, len(measured)),
    )  # fmt: skip


def mean_staleness(history: History) -> float:
    """Return the mean staleness of the usable updates of buffered rounds; NaN if there are none."""
    found = [row.staleness for row in history.clients if row.completed and row.buffered]
    return float(np.mean(found)) if found else math.nan


def aggregate(summaries: Iterable[RunSummary]) -> list[SelectorRow]:
    """Aggregate the runs of each selector.

    Args:
        summaries: Runs in any order.

    Returns:
        One row per selector, in the order in which the selectors first appear.
    """
    runs: dict[str, list[RunSummary]] = {}
    for summary in summaries:
        runs.setdefault(summary.selector, []).append(summary)
    return [
        SelectorRow(
            selector=one, seeds=len(own), figures={f: _spread([getattr(run, f) for run in own]) for f in FIGURES}
        )
        for one, own in runs.items()
    ]


def _worst_tenth(accuracies: ArrayLike) -> float:
    """Return the mean of the lowest tenth of the finite accuracies, at least of one; NaN if there are none."""
    values = np.asarray(accuracies, dtype=np.float64)
    known = np.sort(values[np.isfinite(values)])
    return float(known[: math.ceil(len(known) / 10)].mean()) if known.size else math.nan


def _last_ten(rounds: Sequence[RoundRecord]) -> NDArray[np.float64]:
    """Return the accuracies of the last ten measured rounds."""
    return np.array([record.accuracy for record in rounds if math.isfinite(record.accuracy)][-10:])


def _mean_until(rounds: Sequence[RoundRecord], share: float) -> float:
    """Return the mean accuracy of the last ten measured rounds within the first ``share`` of all rounds."""
    # Rounded first, because a product of floats may be just above a whole number, and its ceiling one round too high.
    last10 = _last_ten(rounds[: math.ceil(round(share * len(rounds), 9))])
    return float(last10.mean()) if last10.size else math.nan


def _rounds_to_all(history: History, num_clients: int) -> float:
    """Return the round after which every client had been selected; infinity if some clients never were."""
    seen: set[int] = set()
    for row in history.clients:
        seen.add(row.client)
        if len(seen) == num_clients:
            return float(row.round)
    return math.inf


def check_target(target_accuracy: float) -> None:
    """Refuse a target accuracy that is not a fraction.

    Args:
        target_accuracy: The value to check.

    Raises:
        ParameterError: The value is not in (0, 1].
    """
    if not 0 < target_accuracy <= 1:
        raise ParameterError(
            f"target_accuracy must be above 0 and at most 1, got {target_accuracy!r}. Write 80 % as 0.8."
        )


def _spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation; infinity means that the target was never reached, NaN that it is unknown."""
    finite = np.asarray([v for v in values if math.isfinite(v)], dtype=np.float64)
    never = sum(math.isinf(v) for v in values)
    mean = float(finite.mean()) if finite.size and not never else math.nan
    deviation = float(finite.std(ddof=1)) if finite.size > 1 and not never else math.nan
    return Spread(mean=mean, deviation=deviation, count=int(finite.size), total=len(values), never=never)


def decimals_of(value: float) -> int:
    """Return the number of decimals for three significant digits, with at least one decimal below 1,000.

    Args:
        value: A finite number.

    Returns:
        The number of decimals.

    Examples:
        >>> [decimals_of(x) for x in (1234.5, 123.4, 12.3, 1.23, 0.0123)]
        [0, 1, 1, 2, 4]
    """
    # From 100 to 999, three significant digits need no decimal, but one is kept.
    exponent = math.floor(math.log10(abs(value))) if value else 0
    return 1 if exponent == 2 else max(0, 2 - exponent)


def setting_label(selector: str, setting: Mapping[str, str]) -> str:
    """Return the label of a setting.

    Args:
        selector: Label of the selector.
        setting: Parameter -> value, in the form of :func:`value_texts`.

    >>> setting_label("bsfl", {"alpha": "0.3", "beta": "2"})
    'bsfl alpha=0.3 beta=2'
    """
    return " ".join([selector, *(f"{name}={value}" for name, value in setting.items())])


def value_texts(values: Sequence[Any]) -> list[str]:
    """Return the values of a parameter as short texts for labels, all different.

    Args:
        values: Numbers, texts, booleans, or lists of them. No value occurs twice.

    >>> value_texts([0.30000000000000004, 1.0, True, [40, 30], "exact"])
    ['0.3', '1', 'true', '40,30', 'exact']
    >>> value_texts([0.3, 0.30000000000000004])
    ['0.3', '0.30000000000000004']
    """
    short = [_text(value) for value in values]
    return short if len(set(short)) == len(short) else [_text(value, "") for value in values]


def _text(value: Any, precision: str = "g") -> str:
    """Return a value as text without spaces; floats have six significant digits, or all digits without a format."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(_text(one, precision) for one in value)
    text = format(value, precision) if isinstance(value, float) else str(value)
    # The notes split labels at spaces.
    return "_".join(text.split())


def selector_of(label: str) -> str:
    """Return the selector's label without the values of a setting.

    >>> selector_of("bsfl alpha=0.3 beta=2"), selector_of("cs-ucb")
    ('bsfl', 'cs-ucb')
    """
    found = _SETTING.fullmatch(label)
    return found["selector"] if found else label


def settings_tried(labels: Iterable[str]) -> dict[str, int]:
    """Count the settings of each selector that ran with several settings.

    Args:
        labels: Labels of the rows of a comparison.

    Returns:
        Selector -> number of its settings, for selectors with at least two settings.

    >>> settings_tried(["bsfl alpha=0.3", "bsfl alpha=1", "oort", "random"])
    {'bsfl': 2}
    """
    return {selector: count for selector, count in Counter(map(selector_of, labels)).items() if count > 1}


def describe_settings(labels: Iterable[str]) -> str:
    """Return the table's note on the number of settings tried per selector; empty without a sweep.

    >>> describe_settings(["bsfl alpha=0.3", "bsfl alpha=1", "random"])
    'Settings tried: 2 of bsfl.'
    """
    tried = settings_tried(labels)
    return f"Settings tried: {', '.join(f'{count} of {name}' for name, count in tried.items())}." if tried else ""


def describe_optimism(labels: Iterable[str]) -> str:
    """Return the verdict's warning about the best of several settings; empty without a sweep.

    >>> describe_optimism(["bsfl alpha=0.3", "bsfl alpha=1", "random"])
    'The best of the 2 settings of bsfl looks better than it is: some of its lead is chance. Run it again on new seeds.'
    """
    tried = [f"{count} settings of {name}" for name, count in settings_tried(labels).items()]
    if not tried:
        return ""
    return (
        f"The best of the {' or of the '.join(tried)} looks better than it is: some of its lead is chance. Run it "
        "again on new seeds."
    )
