"""Pictures of reproduced figures: curves over the rounds, or outcomes by cell."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.report.page import charts
from fedsel_flwr.report.page.charts import alt
from fedsel_flwr.report.paired import paired_interval
from fedsel_flwr.report.plots import Panel, save_picture, series_rows
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.simulations.reproductions.paper_figure import ROUNDS_TO, PaperFigure

if TYPE_CHECKING:
    from fedsel_flwr.simulations.reproductions.rows import Results

MOST_COLUMNS = 4
"""Largest number of panels side by side."""
FRONT, OTHER, CLIENT = "#D55E00", "#0072B2", "#009E73"
"""Colours of the balls on the Pareto front and of other balls, as in the paper, and of the clients."""
BALLS = "balls"
"""Curve of a picture that draws PCZFL's balls."""
LABELS = tomllib.loads((resources.files("fedsel_flwr.simulations.reproductions") / "axes.toml").read_text("utf-8"))
"""Names of curves and outcomes on axes."""
ACCURACIES = ("accuracy", "best_above", "last_above")
"""Beginnings of the names of curves and outcomes between 0 and 1."""
COUNTED = ("counts", "failed", "loss", "score_energy", "seconds", "seen")
"""Curves that are never below 0."""
BOUND_OF = "bound of "
"""Beginning of a bound's name in the legend."""
Rows = list[dict[str, Any]]


