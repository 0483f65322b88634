"""Tables of a comparison's page: the rows that its charts draw and its downloads hold.

Every table has a column ``seed``. The rows of one seed are that run's. The rows of :data:`ALL` are means over the
seeds. Ratios, intervals and verdicts are those of :mod:`fedsel_flwr.report.verdict`; the picture shows the same
mean curves (:func:`mean_curve`).

Curves and maps have fewer points than rounds, so that a page of 400 runs stays below 8 MB. All other values are exact
to six digits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.report.page.document import Columns
from fedsel_flwr.report.paired import PairedEffect, reference_band
from fedsel_flwr.report.summary import RunSummary, aggregate, moving_average
from fedsel_flwr.report.verdict import LEVEL, Verdict
from fedsel_flwr.rounds.history import History, failure_reason
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

ALL = "all"
"""Value of the column ``seed`` for means over the seeds."""
FEW_RUNS = 60
"""Number of runs up to which curves have many points."""
CURVE_POINTS = (120, 40)
"""Largest number of points of a run's curve, with few runs and with many."""
MEAN_POINTS = 300
"""Largest number of points of a mean curve."""
MAP_CELLS = (60, 50)
"""Largest number of rows and columns of a map."""
MAP_ROWS = 60_000
"""Largest number of rows of the maps of single seeds. The first seeds get a map."""
MOST_POINTS = (1_000, 300)
"""Largest number of clients that are drawn as points, with few runs and with many."""
REASONS = 7
"""Largest number of reasons of failure; all others together are "other"."""
NOTHING = (math.nan, math.nan, math.nan)
"""Interval and p-value of a single run."""
PARTS = ("download", "compute", "upload", "waiting", "failures", "probes")
"""Parts of a round."""
_Found = Mapping[tuple[Any, ...], Any]
"""Rows of a run: the columns that name a row -> value, or values, of its other columns."""


@dataclass(frozen=True)
class PageRun:
    """A run of a page.

    Attributes:
        selector: The selector's label.
        seed: The seed.
        history: The history.
        model_bytes: Bytes of a model sent to a client, and of an update sent back; NaN if unknown.
        theta: Seconds lost per round so far, compared with the genie, shape (rounds,); empty if unknown.
    """

    selector: str
    seed: int
    history: History
    model_bytes: tuple[float, float] = (math.nan, math.nan)
    theta: FloatArray | Sequence[float] = ()

    @cached_property
    def rounds(self) -> Sequence[RoundRecord]:
        """The rounds, read once."""
        return list(self.history.rounds)

    @cached_property
    def clients(self) -> dict[str, FloatArray]:
        """Columns of the selected clients of all rounds."""
        names = ("round", "client", "latency_s", "download_s", "compute_s", "upload_s", "completed", "spare")
        rows = [[*(float(getattr(row, name)) for name in names), took_s(row)] for row in self.history.clients]
        columns = np.reshape(np.array(rows, dtype=np.float64), (-1, len(names) + 1)).T
        return dict(zip((*names, "took_s"), columns, strict=True))

    @cached_property
    def reasons(self) -> list[tuple[int, str]]:
        """Round and reason of each failure."""
        return [
            (row.round, failure_reason(row) or "unknown")
            for row in self.history.clients
            if not row.completed and not row.spare
        ]

    def axis(self, name: str) -> FloatArray:
        """Return seconds, joules, rounds or megabytes since the start, at the end of each round."""
        if name == "megabytes":
            asked = np.array([one.num_selected + one.num_probed for one in self.rounds], dtype=np.float64)
            arrived = np.array([one.num_completed for one in self.rounds], dtype=np.float64)
            return np.asarray(np.cumsum(asked * self.model_bytes[0] + arrived * self.model_bytes[1]) / 1e6)
        field = {"seconds": "simulated_s", "joules": "total_energy_j", "rounds": "round"}[name]
        return np.array([getattr(one, field) for one in self.rounds], dtype=np.float64)


AXES = {
    "seconds": "simulated time (s)", "rounds": "round", "joules": "energy (J)", "megabytes": "sent models (MB)"
}  # fmt: skip
"""Horizontal axes of the curves -> title."""
MEASURES = {
    "time": "time to the target", "seconds_per_round": "seconds per round", "rounds": "rounds to the target",
    "energy": "energy to the target", "joules_per_round": "joules per round",
}  # fmt: skip
"""Ratios of the forest plot, which are attributes of a verdict -> title."""
FIGURES = {"time": "time_to_target_s", "rounds": "rounds_to_target", "energy": "energy_to_target_j"}
"""Ratio -> the figure of a run, if it has another name."""


def took_s(row: ClientRecord) -> float:
    """Return the seconds from the round's start until the client was done, cold starts included.

    NaN in buffered rounds, which wait for no client: the client may have started in an earlier round.
    """
    if row.buffered:
        return math.nan
    return row.first_s if row.latency_source == "first" and math.isfinite(row.first_s) else row.latency_s


def by_selector(runs: Sequence[PageRun]) -> dict[str, list[PageRun]]:
    """Group runs by selector, in the order of the first runs."""
    groups: dict[str, list[PageRun]] = {}
    for run in runs:
        groups.setdefault(run.selector, []).append(run)
    return groups


def curve_table(runs: Sequence[PageRun], window: int, axes: Sequence[str]) -> Columns:
    """Return test accuracy over each axis: a curve per run, and the mean of each selector with its deviation.

    A band of fractions ends at 0 and 1.
    """
    most, rows = CURVE_POINTS[len(runs) > FEW_RUNS], list[Sequence[Any]]()
    is_fraction = are_fractions(one.accuracy for run in runs for one in run.rounds)
    for axis in axes:
        for selector, own in by_selector(runs).items():
            series = [_accuracies(run, axis, window) for run in own]
            for run, (x, accuracy) in zip(own, series, strict=True):
                where = axis, str(run.seed), selector
                rows += [(*where, x[i], accuracy[i], math.nan, math.nan) for i in thin(len(x), most)]
            x, mean, deviation = mean_curve(series)
            low, high = mean - deviation, mean + deviation
            # A quality that the user defines may be outside the range of a fraction, as R² can be.
            if is_fraction:
                low, high = low.clip(min=0.0), high.clip(max=1.0)
            rows += [(axis, ALL, selector, x[i], mean[i], low[i], high[i]) for i in thin(len(x), MEAN_POINTS)]
    return columns("axis seed selector x accuracy low high", rows)


