"""Advice: whether selection by latency pays for a fleet, by how much, and with which selector.

:func:`advise` fits the model of :mod:`~fedsel_flwr.report.components` to a history of latencies. Then it draws
fleets from the fitted model, and runs the selectors on each fleet without training
(:mod:`~fedsel_flwr.report.choices`). The *saving* of a selector is the share of random selection's seconds per round
that it saves. The *ceiling* is the saving of sorted groups: no selection with equal shares has much shorter rounds.

Let d be the logs of the ratios of seconds per round to random selection, one per drawn fleet and its run. The saving is
1 - exp(mean(d)), and its interval comes from

    mean(d) ± c · √(h² + 0.01²),    h = t_{n-1, 0.975} · sd(d) · √(1 + 1/n).

Here h belongs to Student's interval for one more run, and 0.01 says that no model is exact (:data:`INEXACT`).
``benchmarks/advising.py`` found c = :data:`CALIBRATION` on 20 fleets that break the model: in 19 of them, the interval
holds at least 90 % of the real savings. The intervals are not corrected for several selectors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.choices import Fleet, draw_available, run_selectors, sorted_seconds
from fedsel_flwr.report.components import Interval, VarianceComponents, fit_components
from fedsel_flwr.report.latencies import SELECTORS, Latencies, read_latencies
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.summary import jain_index
from fedsel_flwr.selectors.registry import selector_class

Word = Literal["gain", "no gain", "not settled"]

FLEETS = 20
"""Number of drawn fleets."""
INEXACT = 0.01
"""Part of the half-widths of the savings' intervals, in logs, that no history makes smaller."""
CALIBRATION = 1.2
"""Factor of the half-widths of the savings' intervals, from ``benchmarks/advising.py``."""
MOST_CELLS = 30_000_000
"""Largest number of rounds times clients of a prediction, because memory grows with it."""
ROUNDS = 300
"""Number of rounds, if neither the folder nor the user gives one."""
SHORTER = (50, 100)
"""Numbers of rounds for which the saving is also stated, if they are smaller."""
MARGIN = 0.05
"""A saving below this share counts as no gain."""
MORE = " A longer history, or a prediction of more rounds (--rounds), may settle it."
"""Sentence after a saving that is not settled."""
UNADVISED = "fedcs"
"""A selector that the advice never recommends, because it always selects the fastest clients."""
SMALLEST_CEILING = 0.01
"""Share above which the interval of the ceiling must lie, so that shares of the ceiling are stated."""
SCENARIOS_PARAMETERS = "Selectors have the parameters of the folder's scenario."
DEPLOYMENTS_PARAMETERS = (
    'Selectors have the defaults of a deployment: min_latency and max_latency "auto", exploration 1.'
)
EVEN = 0.9
"""Smallest ratio of a selector's Jain's index to that of random selection, if the shares count as equal."""


