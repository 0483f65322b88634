"""Pictures of a world: the time ratio of each selector with its factors, and accuracy over simulated time."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from effects import World
from formats import counted
from lineup import REFERENCE, REFERENCES
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator
from references import GROUPS
from sections import ordered

from fedsel_flwr.report.paired import PairedEffect

COLORS = {
    "sooner": "#0072b2", "later": "#d55e00", "no difference": "#555555", "not settled": "#999999",
    "missed": "#aa3377", "reference": "#009e73", "interim": "#999999",
}  # fmt: skip
LIMITS = (0.1, 10.0)
"""Smallest and largest ratio on the axes."""
CURVES = 5
"""Number of selectors among the curves, in addition to random selection, sorted groups and FedCS."""
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10)


def draw(world: World, path: Path) -> Path:
    """Draw the picture of a world into a PNG file, and return its path.

    Args:
        world: The world.
        path: The file.
    """
    labels = [label for label in ordered(world) if label in world.verdicts]
    groups = [2 if one in REFERENCES else 0 if world.equal_cohort(one) else 1 for one in labels]
    panels = ("time", "seconds_per_round", "rounds", "energy")
    titles = (f"time to {world.target}", "seconds a round until then", "rounds", f"joules to {world.target}")
    figure, axes = plt.subplots(1, 4, figsize=(14, 1.9 + 0.26 * len(labels)), sharey=True, layout="constrained")
    for axis, name, title in zip(axes, panels, titles, strict=True):
        _ratio_axis(axis, title)
        for place, label in enumerate(labels):
            _draw_ratio(axis, place, getattr(world.verdicts[label], name), _color(world, label))
        for place in range(1, len(labels)):
            if groups[place] != groups[place - 1]:
                axis.axhline(place - 0.5, color="#bbbbbb", linewidth=0.8)
    texts = [f"{label}  ({world.asked(label):.3g} asked)" for label in labels]
    axes[0].set_yticks(range(len(labels)), texts)
    axes[0].set_ylim(len(labels) - 0.5, -0.5)
    pairs = [world.verdicts[label].time.pairs for label in labels]
    few, seeds = min(pairs), counted(max(pairs), "seed")
    seeds = f"{few} to {seeds}, not the same for all rows" if few < max(pairs) else seeds
    colors = (
        "Colors show the verdict about the time. Blue: sooner; orange: later; dark grey: no difference; "
        "light grey: not settled; purple: missed the target on a seed, and no verdict; green: references"
    )
    figure.suptitle(
        f"({world.letter}) {world.scenario.description}; {seeds}, 95 % intervals\n"
        + ("Interim: runs are missing, so there are no verdicts. Green: references" if world.interim else colors),
        fontsize=9,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def draw_overview(worlds: list[World], path: Path) -> Path:
    """Draw the time ratios of all worlds side by side into a PNG file, and return its path.

    A row is a selector that asks as many clients as random selection in a world.

    Args:
        worlds: The worlds.
        path: The file.
    """
    told = [world for world in worlds if world.complete and world.verdicts]
    ratios: dict[str, list[float]] = {}
    for world in told:
        for label in (one for one in world.contenders if one in world.verdicts and world.equal_cohort(one)):
            estimate = world.verdicts[label].time.estimate
            # A selector that missed the target comes last.
            ratios.setdefault(label, []).append(math.log(estimate) if math.isfinite(estimate) else math.log(LIMITS[1]))
    labels = sorted(ratios, key=lambda label: np.mean(ratios[label]))
    figure, axes = plt.subplots(
        1, len(told), figsize=(14, 1.6 + 0.26 * len(labels)), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, world in zip(axes[0], told, strict=True):
        _ratio_axis(axis, f"({world.letter}) {counted(len(world.of(REFERENCE)), 'seed')}, time to {world.target}")
        for place, label in enumerate(labels):
            if label in world.verdicts and world.equal_cohort(label):
                _draw_ratio(axis, place, world.verdicts[label].time, _color(world, label))
    axes[0, 0].set_yticks(range(len(labels)), labels)
    axes[0, 0].set_ylim(len(labels) - 0.5, -0.5)
    figure.suptitle(
        "Blue: sooner; orange: later; light grey: not settled after the correction; purple: missed the target on a "
        "seed. 95 % intervals; rows by their mean",
        fontsize=9,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def _color(world: World, label: str) -> str:
    """Return the color of a label's verdict."""
    word: str = "reference" if label in REFERENCES else "interim" if world.interim else world.verdicts[label].word
    return COLORS["missed" if word == "not settled" and world.missed(label) else word]


