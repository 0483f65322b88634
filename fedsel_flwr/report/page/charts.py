"""Charts of a page, as Vega-Lite specifications that Altair builds and checks.

The rows come later under the name ``rows`` (:mod:`fedsel_flwr.report.page.document`). Their column ``series`` is the
number of their selector, client or reason. ``page.js`` adds the names as ``labels``, which are data and no properties.
Axes and texts have the colour of the page's text (``currentColor``), so that a chart is readable on a light and on a
dark page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fedsel_flwr.report.panels import COLOURS
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.verdict import MARGIN

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
LABEL = "labels[datum.value]"
"""Label of a series on an axis or in a legend."""
Styles = Mapping[int, tuple[str, Sequence[int]]]
"""Number of a selector -> colour and dashes."""


def selector_styles(selectors: Sequence[str]) -> dict[str, tuple[str, list[int]]]:
    """Return colour and dashes of each selector, as in the picture; black is the colour of the text."""
    return {
        name: (
            COLOURS[i % len(COLOURS)].replace("#000000", TEXT),
            list(DASHES[i // len(COLOURS) % len(DASHES)]),
        )
        for i, name in enumerate(selectors)
    }


def accuracy_chart(selectors: Styles, target: float, *, is_fraction: bool) -> dict[str, Any]:
    """Lines of accuracy with a band of one deviation, and the target as a dashed line."""
    alt = _altair()
    form = alt.Axis(format=".0%") if is_fraction else alt.Axis()
    y = alt.Y("accuracy:Q", title="test accuracy", axis=form, scale=alt.Scale(zero=False))
    base = alt.Chart().encode(x=alt.X("x:Q", title=X_TITLE), color=_colour(selectors))
    band = base.mark_area(opacity=0.15, interpolate="step-after", clip=True).encode(
        y=alt.Y("low:Q", title="test accuracy", axis=form), y2="high:Q"
    )
    line = base.mark_line(interpolate="step-after", strokeWidth=1.8).encode(
        y=y, strokeDash=_dash(selectors), detail="series:N", tooltip=["selector:N", "x:Q", "accuracy:Q"]
    )
    goal = _once().mark_rule(strokeDash=[4, 4], color=TEXT, opacity=0.6).encode(y=alt.datum(target))
    return _specification(alt.layer(band, line, goal), HEIGHT)


def ratio_chart(selectors: Styles, reference: str) -> dict[str, Any]:
    """Forest plot: ratios with intervals, a point per seed, the margin, and the band of the reference itself."""
    alt = _altair()
    x = alt.X("ratio:Q", title=f"{X_TITLE}, ratio to {reference}", scale=alt.Scale(type="log", nice=False, padding=12))
    y = _series_axis()
    colour = _colour(selectors)
    rows = alt.Chart()
    band = rows.transform_filter("datum.kind == 'band' && isValid(datum.low)").mark_rect(color=TEXT, opacity=0.07)
    margin = _once().mark_rect(color=TEXT, opacity=0.12).encode(x=alt.datum(1 / MARGIN), x2=alt.datum(MARGIN))
    one = _once().mark_rule(color=TEXT, opacity=0.7).encode(x=alt.datum(1))
    is_chosen = "datum.seed === chosen"
    seeds = rows.transform_filter("datum.kind == 'seed' && isValid(datum.ratio)").mark_circle(yOffset=-6).encode(
        x=x, y=y, color=colour, opacity=alt.condition(is_chosen, alt.value(1), alt.value(0.45)),
        size=alt.condition(is_chosen, alt.value(110), alt.value(32)),
        tooltip=["selector:N", "seed:N", alt.Tooltip("ratio:Q", format=".3~g")],
    )  # fmt: skip
    mean = rows.transform_filter("datum.kind == 'mean'")
    known = mean.transform_filter("isValid(datum.low)")
    interval = known.mark_rule(strokeWidth=2.5, yOffset=6).encode(x=alt.X("low:Q"), x2="high:Q", y=y, color=colour)
    numbers = [alt.Tooltip(f"{field}:Q", format=".3~g") for field in ("ratio", "low", "high", "p")]
    words = ["selector:N", *numbers, "verdict:N", "note:N"]
    point = known.mark_point(filled=True, shape="diamond", size=90, yOffset=6, opacity=1).encode(
        x=x, y=y, color=colour, tooltip=words
    )
    note = mean.mark_text(align="left", dx=8, dy=6, color=TEXT).encode(
        x=alt.X("high:Q", scale=alt.Scale(type="log")), y=y, text="note:N"
    )
    name = rows.transform_filter("datum.kind == 'band' && isValid(datum.low)").mark_text(
        text=f"{reference} against itself", align="left", baseline="bottom", dx=2, color=TEXT
    )
    name = name.encode(x=alt.X("low:Q", scale=alt.Scale(type="log")), y=alt.value(-3))
    layers = (band.encode(x="low:Q", x2="high:Q"), name, margin, one, seeds, interval, point)
    found = _specification(alt.layer(*layers, note), 34 * len(selectors))
    return found | {"params": [{"name": "chosen", "value": CHOSEN}]}


def profile_chart(selectors: Styles, reference: str, targets: Sequence[float]) -> dict[str, Any]:
    """Lines of the time ratio over the target accuracy, with the interval as a band."""
    alt = _altair()
    scale = alt.Scale(type="log", nice=False, padding=8)
    base = alt.Chart().encode(
        x=alt.X(
            "target:Q",
            title="target accuracy",
            axis=alt.Axis(format="~%", values=list(targets)),
            scale=alt.Scale(zero=False, padding=10),
        ),
        color=_colour(selectors),
    )
    title = f"time, ratio to {reference}"
    known = base.transform_filter("isValid(datum.low)")
    band = known.mark_area(opacity=0.13).encode(y=alt.Y("low:Q", title=title, scale=scale), y2="high:Q")
    line = base.transform_filter("isValid(datum.ratio)").mark_line(point=True).encode(
        y=alt.Y("ratio:Q", title=title, scale=scale), strokeDash=_dash(selectors),
        tooltip=["selector:N", "target:Q", "ratio:Q", "low:Q", "high:Q", "reached:Q", "pairs:Q"],
    )  # fmt: skip
    one = _once().mark_rule(color=TEXT, opacity=0.7).encode(y=alt.datum(1))
    return _specification(alt.layer(band, line, one), HEIGHT)


def map_chart() -> dict[str, Any]:
    """Heat map: rounds from left to right, clients in the order of their mean latency from below."""
    alt = _altair()
    chart = _centred(alt.Chart()).transform_calculate(first_client="datum.place + 1").mark_rect().encode(
        x=alt.X("left:Q", title="round", axis=_whole(), scale=alt.Scale(zero=False, nice=False)),
        x2="right:Q",
        y=alt.Y("place:Q", title="clients, fastest below", scale=alt.Scale(nice=False)),
        y2="place_end:Q",
        # Without the darkest colours, which look like no selection on a dark page.
        color=alt.Color(
            "selections:Q",
            scale=alt.Scale(scheme=alt.SchemeParams(name="viridis", extent=[0.25, 1])),
            legend=_legend("selections"),
        ),
        tooltip=[
            alt.Tooltip("first_client:Q", title="from the client in place"),
            alt.Tooltip("place_end:Q", title="to the client in place"),
            *_ends(),
            alt.Tooltip("selections:Q", format=".3~g"),
        ],
    )  # fmt: skip
    return _specification(chart, HEIGHT)


def selection_chart(selectors: Styles) -> dict[str, Any]:
    """Points: how often a client was selected against its mean latency."""
    alt = _altair()
    chart = alt.Chart().mark_circle(opacity=0.6, size=40).encode(
        x=alt.X("latency_s:Q", title="mean latency (s)", scale=alt.Scale(zero=False)),
        y=alt.Y("selections:Q", title="times selected"),
        color=_colour(selectors),
        tooltip=["selector:N", "client:N", "latency_s:Q", "selections:Q"],
    )  # fmt: skip
    return _specification(chart, HEIGHT)


def tenth_chart(selectors: Styles) -> dict[str, Any]:
    """Lines: how often a client of each tenth was selected against the tenth's mean latency."""
    alt = _altair()
    chart = alt.Chart().mark_line(point=True).encode(
        x=alt.X("latency_s:Q", title="mean latency (s)", scale=alt.Scale(zero=False)),
        y=alt.Y("selections_per_client:Q", title="times selected"),
        color=_colour(selectors),
        strokeDash=_dash(selectors),
        tooltip=["selector:N", "tenth:Q", "latency_s:Q", "selections_per_client:Q"],
    )  # fmt: skip
    return _specification(chart, HEIGHT)


