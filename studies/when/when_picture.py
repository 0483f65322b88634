"""Picture of ``when.py``: heat maps of the ceiling and of BSFL's saving, and savings by the number of plays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from when_cells import Results
from when_fleet import Fleet

LINES = {
    "bsfl auto": ("BSFL, auto, exploration 1", "#0072b2", "-"),
    "bsfl auto 0.1": ("BSFL, auto, exploration 0.1", "#0072b2", "--"),
    "cs-ucb auto": ("CS-UCB, auto, exploration 1", "#d55e00", "-"),
    "cs-ucb auto 0.1": ("CS-UCB, auto, exploration 0.1", "#d55e00", "--"),
    "tifl": ("TiFL", "#cc79a7", "-"),
}
"""Selector -> name in the legend, color and line. Oort is left out: its savings with training are not known."""
MAP = "bsfl auto"
"""Selector of the heat maps: BSFL as a deployment runs it."""
NOISE = 0.4
"""Noise of the fleets in the panels with lines."""
HEAT_PLAYS = 15


def draw(results: Results, fleets: Sequence[Fleet], plays: Sequence[int], path: Path) -> None:
    """Draw the picture into a PNG file."""
    cohorts = list(dict.fromkeys((fleet.clients, fleet.per_round) for fleet in fleets))
    spreads = [s for s in dict.fromkeys(fleet.spread for fleet in fleets) if s > 0]
    columns = max(len(spreads), 2 * len(cohorts))
    figure = plt.figure(figsize=(3.1 * columns, 3.0 * (1 + len(cohorts))), layout="constrained")
    grid = figure.add_gridspec(1 + len(cohorts), columns)
    shown = HEAT_PLAYS if HEAT_PLAYS in plays else plays[-1]
    for i, cohort in enumerate(cohorts):
        own = [fleet for fleet in fleets if (fleet.clients, fleet.per_round) == cohort]
        said = f"{cohort[1]} of {cohort[0]} clients"
        ceilings = {fleet: 100 * results.ceiling(fleet).value for fleet in own}
        savings = {fleet: 100 * results.saving(fleet, MAP, shown).value for fleet in own}
        _heat(figure.add_subplot(grid[0, 2 * i]), results, ceilings, f"Ceiling, {said}")
        _heat(figure.add_subplot(grid[0, 2 * i + 1]), results, savings, f"BSFL auto, {shown} plays, {said}")
        first: Axes | None = None
        for j, spread in enumerate(spreads):
            axis = figure.add_subplot(grid[1 + i, j], sharey=first)
            first = first or axis
            fleet = Fleet(*cohort, spread, NOISE)
            _lines(axis, results, fleet, plays)
            own_spread, own_noise = results.latency(fleet)
            axis.set_title(
                f"{said}, compute_log_sd {spread:g}\n(spread {own_spread:.2f}, noise {own_noise:.2f})", fontsize=9
            )
            if j == 0:
                axis.set_ylabel("saving, % of random's seconds", fontsize=8)
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(
        "Saving in seconds a round compared with random selection, %.\nTop: by compute_log_sd (spread between clients) "
        f"and network_round_cv (noise). Below: by plays, with network_round_cv {NOISE:g}; bands are 95 % intervals.",
        fontsize=9,
    )
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def ticks(results: Results, fleets: Sequence[Fleet]) -> tuple[list[str], list[str]]:
    """Return the labels of the columns and the rows of a heat map: the key's value, and the latencies' in parentheses.

    Spread and noise of the latencies are means over the fleets of the column or the row.
    """
    labels: list[list[str]] = []
    for index, key in enumerate(("spread", "noise")):
        values: dict[float, list[float]] = {}
        for fleet in fleets:
            values.setdefault(getattr(fleet, key), []).append(results.latency(fleet)[index])
        labels.append([f"{value:g}\n({np.mean(own):.2f})" for value, own in values.items()])
    return labels[0], labels[1]


def _heat(axis: Axes, results: Results, values: dict[Fleet, float], title: str) -> None:
    spreads = list(dict.fromkeys(fleet.spread for fleet in values))
    noises = list(dict.fromkeys(fleet.noise for fleet in values))
    table = np.full((len(noises), len(spreads)), np.nan)
    for fleet, value in values.items():
        table[noises.index(fleet.noise), spreads.index(fleet.spread)] = value
    axis.imshow(table, cmap="Blues", vmin=0, vmax=60, aspect="auto", origin="lower")
    for (row, column), value in np.ndenumerate(table):
        color = "white" if value > 35 else "black"
        axis.text(
            column, row, f"{value + 0.0:.0f}".replace("-0", "0"), ha="center", va="center", fontsize=9, color=color
        )
    columns, rows = ticks(results, list(values))
    axis.set_xticks(range(len(spreads)), columns, fontsize=8)
    axis.set_yticks(range(len(noises)), rows, fontsize=8)
    axis.set_xlabel("compute_log_sd (spread)", fontsize=8)
    axis.set_ylabel("network_round_cv (noise)", fontsize=8)
    axis.set_title(title, fontsize=9)


def _lines(axis: Axes, results: Results, fleet: Fleet, plays: Sequence[int]) -> None:
    axis.axhline(0, color="#bbbbbb", linewidth=0.8)
    axis.axhline(100 * results.ceiling(fleet).value, color="black", linestyle=":", label="ceiling at equal shares")
    for selector, (label, color, line) in LINES.items():
        found = [results.saving(fleet, selector, count) for count in plays]
        axis.plot(plays, [100 * one.value for one in found], line, color=color, label=label, marker="o", markersize=3)
        low, high = [100 * one.low for one in found], [100 * one.high for one in found]
        axis.fill_between(plays, low, high, color=color, alpha=0.12, linewidth=0)
    axis.set_xscale("log")
    axis.set_xticks(plays, [str(count) for count in plays])
    axis.minorticks_off()
    axis.tick_params(labelsize=8)
    axis.set_xlabel("plays of each client", fontsize=8)