def _ratio_axis(axis: plt.Axes, title: str) -> None:
    """Prepare an axis of ratios to random selection."""
    axis.set_xscale("log")
    axis.set_xlim(*LIMITS)
    axis.axvline(1, color="#333333", linewidth=0.8)
    axis.xaxis.set_major_locator(FixedLocator(TICKS))
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("ratio to random", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(axis="x", color="#eeeeee")
    axis.set_axisbelow(True)


def _draw_ratio(axis: plt.Axes, place: int, effect: PairedEffect, color: str) -> None:
    if not math.isfinite(effect.estimate):
        told = f"reached on {effect.reached} of {counted(effect.pairs, 'seed')}"
        if effect.figure == "time_to_target_s":
            told += f"; sooner on {effect.sooner}, later on {effect.later}"
        axis.annotate(told, (0.98, place), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=7,
                      color=color, bbox={"color": "white", "pad": 0.5})  # fmt: skip
        return
    if math.isfinite(effect.low):
        ends = [min(max(end, LIMITS[0]), LIMITS[1]) for end in (effect.low, effect.high)]
        axis.plot(ends, [place, place], color=color, linewidth=1.6)
    at = min(max(effect.estimate, LIMITS[0]), LIMITS[1])
    mark = "o" if at == effect.estimate else "<" if at == LIMITS[0] else ">"
    axis.plot(at, place, mark, color=color, markersize=4 if mark == "o" else 7, clip_on=False)


def draw_curves(world: World, path: Path) -> Path:
    """Draw the mean accuracy over the simulated seconds into a PNG file, and return its path.

    The curves are those of random selection, sorted groups, FedCS, and the five selectors with the lowest time ratio.
    If runs are missing, there are only the first three, on their common seeds.

    Args:
        world: The world.
        path: The file.
    """
    own = [one for one in world.contenders if one != "fedcs"]
    finite = [one for one in own if math.isfinite(world.verdicts[one].time.estimate)]
    best = sorted(finite, key=lambda one: world.verdicts[one].time.estimate)[: 0 if world.interim else CURVES]
    labels = list(dict.fromkeys([REFERENCE, GROUPS, *(["fedcs"] if "fedcs" in world.rows else []), *best]))
    labels = [one for one in labels if one in world.rows]
    # Seeds differ, so a mean over other seeds would be another curve.
    seeds = world.common_seeds(*labels)
    whole = world.mean(REFERENCE, lambda row: row.simulated_s, seeds)
    until = world.mean(REFERENCE, lambda row: row.time_to_target_s, seeds)
    end = min(whole, 2 * until) if math.isfinite(until) else whole
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for i, label in enumerate(labels):
        rows = [world.rows[label][seed] for seed in seeds]
        last = min(end, *(row.curve_s[-1] for row in rows))
        first = max(row.curve_s[0] for row in rows)
        grid = np.linspace(first, last, 200)
        mean = np.mean([np.interp(grid, row.curve_s, row.curve_accuracy) for row in rows], axis=0)
        known = label in (REFERENCE, GROUPS)
        color = {REFERENCE: "black", GROUPS: COLORS["reference"]}.get(label, f"C{i}")
        axis.plot(
            grid, 100 * mean, "--" if known else "-", color=color, label=f"{label} ({world.asked(label):.3g} asked)"
        )
    axis.axhline(100 * world.scenario.target_accuracy, color="#999999", linewidth=0.8)
    axis.set_xlabel("simulated seconds")
    axis.set_ylabel(f"accuracy, %, mean of {world.scenario.target_rounds} evaluated rounds")
    axis.set_title(f"({world.letter}) {world.scenario.description}; {counted(len(seeds), 'seed')}", fontsize=9)
    axis.set_xlim(0, end)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axis.grid(color="#eeeeee")
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path