def fairness_chart(selectors: Styles, title: str, form: str) -> dict[str, Any]:
    """Points: one figure of each selector, with one deviation; ``form`` is the format of the axis."""
    alt = _altair()
    y = _series_axis()
    scale, axis = alt.Scale(zero=False), alt.Axis(format=form)
    base = alt.Chart().encode(y=y, color=_colour(selectors))
    spread = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2.5).encode(
        x=alt.X("low:Q", title=title, scale=scale, axis=axis), x2="high:Q"
    )  # fmt: skip
    point = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=alt.X("value:Q", title=title, scale=scale, axis=axis), tooltip=["selector:N", "seed:N", "value:Q"]
    )
    return _specification(alt.layer(spread, point), 24 * len(selectors))


def failure_chart(last: int, most: int | None = None) -> dict[str, Any]:
    """Stacked bars: failed clients per round, by reason, from round 1 to the last.

    ``most`` is the largest number of failed clients if every bar is one round; None if bars are means.
    """
    alt = _altair()
    rows = _centred(alt.Chart()).transform_stack(
        stack="clients_per_round", as_=["low", "high"], groupby=["round"], sort=[alt.SortField("series")]
    )
    y = alt.Y("low:Q", title="failed clients per round")
    if most is not None:
        # The least step between ticks (tickMinStep) does not hold for an axis with few of them.
        ticks = list(range(0, most + 1, math.ceil(most / 8)))
        y = y.axis(values=ticks, format="d").scale(domain=[0, most], nice=False)
    chart = rows.mark_rect(stroke=None).encode(
        x=alt.X("left:Q", title="round", axis=_whole(), scale=alt.Scale(domain=[0.5, last + 0.5], nice=False)),
        x2="right:Q",
        y=y,
        y2="high:Q",
        color=alt.Color("series:N", legend=_legend(None, LABEL)),
        tooltip=["reason:N", *_ends(), alt.Tooltip("clients_per_round:Q", title="clients per round", format=".3~g")],
    )
    return _specification(chart, HEIGHT)


