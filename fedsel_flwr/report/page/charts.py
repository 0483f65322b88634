"""Charts of pages and of pictures, as Vega-Lite specifications that Altair builds and checks.

The rows come later under the name ``rows``: in a page from ``page.js``, in a picture from
:mod:`fedsel_flwr.report.plots`. Their column ``series`` is the number of their selector, client or reason. Page and
picture add the names as ``labels``, which are data and no properties. They also put a legend in the place of ``null``,
and titles in the place of :data:`X_TITLE`. Axes and texts have the colour of the page's text (``currentColor``). So a
chart is readable on a light and on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.verdict import MARGIN

# Okabe and Ito's palette, which people with colour-vision deficiency can distinguish. Yellow is left out, because it is
# too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TEXT = "currentColor"
DASHES = ([1, 0], [6, 2], [2, 2])
"""Dashes of the lines: the first seven selectors, the next seven, and the rest."""
HEIGHT = 260
PART_COLOURS = {
    "download": "#4c78a8", "compute": "#f58518", "upload": "#e45756", "waiting": "#72b7b2", "probes": "#54a24b",
    "transfer": "#b279a2", "latency": "#eeca3b", "failures": "#9d755d",
}  # fmt: skip
"""Part of a round -> its colour on every page."""
COUNTED = "datum.label === 'failures' ? 'failures (counted)' : datum.label"
"""Labels of the parts of a deployment's round."""
CHOSEN = "chosen seed"
"""Value in a specification that the menu of seeds replaces."""
X_TITLE = "x title"
"""Text in a specification that the axis menu replaces."""
SHAPES = ("circle", "square", "triangle-up", "diamond")
"""Shapes of points. The next shape follows when all colours are used."""
LONGEST_NAMES = 60
"""Largest number of characters of the names of groups in a row."""
LABEL = "labels[datum.value]"
"""Label of a series on an axis or in a legend."""
SOFT = {
    "gridColor": TEXT, "gridOpacity": 0.15, "domainColor": TEXT, "domainOpacity": 0.5, "tickColor": TEXT,
    "tickOpacity": 0.5, "labelColor": TEXT, "titleColor": TEXT, "titleFontWeight": "normal",
    "labelOverlap": "greedy", "labelSeparation": 6, "labelFontSize": 12, "titleFontSize": 12,
}  # fmt: skip
"""Settings of the axes."""
Styles = Mapping[int, tuple[str, Sequence[int]]]
"""Number of a selector -> colour and dashes."""


