"""The house as `make house` counts it: its rooms and their names."""

from __future__ import annotations

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
    # 200 rooms, the ten of the reproductions, the exporter of a run's metrics, the 13 of the report pages (seven for
    # comparisons, five for deployments, and the glossary), and the four of runs on a Ray cluster.
    assert len(HOUSE.rooms) <= 229


def test_the_table_compares_with_itself() -> None:
    said = table(HOUSE, HOUSE).splitlines()
    assert said[0].startswith("| folder | files | code | docstring | comment |")
    cells = [cell.strip(" |").split(" → ") for cell in said[-5].split(" | ")[1:]]
    assert cells
    assert all(before == now for before, now in cells)


@pytest.mark.timeout(200)
def test_the_architecture_page_is_as_the_code_has_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.architecture", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, f"make architecture writes it anew\n{done.stdout[:4000]}\n{done.stderr[-2000:]}"
