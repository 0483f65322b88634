"""Pictures of reproduced figures: curves over the rounds, or outcomes by cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.report.paired import student_interval
from fedsel_flwr.report.panels import COLOURS, GREY, label_panel, line_style
from fedsel_flwr.report.run_folder import atomic_write, load_optional
from fedsel_flwr.simulations.reproductions.paper_figure import ROUNDS_TO, PaperFigure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedsel_flwr.simulations.reproductions.rows import Results

MOST_COLUMNS = 4
"""Largest number of panels side by side."""
FRONT, OTHER = "#d55e00", "#0072b2"
"""Colours of the balls on the Pareto front and of other balls, as in the paper."""
BALLS = "balls"
"""Curve of a picture that draws PCZFL's balls."""
LONGEST_NAMES = 60
"""Largest number of characters of the names of cells in a row."""
LABELS = {
    "accuracy_last10": "test accuracy, mean of the last ten rounds", "client_spread": "standard deviation over clients",
    "accuracy": "test accuracy", "loss": "test loss", "regret": "regret of means",
    "regret_realized": "regret of realized rewards", "failed": "failed clients", "seconds": "seconds",
    "seen": "clients selected at least once", "score_energy": "energy, sum of 1 - score",
    "simulated_s": "simulated time (s)", "at": "round", "average": "regret of means per round",
    "average_realized": "regret of realized rewards per round",
    "margin_1": "share of client 1 minus c_1", "margin_2": "share of client 2 minus c_2",
    "margin_3": "share of client 3 minus c_3",
    "counts": "rounds of the client", "rank": "rank of the client",
    "run_s_200": "processor seconds of 200 rounds",
    "energy": "energy of the current state",
    "last_above": "share of instances\nlast state, equal steps",
    "best_above": "share of instances\nbest state, equal steps",
    "last_above_in_time": "share of instances\nlast state, equal seconds",
    "best_above_in_time": "share of instances\nbest state, equal seconds",
}  # fmt: skip
"""Names of curves and outcomes on axes."""
ACCURACIES = ("accuracy", "best_above", "last_above")
"""Beginnings of the names of curves and outcomes between 0 and 1."""
COUNTED = ("counts", "failed", "loss", "score_energy", "seconds", "seen")
"""Curves that are never below 0."""
BOUND_OF = "bound of "
"""Beginning of a bound's name in the legend."""
MARKERS = "os^D"
"""Markers of outcomes. The next marker follows when all colours are used."""


def draw(figure: PaperFigure, results: Results, folder: Path) -> Path | None:
    """Draw the picture of a figure.

    Args:
        figure: The figure.
        results: Its outcomes.
        folder: Folder of the file, ``<name>.png``.

    Returns:
        The file; None if the figure has no picture, or no run has finished.
    """
    wanted = figure.picture
    if wanted.curve == BALLS:
        return _draw_balls(figure, results, folder)
    cells = [cell for cell in wanted.cells or figure.claimed_cells if _arms(figure, results, cell)]
    curves, outcomes = wanted.drawn_curves, wanted.drawn_outcomes
    if not (curves or outcomes) or not cells:
        return None
    panels = [(cell, curve) for cell in cells for curve in curves]
    count = len(panels) or len(outcomes)
    # With several curves, each cell is a row.
    columns = min(len(curves) if len(curves) > 1 else count, MOST_COLUMNS)
    rows = math.ceil(count / columns)
    drawing = _new_figure(max(4.2 * columns, 6.5), 3.6 * rows + 0.8)
    axes = list(np.ravel(drawing.subplots(rows, columns, squeeze=False)))
    for unused in axes[count:]:
        unused.set_axis_off()
    if curves:
        for own, (cell, curve) in zip(axes, panels, strict=False):
            _draw_curves(own, figure, results, cell, curve)
    for own, outcome in zip(axes, outcomes, strict=False):
        _draw_outcome(own, figure, results, outcome, cells)
    handles: dict[str, Any] = {}
    for own in axes[:count]:
        handles |= {label: handle for handle, label in zip(*own.get_legend_handles_labels(), strict=True)}
    if not handles:
        # An outcome such as "rounds_to.fedavg" needs the runs of another arm, which may be missing.
        return None
    handles = dict(sorted(handles.items(), key=lambda pair: pair[0].startswith(BOUND_OF)))
    columns = max(1, min(len(handles), int(drawing.get_figwidth() / (0.75 + 0.075 * max(map(len, handles))))))
    # As few columns as the same number of lines allows, so that the columns are equally long.
    columns = math.ceil(len(handles) / math.ceil(len(handles) / columns))
    drawing.legend(
        handles.values(), handles.keys(), frameon=False, fontsize=9, loc="outside lower center", ncols=columns
    )
    path = folder / f"{figure.name}.png"
    with atomic_write(path) as temporary:
        drawing.savefig(temporary, format="png", dpi=110)
    return path


def _arms(figure: PaperFigure, results: Results, cell: str) -> list[str]:
    """Return the arms with finished runs in a cell."""
    wanted = figure.picture
    if wanted.drawn_curves:
        return [arm for arm in figure.arms if results.curves(wanted.drawn_curves[0], arm, cell)]
    return [arm for arm in figure.arms for name in wanted.drawn_outcomes[:1] if results.values(name, arm, cell)]