@dataclass(frozen=True, kw_only=True)
class SelectorAdvice:
    """Prediction for one selector.

    Attributes:
        selector: Name of the selector.
        saving: Number of rounds -> share of random selection's seconds per round that the selector saves.
        ceiling_share: The saving divided by the ceiling; NaN if the ceiling may be 0.
        jain: Jain's index of the clients' selection counts after the last round.
        even: Whether the selector's shares count as equal (:data:`EVEN`).
        probes: Whether the selector probes clients. The time of probes is not counted.
        word: "gain" if the interval of the saving begins at :data:`MARGIN` or above, "no gain" if it ends below, else
            "not settled". The saving is that after the last round.
    """

    selector: str
    saving: Mapping[int, Interval]
    ceiling_share: float
    jain: float
    even: bool
    probes: bool
    word: Word

    @property
    def final(self) -> Interval:
        """The saving over all rounds."""
        return self.saving[max(self.saving)]

    @property
    def advisable(self) -> bool:
        """Whether the advice may recommend the selector."""
        return self.even and not self.probes and self.selector != UNADVISED


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advice on selection by latency for one fleet.

    Attributes:
        source: The folder or file.
        num_clients: Number of clients.
        clients_per_round: Number of clients that a round selects.
        max_latency: Seconds at which latencies are cut off; infinity if nothing is cut off.
        rounds: Number of rounds of the prediction.
        measured: Number of measured latencies.
        censored: Number of latencies that were cut off.
        failed: Number of failures for a reason other than time.
        left_out: Number of completed rows without a measured time.
        median_s: Median seconds of a typical client.
        spread: Standard deviation of the clients' mean log seconds.
        noise: Standard deviation of one client's log seconds.
        random_s: Seconds per round of random selection.
        sorted_s: Seconds per round of sorted groups.
        ceiling: Share of random selection's seconds that sorted groups save.
        random_jain: Jain's index of random selection after the last round.
        selectors: Predictions, in the order of :data:`~fedsel_flwr.report.latencies.SELECTORS`.
        preferred: The recommended selector; None if no selector is recommended.
        word: "gain" if a selector gains, "no gain" if no selector that may be recommended gains, else "not settled".
            FedCS does not count.
        sentence: The advice in words.
        notes: Values that were chosen by default, and the selectors' parameters, as sentences.
    """

    source: str
    num_clients: int
    clients_per_round: int
    max_latency: float
    rounds: int
    measured: int
    censored: int
    failed: int
    left_out: int
    median_s: float
    spread: Interval
    noise: Interval
    random_s: Interval
    sorted_s: Interval
    ceiling: Interval
    random_jain: float
    selectors: tuple[SelectorAdvice, ...]
    preferred: str | None
    word: Word
    sentence: str
    notes: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Return all values as plain types; None for a value that is unknown or infinite."""
        return {key: plain_values(value) for key, value in asdict(self).items()}

    def lines(self) -> list[str]:
        """Return the advice as text."""
        limit = "" if math.isinf(self.max_latency) else f" at {self.max_latency:g} s"
        rows = f"{self.measured:,} latencies measured, {self.censored:,} cut off{limit}"
        if self.failed:
            rows += f", {self.failed:,} failures"
        if self.left_out:
            rows += f", {self.left_out:,} without a measured time"
        return [
            self.sentence,
            f"{self.num_clients:,} clients, {self.clients_per_round:,} per round; {rows}",
            *self.notes,
            f"Standard deviations of log seconds: {_numbers(self.spread)} between clients (spread), "
            f"{_numbers(self.noise)} within a client (noise).",
            f"A round of random selection takes {_numbers(self.random_s)} seconds. With equal shares, "
            f"{_numbers(self.sorted_s)} are possible: the ceiling of a saving is {_percent(self.ceiling)}.",
            *self._table(),
        ]

    def _table(self) -> list[str]:
        ends = sorted(self.selectors[0].saving)
        head = ["saving after", *(f"{end} rounds" for end in ends), "of the ceiling", "Jain's index"]
        body = [
            [
                one.selector + ("*" if one.probes else ""),
                *(_percent(one.saving[end]) for end in ends),
                "-" if math.isnan(one.ceiling_share) else f"{100 * one.ceiling_share:.0f} %",
                f"{one.jain:.2f}",
            ]
            for one in self.selectors
        ]
        return [
            *aligned([head, *body]),
            f"Jain's index of random selection: {self.random_jain:.2f}. Ranges of savings held 9 of 10 single runs in "
            "19 of 20 fleets (docs/comparing.md). *: without the time of probes. Selectors that also read losses, such "
            "as oort, are not predicted.",
        ]


