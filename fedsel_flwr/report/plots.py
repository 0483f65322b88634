"""Pictures of a comparison, as PNG files: by simulated seconds, and by rounds.

The picture by seconds shows accuracy, time ratios to a reference, and the clients' selection counts. The picture by
rounds shows accuracy, the number of clients selected so far, and the clients' selection fractions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.run_folder import atomic_write, load_optional
from fedsel_flwr.report.summary import TARGET_ROUNDS, check_target, moving_average
from fedsel_flwr.report.verdict import MARGIN, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike, NDArray

    from fedsel_flwr.rounds.history import History

    FloatArray = NDArray[np.float64]
    Style = Mapping[str, Any]

# Okabe and Ito's palette, which people with colour-vision deficiency can distinguish. Yellow is left out, because it is
# too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# The first seven selectors have solid lines, the next seven dashed lines, and the rest dotted lines.
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
GREY = "#595959"
MOST_BANDS = 4
"""Largest number of selectors for which the range of the fractions is drawn. More bands would hide each other."""


def plot_comparison(
    runs: Mapping[str, Sequence[History]],
    path: str | os.PathLike[str],
    *,
    num_clients: int,
    target_accuracy: float,
    title: str = "",
    verdict: Verdict | None = None,
    target_rounds: int = TARGET_ROUNDS,
) -> Path:
    """Draw one PNG that compares selectors by simulated seconds.

    Left: test accuracy against simulated seconds, smoothed over ``target_rounds`` measured rounds. The line is the mean
    over the seeds, and each seed keeps its last value after its end. The band is one standard deviation, and the dashed
    line is the target.

    Middle, if there is a verdict: the ratio of the time to the target, compared with the reference. There is one point
    per seed, with mean and interval. Below it, the ratio by target, with its interval as a band.

    Right: the selection counts of the clients, in descending order, with mean and band over the seeds at each rank.

    Args:
        runs: The histories of each selector, one per seed.
        path: Path of the file, which is replaced if it exists.
        num_clients: Number of clients of the federation, including clients that were never selected.
        target_accuracy: Test accuracy to mark, a fraction in (0, 1].
        title: Heading of the picture.
        verdict: Verdict on these runs. If None, no ratios are drawn.
        target_rounds: Number of measured rounds whose mean accuracy must reach the target.

    Returns:
        ``path``.

    Raises:
        ParameterError: There is no run, or ``target_accuracy`` is not a fraction.
        RunError: matplotlib is not installed.
    """
    check_target(target_accuracy)
    if not any(runs.values()):
        raise ParameterError("plot_comparison got no run. Give at least one history of one selector.")
    figure = _new_figure(18 if verdict else 10)
    left, *middle, right = figure.subplots(1, 4 if verdict else 2, width_ratios=(6, 4, 4, 4) if verdict else (3, 2))
    drawn = {selector: histories for selector, histories in runs.items() if histories}
    styles = {selector: line_style(index, len(drawn)) for index, selector in enumerate(drawn)}
    shapes: list[bytes] = []
    for selector, histories in drawn.items():
        style = styles[selector]
        draw_accuracy(left, selector, histories, style, target_rounds)
        counts = np.stack([np.sort(h.selection_counts(num_clients))[::-1] for h in histories])
        shapes.append(counts.mean(axis=0).tobytes())
        # Selectors with equal counts, such as round-robin, would hide each other, so the lower lines are wider.
        wider = {"linewidth": style["linewidth"] + 2.4 * (shapes.count(shapes[-1]) - 1)}
        _draw_counts(right, counts, style | wider)
    if verdict:
        draw_ratios(middle[0], verdict, styles)
        draw_profile(middle[1], verdict, styles)
        what = f"Time to {100 * target_accuracy:g} %, ratio to {verdict.reference}"
        _label_panel(middle[0], what, "ratio with 95 % interval, a point a seed; grey: within 5 %", "")
        _label_panel(middle[1], "The same by target", "target accuracy (%)", "time ratio")
    _label_outer_panels(left, right, drawn, num_clients, target_accuracy, target_rounds)
    return _save_figure(figure, left, title, path, dpi=200)


def _label_outer_panels(
    left: Axes,
    right: Axes,
    drawn: Mapping[str, Sequence[History]],
    num_clients: int,
    target_accuracy: float,
    target_rounds: int,
) -> None:
    seeds = sorted({len(histories) for histories in drawn.values()})
    of_seeds = f"; mean ± sd of {' or '.join(map(str, seeds))} seeds" if seeds[-1] > 1 else ""
    target = f"target {100 * target_accuracy:g} %"
    left.axhline(100 * target_accuracy, color=GREY, linestyle="--", linewidth=1, zorder=1, label=target)
    left.set_xlim(left=0)
    right.set_xlim(0, num_clients)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_locator(load_optional("matplotlib.ticker").MaxNLocator(integer=True))
    _label_panel(left, f"Accuracy, mean of {target_rounds} rounds{of_seeds}", "simulated time (s)", "test accuracy (%)")
    _label_panel(right, "How often each client was selected", "clients, most selected first", "times selected")


def plot_rounds(
    runs: Mapping[str, Sequence[History]],
    path: str | os.PathLike[str],
    *,
    num_clients: int,
    target_accuracy: float,
    title: str = "",
    lost: Mapping[str, Sequence[ArrayLike]] | None = None,
    target_rounds: int = TARGET_ROUNDS,
) -> Path:
    """Draw one PNG that compares selectors by rounds, as :func:`plot_comparison` does by seconds.

    Left: test accuracy, the mean of ``target_rounds`` measured rounds. Middle: the number of clients selected at least
    once. Right: the selection fractions of the clients on the first seed. The line is the median. For up to four
    selectors, a band shows the range from the least to the most selected client.

    A fourth panel shows the waiting time lost, compared with known mean latencies of the clients. All panels except the
    fractions show means over the seeds, up to the last round that all seeds have.

    Args:
        runs: The histories of each selector, one per seed.
        path: Path of the file, which is replaced if it exists.
        num_clients: Number of clients of the federation, including clients that were never selected.
        target_accuracy: Test accuracy to mark, a fraction in (0, 1].
        title: Heading of the picture.
        lost: Selector -> Xia's theta of each of its runs, that is, the seconds lost per round so far, by rounds. If
            None, there is no fourth panel.
        target_rounds: Number of measured rounds whose mean accuracy must reach the target.

    Returns:
        ``path``.

    Raises:
        ParameterError: There is no run.
        RunError: matplotlib is not installed.
    """
    drawn = {selector: histories for selector, histories in runs.items() if histories}
    if not drawn:
        raise ParameterError("plot_rounds got no run. Give at least one history of one selector.")
    figure = _new_figure(18 if lost else 14)
    left, middle, right, *last = figure.subplots(1, 4 if lost else 3)
    banded = len(drawn) <= MOST_BANDS
    # The axis of the fractions ignores the first fifth of the rounds, in which fractions are near 1.
    highest = 0.0
    for index, (selector, histories) in enumerate(drawn.items()):
        style = line_style(index, len(drawn))
        rounds = np.arange(1, min(len(h.rounds) for h in histories) + 1)
        curves = [_accuracy(h, target_rounds)[: len(rounds)] for h in histories]
        left.plot(rounds, 100 * np.mean(curves, axis=0), label=selector, **style)
        fractions = [selection_fractions(h, num_clients) for h in histories]
        seen = [(own > 0).sum(axis=1)[: len(rounds)] for own in fractions]
        middle.plot(rounds, np.mean(seen, axis=0), **style)
        first, own_rounds = fractions[0], np.arange(1, len(fractions[0]) + 1)
        right.plot(own_rounds, np.median(first, axis=1), **style)
        edges = (first.min(axis=1), first.max(axis=1)) if banded else (np.median(first, axis=1),) * 2
        right.fill_between(own_rounds, *edges, color=style["color"], alpha=0.12, linewidth=0)
        highest = max(highest, float(edges[1][len(first) // 5 :].max(initial=0.0)))
        for axes in last:
            each = [np.asarray(one, dtype=np.float64)[: len(rounds)] for one in (lost or {})[selector]]
            axes.plot(rounds, np.mean(each, axis=0), **style)
            axes.axhline(0, color=GREY, linewidth=1, zorder=1)
            _label_panel(axes, "Lost against knowing the means (theta)", "round", "seconds a round so far")
    left.axhline(100 * target_accuracy, color=GREY, linestyle="--", linewidth=1, zorder=1)
    middle.axhline(num_clients, color=GREY, linestyle="--", linewidth=1, zorder=1)
    middle.set_ylim(bottom=0)
    right.set_ylim(0, 1.1 * highest or 1.0)
    for axes in (left, middle, right, *last):
        axes.set_xlim(left=1)
    _label_panel(left, f"Accuracy, mean of {target_rounds} rounds", "round", "test accuracy (%)")
    _label_panel(middle, "Clients selected at least once", "round", "clients")
    spread = ": median, least to most" if banded else " of the median client"
    _label_panel(right, f"Selection fractions{spread}", "round", "share of the rounds so far")
    return _save_figure(figure, left, title, path, dpi=150)


def selection_fractions(history: History, num_clients: int) -> NDArray[np.float64]:
    """Return, for each client, the share of the rounds so far in which it was selected.

    Args:
        history: History of the run.
        num_clients: Number of clients of the federation, including clients that were never selected.

    Returns:
        Shares of shape (rounds, num_clients): one row per round, with the clients in the order of their rows.
    """
    chosen = np.zeros((len(history.rounds), num_clients))
    place = {record.round: i for i, record in enumerate(history.rounds)}
    for row in history.clients:
        chosen[place[row.round], row.client] = 1.0
    return np.asarray(chosen.cumsum(axis=0) / np.arange(1, len(chosen) + 1)[:, np.newaxis])


def _accuracy(history: History, window: int) -> NDArray[np.float64]:
    """Return the moving average of the accuracy at each round; NaN before the first measurement."""
    values = np.array([record.accuracy for record in history.rounds], dtype=np.float64)
    measured = np.flatnonzero(np.isfinite(values))
    means = np.concatenate([[np.nan], moving_average(values[measured], window)])
    return np.asarray(means[np.searchsorted(measured, np.arange(len(values)), side="right")])


def draw_accuracy(
    axes: Axes, selector: str, histories: Sequence[History], style: Style, window: int = TARGET_ROUNDS
) -> None:
    """Draw smoothed accuracy against simulated seconds: the mean over the seeds, with one standard deviation."""
    runs = [[(r.simulated_s, 100 * r.accuracy) for r in h.rounds if not np.isnan(r.accuracy)] for h in histories]
    series = [np.reshape(np.array(run, dtype=np.float64), (-1, 2)) for run in runs]
    # If one seed was never measured, there is no mean over all seeds, and only the legend shows the selector.
    if not all(len(s) for s in series):
        axes.plot([], [], label=selector, **style)
        return
    grid = np.unique(np.concatenate([s[:, 0] for s in series]))
    # The mean starts when every seed has a value.
    grid = grid[grid >= max(s[0, 0] for s in series)]
    curves = np.stack([carry_forward(s[:, 0], moving_average(s[:, 1], window), grid) for s in series])
    mean = curves.mean(axis=0)
    axes.plot(grid, mean, drawstyle="steps-post", label=selector, **style)
    # A dot marks the end of the last seed.
    end = {"marker": "o", "markersize": 4.5, "color": style["color"], "zorder": style["zorder"]}
    axes.plot(grid[-1:], mean[-1:], **end)
    _draw_band(axes, grid, curves, style)


def draw_ratios(axes: Axes, verdict: Verdict, styles: Mapping[str, Style]) -> None:
    """Draw each selector's time ratios to the reference: one point per seed, and below them mean and interval."""
    # The scale is logarithmic, so half the time and twice the time have the same distance from 1.
    _prepare_ratio_axis(axes, "x")
    for row, one in enumerate(verdict.selectors):
        effect, colour = one.time, styles[one.selector]["color"]
        known = [value for value in effect.values if np.isfinite(value)]
        axes.plot(known, [row - 0.16] * len(known), "o", color=colour, alpha=0.45, markersize=5, markeredgewidth=0)
        if np.isfinite(effect.low):
            axes.plot([effect.low, effect.high], [row + 0.12] * 2, color=colour, linewidth=2.4)
            axes.plot([effect.estimate], [row + 0.12], "D", color=colour, markersize=7)
        elif effect.censored:
            # On some seeds the target was never reached. The mean of the others would favour this selector, so show
            # counts.
            text = f"{effect.reached} of {effect.pairs} reach it"
            axes.annotate(text, (0.02, row + 0.12), xycoords=("axes fraction", "data"), color=colour, fontsize=9)
    axes.set_yticks(range(len(verdict.selectors)), [one.selector for one in verdict.selectors])
    axes.set_ylim(len(verdict.selectors) - 0.5, -0.5)


