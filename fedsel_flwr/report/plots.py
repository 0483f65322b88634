"""The comparison picture: accuracy against simulated time, and who was selected how often."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.files import load_optional, replacing
from fedsel_flwr.report.summary import check_target

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike, NDArray

    from fedsel_flwr.rounds.history import History

    FloatArray = NDArray[np.float64]

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


def plot_comparison(
    runs: Mapping[str, Sequence[History]],
    path: str | os.PathLike[str],
    *,
    num_clients: int,
    target_accuracy: float,
    title: str = "",
) -> Path:
    """Draw one PNG that compares selectors.

    Left: test accuracy against simulated seconds, the mean over seeds (each seed carried forward from its last round)
    with a band from the lowest to the highest seed, and the target as a dashed line. Right: how often each client was
    selected, the most selected first, the mean over seeds at each rank.

    Args:
        runs: The histories of each selector, one per seed.
        path: The file to write, replaced if it exists.
        num_clients: Number of clients of the federation, those never selected included.
        target_accuracy: Test accuracy to mark, a fraction in (0, 1].
        title: Heading of the picture.

    Returns:
        ``path``.

    Raises:
        ParameterError: If there is no run, or ``target_accuracy`` is not a fraction.
        RunError: If matplotlib is not installed.
    """
    check_target(target_accuracy)
    if not any(runs.values()):
        raise ParameterError("plot_comparison needs at least one history of one selector; it got none.")
    figure = load_optional("matplotlib.figure").Figure(figsize=(10, 4.6), layout="constrained", facecolor="white")
    load_optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    drawn = {selector: histories for selector, histories in runs.items() if histories}
    shapes: list[bytes] = []
    for index, (selector, histories) in enumerate(drawn.items()):
        look = _look(index, len(drawn))
        _draw_accuracy(left, selector, histories, look)
        counts = np.stack([np.sort(h.selection_counts(num_clients))[::-1] for h in histories])
        shapes.append(counts.mean(axis=0).tobytes())
        wider = {"linewidth": look["linewidth"] + 2.4 * (shapes.count(shapes[-1]) - 1)}  # shows below one like it
        _draw_counts(right, counts, look | wider)
    seeds = sorted({len(histories) for histories in drawn.values()})
    of_seeds = f" (mean and range of {' or '.join(map(str, seeds))} seeds)" if seeds[-1] > 1 else ""
    target = f"target {100 * target_accuracy:g} %"
    left.axhline(100 * target_accuracy, color=GREY, linestyle="--", linewidth=1, zorder=1, label=target)
    left.set_xlim(left=0)
    right.set_xlim(0, num_clients)
    right.set_ylim(bottom=0)
    _dress(left, f"Accuracy against simulated time{of_seeds}", "simulated time (s)", "test accuracy (%)")
    _dress(
        right,
        "How often each client was selected",
        "clients, most selected first",
        f"times selected{' (mean and range)' if of_seeds else ''}",
    )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, fontsize=10)
    if title:
        figure.suptitle(title, fontsize=13)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=200)
    return Path(path)


def _draw_accuracy(axes: Axes, selector: str, histories: Sequence[History], look: dict[str, Any]) -> None:
    runs = [[(r.simulated_s, 100 * r.accuracy) for r in h.rounds if not np.isnan(r.accuracy)] for h in histories]
    series = [np.reshape(np.array(run, dtype=np.float64), (-1, 2)) for run in runs]
    if not all(len(s) for s in series):  # a seed without any measurement: the mean never starts
        axes.plot([], [], label=selector, **look)
        return
    grid = np.unique(np.concatenate([s[:, 0] for s in series]))
    grid = grid[grid >= max(s[0, 0] for s in series)]  # the mean starts where every seed has a value
    curves = np.stack([carry_forward(s[:, 0], s[:, 1], grid) for s in series])
    mean = curves.mean(axis=0)
    axes.plot(grid, mean, drawstyle="steps-post", label=selector, **look)
    end = {"marker": "o", "markersize": 4.5, "color": look["color"], "zorder": look["zorder"]}
    axes.plot(grid[-1:], mean[-1:], **end)  # the last seed ends here
    if len(curves) > 1:
        _band(axes, grid, curves, look)


def _draw_counts(axes: Axes, counts: NDArray[Any], look: dict[str, Any]) -> None:
    edges = np.arange(counts.shape[1] + 1)
    axes.stairs(counts.mean(axis=0), edges, baseline=None, **look)
    if len(counts) > 1:
        _band(axes, edges, np.append(counts, counts[:, -1:], axis=1), look)


def _band(axes: Axes, x: NDArray[Any], curves: NDArray[Any], look: dict[str, Any]) -> None:
    low, high = curves.min(axis=0), curves.max(axis=0)
    axes.fill_between(x, low, high, step="post", color=look["color"], alpha=0.15, linewidth=0)


def _dress(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def _look(index: int, total: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "linewidth": 1.6 if total <= len(COLOURS) else 1.2,
        "zorder": 3 - index / total,  # the first selector lies on top
    }