class _Later:
    """Module that is imported on first use, because servers need no charts."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(load_optional(self._name), name)


alt: Any = _Later("altair")


def selector_styles(selectors: Sequence[str]) -> dict[str, tuple[str, list[int]]]:
    """Return colour and dashes of each selector, as in the picture; black is the colour of the text."""
    colours = [COLOURS[i % len(COLOURS)].replace("#000000", TEXT) for i in range(len(selectors))]
    dashes = [list(DASHES[i // len(COLOURS) % len(DASHES)]) for i in range(len(selectors))]
    return dict(zip(selectors, zip(colours, dashes, strict=True), strict=True))


def line_chart(
    selectors: Styles,
    x: Any,
    y: str,
    y_title: str | list[str],
    *,
    tooltip: Sequence[str] = (),
    band: bool = False,
    step: bool = False,
    points: bool = False,
    form: str = "",
    scale: Mapping[str, Any] | None = None,
    rule: float | None = None,
    goal: float | None = None,
    width: str = "",
    more: Sequence[Any] = (),
) -> dict[str, Any]:
    """Lines of the selectors over a column.

    Args:
        selectors: The selectors' styles.
        x: Altair's channel of the horizontal axis.
        y: Column of the values.
        y_title: Title of the vertical axis.
        tooltip: Columns in a tooltip, next to the selector.
        band: Whether there is a band between the columns ``low`` and ``high``.
        step: Whether a value stays until the next one.
        points: Whether each value has a point.
        form: Format of the vertical axis.
        scale: Settings of the vertical scale.
        rule: Place of a horizontal line.
        goal: Place of a dashed horizontal line.
        width: Column of the lines' widths; empty for equal widths.
        more: Further layers.
    """
    axis = alt.Axis(format=form) if form else alt.Axis()
    of = {"title": y_title, "axis": axis, "scale": alt.Scale(**(scale or {"zero": False}))}
    how = {"interpolate": "step-after"} if step else {}
    base = alt.Chart().encode(x=x, color=series_colour(selectors))
    area = base.transform_filter("isValid(datum.low)").mark_area(opacity=0.15, clip=True, **how)
    line = base.transform_filter(f"isValid(datum.{y})").mark_line(point=points, **how).encode(
        y=alt.Y(f"{y}:Q", **of), strokeDash=_dash(selectors), tooltip=["selector:N", *tooltip]
    )  # fmt: skip
    line = line.encode(strokeWidth=alt.StrokeWidth(f"{width}:Q", scale=None) if width else alt.value(1.8))
    layers = [area.encode(y=alt.Y("low:Q", **of), y2="high:Q")] if band else []
    layers += [line, *(_rule(place, dash) for place, dash in ((rule, []), (goal, [4, 4])) if place is not None)]
    return specification(alt.layer(*layers, *more), HEIGHT)


def accuracy_chart(selectors: Styles, target: float, *, is_fraction: bool) -> dict[str, Any]:
    """Lines of accuracy with a band of one deviation, and the target as a dashed line."""
    return line_chart(
        selectors, alt.X("x:Q", title=X_TITLE), "accuracy", "test accuracy", tooltip=["x:Q", "accuracy:Q"],
        band=True, step=True, form=".0%" if is_fraction else "", goal=target,
    )  # fmt: skip


def ratio_chart(selectors: Styles, reference: str) -> dict[str, Any]:
    """Forest plot: ratios with intervals, a point per seed, the margin, and the band of the reference itself."""
    x = alt.X("ratio:Q", title=f"{X_TITLE}, ratio to {reference}", scale=alt.Scale(type="log", nice=False, padding=12))
    y = _series_axis()
    colour = series_colour(selectors)
    rows = alt.Chart()
    itself = rows.transform_filter("datum.kind == 'band' && isValid(datum.low)")
    band = itself.mark_rect(color=TEXT, opacity=0.07).encode(x="low:Q", x2="high:Q")
    margin = _once().mark_rect(color=TEXT, opacity=0.12).encode(x=alt.datum(1 / MARGIN), x2=alt.datum(MARGIN))
    one = _once().mark_rule(color=TEXT, opacity=0.7).encode(x=alt.datum(1))
    is_chosen = "datum.seed === chosen"
    seeds = rows.transform_filter("datum.kind == 'seed' && isValid(datum.ratio)").mark_circle(yOffset=-6).encode(
        x=x, y=y, color=colour, opacity=alt.condition(is_chosen, alt.value(1), alt.value(0.45)),
        size=alt.condition(is_chosen, alt.value(110), alt.value(32)), tooltip=["selector:N", "seed:N", _short("ratio")],
    )  # fmt: skip
    mean = rows.transform_filter("datum.kind == 'mean'")
    known = mean.transform_filter("isValid(datum.low)")
    interval = known.mark_rule(strokeWidth=2.5, yOffset=6).encode(x=alt.X("low:Q"), x2="high:Q", y=y, color=colour)
    words = ["selector:N", *map(_short, ("ratio", "low", "high", "p")), "verdict:N", "note:N"]
    point = known.mark_point(filled=True, shape="diamond", size=90, yOffset=6, opacity=1).encode(
        x=x, y=y, color=colour, tooltip=words
    )
    note = known.mark_text(align="left", dx=8, dy=6, color=TEXT).encode(
        x=alt.X("high:Q", scale=alt.Scale(type="log")), y=y, text="note:N"
    )
    count = mean.transform_filter("!isValid(datum.low)").mark_text(align="left", dx=4, dy=6, color=TEXT).encode(
        x=alt.value(0), y=y, text="note:N"
    )  # fmt: skip
    name = itself.mark_text(text=f"{reference} against itself", align="left", baseline="bottom", dx=2, color=TEXT)
    name = name.encode(x=alt.X("low:Q", scale=alt.Scale(type="log")), y=alt.value(-3))
    layers = (band, name, margin, one, seeds, interval, point)
    found = specification(alt.layer(*layers, note, count), 34 * len(selectors))
    return found | {"params": [{"name": "chosen", "value": CHOSEN}]}


def profile_chart(
    selectors: Styles, reference: str, targets: Sequence[float], *, named: bool = False
) -> dict[str, Any]:
    """Lines of the time ratio over the target accuracy, with the interval as a band.

    ``named``: a text names the targets that some runs did not reach.
    """
    form, scale = alt.Axis(format="~%", values=list(targets)), alt.Scale(zero=False, padding=10)
    x = alt.X("target:Q", title="target accuracy", axis=form, scale=scale)
    text = alt.Chart().transform_filter("datum.reached < datum.pairs").mark_text(
        text="not on all seeds", angle=270, align="left", color=TEXT
    ).encode(x=x, y=alt.value("height"))  # fmt: skip
    return line_chart(
        selectors, x, "ratio",
        f"time, ratio to {reference}", tooltip=["target:Q", "ratio:Q", "low:Q", "high:Q", "reached:Q", "pairs:Q"],
        band=True, points=True, scale={"type": "log", "nice": False, "padding": 8}, rule=1,
        more=[text] if named else (),
    )  # fmt: skip


def interval_chart(
    selectors: Styles, groups: Sequence[str], title: str | list[str], levels: Mapping[str, float]
) -> dict[str, Any]:
    """Points with intervals: one value of each selector in each group; lines at the levels, with their names."""
    crowded = len(groups) > 5 or len("".join(groups)) > LONGEST_NAMES
    axis = alt.Axis(labelAngle=-30 if crowded else 0, labelLimit=0, labelOverlap=False)
    base = alt.Chart().encode(
        x=alt.X("group:N", title=None, sort=list(groups), axis=axis), color=series_colour(selectors),
        xOffset=alt.XOffset("series:O", scale=alt.Scale(domain=list(selectors))),
    )  # fmt: skip
    of = {"title": title, "scale": alt.Scale(zero=False)}
    whisker = base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", **of), y2="high:Q")
    shapes = alt.Scale(domain=list(selectors), range=[SHAPES[i // len(COLOURS) % len(SHAPES)] for i in selectors])
    point = base.mark_point(filled=True, size=40, opacity=1).encode(
        y=alt.Y("value:Q", **of), shape=alt.Shape("series:N", scale=shapes, legend=None)
    )
    lines = [part for name, place in levels.items() for part in named_line(place, name)]
    return specification(alt.layer(whisker, point, *lines), HEIGHT)


def count_chart(selectors: Styles) -> dict[str, Any]:
    """Lines: how often the clients were selected, the most selected client first, with a band of one deviation."""
    x = alt.X("place:Q", title=X_TITLE, axis=alt.Axis(format="d"), scale=alt.Scale(nice=False))
    return line_chart(
        selectors, x, "count", "times selected", band=True, step=True, form="~g", scale={"domainMin": 0}, width="width"
    )


def map_chart() -> dict[str, Any]:
    """Heat map: rounds from left to right, clients in the order of their mean latency from below."""
    # Without the darkest colours, which look like no selection on a dark page.
    scale = alt.Scale(scheme=alt.SchemeParams(name="viridis", extent=[0.25, 1]))
    ends = {"first_client:Q": "from the client in place", "place_end:Q": "to the client in place"}
    chart = _bars(alt.Chart().transform_calculate(first_client="datum.place + 1")).encode(
        y=alt.Y("place:Q", title="clients, fastest below", scale=alt.Scale(nice=False)),
        y2="place_end:Q",
        color=alt.Color("selections:Q", scale=scale, legend=_legend("selections")),
        tooltip=[*(alt.Tooltip(name, title=title) for name, title in ends.items()), *_ends(), _short("selections")],
    )
    return specification(chart, HEIGHT)


def selection_chart(selectors: Styles) -> dict[str, Any]:
    """Points: how often a client was selected against its mean latency."""
    chart = alt.Chart().mark_circle(opacity=0.6, size=40).encode(
        x=_latency_axis(), y=alt.Y("selections:Q", title="times selected"), color=series_colour(selectors),
        tooltip=["selector:N", "client:N", "latency_s:Q", "selections:Q"],
    )  # fmt: skip
    return specification(chart, HEIGHT)


def tenth_chart(selectors: Styles) -> dict[str, Any]:
    """Lines: how often a client of each tenth was selected against the tenth's mean latency."""
    return line_chart(
        selectors, _latency_axis(), "selections_per_client", "times selected", points=True, scale={"zero": True},
        tooltip=["tenth:Q", "latency_s:Q", "selections_per_client:Q"],
    )  # fmt: skip