def duration_chart(parts: Sequence[str], title: str, limit: float = math.nan) -> dict[str, Any]:
    """Stacked bars: the parts of a round, in seconds, over the rounds of a deployment; a line at ``limit``."""
    alt = _altair()
    rows = _centred(alt.Chart()).transform_filter("datum.seconds > 0")
    rows = rows.transform_calculate(order=f"indexof({list(parts)}, datum.part)").transform_stack(
        stack="seconds", as_=["low", "high"], groupby=["round"], sort=[alt.SortField("order")]
    )  # fmt: skip
    chart = rows.mark_rect(stroke=None).encode(
        x=alt.X("left:Q", title="round", axis=_whole(), scale=alt.Scale(zero=False, nice=False)),
        x2="right:Q",
        y=alt.Y("low:Q", title=title),
        y2="high:Q",
        color=_part_colour(parts, COUNTED),
        # Only these seconds are not measured.
        fillOpacity=alt.condition("datum.part === 'failures'", alt.value(0.4), alt.value(1)),
        tooltip=["part:N", *_ends(), alt.Tooltip("seconds:Q", format=".3~g")],
    )
    return _specification(alt.layer(chart, *_limit(limit)), HEIGHT)


def cost_chart(most: int) -> dict[str, Any]:
    """Bars: the seconds that waiting for a client cost, of this number of the costliest clients."""
    alt = _altair()
    chart = alt.Chart().transform_filter(f"datum.place <= {most}").mark_bar().encode(
        x=alt.X("beyond_median_s:Q", title="seconds beyond the median client"),
        y=_series_axis(),
        tooltip=["client:N", "beyond_median_s:Q", "beyond_second_s:Q", "slowest:Q", "failures:Q", "problem:N"],
    )  # fmt: skip
    return _specification(chart, 20 * most)


