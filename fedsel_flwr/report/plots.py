"""Pictures of a comparison, as PNG, PDF or SVG files: by simulated seconds, and by rounds.

The picture by seconds shows accuracy, time ratios to a reference, and the clients' selection counts. The picture by
rounds shows accuracy, the number of clients selected so far, and the clients' selection fractions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsel_flwr.checks import one_of
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.panels import (
    GREY,
    draw_accuracy,
    draw_counts,
    draw_profile,
    draw_ratios,
    label_panel,
    limit_to_percent,
    line_style,
)
from fedsel_flwr.report.run_folder import atomic_write, load_optional
from fedsel_flwr.report.summary import TARGET_ROUNDS, check_target, moving_average
from fedsel_flwr.report.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike, NDArray

    from fedsel_flwr.rounds.history import History

MOST_BANDS = 4
"""Largest number of selectors for which the range of the fractions is drawn. More bands would hide each other."""
FORMATS: dict[str, dict[str, Any]] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""Format (suffix of the file) -> metadata. There is no date, so that the same runs give the same file."""
PANELS = {"accuracy": 6, "ratios": 4, "targets": 4, "selections": 4}
"""Panels of :func:`plot_comparison`, from left to right -> their relative widths."""
NEED_VERDICT = ("ratios", "targets")
"""Panels that show ratios to a reference."""


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
        RunError: matplotlib is not installed.
    """
    check_target(target_accuracy)
    _format_of(path)
    if not any(runs.values()):
        raise ParameterError("plot_comparison got no run. Give at least one history of one selector.")
    if panel is not None and one_of("panel", panel, tuple(PANELS)) in NEED_VERDICT and verdict is None:
        raise ParameterError(
            f"panel {panel!r} needs a reference and another selector. Compare at least two selectors, one of them "
            "'random' or named by reference="
        )
    shown = [name for name in PANELS if verdict or name not in NEED_VERDICT] if panel is None else [panel]
    widths = [PANELS[name] for name in shown]
    figure = _new_figure(sum(widths) if len(shown) > 1 else 7)
    axes = dict(zip(shown, figure.subplots(1, len(shown), width_ratios=widths, squeeze=False)[0], strict=True))
    drawn = {selector: histories for selector, histories in runs.items() if histories}
    styles = {selector: line_style(index, len(drawn)) for index, selector in enumerate(drawn)}
    goal = f"{100 * target_accuracy:g} %"
    if own := axes.get("accuracy"):
        for selector, histories in drawn.items():
            draw_accuracy(own, selector, histories, styles[selector], target_rounds)
        own.axhline(100 * target_accuracy, color=GREY, linestyle="--", linewidth=1, zorder=1, label=f"target {goal}")
        own.set_xlim(left=0)
        limit_to_percent(own)
        what = f"Accuracy, mean of {target_rounds} rounds{_describe_seeds(drawn)}"
        label_panel(own, what, "simulated time (s)", "test accuracy (%)")
    if verdict and (own := axes.get("ratios")):
        draw_ratios(own, verdict, styles)
        what = f"Time to {goal}, ratio to {verdict.reference}"
        label_panel(own, what, "ratio with 95 % interval, a point a seed; grey: within 5 %", "")
    if verdict and (own := axes.get("targets")):
        draw_profile(own, verdict, styles)
        what = f"Time ratio to {verdict.reference} by target" if panel else "The same by target"
        label_panel(own, what, "target accuracy (%)", "time ratio")
    if own := axes.get("selections"):
        _draw_selections(own, drawn, styles, num_clients)
    return _save_figure(figure, axes[shown[0]], title, path, dpi=200)


def _describe_seeds(drawn: Mapping[str, Sequence[History]]) -> str:
    """Describe the line and the band, as the end of a panel's title; empty for one seed."""
    seeds = sorted({len(histories) for histories in drawn.values()})
    return f"; mean ± sd of {' or '.join(map(str, seeds))} seeds" if seeds[-1] > 1 else ""