def advise(
    source: str | os.PathLike[str] | Latencies,
    *,
    clients_per_round: int | None = None,
    max_latency: float | None = None,
    rounds: int | None = None,
    seed: int = 1,
    num_clients: int | None = None,
) -> Advice:
    """Advise whether selection by latency pays, from a history of latencies.

    Args:
        source: The folder of a run or of a comparison, a ``checkpoint_dir``, a CSV file with the columns ``client`` and
            ``seconds``, or :class:`~fedsel_flwr.report.latencies.Latencies`.
        clients_per_round: Number of clients that a round selects. If None: that of the folder, or 5 % of the clients of
            a CSV file.
        max_latency: Seconds at which latencies are cut off. If None: those of the folder; in a CSV file, nothing is cut
            off.
        rounds: Number of rounds of the prediction. If None: that of the folder's scenario, else :data:`ROUNDS`.
        seed: Seed of the drawn fleets.
        num_clients: Number of clients of the fleet. If None: that of the folder, or the number of clients with a row in
            a CSV file.

    Returns:
        The advice.

    Raises:
        ParameterError: The file cannot be used. Or the history is too short, or a round selects all clients.
        RunError: SciPy or pyarrow is not installed.

    Examples:
        >>> clients, rng = np.tile(np.arange(20), 10), np.random.default_rng(1)
        >>> seconds = np.where(clients % 2, 30.0, 10.0) * np.exp(0.2 * rng.standard_normal(200))
        >>> history = Latencies(
        ...     client=clients, seconds=seconds, censored=np.zeros(200, dtype=bool), fleet=np.zeros(20, dtype=int),
        ...     num_clients=20, clients_per_round=4, num_examples=np.ones(20),
        ... )
        >>> advice = advise(history, rounds=20)
        >>> print(f"ceiling {100 * advice.ceiling.estimate:.0f} %: {advice.word}")
        ceiling 21 %: gain
    """
    if not isinstance(source, Latencies):
        source = read_latencies(
            source, clients_per_round=clients_per_round, max_latency=max_latency, num_clients=num_clients
        )
    m, seed = source.clients_per_round, whole("seed", seed, 0)
    rounds = whole("rounds", source.rounds or ROUNDS if rounds is None else rounds, 1)
    if rounds * source.num_clients > MOST_CELLS:
        raise ParameterError(
            f"a prediction of {rounds:,} rounds with {source.num_clients:,} clients has more than {MOST_CELLS:,} "
            "latencies. Set a smaller --rounds or --clients."
        )
    fitted = fit_components(source)
    if m >= source.num_clients:
        raise ParameterError(
            f"a round selects {m} of {source.num_clients} clients, so there is nothing to choose. Give a smaller "
            "--clients-per-round."
        )
    ends = (*(end for end in SHORTER if end < rounds), rounds)
    ratios = {name: np.zeros((FLEETS, len(ends))) for name in SELECTORS}
    jains = {name: np.zeros(FLEETS) for name in ("random", *SELECTORS)}
    expected, best = np.zeros(FLEETS), np.zeros(FLEETS)
    for i in range(FLEETS):
        fleet = _draw_fleet(source, fitted, i, seed)
        selections = _of_fleet(source, source.selections, i, 0)
        available = draw_available(source.num_available, selections, rounds, np.random.default_rng([seed, 3, i]))
        expected[i], seconds, found_rounds = run_selectors(fleet, m, seed + i, source.parameters, available)
        best[i] = sorted_seconds(seconds, fleet.log_means, m)
        taken = {}
        for name, chosen in found_rounds.items():
            jains[name][i] = jain_index(chosen.sum(axis=0))
            total = np.where(chosen, seconds, 0.0).max(axis=1).cumsum()
            taken[name] = total[np.array(ends) - 1]
        for name in SELECTORS:
            ratios[name][i] = np.log(taken[name] / taken["random"])
    ceiling = _saving(np.log(best / expected))
    random_jain = float(jains["random"].mean())
    found = []
    for name in SELECTORS:
        saving = {end: _saving(ratios[name][:, j]) for j, end in enumerate(ends)}
        final, jain = saving[rounds], float(jains[name].mean())
        found.append(
            SelectorAdvice(
                selector=name,
                saving=saving,
                ceiling_share=final.estimate / ceiling.estimate if ceiling.low > SMALLEST_CEILING else math.nan,
                jain=jain,
                even=jain >= EVEN * random_jain,
                probes=bool(selector_class(name).asks),
                word="no gain" if final.high < MARGIN else "gain" if final.low >= MARGIN else "not settled",
            )
        )
    preferred, word, sentence = _conclude(found, rounds, random_jain)
    return Advice(
        source=source.source, num_clients=source.num_clients, clients_per_round=m, max_latency=source.max_latency,
        rounds=rounds, measured=int((~source.censored).sum()), censored=int(source.censored.sum()),
        failed=source.failed, left_out=source.left_out, median_s=fitted.median_s, spread=fitted.spread,
        noise=fitted.noise, random_s=_mean(expected), sorted_s=_mean(best), ceiling=ceiling, random_jain=random_jain,
        selectors=tuple(found), preferred=preferred, word=word, sentence=sentence,
        notes=(*source.notes, SCENARIOS_PARAMETERS if source.parameters else DEPLOYMENTS_PARAMETERS),
    )  # fmt: skip


def _draw_fleet(source: Latencies, fitted: VarianceComponents, number: int, seed: int) -> Fleet:
    """Draw a fleet like one of the history's fleets, in turn."""
    clients = _clients_of_fleet(source, number)
    log_means, noise = fitted.draw_fleet(clients, source.num_clients, np.random.default_rng([seed, 2, number]))
    sizes = source.num_examples[clients]
    usual = float(np.nanmedian(sizes)) if np.isfinite(sizes).any() else 1.0
    examples = _of_fleet(source, np.where(np.isnan(source.num_examples), usual, source.num_examples), number, usual)
    return Fleet(
        log_means=log_means, noise=noise, shape=fitted.shape, max_latency=source.max_latency,
        failure_rate=source.failure_rate, num_examples=examples,
    )  # fmt: skip


def _clients_of_fleet(source: Latencies, number: int) -> IntArray:
    """Return the numbers of a fleet's clients; the fleets take turns."""
    fleets = np.unique(source.fleet)
    return np.flatnonzero(source.fleet == fleets[number % len(fleets)])


def _of_fleet(source: Latencies, values: npt.NDArray[Any], number: int, usual: float) -> npt.NDArray[Any]:
    """Return the values of a fleet's clients, shape (num_clients,), with ``usual`` for clients without a row."""
    own = values[_clients_of_fleet(source, number)]
    return np.concatenate([own, np.full(source.num_clients - len(own), usual, dtype=own.dtype)])


