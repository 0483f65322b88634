"""The comparison picture: accuracy against simulated time, differences in time, who was selected how often."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.files import load_optional
from fedsel_flwr.report.paired import PairedDifference
from fedsel_flwr.report.panels import (
    GREY,
    blank,
    draw_accuracy,
    draw_counts,
    draw_differences,
    dress,
    finished,
    look_of,
)
from fedsel_flwr.report.summary import check_target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedsel_flwr.rounds.history import History


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