def _draw_selections(
    axes: Axes, drawn: Mapping[str, Sequence[History]], styles: Mapping[str, Mapping[str, Any]], num_clients: int
) -> None:
    """Draw the clients' selection counts of each selector, in descending order."""
    shapes: list[bytes] = []
    for selector, histories in drawn.items():
        style = styles[selector]
        counts = np.stack([np.sort(h.selection_counts(num_clients))[::-1] for h in histories])
        shapes.append(counts.mean(axis=0).tobytes())
        # Selectors with equal counts, such as round-robin, would hide each other, so the lower lines are wider.
        wider = {"linewidth": style["linewidth"] + 2.4 * (shapes.count(shapes[-1]) - 1)}
        draw_counts(axes, selector, counts, {**style, **wider})
    axes.set_xlim(0, num_clients)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(load_optional("matplotlib.ticker").MaxNLocator(integer=True))
    label_panel(axes, "How often each client was selected", "clients, most selected first", "times selected")


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
        RunError: matplotlib is not installed.
    """
    _format_of(path)
    drawn = {selector: histories for selector, histories in runs.items() if histories}
    if not drawn:
        raise ParameterError("plot_rounds got no run. Give at least one history of one selector.")
    figure = _new_figure(18 if lost else 14)
    left, middle, right, *last = figure.subplots(1, 4 if lost else 3)
    banded = len(drawn) <= MOST_BANDS
    # The axis of the fractions ignores the first fifth of the rounds, in which fractions are near 1.
    highest = 0.0
    for index, (selector, histories) in enumerate(drawn.items()):
        style = line_style(index, len(drawn))
        rounds = np.arange(1, min(len(h.rounds) for h in histories) + 1)
        curves = [_accuracy(h, target_rounds)[: len(rounds)] for h in histories]
        left.plot(rounds, 100 * np.mean(curves, axis=0), label=selector, **style)
        fractions = [selection_fractions(h, num_clients) for h in histories]
        seen = [(own > 0).sum(axis=1)[: len(rounds)] for own in fractions]
        middle.plot(rounds, np.mean(seen, axis=0), **style)
        first, own_rounds = fractions[0], np.arange(1, len(fractions[0]) + 1)
        right.plot(own_rounds, np.median(first, axis=1), **style)
        edges = (first.min(axis=1), first.max(axis=1)) if banded else (np.median(first, axis=1),) * 2
        right.fill_between(own_rounds, *edges, color=style["color"], alpha=0.12, linewidth=0)
        highest = max(highest, float(edges[1][len(first) // 5 :].max(initial=0.0)))
        for axes in last:
            each = [np.asarray(one, dtype=np.float64)[: len(rounds)] for one in (lost or {})[selector]]
            axes.plot(rounds, np.mean(each, axis=0), **style)
            axes.axhline(0, color=GREY, linewidth=1, zorder=1)
            label_panel(axes, "Lost against knowing the means (theta)", "round", "seconds a round so far")
    left.axhline(100 * target_accuracy, color=GREY, linestyle="--", linewidth=1, zorder=1)
    middle.axhline(num_clients, color=GREY, linestyle="--", linewidth=1, zorder=1)
    middle.set_ylim(bottom=0)
    right.set_ylim(0, 1.1 * highest or 1.0)
    for axes in (left, middle, right, *last):
        axes.set_xlim(left=1)
    limit_to_percent(left)
    label_panel(left, f"Accuracy, mean of {target_rounds} rounds", "round", "test accuracy (%)")
    label_panel(middle, "Clients selected at least once", "round", "clients")
    spread = ": median, least to most" if banded else " of the median client"
    label_panel(right, f"Selection fractions{spread}", "round", "share of the rounds so far")
    return _save_figure(figure, left, title, path, dpi=150)


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


def _accuracy(history: History, window: int) -> NDArray[np.float64]:
    """Return the moving average of the accuracy at each round; NaN before the first measurement."""
    values = np.array([record.accuracy for record in history.rounds], dtype=np.float64)
    measured = np.flatnonzero(np.isfinite(values))
    means = np.concatenate([[np.nan], moving_average(values[measured], window)])
    return np.asarray(means[np.searchsorted(measured, np.arange(len(values)), side="right")])


def _new_figure(width: float) -> Figure:
    """Return an empty figure of this width in inches."""
    figure: Figure = load_optional("matplotlib.figure").Figure(
        figsize=(width, 4.6), layout="constrained", facecolor="white"
    )
    # Not with pyplot, because it would keep every figure in global state, and might look for a screen.
    load_optional("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


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


def _save_figure(figure: Figure, named: Axes, title: str, path: str | os.PathLike[str], dpi: int) -> Path:
    """Add the title, and below the panels the legend of the panel ``named``; write the file and return its path."""
    handles, labels = named.get_legend_handles_labels()
    if labels:
        # Width of an entry at this font size, in inches: about .075 per letter, and .75 for its line and spacing.
        columns = int(figure.get_figwidth() / (0.75 + 0.075 * max(map(len, labels))))
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": max(1, min(6, columns, len(labels)))}
        figure.legend(handles, labels, frameon=False, fontsize=10, **place)
    if title:
        figure.suptitle(title, fontsize=13)
    # A dollar sign in a selector's label does not start a formula, and matplotlib raises an error for a wrong formula.
    for text in figure.findobj(load_optional("matplotlib.text").Text):
        text.set_parse_math(False)
    kind = _format_of(path)
    # Publishers refuse Type 3 fonts, matplotlib's default in PDF. Without a fixed salt, names in SVG would be random.
    settings = {"pdf.fonttype": 42, "svg.hashsalt": "fedsel"}
    with load_optional("matplotlib").rc_context(settings), atomic_write(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=dpi, metadata=FORMATS[kind])
    return Path(path)