def fairness_chart(selectors: Styles, title: str, form: str) -> dict[str, Any]:
    """Points: one figure of each selector, with one deviation; ``form`` is the format of the axis."""
    y = _series_axis()
    scale, axis = alt.Scale(zero=False), alt.Axis(format=form)
    base = alt.Chart().encode(y=y, color=series_colour(selectors))
    spread = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2.5).encode(
        x=alt.X("low:Q", title=title, scale=scale, axis=axis), x2="high:Q"
    )  # fmt: skip
    point = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=alt.X("value:Q", title=title, scale=scale, axis=axis), tooltip=["selector:N", "seed:N", "value:Q"]
    )
    return specification(alt.layer(spread, point), 24 * len(selectors))


def failure_chart(last: int, *, whole: bool = False) -> dict[str, Any]:
    """Stacked bars: failed clients per round, by reason, from round 1 to the last.

    ``whole``: every bar is one round, so its numbers of clients are whole.
    """
    rows = alt.Chart().transform_stack(
        stack="clients_per_round", as_=["low", "high"], groupby=["round"], sort=[alt.SortField("series")]
    )
    # The least step between ticks (tickMinStep) does not hold for an axis with few of them.
    axis = alt.Axis(labelExpr="datum.value % 1 ? '' : datum.value") if whole else alt.Axis()
    chart = _bars(rows, domain=[0.5, last + 0.5]).encode(
        y=alt.Y("low:Q", title="failed clients per round", axis=axis), y2="high:Q",
        color=alt.Color("series:N", legend=_legend(None, LABEL)),
        tooltip=["reason:N", *_ends(), _short("clients_per_round", "clients per round")],
    )  # fmt: skip
    return specification(chart, HEIGHT)