def _conclude(found: Sequence[SelectorAdvice], rounds: int, random_jain: float) -> tuple[str | None, Word, str]:
    """Return the recommended selector, the word for all selectors, and the sentences."""

    def told(one: SelectorAdvice) -> str:
        return f"{_percent(one.final)} of random selection's seconds per round over {rounds} rounds"

    ranked = sorted(found, key=lambda one: -one.final.estimate)
    # Predictions that leave something out come last.
    others = sorted((one for one in ranked if one.selector != UNADVISED), key=lambda one: one.probes)
    advisable = [one for one in ranked if one.advisable] or others
    gaining = [one for one in advisable if one.word == "gain" and one.advisable]
    probable = [one for one in advisable if one.final.low > 0 and one.final.estimate >= MARGIN and one.advisable]
    warning = _warn(found, gaining[0].final.estimate if gaining else 0.0)
    if gaining:
        top = gaining[0]
        text = (
            f"Try {top.selector}: it saves {told(top)}. The clients' shares are about as equal as those of random "
            f"selection (Jain's index {top.jain:.2f} and {random_jain:.2f})."
        )
        more = [one for one in others if one.word == "gain" and not one.even and not one.probes]
        if more and more[0].final.estimate > top.final.estimate:
            text += (
                f" {more[0].selector} saves more, {_percent(more[0].final)}. However, it selects fast clients more "
                f"often (Jain's index {more[0].jain:.2f}), so training may need more rounds."
            )
        return top.selector, "gain", text + warning
    if probable:
        top = probable[0]
        return None, "not settled", f"Probably {top.selector}: it saves {told(top)}.{MORE}{warning}"
    if beyond := [one for one in others if one.word == "gain"]:
        top = beyond[0]
        text = f"The largest saving is that of {top.selector}: {told(top)}."
        if top.probes:
            text += " This saving does not contain the time of probes."
        if not top.even:
            text += (
                f" It selects fast clients more often (Jain's index {top.jain:.2f}), so training may need more rounds."
            )
        text += " Compare the time to your target accuracy with fedsel compare before you decide."
        return None, "gain", text + warning
    if all(one.word == "no gain" for one in advisable):
        return None, "no gain", (
            f"No gain: no selector that may be recommended saves {100 * MARGIN:.0f} % or more of random selection's "
            f"seconds per round over {rounds} rounds. In seconds per round, random is as good.{warning}"
        )  # fmt: skip
    first = max((one for one in advisable if one.word == "not settled"), key=lambda one: one.final.high)
    return None, "not settled", (
        f"Not settled: the saving of {first.selector} over {rounds} rounds is {100 * first.final.low:.0f} to "
        f"{100 * first.final.high:.0f} % of random selection's seconds per round.{MORE}{warning}"
    )  # fmt: skip


def _warn(found: Sequence[SelectorAdvice], saving: float) -> str:
    """Return why FedCS is not recommended, if it saves more than this share."""
    one = next((one for one in found if one.selector == UNADVISED and one.word == "gain"), None)
    if one is None or one.final.estimate <= saving:
        return ""
    return (
        f" Do not use {one.selector} with this number of clients per round, although it saves {_percent(one.final)}. "
        f"It selects the same few clients (Jain's index {one.jain:.2f}), and then missed the target accuracy on some "
        "seeds of every world of docs/results/selectors.md."
    )


def _mean(values: FloatArray) -> Interval:
    """Return the mean of the logs with Student's interval for one more value, as values."""
    centre, half = _student(np.log(values))
    return Interval(estimate=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half))


def _saving(logs: FloatArray) -> Interval:
    """Return 1 minus the ratio with its calibrated interval, from the logs of ratios."""
    centre, half = _student(logs)
    half = CALIBRATION * math.hypot(half, INEXACT)
    return Interval(estimate=-math.expm1(centre), low=-math.expm1(centre + half), high=-math.expm1(centre - half))


def _student(logs: FloatArray) -> tuple[float, float]:
    """Return the mean, and the half-width of Student's interval for one more value."""
    quantile = float(load_optional("scipy.stats").t.ppf(0.975, len(logs) - 1))
    return float(logs.mean()), quantile * float(logs.std(ddof=1)) * math.sqrt(1 + 1 / len(logs))


def _numbers(one: Interval) -> str:
    digits = 3 if one.estimate < 0.1 else 2 if one.estimate < 10 else 1
    return f"{one.estimate:.{digits}f} ({one.low:.{digits}f} to {one.high:.{digits}f})"


def _percent(one: Interval) -> str:
    return f"{100 * one.estimate:.0f} % ({100 * one.low:.0f} to {100 * one.high:.0f} %)"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, in which each column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plain_values(value: Any) -> Any:
    """Convert to the types of JSON: None for a number that is not finite, ISO 8601 for a time."""
    if isinstance(value, Mapping):
        return {str(key): plain_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.isoformat() if isinstance(value, datetime) else value
