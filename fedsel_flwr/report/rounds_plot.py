"""The picture against rounds: accuracy, how many clients were ever selected, and the clients' selection fractions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.panels import GREY, blank, dress, finished, look_of
from fedsel_flwr.report.summary import smoothed

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fedsel_flwr.rounds.history import History


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
