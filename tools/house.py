"""The house in numbers and in a picture: ``make house``.

    python tools/house.py                    files, lines, floors and import arrows of each folder
    python tools/house.py --against COMMIT   the same before and after

A room is a file other than ``__init__.py``. An arrow is a pair of rooms of which one imports the other, in a function
too; imports for type checkers alone do not count. The floors of a folder are the rooms on its longest path of arrows. A
comment counts if it has a line of its own.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fedsel_flwr"
LONGEST = 500
"""Lines that no room may pass."""
SECTIONS = ("Args", "Returns", "Raises", "References", "Deviations")
LAYERS = (
    ("cli",),
    ("simulations",),
    ("report", "clients", "strategies"),
    ("callbacks",),
    ("theory", "rounds", "testing"),
    ("aggregation", "selectors", "wireless"),
    ("arguments", "checks", "errors", "flower", "flower_entries", "references"),
    ("operating_system",),
)
"""Who may import whom, highest layer first; ``tests/test_imports.py`` checks it."""


@dataclass(frozen=True)
class Room:
    """One file of the package.

    Attributes:
        path: Within the repository, such as ``fedsel_flwr/rounds/core.py``.
        text: Its source.
    """

    path: PurePosixPath
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def folder(self) -> str:
        return self.path.parent.as_posix()

    @property
    def is_table(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def lines(self) -> Counter[str]:
        """How many lines are code, docstring, comment and blank; they add up to all."""
        kinds = ["blank" if not line.strip() else "code" for line in self.text.splitlines()]
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
                kinds[token.start[0] - 1] = "comment"
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                kinds[node.lineno - 1 : node.end_lineno] = ["docstring"] * ((node.end_lineno or 0) - node.lineno + 1)
        return Counter(kinds)

    @cached_property
    def sections(self) -> Counter[str]:
        """How many docstrings have each section."""
        return Counter(re.findall(rf"^\s*({'|'.join(SECTIONS)}):?\s*$", self.text, re.MULTILINE))


@dataclass
class House:
    """The package at one commit, or as it is in the working tree."""

    rooms: list[Room]
    arrows: set[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        known = {room.module for room in self.rooms}
        self.arrows = {
            (room.module, target)
            for room in self.rooms
            for target in imported(room.tree, known)
            if target != room.module
        }

    @classmethod
    def here(cls) -> House:
        files = sorted((ROOT / PACKAGE).rglob("*.py"))
        return cls([Room(PurePosixPath(file.relative_to(ROOT).as_posix()), file.read_text("utf-8")) for file in files])

    @classmethod
    def at(cls, commit: str) -> House:
        packed = subprocess.run(["git", "archive", commit, PACKAGE], cwd=ROOT, capture_output=True, check=True).stdout
        rooms = []
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive.getmembers():
                if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None:
                    rooms.append(Room(PurePosixPath(member.name), file.read().decode("utf-8")))
        return cls(sorted(rooms, key=lambda room: room.path))

    @property
    def folders(self) -> list[str]:
        return sorted({room.folder for room in self.rooms})

    def within(self, folder: str) -> list[Room]:
        return [room for room in self.rooms if room.folder == folder and not room.is_table]

    def arrows_within(self, folder: str) -> set[tuple[str, str]]:
        inside = {room.module for room in self.within(folder)}
        return {(one, other) for one, other in self.arrows if one in inside and other in inside}

    def floors(self, folder: str) -> int:
        """Rooms on the longest path of arrows within a folder."""
        below = defaultdict(set)
        for one, other in self.arrows_within(folder):
            below[one].add(other)
        height: dict[str, int] = {}

        def climb(room: str, above: tuple[str, ...] = ()) -> int:
            if room not in height:
                lower = [climb(each, (*above, room)) for each in below[room] if each not in above]
                height[room] = 1 + max(lower, default=0)
            return height[room]

        return max((climb(room.module) for room in self.within(folder)), default=0)

    def doubled(self) -> dict[str, list[str]]:
        """Base names of several rooms, but for the pairs that are meant: API twins, and a selector and its strategy."""
        homes = defaultdict(list)
        for room in self.rooms:
            if not room.is_table:
                homes[room.path.stem.strip("_")].append(room.path.as_posix())
        meant = ("strategies/", "strategies/message/", "selectors/")
        return {
            name: paths
            for name, paths in homes.items()
            if len(paths) > 1 and not all(f"{PACKAGE}/{place}{name}.py" in paths for place in meant[:2])
            and not {path.removeprefix(f"{PACKAGE}/") for path in paths} <= {f"{place}{name}.py" for place in meant}
        }  # fmt: skip


def imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Modules of the package that a module imports; not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module
        yield from imported(node, known)


def figures(house: House) -> dict[str, dict[str, int]]:
    """The numbers of each folder, and of all."""
    rows: dict[str, dict[str, int]] = {}
    for folder in [*house.folders, "all"]:
        files = [room for room in house.rooms if folder in ("all", room.folder)]
        lines = sum((room.lines for room in files), Counter[str]())
        rows[folder] = {
            "files": len(files),
            **{kind: lines[kind] for kind in ("code", "docstring", "comment")},
            "longest": max(sum(room.lines.values()) for room in files),
            "floors": max(map(house.floors, house.folders)) if folder == "all" else house.floors(folder),
            "arrows": len(house.arrows) if folder == "all" else len(house.arrows_within(folder)),
        }
    return rows


def table(now: House, before: House | None = None) -> str:
    """The figures as Markdown, each as "before → now" if there is a before."""
    rows, earlier = figures(now), figures(before) if before else {}
    columns = list(rows["all"])
    lines = [f"| folder | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for folder in sorted({*rows, *earlier}, key=lambda name: (name == "all", name)):
        cells = []
        for column in columns:
            new, old = (one.get(folder, {}).get(column) for one in (rows, earlier))
            cells.append(f"{'-' if old is None else old} → {'-' if new is None else new}" if before else str(new))
        lines.append(f"| {folder.removeprefix(PACKAGE + '/')} | {' | '.join(cells)} |")
    for one, named in ((before, "before"), (now, "now" if before else "")):
        if one is not None:
            sections = sum((room.sections for room in one.rooms), Counter[str]())
            across = len(one.arrows) - sum(len(one.arrows_within(folder)) for folder in one.folders)
            lines += [
                "",
                f"{named + ': ' if named else ''}sections: {', '.join(f'{key} {sections[key]}' for key in SECTIONS)}; "
                f"names twice: {len(one.doubled())} ({', '.join(sorted(one.doubled())) or 'none'}); "
                f"arrows from folder to folder: {across}",
            ]
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit")
    args = parser.parse_args()
    print(table(House.here(), House.at(args.against) if args.against else None))


if __name__ == "__main__":
    main()
