"""The panels of the comparison picture: accuracy, differences in time, how often each client was selected."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.report.files import load_optional, replacing
from fedsel_flwr.report.paired import PairedDifference
from fedsel_flwr.report.summary import smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike, NDArray

    from fedsel_flwr.rounds.history import History

    FloatArray = NDArray[np.float64]
    Look = Mapping[str, Any]

# Okabe and Ito's palette for all kinds of colour vision, without yellow, which is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))  # the next seven selectors are dashed, then dotted
GREY = "#595959"


def carry_forward(times: ArrayLike, values: ArrayLike, grid: ArrayLike) -> FloatArray:
    """Read a series of measurements at other times: the last value measured so far.

    Args:
        times: When the values were measured, ascending, shape (n,), in seconds.
        values: The measurements, shape (n,); NaN where nothing was measured.
        grid: Times at which to read, shape (m,), in seconds.

    Returns:
        Shape (m,): at each time of ``grid`` the last value measured at or before it; NaN before the first.

    Examples:
        >>> carry_forward([1.0, 3.0], [0.5, 0.7], [0.0, 1.0, 2.9, 3.0, 9.0]).tolist()
        [nan, 0.5, 0.5, 0.7, 0.7]
    """
    t, v = np.asarray(times, dtype=np.float64), np.asarray(values, dtype=np.float64)
    measured = ~np.isnan(v)
    t, v = t[measured], np.concatenate([[np.nan], v[measured]])
    result: FloatArray = v[np.searchsorted(t, np.asarray(grid, dtype=np.float64), side="right")]
    return result


def look_of(index: int, total: int) -> dict[str, Any]:
    """How the selector number ``index`` of ``total`` is drawn, everywhere."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "linewidth": 1.6 if total <= len(COLOURS) else 1.2,
        "zorder": 3 - index / total,  # the first selector lies on top
    }


def draw_accuracy(axes: Axes, selector: str, histories: Sequence[History], look: Look) -> None:
    """Draw smoothed accuracy against simulated seconds: mean over the seeds, and one standard deviation around it."""
    runs = [[(r.simulated_s, 100 * r.accuracy) for r in h.rounds if not np.isnan(r.accuracy)] for h in histories]
    series = [np.reshape(np.array(run, dtype=np.float64), (-1, 2)) for run in runs]
    if not all(len(s) for s in series):  # a seed without any measurement: the mean never starts
        axes.plot([], [], label=selector, **look)
        return
    grid = np.unique(np.concatenate([s[:, 0] for s in series]))
    grid = grid[grid >= max(s[0, 0] for s in series)]  # the mean starts where every seed has a value
    curves = np.stack([carry_forward(s[:, 0], smoothed(s[:, 1]), grid) for s in series])
    mean = curves.mean(axis=0)
    axes.plot(grid, mean, drawstyle="steps-post", label=selector, **look)
    end = {"marker": "o", "markersize": 4.5, "color": look["color"], "zorder": look["zorder"]}
    axes.plot(grid[-1:], mean[-1:], **end)  # the last seed ends here
    _band(axes, grid, curves, look)


def draw_differences(axes: Axes, differences: Sequence[PairedDifference], looks: Mapping[str, Look]) -> None:
    """Draw each selector's difference to the reference: a point a seed, below them mean and interval."""
    axes.axvline(0, color=GREY, linewidth=1, zorder=1)
    for row, difference in enumerate(differences):
        colour = looks[difference.selector]["color"]
        known = [value for value in difference.differences if np.isfinite(value)]
        axes.plot(known, [row - 0.16] * len(known), "o", color=colour, alpha=0.45, markersize=5, markeredgewidth=0)
        if np.isfinite(difference.low):
            axes.plot([difference.low, difference.high], [row + 0.12] * 2, color=colour, linewidth=2.4)
            axes.plot([difference.mean], [row + 0.12], "D", color=colour, markersize=7)
        elif len(known) < difference.pairs:
            said = f"{difference.reached} of {difference.pairs} arrived"
            axes.annotate(said, (0.02, row + 0.12), xycoords=("axes fraction", "data"), color=colour, fontsize=9)
    axes.set_yticks(range(len(differences)), [difference.selector for difference in differences])
    axes.set_ylim(len(differences) - 0.5, -0.5)


def draw_counts(axes: Axes, counts: NDArray[Any], look: Look) -> None:
    """Draw how often clients were selected, the most selected first, as :func:`draw_accuracy` draws."""
    edges = np.arange(counts.shape[1] + 1)
    axes.stairs(counts.mean(axis=0), edges, baseline=None, **look)
    _band(axes, edges, np.append(counts, counts[:, -1:], axis=1), look)


def dress(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Give a panel its title, labels and grid."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def blank(width: float) -> Figure:
    """An empty picture, so many inches wide, that needs no screen."""
    figure: Figure = load_optional("matplotlib.figure").Figure(
        figsize=(width, 4.6), layout="constrained", facecolor="white"
    )
    load_optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def finished(figure: Figure, named: Axes, title: str, path: str | os.PathLike[str], dpi: int) -> Path:
    """Add the heading and, below, the names that a panel has, write the PNG, and return its path."""
    handles, labels = named.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, fontsize=10)
    if title:
        figure.suptitle(title, fontsize=13)
    # a dollar sign in a label is no formula, and a wrong formula would end the report
    for text in figure.findobj(load_optional("matplotlib.text").Text):
        text.set_parse_math(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)
    return Path(path)


def _band(axes: Axes, x: NDArray[Any], curves: NDArray[Any], look: Look) -> None:
    if len(curves) > 1:
        mean, deviation = curves.mean(axis=0), curves.std(axis=0, ddof=1)
        edges = (mean - deviation, mean + deviation)
        axes.fill_between(x, *edges, step="post", color=look["color"], alpha=0.15, linewidth=0)
