"""The picture of a world: differences to random, a row a selector, a panel a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from figures import KNOWING, REFERENCE, SelectorFigures

from fedsel_flwr.simulations import Scenario

BETTER, WORSE, SAME, KNOWS = "#0072b2", "#d55e00", "#777777", "#009e73"


def draw(figures: Mapping[str, SelectorFigures], world: Scenario, path: Path) -> Path:
    """Draw the picture into a PNG file; returns its path."""
    target = f"{100 * world.target_accuracy:g} %"
    panels = {
        "accuracy_last10": (f"accuracy after {world.rounds} rounds", "percentage points", 100.0),
        "accuracy_at_s": ("accuracy at equal simulated time", "percentage points", 100.0),
        "time_to_target_s": (f"simulated time to {target}", "percent", 1.0),
        "energy_to_target_j": (f"energy to {target}", "percent", 1.0),
    }

    def key(own: SelectorFigures) -> tuple[bool, float]:
        return own.label in KNOWING, -own.mean("accuracy_at_s")

    rows = sorted((own for own in figures.values() if own.label != REFERENCE), key=key)
    contenders = sum(own.label not in KNOWING for own in rows)
    figure, axes = plt.subplots(1, 4, figsize=(15, 1.6 + 0.27 * len(rows)), sharey=True, layout="constrained")
    for axis, (name, (title, unit, scale)) in zip(axes, panels.items(), strict=True):
        axis.axvline(0, color="#333333", linewidth=0.8)
        axis.axhline(contenders - 0.5, color="#bbbbbb", linewidth=0.8)
        axis.set_xlim(limits := _limits(rows, name, scale))
        for place, own in enumerate(rows):
            _row(axis, place, own, name, scale, limits)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(f"{unit}, against random", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.locator_params(axis="x", nbins=5)
        axis.grid(axis="x", color="#eeeeee")
        axis.set_axisbelow(True)
    axes[0].set_yticks(range(len(rows)), [own.label for own in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    figure.suptitle(
        f"{world.description}\nPaired differences to random, 95 % intervals. Blue is better, orange worse (Holm), grey "
        "no difference, arrow beyond; green knows the truth or is chance",
        fontsize=9,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def _limits(rows: Sequence[SelectorFigures], name: str, scale: float) -> tuple[float, float]:
    """What most rows need; an arrow stands for what lies beyond."""
    found = [own.against[name] for own in rows if name in own.against and not math.isnan(own.against[name].mean)]
    means = np.array([scale * one.mean for one in found] or [-1.0, 1.0])
    middle, spread = np.median(means), np.quantile(np.abs(means - np.median(means)), 0.7)
    reach = 2.5 * spread or 1.0
    return float(min(0.0, middle) - reach), float(max(0.0, middle) + reach)


def _row(
    axis: plt.Axes, place: int, own: SelectorFigures, name: str, scale: float, limits: tuple[float, float]
) -> None:
    found = own.against.get(name)
    if found is None or math.isnan(found.mean):
        reached = len(own.values(name))
        said = "never" if not reached else f"{reached} of {len(own.rows)} seeds"
        axis.annotate(said, (0.98, place), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=7,
                      color=SAME)  # fmt: skip
        return
    color = KNOWS if own.label in KNOWING else BETTER if own.better(name) else WORSE if own.worse(name) else SAME
    if math.isfinite(found.low):
        axis.plot([scale * found.low, scale * found.high], [place, place], color=color, linewidth=1.6)
    at = min(max(scale * found.mean, limits[0]), limits[1])
    mark = "o" if at == scale * found.mean else "<" if at == limits[0] else ">"
    axis.plot(at, place, mark, color=color, markersize=4 if mark == "o" else 7, clip_on=False)