def draw(figure: PaperFigure, results: Results, folder: Path) -> Path | None:
    """Draw the picture of a figure.

    Args:
        figure: The figure.
        results: Its outcomes.
        folder: Folder of the file, ``<name>.png``.

    Returns:
        The file; None if the figure has no picture, or no run has finished.
    """
    wanted, path = figure.picture, folder / f"{figure.name}.png"
    if BALLS in wanted.curves:
        panels = _ball_panels(figure, results)
        labels = ["ball on the Pareto front", "other ball with a client", "client"]
        return save_picture(panels, path, labels=labels) if panels else None
    cells, curves, outcomes = wanted.cells or figure.claimed_cells, wanted.curves, wanted.outcomes
    arms = list(figure.arms)
    styles = list(charts.selector_styles(arms).values())
    # A bound has the colour of its arm.
    labels = [*arms, *(f"{BOUND_OF}{arm}" for arm in arms)]
    styles += [(colour, [4, 4]) for colour, _ in styles]
    tables = [(cell, curve, _curve_rows(figure, results, cell, curve)) for cell in cells for curve in curves]
    tables += [("", outcome, _outcome_rows(figure, results, outcome, cells)) for outcome in outcomes]
    # Runs may be missing. An outcome such as "rounds_to.fedavg" also needs the runs of another arm.
    tables = [table for table in tables if table[2]]
    drawn = {row["series"] for _, _, rows in tables for row in rows}
    if not drawn:
        return None
    series = {number: styles[number] for number in sorted(drawn)}
    # With several curves, each cell is a row.
    columns = min(len(curves) if len(curves) > 1 else len(tables), MOST_COLUMNS)
    width = max(300, 480 // columns)
    panels = list[Panel]()
    for title, name, rows in tables:
        spec = (
            _curve_chart(figure, series, name) if curves
            else charts.interval_chart(series, cells, _title(name), wanted.levels)
        )  # fmt: skip
        panels.append(Panel(title=title, spec=spec, rows=rows, width=width))
    return save_picture(panels, path, labels=labels, columns=columns)


def _title(name: str) -> list[str]:
    """Return the title of the axis of a curve or an outcome, in lines."""
    if name.startswith(ROUNDS_TO):
        return [f"median rounds to the final accuracy of {name.removeprefix(ROUNDS_TO)}"]
    return str(LABELS.get(name, name.replace("_", " "))).split("\n")


def _curve_chart(figure: PaperFigure, series: charts.Styles, curve: str) -> dict[str, Any]:
    wanted = figure.picture
    unit = "step" if figure.runner == "solvers" else LABELS.get(wanted.over, wanted.over)
    x = alt.X("x:Q", title=unit, scale=alt.Scale(zero=False, nice=False))
    scale = {"type": wanted.scale, "zero": False}
    return charts.line_chart(series, x, "value", _title(curve), band=True, scale=scale)


def _curve_rows(figure: PaperFigure, results: Results, cell: str, curve: str) -> Rows:
    """Return a line for each arm: the mean over the seeds, with its 95 % interval; and the mean of each bound."""
    wanted, rows = figure.picture, Rows()
    over = "at" if wanted.over == "round" else wanted.over
    for number, arm in enumerate(figure.arms):
        found = results.curves(curve, arm, cell, over)
        if not found:
            continue
        # Points that every seed covers.
        grid = np.linspace(max(x[0] for x, _ in found), min(x[-1] for x, _ in found), 50)
        grid = found[0][0] if over == "at" else grid
        grid = grid[grid >= wanted.start]
        values = np.array([np.interp(grid, x, y) for x, y in found])
        columns = {"x": grid, "value": values.mean(axis=0)}
        if len(values) > 1:
            # In the order of memory, so that sums round as those of one point.
            low, high = np.clip(paired_interval(np.ascontiguousarray(values.T), skewed=False), *_limits(curve, values))
            columns |= {"low": low, "high": high}
        rows += series_rows(number, **columns)
        if wanted.bound and (bound := results.curves(wanted.bound, arm, cell, over)):
            mean = np.mean([np.interp(grid, x, y) for x, y in bound], axis=0)
            rows += series_rows(len(figure.arms) + number, x=grid, value=mean)
    return rows


def _limits(name: str, values: Any) -> tuple[float, float]:
    """Return the smallest and the largest possible value of a curve or outcome, at which its intervals end.

    >>> _limits("accuracy", np.array([0.5])), _limits("regret", np.array([-3.0]))
    ((0.0, 1.0), (-inf, inf))
    """
    if name.startswith(ACCURACIES):
        return 0.0, 1.0
    # Only the clients that were selected until the end were selected at least once.
    return (0.0 if name in COUNTED else -math.inf), (float(values.max()) if name == "seen" else math.inf)


def _outcome_rows(figure: PaperFigure, results: Results, outcome: str, cells: Sequence[str]) -> Rows:
    """Return a point with its 95 % interval for each arm and cell: a median for rounds, which may be infinite."""
    rows, is_median = Rows(), outcome.startswith(ROUNDS_TO)
    for number, arm in enumerate(figure.arms):
        for cell in cells:
            values = np.array(list(results.values(outcome, arm, cell).values()))
            if not len(values) or not math.isfinite(middle := np.median(values) if is_median else values.mean()):
                continue
            if is_median:
                ends = load_optional("scipy.stats").quantile_test(values).confidence_interval()
            else:
                ends = paired_interval(values, skewed=False) if len(values) > 1 else (values[0], values[0])
            ends = np.nan_to_num(ends, nan=middle, posinf=values[np.isfinite(values)].max())
            low, high = np.clip(ends, *_limits(outcome, values)).tolist()
            rows.append({"series": number, "group": cell, "value": float(middle), "low": low, "high": high})
    return rows


def _ball_panels(figure: PaperFigure, results: Results) -> list[Panel]:
    """Return PCZFL's balls and the clients' contexts: a panel for each recorded round of the first recorded seed."""
    arm, cell = next(iter(figure.arms)), figure.claimed_cells[0]

    def recorded(name: str) -> Any:
        return results.curves(name, arm, cell, name)[0][1]

    if not results.curves("balls_rounds", arm, cell, "balls_rounds"):
        return []
    panels, angle = [], np.linspace(0.0, 2 * math.pi, 121)
    for time in map(int, recorded("balls_rounds")):
        balls = {part: recorded(f"balls_{time}_{part}") for part in ("x", "y", "radius", "front")}
        rows = series_rows(2, x=recorded(f"contexts_{time}_x"), y=recorded(f"contexts_{time}_y"))
        for ball, (x, y, radius, front) in enumerate(zip(*balls.values(), strict=True)):
            series, place = 0 if front else 1, np.arange(len(angle))
            path = {"x": x + radius * np.cos(angle), "y": y + radius * np.sin(angle)}
            rows += series_rows(series, ball=np.full(len(angle), ball), place=place, **path)
            # The distance from a centre in the panel to the farthest corner.
            if radius >= np.hypot(*np.maximum((x, y), (1 - x, 1 - y))):
                text = f"a ball of radius {radius:g} covers the panel"
                rows.append({"series": series, "x": 0.5, "y": 0.3, "text": text})
        panels.append(Panel(title=f"round {time}", spec=_ball_chart(), rows=rows, width=charts.HEIGHT + 40))
    return panels


def _ball_chart() -> Mapping[str, Any]:
    series: charts.Styles = {0: (FRONT, [1, 0]), 1: (OTHER, [1, 0]), 2: (CLIENT, [1, 0])}
    scale = alt.Scale(domain=[0, 1], nice=False)
    base = alt.Chart().encode(
        x=alt.X("x:Q", title="accuracy on the validation set", scale=scale),
        y=alt.Y("y:Q", title="energy score", scale=scale), color=charts.series_colour(series),
    )  # fmt: skip
    circle = base.transform_filter("isValid(datum.ball)").mark_line(strokeWidth=1, clip=True)
    client = base.transform_filter("datum.series === 2").mark_circle(size=30, opacity=1)
    text = base.transform_filter("isValid(datum.text)").mark_text().encode(text="text:N")
    layers = circle.encode(detail="ball:N", order="place:Q"), client, text
    return charts.specification(alt.layer(*layers), charts.HEIGHT)
