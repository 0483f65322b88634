"""What one liar gains: the tables of ``benchmarks/liars.py``, as docs/security.md prints them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import names
from tests.benchmarks.scripts import load

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
SEEDS = 3


@pytest.fixture(scope="module")
def script() -> Any:
    return load("liars")


def rows(first: str) -> dict[str, list[str]]:
    """The cells of the page's table whose head begins so, by the first cell."""
    lines = iter(PAGE.read_text(encoding="utf-8").splitlines())
    assert any(line.startswith(f"| {first} |") for line in lines)
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            return found
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[name] = cells
    raise AssertionError(first)


def figures(cells: list[str]) -> list[float]:
    return [float(cell) for cell in cells]


@pytest.mark.parametrize("name", ["active-fl", "random-by-size", "oort"])
def test_the_pages_rows_are_what_the_benchmark_prints(script: Any, name: str) -> None:
    lie, *shares = rows("selector")[name]
    printed = [cell.strip() for cell in script.row(name, SEEDS, lie).strip("|").split("|")][1:]
    assert printed[0] == lie
    assert figures(printed[1:]) == pytest.approx(figures(shares), abs=0.02)


def test_the_page_has_every_selector_and_the_guards_hold() -> None:
    table = rows("selector")
    assert list(table) == list(names())
    shares = {name: figures(cells[1:]) for name, cells in table.items()}
    taken = {name for name, share in shares.items() if share[1] >= 0.9}
    assert {"active-fl", "local-accuracy", "random-by-size", "divfl", "gpfl", "fedcs", "cs-ucb-q"} <= taken
    assert max(share[1] for name, share in shares.items() if name in ("bsfl", "cs-ucb", "tifl")) < 0.4
    assert max(share[4] for share in shares.values()) < 0.56  # the cap of a half, and a round of twenty
    assert {cells[0] for cells in table.values()} >= {"low accuracy", "odd gradient", "odd sketch", "huge loss"}


def test_the_range_after_clipping_keeps_oorts_ranking(script: Any) -> None:
    table = {name: figures(cells) for name, cells in rows("Oort's `score_range`").items()}
    for way, lies in (("paper", [1e30]), ("clipped", [20.0, 1e30])):
        found = [np.mean([script.oort_ranking(way, lie, seed) for seed in range(SEEDS)]) for lie in lies]
        assert found == pytest.approx(table[f'`"{way}"`'][-len(lies) :], abs=0.02)
    honest, small, large = table['`"clipped"`']
    assert min(small, large) > honest - 0.1
    assert table['`"paper"`'][2] < 0.1