def duration_chart(parts: Sequence[str], title: str, limit: float = math.nan) -> dict[str, Any]:
    """Stacked bars: the parts of a round, in seconds, over the rounds of a deployment; a line at ``limit``."""
    rows = alt.Chart().transform_filter("datum.seconds > 0")
    rows = rows.transform_calculate(order=f"indexof({list(parts)}, datum.part)").transform_stack(
        stack="seconds", as_=["low", "high"], groupby=["round"], sort=[alt.SortField("order")]
    )  # fmt: skip
    chart = _bars(rows).encode(
        y=alt.Y("low:Q", title=title), y2="high:Q", color=_part_colour(parts, COUNTED),
        # Only these seconds are not measured.
        fillOpacity=alt.condition("datum.part === 'failures'", alt.value(0.4), alt.value(1)),
        tooltip=["part:N", *_ends(), _short("seconds")],
    )  # fmt: skip
    return specification(alt.layer(chart, *named_line(limit, "max_latency")), HEIGHT)


def cost_chart(most: int) -> dict[str, Any]:
    """Bars: the seconds that waiting for a client cost, of this number of the costliest clients."""
    chart = alt.Chart().transform_filter(f"datum.place <= {most}").mark_bar().encode(
        x=alt.X("beyond_median_s:Q", title="seconds beyond the median client"),
        y=_series_axis(),
        tooltip=["client:N", "beyond_median_s:Q", "beyond_second_s:Q", "slowest:Q", "failures:Q", "problem:N"],
    )  # fmt: skip
    return specification(chart, 20 * most)