def draw_profile(axes: Axes, verdict: Verdict, styles: Mapping[str, Style]) -> None:
    """Draw each selector's time ratio by target, with its interval; a target that a run never reached has no ratio."""
    _prepare_ratio_axis(axes, "y")
    targets = 100 * np.array(list(verdict.profile))
    for i, one in enumerate(verdict.selectors):
        style = styles[one.selector]
        effects = [found[i] for found in verdict.profile.values()]
        low, middle, high = (np.array([getattr(e, name) for e in effects]) for name in ("low", "estimate", "high"))
        axes.plot(targets, middle, marker="o", markersize=3.5, **style)
        axes.fill_between(targets, low, high, color=style["color"], alpha=0.12, linewidth=0)
    for target, effects in zip(targets, verdict.profile.values(), strict=True):
        if any(effect.censored for effect in effects):
            # A ratio over the seeds that reached the target would favour a selector that failed on the others.
            place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
            axes.annotate("not on all seeds", (target, 0.02), color=GREY, fontsize=8, rotation=90, **place)
    axes.set_xticks(targets, [f"{target:g}" for target in targets])
    # Limits are set here, because margins would ignore targets without a ratio, which have no point.
    edge = 0.06 * (targets.max() - targets.min()) or 1.0
    axes.set_xlim(targets.min() - edge, targets.max() + edge)


