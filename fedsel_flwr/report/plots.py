"""Pictures of a comparison, as PNG, PDF or SVG files: by simulated seconds, and by rounds.

The picture by seconds shows accuracy, time ratios to a reference, and the clients' selection counts. The picture by
rounds shows accuracy, the number of clients selected so far, and the clients' selection fractions. A picture is a grid
of charts of the page (:mod:`fedsel_flwr.report.page.charts`), which vl-convert draws.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.checks import one_of
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.page import charts
from fedsel_flwr.report.page import comparison_tables as tables
from fedsel_flwr.report.page.document import convert
from fedsel_flwr.report.run_folder import atomic_write
from fedsel_flwr.report.summary import TARGET_ROUNDS, check_target
from fedsel_flwr.report.verdict import Verdict

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fedsel_flwr.rounds.history import History

MOST_BANDS = 4
"""Largest number of selectors for which the range of the fractions is drawn. More bands would hide each other."""
MOST_POINTS = 600
"""Largest number of points of a line. More of them would not be seen."""
FORMATS = ("png", "pdf", "svg")
"""Formats, which are the suffixes of the files."""
PANELS = {"accuracy": 480, "ratios": 320, "targets": 320, "selections": 320}
"""Panels of :func:`plot_comparison`, from left to right -> their widths."""
NEED_VERDICT = ("ratios", "targets")
"""Panels that show ratios to a reference."""
HEIGHT, ALONE = 300, 560
"""Height of a panel, and width of a panel that is alone."""
SCALE = 2
"""Pixels of a PNG file for each unit of a picture."""
CLIP = re.compile(rb'((?:id="|clip-path="url\(#)clip)(\d+)')
"""Number of a clipping path in an SVG file."""
INK = "#262626"
"""Colour of the texts."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart of a picture.

    Attributes:
        title: Title above the chart.
        spec: Specification of the chart, as the page has it. Its data have the name ``rows``.
        rows: Its rows; ``series`` is the number of the selector.
        width: Width of the chart without its axes.
        x_title: Title of the horizontal axis, in the place of :data:`~fedsel_flwr.report.page.charts.X_TITLE`.
    """

    title: str
    spec: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    width: int
    x_title: str = ""


def plot_comparison(
    runs: Mapping[str, Sequence[History]],
    path: str | os.PathLike[str],
    *,
    num_clients: int,
    target_accuracy: float,
    title: str = "",
    verdict: Verdict | None = None,
    target_rounds: int = TARGET_ROUNDS,
    panel: str | None = None,
) -> Path:
    """Draw a picture that compares selectors by simulated seconds.

    It has these panels, from left to right. The second and the third need a verdict.

    ``accuracy``
        Test accuracy against simulated seconds, smoothed over ``target_rounds`` measured rounds. The line is the mean
        over the seeds, and each seed keeps its last value after its end. The band is one standard deviation, limited to
        0 and 100 %. The dashed line is the target.
    ``ratios``
        Ratio of the time to the target, compared with the reference: one point per seed, with mean and interval.
    ``targets``
        The same ratio by target accuracy, with its interval as a band.
    ``selections``
        Selection counts of the clients in descending order, with mean and band over the seeds at each rank.

    The charts are those of the page (:mod:`fedsel_flwr.report.page.charts`). The same runs give the same bytes of a PNG
    or SVG file. Two PDF files of the same runs may differ.

    Args:
        runs: The histories of each selector, one per seed.
        path: Path of the file, which is replaced if it exists. Its suffix sets the format: .png, .pdf or .svg.
        num_clients: Number of clients of the federation, including clients that were never selected.
        target_accuracy: Test accuracy to mark, a fraction in (0, 1].
        title: Heading of the picture.
        verdict: Verdict on these runs. If None, no ratios are drawn.
        target_rounds: Number of measured rounds whose mean accuracy must reach the target.
        panel: The only panel to draw. If None, all panels.

    Returns:
        ``path``.

    Raises:
        ParameterError: There is no run, ``target_accuracy`` is not a fraction, the suffix or the panel is unknown, or
            the panel needs a verdict.
        RunError: Altair or vl-convert is not installed.
    """
    check_target(target_accuracy)
    drawn, labels, series = _drawn(runs, path, "plot_comparison")
    if panel is not None and one_of("panel", panel, tuple(PANELS)) in NEED_VERDICT and verdict is None:
        raise ParameterError(
            f"panel {panel!r} needs a reference and another selector. Compare at least two selectors, one of them "
            "'random' or named by reference="
        )
    counts = sorted({len(histories) for histories in drawn.values()})
    spread = f"; mean ± sd of {' or '.join(map(str, counts))} seeds" if counts[-1] > 1 else ""
    goal, page_runs = f"{100 * target_accuracy:g} %", _page_runs(drawn)
    is_fraction = tables.are_fractions(one.accuracy for run in page_runs for one in run.rounds)
    # Title, title of the horizontal axis, chart and rows of each panel.
    found: dict[str, tuple[str, str, Mapping[str, Any], Sequence[Mapping[str, Any]]]] = {
        "accuracy": (f"Accuracy, mean of {target_rounds} rounds{spread}; dashed: {goal}", "simulated time (s)",
                     charts.accuracy_chart(series, target_accuracy, is_fraction=is_fraction),
                     _numbered(tables.curve_table(page_runs, target_rounds, ["seconds"]), labels, seed=tables.ALL)),
        "selections": ("How often each client was selected", "clients, most selected first",
                       charts.count_chart(series), _count_rows(drawn, num_clients)),
    }  # fmt: skip
    if verdict:
        reference, targets = verdict.reference, list(verdict.profile)
        found |= {
            "ratios": (f"Time to {goal}; a point a seed, grey: within 5 %", "time",
                       charts.ratio_chart(series, reference),
                       _numbered(tables.ratio_table(verdict, ()), labels, measure="time")),
            "targets": (f"Time ratio to {reference} by target", "target accuracy",
                        charts.profile_chart(series, reference, targets, named=True),
                        _numbered(tables.profile_table(verdict), labels)),
        }  # fmt: skip
    panels = [
        Panel(title=what, x_title=axis, spec=spec, rows=rows, width=ALONE if panel else width)
        for name, width in PANELS.items() if name in found and panel in (None, name)
        for what, axis, spec, rows in [found[name]]
    ]  # fmt: skip
    return save_picture(panels, path, labels=labels, title=title, has_legend=panel != "ratios")


def _drawn(
    runs: Mapping[str, Sequence[History]], path: str | os.PathLike[str], function: str
) -> tuple[dict[str, Sequence[History]], list[str], charts.Styles]:
    """Return the selectors that have runs, their labels, and the style of each selector's number.

    Raises:
        ParameterError: There is no run, or the suffix of the path is unknown.
    """
    _format_of(path)
    drawn = {selector: histories for selector, histories in runs.items() if histories}
    if not drawn:
        raise ParameterError(f"{function} got no run. Give at least one history of one selector.")
    return drawn, list(drawn), dict(enumerate(charts.selector_styles(list(drawn)).values()))


def _page_runs(
    drawn: Mapping[str, Sequence[History]], lost: Mapping[str, Sequence[ArrayLike]] | None = None
) -> list[tables.PageRun]:
    """Return the runs as those of a page."""
    return [
        tables.PageRun(selector, seed, history, theta=np.asarray(lost[selector][seed], np.float64) if lost else ())
        for selector, histories in drawn.items()
        for seed, history in enumerate(histories)
    ]


def series_rows(number: int, **columns: NDArray[Any]) -> list[dict[str, Any]]:
    """Return columns of equal length as the rows of a series, at most :data:`MOST_POINTS` of them."""
    kept = tables.thin(len(next(iter(columns.values()))), MOST_POINTS)
    lists = [values[kept].tolist() for values in columns.values()]
    return [{"series": number, **dict(zip(columns, values, strict=True))} for values in zip(*lists, strict=True)]


def _numbered(columns: Mapping[str, Any], labels: Sequence[str], **only: str) -> list[dict[str, Any]]:
    """Return the rows of a table of the page, with the number of each selector: those with these values."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [
        row | {"series": labels.index(row["selector"])}
        for row in rows
        if all(row[name] == value for name, value in only.items())
    ]