def slowest_chart(longest: float, limit: float = math.nan) -> dict[str, Any]:
    """Points: the duration of each round, with its slowest client; the longest round, and a line at ``limit``."""
    alt = _altair()
    # Without this space, the points of the longest rounds are cut by the upper edge.
    top = 1.08 * max(longest, limit if math.isfinite(limit) else 0.0)
    scale = alt.Scale(domain=[0, top], nice=False) if top > 0 else alt.Scale()
    colour = alt.Color(
        "outcome:N", legend=_legend("slowest client"),
        scale=alt.Scale(domain=["usable update", "failed"], range=[PART_COLOURS["download"], PART_COLOURS["upload"]]),
    )  # fmt: skip
    chart = alt.Chart().mark_point(filled=True, size=45, opacity=0.8).encode(
        x=alt.X("round:Q", title="round", axis=_whole(), scale=alt.Scale(zero=False, nice=False, padding=8)),
        y=alt.Y("round_s:Q", title="duration of the round (s)", scale=scale),
        color=colour,
        shape=alt.Shape("outcome:N", legend=_legend("slowest client"), scale=alt.Scale(
            domain=["usable update", "failed"], range=["circle", "triangle-up"])),
        tooltip=["round:Q", alt.Tooltip("round_s:Q", title="seconds", format=".3~g"), "client:N", "outcome:N",
                 alt.Tooltip("beyond_median_s:Q", title="seconds beyond the median", format=".3~g"), "problem:N"],
    )  # fmt: skip
    counted = (
        alt.Chart()
        .mark_rule(color=PART_COLOURS["upload"], opacity=0.5)
        .encode(x=alt.X("round:Q"), y=alt.Y("measured_s:Q", scale=scale), y2="round_s:Q")
    )
    return _specification(alt.layer(counted, chart, *_limit(limit)), HEIGHT)


def evaluation_chart() -> dict[str, Any]:
    """Line: accuracy over the evaluated rounds of a deployment."""
    alt = _altair()
    chart = alt.Chart().mark_line(point=True).encode(
        x=alt.X("round:Q", title="round", axis=_whole(), scale=alt.Scale(zero=False, nice=False)),
        y=alt.Y("accuracy:Q", title="accuracy", scale=alt.Scale(zero=True)),
        tooltip=["round:Q", "accuracy:Q", "loss:Q"],
    )  # fmt: skip
    return _specification(chart, HEIGHT)


def part_chart(number: int, parts: Sequence[str]) -> dict[str, Any]:
    """Stacked bars: the parts of a mean round of each of this number of selectors, in seconds."""
    alt = _altair()
    rows = alt.Chart().transform_calculate(order=f"indexof({list(parts)}, datum.part)")
    chart = rows.transform_filter("datum.seconds > 0").mark_bar().encode(
        x=alt.X("seconds:Q", title="seconds of a mean round", stack="zero"),
        y=_series_axis(),
        color=_part_colour(parts),
        order=alt.Order("order:Q"),
        tooltip=["selector:N", "part:N", "seconds:Q"],
    )  # fmt: skip
    return _specification(chart, 24 * number)


def regret_chart(selectors: Styles) -> dict[str, Any]:
    """Lines: seconds lost per round so far."""
    alt = _altair()
    line = alt.Chart().mark_line().encode(
        x=alt.X("round:Q", title="round", axis=_whole()),
        y=alt.Y("theta:Q", title="seconds lost per round so far"),
        color=_colour(selectors),
        strokeDash=_dash(selectors),
        tooltip=["selector:N", "round:Q", "theta:Q"],
    )  # fmt: skip
    zero = _once().mark_rule(color=TEXT, opacity=0.5).encode(y=alt.datum(0))
    return _specification(alt.layer(line, zero), HEIGHT)