def _prepare_ratio_axis(axes: Axes, axis: str) -> None:
    """Give an axis a logarithmic scale with plain numbers, a line at 1, and the margin of no difference in grey."""
    ticker = load_optional("matplotlib.ticker")
    vertical = axis == "x"
    (axes.axvline if vertical else axes.axhline)(1, color=GREY, linewidth=1, zorder=1)
    (axes.axvspan if vertical else axes.axhspan)(1 / MARGIN, MARGIN, color=GREY, alpha=0.12, linewidth=0, zorder=0)
    own = axes.xaxis if vertical else axes.yaxis
    axes.set(**{f"{axis}scale": "log"})
    own.set_major_locator(ticker.LogLocator(base=10, subs=(0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4)))
    own.set_major_formatter(ticker.FormatStrFormatter("%g"))
    own.set_minor_formatter(ticker.NullFormatter())


def _draw_counts(axes: Axes, counts: NDArray[Any], style: Style) -> None:
    """Draw the clients' selection counts in descending order: mean and band over the seeds."""
    edges = np.arange(counts.shape[1] + 1)
    axes.stairs(counts.mean(axis=0), edges, baseline=None, **style)
    # fill_between needs a value at each edge, stairs a value between edges, so the last count is repeated.
    _draw_band(axes, edges, np.append(counts, counts[:, -1:], axis=1), style)