def _count_rows(drawn: Mapping[str, Sequence[History]], num_clients: int) -> list[dict[str, Any]]:
    """Return the clients' selection counts in descending order: mean and band over the seeds at each rank."""
    found = []
    shapes: list[bytes] = []
    for number, histories in enumerate(drawn.values()):
        counts = np.stack([np.sort(h.selection_counts(num_clients))[::-1] for h in histories])
        mean, deviation = counts.mean(axis=0), counts.std(axis=0, ddof=min(1, len(counts) - 1))
        # Selectors with equal counts, such as round-robin, would hide each other, so the lower lines are wider.
        shapes.append(mean.tobytes())
        width = np.full(num_clients + 1, 1.8 + 2.4 * (shapes.count(shapes[-1]) - 1))
        # A step lasts until the next place, so the last count is repeated.
        count, low, high = (np.append(one, one[-1:]) for one in (mean, mean - deviation, mean + deviation))
        found += series_rows(number, place=np.arange(num_clients + 1), count=count, low=low, high=high, width=width)
    return found


def plot_rounds(
    runs: Mapping[str, Sequence[History]],
    path: str | os.PathLike[str],
    *,
    num_clients: int,
    target_accuracy: float,
    title: str = "",
    lost: Mapping[str, Sequence[ArrayLike]] | None = None,
    target_rounds: int = TARGET_ROUNDS,
) -> Path:
    """Draw a picture that compares selectors by rounds, as :func:`plot_comparison` does by seconds.

    Left: test accuracy, the mean of ``target_rounds`` measured rounds. Middle: the number of clients selected at least
    once. Right: the selection fractions of the clients on the first seed. The line is the median. For up to four
    selectors, a band shows the range from the least to the most selected client.

    A fourth panel shows the waiting time lost, compared with known mean latencies of the clients. All panels except the
    fractions show means over the seeds, up to the last round that all seeds have.

    Args:
        runs: The histories of each selector, one per seed.
        path: Path of the file, which is replaced if it exists. Its suffix sets the format: .png, .pdf or .svg.
        num_clients: Number of clients of the federation, including clients that were never selected.
        target_accuracy: Test accuracy to mark, a fraction in (0, 1].
        title: Heading of the picture.
        lost: Selector -> Xia's theta of each of its runs, that is, the seconds lost per round so far, by rounds. If
            None, there is no fourth panel.
        target_rounds: Number of measured rounds whose mean accuracy must reach the target.

    Returns:
        ``path``.

    Raises:
        ParameterError: There is no run, or the suffix is unknown.
        RunError: Altair or vl-convert is not installed.
    """
    drawn, labels, series = _drawn(runs, path, "plot_rounds")
    banded = len(drawn) <= MOST_BANDS
    page_runs = _page_runs(drawn, lost)
    lengths = [min(len(h.rounds) for h in histories) for histories in drawn.values()]
    means = _numbered(tables.curve_table(page_runs, target_rounds, ["rounds"]), labels, seed=tables.ALL)
    accuracies = [row for row in means if row["x"] <= lengths[row["series"]]]
    clients, shares = list[dict[str, Any]](), list[dict[str, Any]]()
    # The axis of the fractions ignores the first fifth of the rounds, in which fractions are near 1.
    highest = 0.0
    for number, (histories, length) in enumerate(zip(drawn.values(), lengths, strict=True)):
        fractions = [selection_fractions(h, num_clients) for h in histories]
        seen = np.mean([(own > 0).sum(axis=1)[:length] for own in fractions], axis=0)
        clients += series_rows(number, round=np.arange(1, length + 1), clients=seen)
        own = np.sort(fractions[0], axis=1)
        share, edges = np.median(own, axis=1), {"low": own[:, 0], "high": own[:, -1]} if banded else {}
        shares += series_rows(number, round=np.arange(1, len(own) + 1), share=share, **edges)
        highest = max(highest, float(edges.get("high", share)[len(own) // 5 :].max(initial=0.0)))
    x = charts.round_axis()
    form = ".0%" if tables.are_fractions(row["accuracy"] for row in accuracies) else ""
    spread = ": median, least to most" if banded else " of the median client"
    scale = {"domain": [0, 1.1 * highest or 1.0], "nice": False}
    panels = [
        (f"Accuracy, mean of {target_rounds} rounds", accuracies, charts.line_chart(
            series, charts.round_axis("x"), "accuracy", "test accuracy", form=form, goal=target_accuracy)),
        ("Clients selected at least once", clients, charts.line_chart(
            series, x, "clients", "clients", scale={"zero": True}, goal=num_clients)),
        (f"Selection fractions{spread}", shares, charts.line_chart(
            series, x, "share", "share of the rounds so far", band=banded, scale=scale)),
        ("Lost against knowing the means (theta)",
         _numbered(tables.regret_table(page_runs), labels, seed=tables.ALL), charts.regret_chart(series)),
    ]  # fmt: skip
    shown = [Panel(title=what, spec=spec, rows=rows, width=360) for what, rows, spec in panels if rows]
    return save_picture(shown, path, labels=labels, title=title)


def save_picture(
    panels: Sequence[Panel],
    path: str | os.PathLike[str],
    *,
    labels: Sequence[str],
    title: str = "",
    columns: int | None = None,
    has_legend: bool = True,
) -> Path:
    """Write a picture of panels, with a legend below them.

    Args:
        panels: The panels, row by row.
        path: Path of the file, which is replaced if it exists. Its suffix sets the format.
        labels: Name of each series.
        title: Heading of the picture.
        columns: Number of panels in a row. If None, all panels are in one row.
        has_legend: Whether there is a legend.

    Returns:
        ``path``.

    Raises:
        ParameterError: The suffix is unknown.
        RunError: vl-convert is not installed.
    """
    kind = _format_of(path)
    spec = _picture(panels, labels, title, columns or len(panels), has_legend)
    size = {"scale": SCALE} if kind == "png" else {}
    content = convert(f"vegalite_to_{kind}", vl_spec=json.dumps(spec, allow_nan=False), **size)
    if kind == "svg":
        # Vega numbers the clipping paths of all pictures of a process.
        numbers: dict[bytes, int] = {}
        content = CLIP.sub(lambda found: found[1] + b"%d" % numbers.setdefault(found[2], len(numbers)), content)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def _picture(
    panels: Sequence[Panel], labels: Sequence[str], title: str, columns: int, has_legend: bool
) -> dict[str, Any]:
    """Return the specification of a picture."""
    # Width of an entry: about 7 units per letter, and 60 for its line and spacing.
    named = [labels[number] for number in sorted({row["series"] for panel in panels for row in panel.rows})]
    room = sum(panel.width + 70 for panel in panels[:columns]) / (60 + 7 * max(map(len, named), default=0))
    # As few columns as the same number of lines allows, so that the columns are equally long.
    entries = max(1, math.ceil(len(named) / max(1, math.ceil(len(named) / max(1, int(room))))))
    legend = {"title": None, "orient": "bottom", "columns": entries, "labelExpr": charts.LABEL, "labelLimit": 500,
              "symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2.5, "symbolSize": 160}  # fmt: skip
    shared = {"color": "shared", "strokeDash": "shared"}
    return {
        "title": {"text": title, "anchor": "middle", "fontSize": 17, "offset": 14, "frame": "bounds"},
        "params": [{"name": "labels", "value": list(labels)}, {"name": "chosen", "value": ""}],
        "columns": columns,
        "concat": [_unit(panel, legend if has_legend else None) for panel in panels],
        "resolve": {"scale": shared, "legend": shared},
        "datasets": {name: rows for panel in panels for name, rows in panel.spec.get("datasets", {}).items()},
        "spacing": 35,
        "config": {
            "background": "white", "font": "sans-serif", "view": {"stroke": None}, "aria": False,
            "axis": {key: INK if value == charts.TEXT else value for key, value in charts.SOFT.items()},
            "legend": {"labelColor": INK, "labelFontSize": 13, "layout": {"bottom": {"anchor": "middle"}}},
            "title": {"color": INK, "anchor": "start", "fontWeight": "normal", "fontSize": 14, "offset": 10,
                      "frame": "group"},
        },
    }  # fmt: skip


def _unit(panel: Panel, legend: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a panel as a part of a picture, with the picture's colour of texts, title and legend."""
    spec = {key: value for key, value in panel.spec.items() if key not in ("config", "autosize", "params", "datasets")}
    # As page.js does. A quotation mark within a text is escaped, so only whole values and beginnings are replaced.
    text = json.dumps(spec).replace('"legend": null', f'"legend": {json.dumps(legend)}')
    text = text.replace(f'"{charts.TEXT}"', f'"{INK}"').replace(f'"{charts.X_TITLE}', json.dumps(panel.x_title)[:-1])
    # What comes last is on top: the first selector.
    rows = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        for row in sorted(panel.rows, key=lambda row: -row["series"])
    ]
    found: dict[str, Any] = json.loads(text)
    return found | {"title": panel.title, "data": {"values": rows}, "width": panel.width, "height": HEIGHT}


def selection_fractions(history: History, num_clients: int) -> NDArray[np.float64]:
    """Return, for each client, the share of the rounds so far in which it was selected.

    Args:
        history: History of the run.
        num_clients: Number of clients of the federation, including clients that were never selected.

    Returns:
        Shares of shape (rounds, num_clients): one row per round, with the clients in the order of their rows.
    """
    chosen = np.zeros((len(history.rounds), num_clients))
    place = {record.round: i for i, record in enumerate(history.rounds)}
    for row in history.clients:
        chosen[place[row.round], row.client] = 1.0
    return np.asarray(chosen.cumsum(axis=0) / np.arange(1, len(chosen) + 1)[:, np.newaxis])


def _format_of(path: str | os.PathLike[str]) -> str:
    """Return the format of a picture, by the suffix of its file.

    Raises:
        ParameterError: The suffix is unknown. The error names the known suffixes.
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        *first, last = (f".{name}" for name in FORMATS)
        raise ParameterError(
            f"the name of a picture must end in {', '.join(first)} or {last}, got {os.fspath(path)!r}. Choose one of "
            "these formats"
        )
    return suffix