def slowest_chart(longest: float, limit: float = math.nan) -> dict[str, Any]:
    """Points: the duration of each round, with its slowest client; the longest round, and a line at ``limit``."""
    # Without this space, the points of the longest rounds are cut by the upper edge.
    top = 1.08 * max(longest, limit if math.isfinite(limit) else 0.0)
    scale = alt.Scale(domain=[0, top], nice=False) if top > 0 else alt.Scale()
    outcomes, legend = ["usable update", "failed"], _legend("slowest client")
    colours = alt.Scale(domain=outcomes, range=[PART_COLOURS["download"], PART_COLOURS["upload"]])
    chart = alt.Chart().mark_point(filled=True, size=45, opacity=0.8).encode(
        x=round_axis(padding=8),
        y=alt.Y("round_s:Q", title="duration of the round (s)", scale=scale),
        color=alt.Color("outcome:N", legend=legend, scale=colours),
        shape=alt.Shape("outcome:N", legend=legend, scale=alt.Scale(domain=outcomes, range=["circle", "triangle-up"])),
        tooltip=["round:Q", _short("round_s", "seconds"), "client:N", "outcome:N",
                 _short("beyond_median_s", "seconds beyond the median"), "problem:N"],
    )  # fmt: skip
    counted = alt.Chart().mark_rule(color=PART_COLOURS["upload"], opacity=0.5).encode(
        x="round:Q", y=alt.Y("measured_s:Q", scale=scale), y2="round_s:Q"
    )  # fmt: skip
    return specification(alt.layer(counted, chart, *named_line(limit, "max_latency")), HEIGHT)


def evaluation_chart() -> dict[str, Any]:
    """Line: accuracy over the evaluated rounds of a deployment."""
    y = alt.Y("accuracy:Q", title="accuracy", scale=alt.Scale(zero=True))
    chart = alt.Chart().mark_line(point=True).encode(x=round_axis(), y=y, tooltip=["round:Q", "accuracy:Q", "loss:Q"])
    return specification(chart, HEIGHT)


def part_chart(number: int, parts: Sequence[str]) -> dict[str, Any]:
    """Stacked bars: the parts of a mean round of each of this number of selectors, in seconds."""
    rows = alt.Chart().transform_calculate(order=f"indexof({list(parts)}, datum.part)")
    chart = rows.transform_filter("datum.seconds > 0").mark_bar().encode(
        x=alt.X("seconds:Q", title="seconds of a mean round", stack="zero"), y=_series_axis(),
        color=_part_colour(parts), order=alt.Order("order:Q"), tooltip=["selector:N", "part:N", "seconds:Q"],
    )  # fmt: skip
    return specification(chart, 24 * number)


def regret_chart(selectors: Styles) -> dict[str, Any]:
    """Lines: seconds lost per round so far."""
    return line_chart(
        selectors, round_axis(), "theta", "seconds lost per round so far", tooltip=["round:Q", "theta:Q"],
        scale={"zero": True}, rule=0,
    )  # fmt: skip