def _draw_curves(axes: Axes, figure: PaperFigure, results: Results, cell: str, curve: str) -> None:
    """Draw a line for each arm: the mean over the seeds, with its 95 % interval as a band."""
    wanted = figure.picture
    over = "at" if wanted.over == "round" else wanted.over
    for index, arm in enumerate(figure.arms):
        found = results.curves(curve, arm, cell, over)
        if not found:
            continue
        grid = found[0][0] if over == "at" else _common_grid([x for x, _ in found])
        grid = grid[grid >= wanted.start]
        values = np.array([np.interp(grid, x, y) for x, y in found])
        style = line_style(index, len(figure.arms))
        axes.plot(grid, values.mean(axis=0), label=arm, **style)
        if len(values) > 1:
            ends = np.clip([student_interval(column) for column in values.T], *_limits(curve, values))
            axes.fill_between(grid, ends[:, 0], ends[:, 1], color=style["color"], alpha=0.15, linewidth=0)
        if wanted.bound and (bound := results.curves(wanted.bound, arm, cell, over)):
            mean = np.mean([np.interp(grid, x, y) for x, y in bound], axis=0)
            axes.plot(grid, mean, label=f"{BOUND_OF}{arm}", color=style["color"], linestyle="--", linewidth=1)
    axes.set_yscale(wanted.scale)
    unit = "step" if figure.runner == "solvers" else LABELS.get(over, over)
    label_panel(axes, cell, unit, LABELS.get(curve, curve.replace("_", " ")))


def _limits(name: str, values: Any) -> tuple[float, float]:
    """Return the smallest and the largest possible value of a curve or outcome, at which its intervals end.

    >>> _limits("accuracy", np.array([0.5])), _limits("regret", np.array([-3.0]))
    ((0.0, 1.0), (-inf, inf))
    """
    if name.startswith(ACCURACIES):
        return 0.0, 1.0
    # Only the clients that were selected until the end were selected at least once.
    return (0.0 if name in COUNTED else -math.inf), (float(values.max()) if name == "seen" else math.inf)


def _common_grid(series: Sequence[Any]) -> Any:
    """Return points that every series covers."""
    return np.linspace(max(one[0] for one in series), min(one[-1] for one in series), 50)


def _draw_outcome(axes: Axes, figure: PaperFigure, results: Results, outcome: str, cells: Sequence[str]) -> None:
    """Draw a point with its 95 % interval for each arm and cell."""
    for index, arm in enumerate(figure.arms):
        style = line_style(index, len(figure.arms))
        shift = (index - (len(figure.arms) - 1) / 2) * 0.6 / max(1, len(figure.arms))
        places, means, ends = [], [], []
        for place, cell in enumerate(cells):
            values = np.array(list(results.values(outcome, arm, cell).values()))
            if not len(values) or not np.isfinite(values).all():
                continue
            low, high = student_interval(values) if len(values) > 1 else (values[0], values[0])
            low, high = np.clip([low, high], *_limits(outcome, values))
            places.append(place + shift)
            means.append(float(values.mean()))
            ends.append((means[-1] - low, high - means[-1]))
        if places:
            marker = MARKERS[index // len(COLOURS) % len(MARKERS)]
            axes.errorbar(
                places, means, yerr=np.array(ends).T, fmt=marker, color=style["color"], label=arm, capsize=2,
                markersize=4,
            )  # fmt: skip
    for dash, (name, value) in zip(("--", ":"), figure.picture.levels.items(), strict=False):
        axes.axhline(value, color=GREY, linestyle=dash, linewidth=1, label=name)
    names = list(cells)
    crowded = len(cells) > 5 or len("".join(names)) > LONGEST_NAMES
    axes.set_xticks(range(len(cells)), names, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    if outcome.startswith(ROUNDS_TO):
        label_panel(axes, "", "", f"rounds to the final accuracy of {outcome.removeprefix(ROUNDS_TO)}")
    else:
        label_panel(axes, "", "", LABELS.get(outcome, outcome.replace("_", " ")))


def _draw_balls(figure: PaperFigure, results: Results, folder: Path) -> Path | None:
    """Draw PCZFL's balls and the clients' contexts: a panel for each recorded round of the first recorded seed."""
    from matplotlib.patches import Circle

    arm, cell = next(iter(figure.arms)), figure.claimed_cells[0]

    def recorded(x: str, y: str) -> tuple[Any, Any]:
        return results.curves(y, arm, cell, x)[0]

    if not results.curves("balls_rounds", arm, cell, "balls_rounds"):
        return None
    times = [int(number) for number in recorded("balls_rounds", "balls_rounds")[0]]
    drawing = _new_figure(3.9 * len(times), 4.5)
    for axes, time in zip(np.ravel(drawing.subplots(1, len(times), squeeze=False)), times, strict=True):
        centres = np.column_stack(recorded(f"balls_{time}_x", f"balls_{time}_y"))
        radii, front = recorded(f"balls_{time}_radius", f"balls_{time}_front")
        for centre, radius, is_best in zip(centres, radii, front, strict=True):
            # The distance from a centre in the panel to the farthest corner.
            if radius >= np.hypot(*np.maximum(centre, 1 - centre)):
                axes.text(0.55, 0.3, f"a ball of radius {radius:g}\ncovers the panel", ha="center", fontsize=9,
                          color=FRONT if is_best else OTHER)  # fmt: skip
            axes.add_patch(Circle(centre, radius, fill=False, lw=1.0, color=FRONT if is_best else OTHER))
        for label, color in (("ball on the Pareto front", FRONT), ("other ball with a client", OTHER)):
            axes.plot([], [], color=color, label=label)
        axes.plot(*recorded(f"contexts_{time}_x", f"contexts_{time}_y"), "o", ms=4, color="#009e73", label="client")
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        label_panel(axes, f"round {time}", "accuracy on the validation set", "energy score")
    drawing.legend(*axes.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
    path = folder / f"{figure.name}.png"
    with atomic_write(path) as temporary:
        drawing.savefig(temporary, format="png", dpi=110)
    return path


def _new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    figure: Figure = load_optional("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained", facecolor="white"
    )
    load_optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure
