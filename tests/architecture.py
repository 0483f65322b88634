"""Writes docs/architecture.md from the code: the picture of the house, and walks through it: ``make architecture``.

A walk is recorded while the code runs: each room when it is first entered, with the function that was called, under the
room that called it.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import io
import logging
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tools.house import LAYERS, PACKAGE, ROOT, House

PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.svg"
BEGIN, END = "<!-- {}: written by `make architecture` -->", "<!-- end of {} -->"
FOLDER = str(ROOT / PACKAGE)
PASSED_OVER = (f"{PACKAGE}.checks", f"{PACKAGE}.errors", f"{PACKAGE}.arguments")
"""Rooms that nearly every other one uses; no place on a way."""
LOADED_BEFORE = ("flwr.simulation", "matplotlib.figure", "pandas", "pyarrow.parquet", "sklearn.datasets", "torch")
"""Imported before a walk: every call of their own imports would be looked at otherwise."""


# ---- walks ---------------------------------------------------------------------------------------------------------


@dataclass
class Stop:
    """A room where it is first entered.

    Attributes:
        room: Its path, within the package.
        function: What was called.
        line: The first line of its docstring, else of the room's.
        inner: The rooms that it entered first.
    """

    room: str
    function: str
    line: str
    inner: list[Stop] = field(default_factory=list)

    def lines(self, depth: int = 0) -> Iterator[str]:
        """As a nested list."""
        yield f"{'  ' * depth}- **{self.room}** `{self.function}`: {plain(self.line)}"
        for stop in self.inner:
            yield from stop.lines(depth + 1)


class Walk:
    """Records the rooms that one thread enters."""

    def __init__(self) -> None:
        self.first: list[Stop] = []
        self._stops: dict[str, Stop] = {}

    def __len__(self) -> int:
        """Rooms that were entered."""
        return len(self._stops)

    def enter(self, frame: FrameType) -> None:
        """Note a call, if it enters a room for the first time."""
        room = _room_of(frame.f_code)
        if room is None or room in self._stops or _importing(frame):
            return
        line = _first_line(frame.f_code)
        if line is None:
            return
        stop = Stop(room, frame.f_code.co_qualname.replace(".<locals>", ""), line)
        caller = frame.f_back
        while caller is not None and _room_of(caller.f_code) not in self._stops:
            caller = caller.f_back
        above = self._stops.get(_room_of(caller.f_code) or "") if caller is not None else None
        (self.first if above is None else above.inner).append(stop)
        self._stops[room] = stop

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """As a profile function."""
        if event == "call":
            self.enter(frame)


@contextlib.contextmanager
def walking() -> Iterator[Walk]:
    """Record the rooms that this thread enters within the block."""
    walk = Walk()
    sys.setprofile(walk.profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def first_call(owner: Any, name: str) -> Iterator[list[Walk]]:
    """Record the first call of a method, in whichever thread, while the block lasts."""
    original, walks = getattr(owner, name), list[Walk]()

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if walks:
            return original(*args, **kwargs)
        with walking() as walk:
            walks.append(walk)
            return original(*args, **kwargs)

    setattr(owner, name, recorded)
    try:
        yield walks
    finally:
        setattr(owner, name, original)


@cache
def _room_of(code: CodeType) -> str | None:
    if not code.co_filename.startswith(FOLDER):
        return None
    room = Path(code.co_filename).relative_to(FOLDER).as_posix()
    module = f"{PACKAGE}.{room.removesuffix('.py').replace('/', '.')}"
    return None if module in PASSED_OVER or room.endswith("__init__.py") else room


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(FOLDER):
            return True
        frame = frame.f_back
    return False


@cache
def _functions(file: str) -> dict[int, ast.FunctionDef]:
    """The functions of a file by the line that a code object has."""
    nodes = [node for node in ast.walk(ast.parse(Path(file).read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node for node in nodes}


@cache
def _first_line(code: CodeType) -> str | None:
    """What a function does; None for those that only make, check or look up, and those without a docstring."""
    node = _functions(code.co_filename).get(code.co_firstlineno)
    if node is None or node.name.startswith("__") or node.name.lstrip("_").startswith("check"):
        return None
    if any(ast.unparse(each) in ("property", "cached_property") for each in node.decorator_list):
        return None
    return (ast.get_docstring(node) or "").partition("\n")[0] or None


@contextlib.contextmanager
def walking_everywhere() -> Iterator[tuple[Walk, list[Walk]]]:
    """Record the rooms that this thread enters, and those of each thread that starts meanwhile."""
    others: list[Walk] = []

    def begin(frame: FrameType, event: str, argument: object) -> None:
        walk = Walk()
        others.append(walk)
        sys.setprofile(walk.profile)
        walk.profile(frame, event, argument)

    threading.setprofile(begin)
    try:
        with walking() as walk:
            yield walk, others
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def walks() -> dict[str, list[Stop]]:
    """Every walk by its name; in this order, as what one has loaded the next ones find."""
    from fedsel_flwr import cli
    from fedsel_flwr.clients.torch_client import TorchClient
    from fedsel_flwr.simulations import load_scenario, simulate
    from fedsel_flwr.simulations.on_flower.app import ScenarioApp
    from fedsel_flwr.simulations.on_flower.driving import drive
    from fedsel_flwr.strategies import SelectionStrategy, message
    from tests.simulations.inprocess import AppGrid

    for name in LOADED_BEFORE:
        importlib.import_module(name)
    found: dict[str, list[Stop]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        command = ["run", "smoke", "--rounds", "1", "--quiet", "--num-cpus", "1", "--runs-dir", folder]
        with walking_everywhere() as (walk, others):
            if cli.main(command) != 0:
                raise RuntimeError(f"fedsel {' '.join(command)} failed")
    found["command"] = walk.first
    found["server"] = max(others, key=len).first
    for api, owner, names in (
        ("legacy", SelectionStrategy, ("configure_fit", "aggregate_fit")),
        ("message", message.SelectionStrategy, ("configure_train", "aggregate_train")),
    ):
        scenario = load_scenario("smoke", {"api": api, "rounds": 1, "selector": "gpfl"})
        grid = AppGrid(ScenarioApp(lambda context, scenario=scenario: scenario), scenario.num_clients)
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(first_call(TorchClient, "fit"))
            asked, told = (stack.enter_context(first_call(owner, name)) for name in names)
            drive(grid, scenario)
        if api == "legacy":
            found["client"] = client[0].first
        found[f"{api}-choice"], found[f"{api}-reply"] = asked[0].first, told[0].first
    with walking() as walk:
        simulate(load_scenario("smoke", {"rounds": 1, "selector": "gpfl"}), engine="vectorized")
    found["vectorized"] = walk.first
    return found


# ---- the picture ---------------------------------------------------------------------------------------------------

ROW, TITLE, PAD, GAP, SIDE = 15, 22, 10, 46, 20
COLUMN = 156
"""Width of a column of names, pixels."""
DEEP = 14
"""Rooms in a column."""


def picture(house: House) -> str:
    """The folders on their layers with their rooms, and an arrow for imports from folder to folder, as SVG."""
    parts: list[str] = []
    boxes: dict[str, tuple[float, float, float, float]] = {}
    top = float(SIDE)
    layers = [_shelves(house, layer) for layer in LAYERS]
    all_widths = [
        [COLUMN * max(1, sum(map(_breadth, columns))) + 2 * PAD for _, columns in shelves] for shelves in layers
    ]
    whole = 2 * SIDE + max(sum(widths) + GAP * (len(widths) - 1) // 2 for widths in all_widths)
    for shelves, widths in zip(layers, all_widths, strict=True):
        height = TITLE + PAD + ROW * max((_depth(columns) for _, columns in shelves), default=0)
        left = (whole - sum(widths) - GAP * (len(widths) - 1) / 2) / 2
        for (name, columns), width in zip(shelves, widths, strict=True):
            boxes[name] = (left, top, width, height)
            parts.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="{width}" height="{height}" rx="6"/>')
            parts.append(f'<text class="title" x="{left + PAD:.0f}" y="{top + 16:.0f}">{escape(name)}</text>')
            at = left + PAD
            for wing, rooms in columns:
                if wing:
                    parts.append(f'<text class="wing" x="{at:.0f}" y="{top + TITLE + 11:.0f}">{escape(wing)}/</text>')
                shift = ROW if any(other for other, _ in columns) else 0
                for first in range(0, len(rooms), DEEP):
                    for line, room in enumerate(rooms[first : first + DEEP]):
                        y = top + TITLE + shift + 11 + ROW * line
                        parts.append(f'<text x="{at:.0f}" y="{y:.0f}">{escape(room)}</text>')
                    at += COLUMN
            left += width + GAP / 2
        top += height + GAP
    arrows = sorted({(_box(one, boxes), _box(other, boxes)) for one, other in house.arrows})
    lines = [_arrow(boxes[one], boxes[other]) for one, other in arrows if one and other and one != other]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {top - GAP + SIDE:.0f}" '
        'font-family="sans-serif" font-size="11">\n'
        "<style>rect{fill:#f4f6f8;stroke:#8a97a5}.title{font-weight:bold;font-size:13px}.wing{font-style:italic}"
        "path{fill:none;stroke:#5b7ea6;stroke-opacity:.35}text{fill:#1c2733}"
        ".ground{fill:#fff;stroke:none}</style>\n"
        f'<rect class="ground" width="{whole}" height="{top - GAP + SIDE:.0f}"/>\n'
        + "\n".join(lines + parts)
        + "\n</svg>\n"
    )


def _shelves(house: House, layer: Sequence[str]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """The parts of a layer with their rooms; rooms directly in the package are one part."""
    shelves = [(name, _columns(house, name)) for name in layer]
    if len(layer) > 1 and all(not columns for _, columns in shelves):
        return [("the package itself", [("", list(layer))])]
    return shelves


def _columns(house: House, part: str) -> list[tuple[str, list[str]]]:
    """The rooms of a part: those directly in it, then those of each wing."""
    found = []
    for folder in house.folders:
        inner = folder.removeprefix(f"{PACKAGE}/")
        if inner == part or inner.startswith(f"{part}/"):
            rooms = [room.path.stem.strip("_") for room in house.within(folder)]
            found.append((inner.partition("/")[2], rooms))
    return found


def _breadth(column: tuple[str, list[str]]) -> int:
    return -(-len(column[1]) // DEEP)


def _depth(columns: list[tuple[str, list[str]]]) -> int:
    return min(DEEP, max((len(rooms) for _, rooms in columns), default=0)) + any(wing for wing, _ in columns)


def _box(module: str, boxes: dict[str, Any]) -> str:
    part = module.split(".")[1] if "." in module else ""
    return part if part in boxes else ""


def _arrow(start: tuple[float, ...], end: tuple[float, ...]) -> str:
    x, y = start[0] + start[2] / 2, start[1] + start[3]
    to, bottom = end[0] + end[2] / 2, end[1]
    middle = (y + bottom) / 2
    return f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {middle:.0f} {to:.0f} {middle:.0f} {to:.0f} {bottom:.0f}"/>'


# ---- the page ------------------------------------------------------------------------------------------------------


def rooms_table(house: House) -> str:
    """Every folder with its rooms and what each is, from their first lines."""
    lines = []
    for folder in house.folders:
        rooms = house.within(folder)
        if not rooms:
            continue
        lines += [f"### {folder}", "", "| room | what it is |", "|---|---|"]
        for room in rooms:
            first = (ast.get_docstring(room.tree) or "").partition("\n")[0].replace("|", "\\|")
            lines.append(f"| `{room.path.stem}` | {plain(first)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def plain(text: str) -> str:
    """A docstring's line in Markdown."""
    text = re.sub(r":[a-z]+:`~?(?:[a-z_]+\.)*([A-Za-z_.]+)`", r"`\1`", text)
    return text.replace("``", "`").rstrip(".")


def page(text: str, blocks: dict[str, str]) -> str:
    """The page with its blocks replaced.

    Raises:
        ValueError: The page lacks the place of a block.
    """
    for name, block in blocks.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in text or end not in text:
            raise ValueError(f"{PAGE.name} has no place for {name!r}: add the lines {begin!r} and {end!r}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{block}\n\n{end}{rest.partition(end)[2]}"
    return text


def built() -> tuple[str, str]:
    """The page and the picture as the code has them."""
    house = House.here()
    blocks = {name: "\n".join(line for stop in stops for line in stop.lines()) for name, stops in walks().items()}
    blocks["rooms"] = rooms_table(house)
    return page(PAGE.read_text("utf-8"), blocks), picture(house)


def main() -> int:
    """Write page and picture; with ``--check`` only say whether they are as the code has them."""
    logging.disable(logging.CRITICAL)
    text, drawn = built()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, "utf-8")
        PICTURE.write_text(drawn, "utf-8")
        return 0
    there = {PAGE: text, PICTURE: drawn}
    old = {path: path.read_text("utf-8") for path in there}
    for path, now in there.items():
        sys.stdout.writelines(difflib.unified_diff(old[path].splitlines(True), now.splitlines(True), path.name, "now"))
    return int(old != there)


if __name__ == "__main__":
    sys.exit(main())