def _altair() -> Any:
    return load_optional("altair")


def _once() -> Any:
    """Return a chart whose mark is drawn once, whatever the rows are."""
    alt = _altair()
    return alt.Chart(alt.InlineData(values=[{}]))


def _colour(selectors: Styles) -> Any:
    names = list(selectors)
    alt = _altair()
    scale = alt.Scale(domain=names, range=[selectors[name][0] for name in names])
    # The menu of selectors is the legend.
    return alt.Color("series:N", scale=scale, legend=None)


def _dash(selectors: Styles) -> Any:
    names = list(selectors)
    alt = _altair()
    scale = alt.Scale(domain=names, range=[list(selectors[name][1]) for name in names])
    return alt.StrokeDash("series:N", scale=scale, legend=None)


def _centred(rows: Any) -> Any:
    """Return the rows with the edges of their bars, so that the bar of a round has the round in its middle."""
    return rows.transform_calculate(
        left="datum.round - 0.5", right="datum.round_end - 0.5", last_round="datum.round_end - 1"
    )


def _ends() -> list[Any]:
    """Return the first and the last round of a group, for a tooltip."""
    alt = _altair()
    return [alt.Tooltip("round:Q", title="first round"), alt.Tooltip("last_round:Q", title="last round")]


def _limit(seconds: float) -> list[Any]:
    """Return a dashed line at ``max_latency`` with its name; nothing if it is unknown."""
    if not math.isfinite(seconds):
        return []
    alt = _altair()
    line = _once().mark_rule(strokeDash=[4, 4], color=TEXT, opacity=0.6).encode(y=alt.datum(seconds))
    name = _once().mark_text(text="max_latency", align="left", baseline="bottom", dx=2, dy=-2, color=TEXT)
    return [line, name.encode(y=alt.datum(seconds), x=alt.value(0))]


def _whole() -> Any:
    """Return an axis of whole numbers."""
    return _altair().Axis(tickMinStep=1, format="d")


def _part_colour(parts: Sequence[str], labels: str = "datum.label") -> Any:
    alt = _altair()
    scale = alt.Scale(domain=list(parts), range=[PART_COLOURS[part] for part in parts])
    return alt.Color("part:N", scale=scale, legend=_legend(None, labels))


def _legend(title: str | None, labels: str = "datum.label") -> Any:
    return _altair().Legend(title=title, orient="bottom", labelExpr=labels)


def _series_axis() -> Any:
    alt = _altair()
    return alt.Y("series:N", title=None, axis=alt.Axis(labelExpr=LABEL))


def _specification(chart: Any, height: Any) -> dict[str, Any]:
    """Return a chart as a specification with the page's width, font and colours."""
    alt = _altair()
    soft = {"gridColor": TEXT, "gridOpacity": 0.15, "domainColor": TEXT, "domainOpacity": 0.5, "tickColor": TEXT,
            "tickOpacity": 0.5, "labelColor": TEXT, "titleColor": TEXT, "titleFontWeight": "normal",
            "labelOverlap": "greedy", "labelSeparation": 6}  # fmt: skip
    config = {
        "background": None, "font": "system-ui, sans-serif", "view": {"stroke": None}, "aria": False,
        "axis": soft | {"labelFontSize": 12, "titleFontSize": 12},
        "axisX": {"tickCount": {"expr": "ceil(width / 90)"}},
        "legend": {"labelColor": TEXT, "titleColor": TEXT, "labelFontSize": 12, "symbolLimit": 20,
                   "columns": {"expr": "max(3, floor(width / 90))"}},
    }  # fmt: skip
    made = chart.properties(width="container", height=height, data=alt.NamedData("rows"))
    found = made.to_dict(context={"pre_transform": False})
    found["config"] = config
    found["autosize"] = {"type": "fit-x", "contains": "padding"}
    found.pop("$schema", None)
    return cast("dict[str, Any]", found)
