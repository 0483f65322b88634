"""The comparison picture: accuracy against simulated time, differences in time, who was selected how often.

The panels of the comparison picture: accuracy, differences in time, how often each client was selected.

The picture against rounds: accuracy, how many clients were ever selected, and the clients' selection fractions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.run_folder import load_optional, replacing
from fedsel_flwr.report.summary import check_target, smoothed
from fedsel_flwr.report.verdict import PairedDifference

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


def plot_comparison(
    runs: Mapping[str, Sequence[History]],
    path: str | os.PathLike[str],
    *,
    num_clients: int,
    target_accuracy: float,
    title: str = "",
    differences: Sequence[PairedDifference] = (),
) -> Path:
    """Draw one PNG that compares selectors.

    Left: test accuracy (mean of five rounds, by which the target is reached) against simulated seconds, the mean over
    seeds (each seed carried forward from its last round) with a band of one standard deviation, and the target as a
    dashed line. Middle, where differences are given: simulated seconds to the target, selector minus reference, a
    point a seed, with mean and interval. Right: how often each client was selected, the most selected first, mean and
    band over the seeds at each rank.

    Args:
        runs: The histories of each selector, one per seed.
        path: The file to write, replaced if it exists.
        num_clients: Number of clients of the federation, those never selected included.
        target_accuracy: Test accuracy to mark, a fraction in (0, 1].
        title: Heading of the picture.
        differences: Of the seconds to the target, between selectors of ``runs`` and a reference.

    Returns:
        ``path``.

    Raises:
        ParameterError: If there is no run, or ``target_accuracy`` is not a fraction.
        RunError: If matplotlib is not installed.
    """
    check_target(target_accuracy)
    if not any(runs.values()):
        raise ParameterError("plot_comparison needs at least one history of one selector; it got none.")
    wide = bool(differences)
    figure = blank(14 if wide else 10)
    left, *middle, right = figure.subplots(1, 3 if wide else 2, width_ratios=(6, 4, 4) if wide else (3, 2))
    drawn = {selector: histories for selector, histories in runs.items() if histories}
    looks = {selector: look_of(index, len(drawn)) for index, selector in enumerate(drawn)}
    shapes: list[bytes] = []
    for selector, histories in drawn.items():
        look = looks[selector]
        draw_accuracy(left, selector, histories, look)
        counts = np.stack([np.sort(h.selection_counts(num_clients))[::-1] for h in histories])
        shapes.append(counts.mean(axis=0).tobytes())
        wider = {"linewidth": look["linewidth"] + 2.4 * (shapes.count(shapes[-1]) - 1)}  # shows below one like it
        draw_counts(right, counts, look | wider)
    for axes in middle:
        draw_differences(axes, differences, looks)
        what = f"Time to {100 * target_accuracy:g} %, against {differences[0].reference}"
        dress(axes, what, f"difference (s) with {100 * differences[0].confidence:g} % interval", "")
    _dress_outer(left, right, drawn, num_clients, target_accuracy)
    return finished(figure, left, title, path, dpi=200)


def _dress_outer(
    left: Axes, right: Axes, drawn: Mapping[str, Sequence[History]], num_clients: int, target_accuracy: float
) -> None:
    seeds = sorted({len(histories) for histories in drawn.values()})
    of_seeds = f"; mean ± sd of {' or '.join(map(str, seeds))} seeds" if seeds[-1] > 1 else ""
    target = f"target {100 * target_accuracy:g} %"
    left.axhline(100 * target_accuracy, color=GREY, linestyle="--", linewidth=1, zorder=1, label=target)
    left.set_xlim(left=0)
    right.set_xlim(0, num_clients)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_locator(load_optional("matplotlib.ticker").MaxNLocator(integer=True))
    dress(left, f"Accuracy, mean of 5 rounds{of_seeds}", "simulated time (s)", "test accuracy (%)")
    dress(right, "How often each client was selected", "clients, most selected first", "times selected")


MOST_BANDS = 4
"""Bands of more selectors hide each other."""


def selection_fractions(history: History, num_clients: int) -> NDArray[np.float64]:
    """Return the share of the rounds so far in which each client was selected.

    Args:
        history: What happened.
        num_clients: Number of clients of the federation, those never selected included.

    Returns:
        Shape (rounds, num_clients); a row a round, by the clients' rows.
    """
    chosen = np.zeros((len(history.rounds), num_clients))
    place = {record.round: i for i, record in enumerate(history.rounds)}
    for row in history.clients:
        chosen[place[row.round], row.client] = 1.0
    return np.asarray(chosen.cumsum(axis=0) / np.arange(1, len(chosen) + 1)[:, np.newaxis])


def plot_rounds(
    runs: Mapping[str, Sequence[History]],
    path: str | os.PathLike[str],
    *,
    num_clients: int,
    target_accuracy: float,
    title: str = "",
    lost: Mapping[str, Sequence[ArrayLike]] | None = None,
) -> Path:
    """Draw one PNG of what happened by rounds, where :func:`~fedsel_flwr.report.plots.plot_comparison` has seconds.

    Left: test accuracy, mean of five rounds. Middle: clients selected at least once. Right: the selection fractions of
    all clients of the first seed, median and, of up to four selectors, the range between the least and the most
    selected one. A fourth panel shows what waiting was lost against knowing the clients' means. All but the fractions
    are means over the seeds, as far as all of them go.

    Args:
        runs: The histories of each selector, one per seed.
        path: The file to write, replaced if it exists.
        num_clients: Number of clients of the federation, those never selected included.
        target_accuracy: Test accuracy to mark, a fraction in (0, 1].
        title: Heading of the picture.
        lost: Selector -> Xia's theta of each of its runs, seconds lost a round so far, by rounds; None draws no such
            panel.

    Returns:
        ``path``.

    Raises:
        ParameterError: If there is no run.
        RunError: If matplotlib is not installed.
    """
    drawn = {selector: histories for selector, histories in runs.items() if histories}
    if not drawn:
        raise ParameterError("plot_rounds needs at least one history of one selector; it got none.")
    figure = blank(18 if lost else 14)
    left, middle, right, *last = figure.subplots(1, 4 if lost else 3)
    banded = len(drawn) <= MOST_BANDS
    highest = 0.0  # of the fractions, the first rounds left out, in which they are near 1
    for index, (selector, histories) in enumerate(drawn.items()):
        look = look_of(index, len(drawn))
        rounds = np.arange(1, min(len(h.rounds) for h in histories) + 1)
        curves = [_accuracy(h)[: len(rounds)] for h in histories]
        left.plot(rounds, 100 * np.mean(curves, axis=0), label=selector, **look)
        fractions = [selection_fractions(h, num_clients) for h in histories]
        seen = [(own > 0).sum(axis=1)[: len(rounds)] for own in fractions]
        middle.plot(rounds, np.mean(seen, axis=0), **look)
        first, own_rounds = fractions[0], np.arange(1, len(fractions[0]) + 1)
        right.plot(own_rounds, np.median(first, axis=1), **look)
        edges = (first.min(axis=1), first.max(axis=1)) if banded else (np.median(first, axis=1),) * 2
        right.fill_between(own_rounds, *edges, color=look["color"], alpha=0.12, linewidth=0)
        highest = max(highest, float(edges[1][len(first) // 5 :].max(initial=0.0)))
        for axes in last:
            each = [np.asarray(one, dtype=np.float64)[: len(rounds)] for one in (lost or {})[selector]]
            axes.plot(rounds, np.mean(each, axis=0), **look)
            axes.axhline(0, color=GREY, linewidth=1, zorder=1)
            dress(axes, "Lost against knowing the means (theta)", "round", "seconds a round so far")
    left.axhline(100 * target_accuracy, color=GREY, linestyle="--", linewidth=1, zorder=1)
    middle.axhline(num_clients, color=GREY, linestyle="--", linewidth=1, zorder=1)
    middle.set_ylim(bottom=0)
    right.set_ylim(0, 1.1 * highest or 1.0)
    for axes in (left, middle, right, *last):
        axes.set_xlim(left=1)
    dress(left, "Accuracy, mean of 5 rounds", "round", "test accuracy (%)")
    dress(middle, "Clients selected at least once", "round", "clients")
    spread = ": median, least to most" if banded else " of the median client"
    dress(right, f"Selection fractions{spread}", "round", "share of the rounds so far")
    return finished(figure, left, title, path, dpi=150)


def _accuracy(history: History) -> NDArray[np.float64]:
    """Smoothed accuracy of each round: the last one measured, NaN before the first."""
    values = np.array([record.accuracy for record in history.rounds], dtype=np.float64)
    measured = np.flatnonzero(np.isfinite(values))
    means = np.concatenate([[np.nan], smoothed(values[measured])])
    return np.asarray(means[np.searchsorted(measured, np.arange(len(values)), side="right")])
