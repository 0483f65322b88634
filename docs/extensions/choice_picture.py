"""The picture of a run in the small world as SVG: a cell for each phone and round, and bars for each phone.

The colours are CSS variables of ``gallery.css``, so that one picture serves light and dark pages and print.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
from small_world import Played

CELL, ROW = 5, 11
"""Width of a round and height of a phone, in units of the picture."""
LEFT, TOP = 58, 40
BAR, GAP = 68, 14
"""Width of the longest bar, and space between two columns."""
TICKS = 4


def picture(name: str, run: Played, text: str) -> str:
    """Return the picture of a run.

    Args:
        name: Name of the selector, which also makes the ids of the picture unique.
        run: The run.
        text: Description for screen readers.
    """
    phones, rounds = run.chosen.shape
    wide, high = rounds * CELL, phones * ROW
    columns = (
        ("latency, s", run.latency, f"{run.latency.max():.0f}"),
        ("examples", run.examples, f"{run.examples.max():,}"),
        ("times chosen", run.times, f"{run.times.max():,}"),
    )
    width = LEFT + wide + len(columns) * (GAP + BAR) + 28
    parts = [
        f'<svg class="gallery-picture" viewBox="0 0 {width} {TOP + high + 34}" role="img" '
        f'aria-labelledby="{name}-title {name}-text" xmlns="http://www.w3.org/2000/svg">',
        f'<title id="{name}-title">Choices of {escape(name)} in the small world</title>',
        f'<desc id="{name}-text">{escape(text)}</desc>',
        *_key(wide),
        f'<rect class="field" x="{LEFT}" y="{TOP}" width="{wide}" height="{high}"/>',
        *(f'<path class="third" d="M{LEFT} {TOP + ROW * rows.stop}h{wide}"/>' for rows in run.thirds[:-1]),
        f'<path class="chosen" d="{cells(run.completed, CELL, ROW, LEFT, TOP)}"/>',
        f'<path class="failed" d="{cells(run.chosen & ~run.completed, CELL, ROW, LEFT, TOP, inset=1.0)}"/>',
    ]
    for rank in sorted({1, *(rows.stop for rows in run.thirds[:-1]), phones}):
        parts.append(_text(LEFT - 5, TOP + ROW * (rank - 0.5) + 4, str(rank), "end"))
    parts.append(_upright(16, TOP + high / 2, "phones, the fastest first"))
    for tick in (1, *(rounds * i // TICKS for i in range(1, TICKS + 1))):
        # The last number ends where the raster ends, beside the first number below the bars.
        x, anchor = (LEFT + wide, "end") if tick == rounds else (LEFT + CELL * (tick - 0.5), "middle")
        parts.append(_text(x, TOP + high + 14, str(tick), anchor))
    parts.append(_text(LEFT + wide / 2, TOP + high + 30, "round", "middle"))
    x = LEFT + wide + GAP
    for title, values, most in columns:
        parts.append(_text(x, TOP - 6, title, "start"))
        parts.append(f'<path class="bar" d="{_bars(values, x)}"/>')
        parts.append(_text(x, TOP + high + 14, "0", "start"))
        parts.append(_text(x + BAR, TOP + high + 14, most, "end"))
        x += BAR + GAP
    return "".join((*parts, "</svg>"))


def thumbnail(run: Played) -> str:
    """Return the raster of a run alone, as a decoration of a link."""
    phones, rounds = run.chosen.shape
    return (
        f'<svg class="gallery-thumbnail" viewBox="0 0 {rounds} {3 * phones}" preserveAspectRatio="none" '
        f'aria-hidden="true" focusable="false"><rect class="field" width="{rounds}" height="{3 * phones}"/>'
        f'<path class="chosen" d="{cells(run.completed, 1, 3, 0, 0)}"/>'
        f'<path class="late" d="{cells(run.chosen & ~run.completed, 1, 3, 0, 0)}"/></svg>'
    )


def cells(marked: npt.NDArray[np.bool_], width: int, height: int, left: int, top: int, inset: float = 0.0) -> str:
    """Return the marked cells as a path: a rectangle for each cell, or for cells side by side without an inset."""
    path = []
    for row, rounds in enumerate(marked):
        for first, last in _runs(rounds) if not inset else ((int(i), int(i) + 1) for i in np.flatnonzero(rounds)):
            x, y = left + width * first + inset, top + height * row + inset
            across, down = width * (last - first) - 2 * inset, height - 2 * inset
            path.append(f"M{x:g} {y:g}h{across:g}v{down:g}h{-across:g}z")
    return "".join(path)


def _runs(marked: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the first column of each run of marked cells, and the column after its last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marked.astype(np.int8), [0]])))
    yield from ((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def _bars(values: npt.NDArray[Any], x: float) -> str:
    longest = max(float(values.max()), 1e-9)
    return "".join(
        f"M{x:g} {TOP + ROW * row + 2}h{BAR * float(value) / longest:.2f}v{ROW - 4}H{x:g}z"
        for row, value in enumerate(values)
    )


def _key(wide: int) -> Iterator[str]:
    """Yield the key of the two kinds of cells, above the raster."""
    for x, mark, text in (
        (LEFT, "chosen", "chosen"),
        (LEFT + 70, "failed", "chosen, but no reply before the client deadline"),
    ):
        yield f'<path class="{mark}" d="M{x + 0.5} {TOP - 20.5}h5v10h-5z"/>'
        yield _text(x + 11, TOP - 11, text, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _upright(x: float, y: float, text: str) -> str:
    turned = f'transform="rotate(-90 {x:g} {y:g})"'
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {turned}>{escape(text)}</text>'