def _once() -> Any:
    """Return a chart whose mark is drawn once, whatever the rows are."""
    return alt.Chart(alt.InlineData(values=[{}]))


def series_colour(selectors: Styles) -> Any:
    """Return the channel of the series' colours. The menu of selectors is the legend."""
    scale = alt.Scale(domain=list(selectors), range=[colour for colour, _ in selectors.values()])
    return alt.Color("series:N", scale=scale, legend=None)


def _dash(selectors: Styles) -> Any:
    scale = alt.Scale(domain=list(selectors), range=[list(dash) for _, dash in selectors.values()])
    return alt.StrokeDash("series:N", scale=scale, legend=None)


def _bars(rows: Any, **scale: Any) -> Any:
    """Return bars of groups of rounds. The bar of one round has the round in its middle."""
    rows = rows.transform_calculate(
        left="datum.round - 0.5", right="datum.round_end - 0.5", last_round="datum.round_end - 1"
    )
    return rows.mark_rect(stroke=None).encode(x=round_axis("left", **scale), x2="right:Q")


def round_axis(column: str = "round", **scale: Any) -> Any:
    """Return the horizontal axis of rounds, which need not begin at 0."""
    axis = alt.Axis(tickMinStep=1, format="d")
    return alt.X(f"{column}:Q", title="round", axis=axis, scale=alt.Scale(**({"zero": False, "nice": False} | scale)))


def _ends() -> list[Any]:
    """Return the first and the last round of a group, for a tooltip."""
    return [alt.Tooltip("round:Q", title="first round"), alt.Tooltip("last_round:Q", title="last round")]


def named_line(place: float, name: str) -> list[Any]:
    """Return a dashed horizontal line with its name; nothing if its place is unknown."""
    if not math.isfinite(place):
        return []
    text = _once().mark_text(text=name, align="left", baseline="bottom", dx=2, dy=-2, color=TEXT)
    return [_rule(place, [4, 4]), text.encode(y=alt.datum(place), x=alt.value(0))]


def _rule(place: float, dash: Sequence[int]) -> Any:
    return _once().mark_rule(strokeDash=dash, color=TEXT, opacity=0.6).encode(y=alt.datum(place))


def _short(column: str, title: str | None = None) -> Any:
    """Return a number with three digits, for a tooltip."""
    return alt.Tooltip(f"{column}:Q", format=".3~g", **({"title": title} if title else {}))


def _latency_axis() -> Any:
    return alt.X("latency_s:Q", title="mean latency (s)", scale=alt.Scale(zero=False))


def _part_colour(parts: Sequence[str], labels: str = "datum.label") -> Any:
    scale = alt.Scale(domain=list(parts), range=[PART_COLOURS[part] for part in parts])
    return alt.Color("part:N", scale=scale, legend=_legend(None, labels))


def _legend(title: str | None, labels: str = "datum.label") -> Any:
    return alt.Legend(title=title, orient="bottom", labelExpr=labels)


def _series_axis() -> Any:
    return alt.Y("series:N", title=None, axis=alt.Axis(labelExpr=LABEL))


def specification(chart: Any, height: Any) -> dict[str, Any]:
    """Return a chart as a specification with the page's width, font and colours."""
    config = {
        "background": None, "font": "system-ui, sans-serif", "view": {"stroke": None}, "aria": False, "axis": SOFT,
        "axisX": {"tickCount": {"expr": "ceil(width / 90)"}},
        "legend": {"labelColor": TEXT, "titleColor": TEXT, "labelFontSize": 12, "symbolLimit": 20,
                   "columns": {"expr": "max(3, floor(width / 90))"}},
    }  # fmt: skip
    made = chart.properties(width="container", height=height, data=alt.NamedData("rows"))
    found = made.to_dict(context={"pre_transform": False})
    found |= {"config": config, "autosize": {"type": "fit-x", "contains": "padding"}}
    found.pop("$schema", None)
    return cast("dict[str, Any]", found)