def mean_curve(series: Sequence[tuple[FloatArray, FloatArray]]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the mean of several seeds' curves, where each curve has the last value measured so far.

    Args:
        series: Places and values of each seed, ascending, each of shape (n,).

    Returns:
        The places from the first one at which every seed has a value, the means there, and the sample standard
        deviations, each of shape (m,). They are empty if a seed has no values. The deviations are NaN for one seed.

    >>> mean_curve([(np.array([1.0, 3.0]), np.array([0.5, 0.7])), (np.array([2.0]), np.array([0.1]))])[:2]
    (array([2., 3.]), array([0.3, 0.4]))
    """
    if not all(len(x) for x, _ in series):
        return np.empty(0), np.empty(0), np.empty(0)
    grid = np.unique(np.concatenate([x for x, _ in series]))
    grid = grid[grid >= max(x[0] for x, _ in series)]
    curves = np.stack([values[np.searchsorted(x, grid, side="right") - 1] for x, values in series])
    deviation = curves.std(axis=0, ddof=1) if len(curves) > 1 else np.full(len(grid), np.nan)
    return grid, curves.mean(axis=0), deviation


def _accuracies(run: PageRun, axis: str, window: int) -> tuple[FloatArray, FloatArray]:
    """Return the smoothed accuracies of the measured rounds over an axis."""
    accuracy = np.array([one.accuracy for one in run.rounds], dtype=np.float64)
    x = run.axis(axis)
    known = np.isfinite(accuracy) & np.isfinite(x)
    return x[known], moving_average(accuracy[known], window)


def thin(length: int, most: int) -> list[int]:
    """Return at most ``most`` indices of a curve, spread evenly, with the first and the last.

    >>> thin(5, 10), thin(9, 5)
    ([0, 1, 2, 3, 4], [0, 2, 4, 6, 8])
    """
    return [int(i) for i in np.unique(np.round(np.linspace(0, length - 1, min(length, most))).astype(int))]


def ratio_table(verdict: Verdict, summaries: Sequence[RunSummary]) -> Columns:
    """Return the ratios to the reference: per measure the mean with its interval, a point per seed, and the band.

    The band is that of :func:`~fedsel_flwr.report.paired.reference_band`: ratios of the reference to itself.
    """
    rows = list[Sequence[Any]]()
    own = [one for one in summaries if one.selector == verdict.reference]
    for measure in MEASURES:
        for one in verdict.selectors:
            effect: PairedEffect = getattr(one, measure)
            word, p = (one.word, one.p) if measure == "time" else ("", effect.p)
            note = f"{effect.reached} of {effect.pairs} reach it" if effect.censored else ""
            mark = "*" if measure == "time" and p <= LEVEL else ""
            ends = effect.estimate, effect.low, effect.high
            rows.append((measure, "mean", one.selector, "", *ends, p, word, note or mark))
            each = zip(effect.seeds, effect.values, strict=True)
            rows += [(measure, "seed", one.selector, str(seed), value, *NOTHING, "", "") for seed, value in each]
        band = reference_band([getattr(one, FIGURES.get(measure, measure)) for one in own])
        rows.append((measure, "band", verdict.reference, "", math.nan, *band, math.nan, "", ""))
    return columns("measure kind selector seed ratio low high p verdict note", rows)


def unreached(verdict: Verdict) -> list[str]:
    """Return a sentence for each target that some runs never reached: on how many seeds each selector reached it."""
    found = []
    for target, effects in verdict.profile.items():
        if not any(effect.censored for effect in effects):
            continue
        first = effects[0]
        counts = [(effect.selector, effect.reached, effect.pairs) for effect in effects]
        counts.append((verdict.reference, first.reference_reached, first.pairs))
        never = [selector for selector, reached, _ in counts if not reached]
        by_count: dict[tuple[int, int], list[str]] = {}
        for selector, reached, pairs in sorted(counts, key=lambda one: -one[1]):
            if reached:
                by_count.setdefault((reached, pairs), []).append(selector)
        rest = [f"on {reached} of {pairs} seeds by {', '.join(own)}" for (reached, pairs), own in by_count.items()]
        text = [f"No run of {', '.join(never)} reaches {100 * target:g} %."] if never else []
        if rest:
            text.append(f"{100 * target:g} % is reached {'; '.join(rest)}.")
        found.append(" ".join(text))
    return found


def profile_table(verdict: Verdict) -> Columns:
    """Return the time ratio to the reference for each target accuracy, with its interval."""
    rows = (
        (target, effect.selector, effect.estimate, effect.low, effect.high, effect.reached, effect.pairs)
        for target, effects in verdict.profile.items()
        for effect in effects
    )
    return columns("target selector ratio low high reached pairs", rows)


def fairness_table(summaries: Sequence[RunSummary], figure: str) -> Columns:
    """Return a figure, such as Jain's index: per run, and means over the seeds with one deviation."""
    rows = [(str(one.seed), one.selector, getattr(one, figure), math.nan, math.nan) for one in summaries]
    for row in aggregate(summaries):
        mean, deviation = row.figures[figure].mean, row.figures[figure].deviation
        rows.append((ALL, row.selector, mean, mean - deviation, mean + deviation))
    return columns("seed selector value low high", rows)


def ranks(runs: Sequence[PageRun], num_clients: int) -> dict[int, FloatArray]:
    """Return for each seed the clients' mean latencies, in seconds, over all runs on this seed.

    Returns:
        Seed -> latencies, shape (num_clients,); NaN for a client that no run selected.
    """
    found = dict[int, FloatArray]()
    for seed in dict.fromkeys(run.seed for run in runs):
        columns = [run.clients for run in runs if run.seed == seed]
        client, latency = (np.concatenate([one[name] for one in columns]) for name in ("client", "latency_s"))
        known = np.isfinite(latency)
        own = client[known].astype(int), latency[known]
        count, total = (np.bincount(own[0], weights, num_clients)[:num_clients] for weights in (None, own[1]))
        found[seed] = np.divide(total, count, out=np.full(num_clients, math.nan), where=count > 0)
    return found


def selection_tables(runs: Sequence[PageRun], num_clients: int) -> tuple[Columns, Columns]:
    """Return the number of selections against the mean latency.

    Returns:
        A table with a row per client, at most :data:`MOST_POINTS`, in which the rows of :data:`ALL` are the clients of
        all seeds. A table with a row per tenth of the clients, sorted by latency.
    """
    most, rows = MOST_POINTS[len(runs) > FEW_RUNS], list[Sequence[Any]]()
    latencies = ranks(runs, num_clients)

    def points(run: PageRun) -> tuple[IntArray, FloatArray, IntArray]:
        # The selected clients, the fastest first, with their latencies and numbers of selections.
        latency, counts = latencies[run.seed], run.history.selection_counts(num_clients)
        order = np.argsort(latency)[: int(np.isfinite(latency).sum())]
        return order, latency[order], counts[order]

    def tenths(run: PageRun) -> _Found:
        parts = zip(*(np.array_split(own, 10) for own in points(run)[1:]), strict=True)
        return {(i,): (x.mean(), count.mean()) for i, (x, count) in enumerate(parts, start=1) if x.size}

    for selector, own in by_selector(runs).items():
        everyone = list[tuple[float, str, int]]()
        for run in own:
            each = list(zip(*(one.tolist() for one in points(run)), strict=True))
            rows += [(str(run.seed), selector, str(each[i][0]), *each[i][1:]) for i in thin(len(each), most)]
            everyone += [(x, f"{client} of seed {run.seed}", count) for client, x, count in each]
        everyone.sort()
        for i in thin(len(everyone), most):
            x, client, count = everyone[i]
            rows.append((ALL, selector, client, x, count))
    names = "tenth latency_s selections_per_client"
    return columns("seed selector client latency_s selections", rows), _of_runs(names, runs, tenths)


def group_edges(size: int, most: int) -> np.ndarray[Any, Any]:
    """Return the edges of at most ``most`` groups of equal length; only the last group may be shorter.

    >>> group_edges(10, 4), group_edges(3, 4)
    (array([ 0,  3,  6,  9, 10]), array([0, 1, 2, 3]))
    """
    return np.append(np.arange(0, size, max(1, math.ceil(size / most))), size)


def map_table(runs: Sequence[PageRun], num_clients: int) -> tuple[Columns, int]:
    """Return how often clients were selected in groups of rounds: clients in the order of their latency.

    Returns:
        The table, and the number of single seeds that have a map.
    """
    latencies = ranks(runs, num_clients)
    rows, groups = (
        group_edges(size, most) for size, most in zip((num_clients, last_round(runs)), MAP_CELLS, strict=True)
    )

    def cells(run: PageRun) -> _Found:
        # Clients that were never selected have no latency, and come last.
        place = np.argsort(np.argsort(latencies[run.seed]))[run.clients["client"].astype(int)]
        counts, *_ = np.histogram2d(place, run.clients["round"] - 1, bins=(rows, groups))
        return {
            (*rows[i : i + 2].tolist(), *(groups[j : j + 2] + 1).tolist()): counts[i, j]
            for i, j in zip(*np.nonzero(counts), strict=True)
        }

    found = {id(run): cells(run) for run in runs}
    cells_of_seed = sum(map(len, found.values())) / max(1, len(latencies))
    shown = list(latencies)[: max(1, int(MAP_ROWS / max(1.0, cells_of_seed)))]
    names = "place place_end round round_end selections"
    return _of_runs(names, runs, lambda run: found[id(run)], missing=0.0, seeds=shown), len(shown)


def last_round(runs: Sequence[PageRun]) -> int:
    """Return the number of the last round of all runs; 0 if there is none."""
    return max((run.rounds[-1].round for run in runs if run.rounds), default=0)


def _of_runs(
    names: str,
    runs: Sequence[PageRun],
    of: Callable[[PageRun], _Found],
    *,
    missing: float | None = None,
    seeds: Sequence[int] | None = None,
) -> Columns:
    """Return a table with the rows of each run, and the means over the runs of a selector.

    Args:
        names: Names of the columns after ``seed`` and ``selector``.
        runs: The runs.
        of: Function that returns the rows of a run.
        missing: Value of a row that a run lacks. If None, such a row has no mean.
        seeds: Seeds whose rows are in the table. If None, all.
    """
    rows = list[Sequence[Any]]()
    for selector, own in by_selector(runs).items():
        found = [of(run) for run in own]
        for run, mine in zip(own, found, strict=True):
            if seeds is None or run.seed in seeds:
                rows += [(str(run.seed), selector, *key, *np.atleast_1d(one).tolist()) for key, one in mine.items()]
        for key in dict.fromkeys(key for mine in found for key in mine):
            values = [mine.get(key, missing) for mine in found]
            if all(value is not None for value in values):
                rows.append((ALL, selector, *key, *np.atleast_1d(np.mean(values, axis=0)).tolist()))
    return columns(f"seed selector {names}", rows)


def failure_table(runs: Sequence[PageRun]) -> Columns:
    """Return the failed clients per round, by reason, in groups of rounds."""
    names, edges = usual_reasons(runs), group_edges(last_round(runs), MAP_CELLS[1])

    def failures(run: PageRun) -> _Found:
        group = np.searchsorted(edges, [number for number, _ in run.reasons]) - 1
        counts = Counter(zip(group.tolist(), (_named(reason, names) for _, reason in run.reasons), strict=True))
        return {
            (int(edges[j] + 1), int(edges[j + 1] + 1), reason): n / int(edges[j + 1] - edges[j])
            for (j, reason), n in counts.items()
        }

    return _of_runs("round round_end reason clients_per_round", runs, failures, missing=0.0)


def usual_reasons(runs: Sequence[PageRun]) -> list[str]:
    """Return the :data:`REASONS` most frequent reasons of failure."""
    return [reason for reason, _ in Counter(one for run in runs for _, one in run.reasons).most_common(REASONS)]


def _named(reason: str, names: Sequence[str]) -> str:
    return reason if reason in names else "other"


def failure_counts(runs: Sequence[PageRun]) -> dict[str, dict[str, float]]:
    """Return selector -> reason of failure -> mean number of failed clients in a run; all other reasons as "other"."""
    names, found = usual_reasons(runs), dict[str, dict[str, float]]()
    for selector, own in by_selector(runs).items():
        counts = Counter(_named(reason, names) for run in own for _, reason in run.reasons)
        found[selector] = {reason: count / len(own) for reason, count in counts.items()}
    return found


def part_table(runs: Sequence[PageRun]) -> Columns:
    """Return the parts of a mean round, in seconds.

    Download, compute and upload are means over the completed clients. Failures are the seconds of
    :func:`failure_seconds`. Waiting is the rest of the round: the seconds for which a client waits for the slowest one.
    It is NaN if no client reports its parts, and in buffered rounds.
    """
    return _of_runs("part seconds", runs, lambda run: {(part,): one for part, one in round_parts(run).items()})


def round_parts(run: PageRun) -> dict[str, float]:
    """Return the parts of a run's mean round, in seconds; their sum is the mean duration of a round."""
    c = run.clients
    done = (c["completed"] > 0) & np.isfinite(c["download_s"] + c["compute_s"] + c["upload_s"] + c["took_s"])
    total = float(np.mean([one.round_s for one in run.rounds])) if run.rounds else math.nan
    probes = float(np.mean([one.probe_s for one in run.rounds])) if run.rounds else math.nan
    means = [float(c[f"{part}_s"][done].mean()) if done.any() else math.nan for part in PARTS[:3]]
    failures = float(failure_seconds(run).mean()) if run.rounds else math.nan
    return dict(zip(PARTS, (*means, total - probes - sum(means) - failures, failures, probes), strict=True))


def failure_seconds(run: PageRun) -> FloatArray:
    """Return the seconds of each round after its slowest usable update, in which it waited for failed clients.

    Returns:
        Seconds, shape (rounds,). If the clients of a round train in several waves, the seconds are those of its slowest
        clients.
    """
    c = run.clients
    numbers = [one.round for one in run.rounds]
    durations = np.array([one.round_s - one.probe_s for one in run.rounds], dtype=np.float64)
    place = np.searchsorted(numbers, c["round"])
    longest = np.zeros((2, len(numbers)))
    for own, rows in zip(longest, (c["completed"] > 0, (c["completed"] == 0) & (c["spare"] == 0)), strict=True):
        np.fmax.at(own, place[rows], c["took_s"][rows])
    # A round with over-selection or a deadline ends before a failed client's max_latency.
    return np.asarray(np.maximum(np.minimum(longest[1], durations) - longest[0], 0.0))


def regret_table(runs: Sequence[PageRun]) -> Columns:
    """Return the seconds lost per round so far, compared with the genie that knows the mean latencies."""
    places = thin(max((len(run.theta) for run in runs), default=0), CURVE_POINTS[len(runs) > FEW_RUNS])
    known = [run for run in runs if len(run.theta)]
    return _of_runs("round theta", known, lambda run: {(i + 1,): run.theta[i] for i in places if i < len(run.theta)})


def are_fractions(accuracies: Iterable[float]) -> bool:
    """Return whether all known accuracies are between 0 and 1. A quality of the user, such as R², may not be."""
    return all(0 <= value <= 1 for value in accuracies if math.isfinite(value))


def columns(names: str, rows: Iterable[Sequence[Any]]) -> Columns:
    """Return rows as columns with these names.

    >>> columns("place count", [(1, 5), (2, 3)])
    {'place': [1, 2], 'count': [5, 3]}
    """
    given = list(rows)
    return {name: [row[i] for row in given] for i, name in enumerate(names.split())}
