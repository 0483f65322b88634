"""Panels of the pictures: each draws one figure of a comparison onto matplotlib's axes.

:mod:`fedsel_flwr.report.plots` combines them into pictures and writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.summary import TARGET_ROUNDS, moving_average
from fedsel_flwr.report.verdict import MARGIN, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
PERCENT = (0.0, 100.0)
"""Range of an accuracy, in percent."""


def draw_accuracy(
    axes: Axes, selector: str, histories: Sequence[History], style: Style, window: int = TARGET_ROUNDS
) -> None:
    """Draw smoothed accuracy against simulated seconds: the mean over the seeds, with one standard deviation."""
    runs = [[(r.simulated_s, 100 * r.accuracy) for r in h.rounds if not np.isnan(r.accuracy)] for h in histories]
    series = [np.reshape(np.array(run, dtype=np.float64), (-1, 2)) for run in runs]
    smooth = [(own[:, 0], moving_average(own[:, 1], window)) for own in series]
    grid, curves = common_grid(smooth)
    # If one seed was never measured, there is no mean over all seeds, and only the legend shows the selector.
    if not grid.size:
        axes.plot([], [], label=selector, **style)
        return
    mean = curves.mean(axis=0)
    axes.plot(grid, mean, drawstyle="steps-post", label=selector, **style)
    # A dot marks the end of the last seed.
    end = {"marker": "o", "markersize": 4.5, "color": style["color"], "zorder": style["zorder"]}
    axes.plot(grid[-1:], mean[-1:], **end)
    # A quality that the user defines may be outside the range of a fraction, as R² can be.
    is_fraction = PERCENT[0] <= curves.min() and curves.max() <= PERCENT[1]
    _draw_band(axes, grid, curves, style, limits=PERCENT if is_fraction else (-np.inf, np.inf))


def common_grid(series: Sequence[tuple[FloatArray, FloatArray]]) -> tuple[FloatArray, FloatArray]:
    """Resample the curves of several seeds at the same places, where each curve has the last value measured so far.

    Args:
        series: Places and values of each seed, ascending, each of shape (n,).

    Returns:
        The places from the first one at which every seed has a value, shape (m,), and the values, shape (seeds, m).
        Both are empty if a seed has no values.
    """
    if not all(len(x) for x, _ in series):
        return np.empty(0), np.empty((len(series), 0))
    grid = np.unique(np.concatenate([x for x, _ in series]))
    grid = grid[grid >= max(x[0] for x, _ in series)]
    return grid, np.stack([carry_forward(x, values, grid) for x, values in series])


def mean_curve(series: Sequence[tuple[FloatArray, FloatArray]]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return places, means and sample standard deviations of several seeds' curves (:func:`common_grid`).

    The deviations are NaN for one seed.
    """
    grid, curves = common_grid(series)
    if not grid.size:
        return grid, grid, grid
    deviation = curves.std(axis=0, ddof=1) if len(curves) > 1 else np.full(len(grid), np.nan)
    return grid, curves.mean(axis=0), deviation


def limit_to_percent(axes: Axes) -> None:
    """Limit an axis of accuracies to 0 and 100 %, if everything drawn is within these limits."""
    (low, high), (bottom, top) = axes.dataLim.intervaly, axes.get_ylim()
    if low >= PERCENT[0] > bottom:
        axes.set_ylim(bottom=PERCENT[0])
    if high <= PERCENT[1] < top:
        axes.set_ylim(top=PERCENT[1])


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
        axes.plot(targets, middle, marker="o", markersize=3.5, label=one.selector, **style)
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


def draw_counts(axes: Axes, selector: str, counts: NDArray[Any], style: Style) -> None:
    """Draw the clients' selection counts in descending order: mean and band over the seeds."""
    edges = np.arange(counts.shape[1] + 1)
    axes.stairs(counts.mean(axis=0), edges, baseline=None, label=selector, **style)
    # fill_between needs a value at each edge, stairs a value between edges, so the last count is repeated.
    _draw_band(axes, edges, np.append(counts, counts[:, -1:], axis=1), style)


def _draw_band(
    axes: Axes,
    x: NDArray[Any],
    curves: NDArray[Any],
    style: Style,
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> None:
    """Draw a band of one standard deviation around the mean of the curves, if there are several curves."""
    if len(curves) > 1:
        mean, deviation = curves.mean(axis=0), curves.std(axis=0, ddof=1)
        edges = (np.maximum(mean - deviation, limits[0]), np.minimum(mean + deviation, limits[1]))
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


def label_panel(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Give a panel its title, labels and grid."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
