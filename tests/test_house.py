"""The house as `make house` counts it: its rooms, their names, and the circles that imports must not make."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import PurePosixPath

import pytest

from tests.house import LONGEST, PACKAGE, ROOT, House, Room, figures, table

HOUSE = House.here()


def room(path: str, text: str) -> Room:
    return Room(PurePosixPath(f"{PACKAGE}/{path}"), text)


def test_the_lines_of_a_room_are_counted_by_kind() -> None:
    text = '"""One.\n\nArgs:\n    x: y\n"""\n\n# why\nx = 1  # trailing\nTEXT = """a\n# no comment\n"""\n'
    one = room("a.py", text)
    assert one.lines == {"docstring": 5, "blank": 1, "comment": 1, "code": 4}
    assert one.sections == {"Args": 1}


def test_floors_and_arrows() -> None:
    house = House(
        [
            room("rounds/a.py", "from fedsel_flwr.rounds import b\nfrom fedsel_flwr.rounds.c import f"),
            room("rounds/b.py", "def g():\n    from fedsel_flwr.rounds.c import f"),
            room("rounds/c.py", "if TYPE_CHECKING:\n    from fedsel_flwr.rounds.a import h"),
            room("wireless/a.py", "from fedsel_flwr.rounds.a import h"),
        ]
    )
    assert house.arrows_within(f"{PACKAGE}/rounds") == {
        (f"{PACKAGE}.rounds.{one}", f"{PACKAGE}.rounds.{other}") for one, other in ("ab", "ac", "bc")
    }
    assert (house.floors(f"{PACKAGE}/rounds"), len(house.arrows), list(house.doubled())) == (3, 4, ["a"])
    assert figures(house)["all"]["files"] == 4


def test_no_room_is_too_long_and_no_name_occurs_twice() -> None:
    assert [one.path.as_posix() for one in HOUSE.rooms if sum(one.lines.values()) > LONGEST] == []
    assert HOUSE.doubled() == {}
    assert len(HOUSE.rooms) <= 195


def test_the_table_compares_with_itself() -> None:
    said = table(HOUSE, HOUSE).splitlines()
    assert said[0].startswith("| folder | files | code | docstring | comment |")
    cells = [cell.split(" → ") for cell in said[-5].split(" | ")[1:]]
    assert cells
    assert all(one == other for one, other in ([part.strip(" |") for part in cell] for cell in cells))


def _imports(tree: ast.AST) -> list[ast.ImportFrom]:
    """The imports that run when a module is loaded."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found += [node] if isinstance(node, ast.ImportFrom) else _imports(node)
    return found


def test_every_room_can_be_imported_first() -> None:
    """A circle, ``__init__`` files included, works or fails with the order of imports, so with the command."""
    known = {one.module for one in HOUSE.rooms}
    needs: dict[str, set[str]] = {module: set() for module in known}
    for one in HOUSE.rooms:
        for node in _imports(one.tree):
            for alias in node.names if (node.module or "").split(".")[0] == PACKAGE else ():
                target = f"{node.module}.{alias.name}"
                parts = (target if target in known else str(node.module)).split(".")
                loaded = {".".join(parts[:k]) for k in range(1, len(parts) + 1)}
                needs[one.module] |= {each for each in loaded & known if not f"{one.module}.".startswith(f"{each}.")}
    left = dict(needs)
    while ready := [module for module, others in left.items() if not others & left.keys()]:
        for module in ready:
            del left[module]
    assert sorted(left) == []


@pytest.mark.timeout(200)
def test_the_architecture_page_is_as_the_code_has_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.architecture", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, f"make architecture writes it anew\n{done.stdout[:4000]}\n{done.stderr[-2000:]}"