def _draw_band(axes: Axes, x: NDArray[Any], curves: NDArray[Any], style: Style) -> None:
    """Draw a band of one standard deviation around the mean of the curves, if there are several curves."""
    if len(curves) > 1:
        mean, deviation = curves.mean(axis=0), curves.std(axis=0, ddof=1)
        edges = (mean - deviation, mean + deviation)
        axes.fill_between(x, *edges, step="post", color=style["color"], alpha=0.15, linewidth=0)


def carry_forward(times: ArrayLike, values: ArrayLike, grid: ArrayLike) -> FloatArray:
    """Resample a series of measurements: each time gets the last value measured so far.

    Args:
        times: Times of the measurements, ascending, shape (n,), in seconds.
        values: The measurements, shape (n,); NaN for a missing measurement.
        grid: Times of the result, shape (m,), in seconds.

    Returns:
        For each time in ``grid``, the last value measured at or before it, shape (m,); NaN before the first one.

    Examples:
        >>> carry_forward([1.0, 3.0], [0.5, 0.7], [0.0, 1.0, 2.9, 3.0, 9.0]).tolist()
        [nan, 0.5, 0.5, 0.7, 0.7]
    """
    t, v = np.asarray(times, dtype=np.float64), np.asarray(values, dtype=np.float64)
    measured = ~np.isnan(v)
    t, v = t[measured], np.concatenate([[np.nan], v[measured]])
    result: FloatArray = v[np.searchsorted(t, np.asarray(grid, dtype=np.float64), side="right")]
    return result


def line_style(index: int, total: int) -> dict[str, Any]:
    """Return the line style of selector number ``index`` of ``total``, the same in all panels."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "linewidth": 1.6 if total <= len(COLOURS) else 1.2,
        # The first selector is drawn on top.
        "zorder": 3 - index / total,
    }


def _new_figure(width: float) -> Figure:
    """Return an empty figure of this width in inches."""
    figure: Figure = load_optional("matplotlib.figure").Figure(
        figsize=(width, 4.6), layout="constrained", facecolor="white"
    )
    # Not with pyplot, because it would keep every figure in global state, and might look for a screen.
    load_optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def _label_panel(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Give a panel its title, labels and grid."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def _save_figure(figure: Figure, named: Axes, title: str, path: str | os.PathLike[str], dpi: int) -> Path:
    """Add the title, and below the panels the legend of the panel ``named``; write the PNG and return its path."""
    handles, labels = named.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, fontsize=10)
    if title:
        figure.suptitle(title, fontsize=13)
    # A dollar sign in a selector's label does not start a formula, and matplotlib raises an error for a wrong formula.
    for text in figure.findobj(load_optional("matplotlib.text").Text):
        text.set_parse_math(False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)
    return Path(path)
