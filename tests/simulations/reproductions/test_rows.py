"""Rows of finished runs: found by fingerprint, added as whole lines, sorted by their key."""

from __future__ import annotations

import csv
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedsel_flwr.simulations.reproductions import rows as rows_module

COLUMNS = ("selector", "seed", "fingerprint", "seconds", "curve")
KEY = ("selector", "seed")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row(selector: str, seed: int, fingerprint: str = "a", seconds: float = 1.0) -> dict[str, object]:
    return {"selector": selector, "seed": seed, "fingerprint": fingerprint, "seconds": seconds, "curve": (0.5, 0.25)}


def test_a_fingerprint_depends_on_values_and_not_on_their_order() -> None:
    """SHA-256 of '{"seed": 1, "selector": "random"}', by sha256sum: bac931638a5e..."""
    first = rows_module.fingerprint(seed=1, selector="random")
    assert first == rows_module.fingerprint(selector="random", seed=1) == "bac931638a5e"
    assert first != rows_module.fingerprint(seed=2, selector="random")


def test_rows_are_there_for_the_next_process(tmp_path: Path) -> None:
    rows = rows_module.Rows(tmp_path / "new" / "rows.csv", COLUMNS, KEY)
    assert not rows.done("a")
    assert not rows.path.exists()
    rows.add(row("bsfl", 1, seconds=12345.678901))
    assert rows.done("a")
    again = rows_module.Rows(rows.path, COLUMNS, KEY)
    assert again.done("a")
    assert not again.done("b")
    assert again.select(["b", "a"]) == [
        {"selector": "bsfl", "seed": "1", "fingerprint": "a", "seconds": "12345.68", "curve": "0.5 0.25"}
    ]
    assert rows_of(rows.path) == list(again)


def test_an_incomplete_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = rows_module.Rows(path, COLUMNS, KEY)
    rows.add(row("bsfl", 1))
    whole = path.read_bytes()
    path.write_bytes(whole + b"bsfl,2,b,1.")
    again = rows_module.Rows(path, COLUMNS, KEY)
    assert not again.done("b")
    assert path.read_bytes() == whole
    again.add(row("bsfl", 2, "b", math.inf))
    assert [one["seconds"] for one in rows_of(path)] == ["1", "inf"]


def test_sorting_orders_numbers_and_keeps_the_last_row_of_a_key(tmp_path: Path) -> None:
    rows = rows_module.Rows(tmp_path / "rows.csv", COLUMNS, KEY)
    for selector, seed, fingerprint in (("random", 10, "a"), ("random", 9, "b"), ("bsfl", 9, "c"), ("random", 9, "d")):
        rows.add(row(selector, seed, fingerprint))
    rows.sort()
    found = [(one["selector"], one["seed"], one["fingerprint"]) for one in rows_of(rows.path)]
    assert found == [("bsfl", "9", "c"), ("random", "9", "d"), ("random", "10", "a")]
    assert not rows.done("b")


def test_a_new_column_is_empty_in_old_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows_module.Rows(path, COLUMNS, KEY).add(row("bsfl", 1))
    rows = rows_module.Rows(path, (*COLUMNS, "joules"), KEY)
    rows.add(row("bsfl", 2, "b") | {"joules": 7})
    assert [one["joules"] for one in rows_of(path)] == ["", "7"]
    with pytest.raises(ValueError, match="unknown columns joules"):
        rows_module.Rows(path, COLUMNS, KEY)


def test_wrong_rows_are_refused(tmp_path: Path) -> None:
    rows = rows_module.Rows(tmp_path / "rows.csv", COLUMNS, KEY)
    with pytest.raises(ValueError, match="these differ: joules"):
        rows.add(row("bsfl", 1) | {"joules": 7})
    with pytest.raises(ValueError, match="line break"):
        rows.add(row("bs\nfl", 1))
    with pytest.raises(ValueError, match="must include fingerprint, seed"):
        rows_module.Rows(tmp_path / "rows.csv", ("selector",), KEY)
    assert not rows.path.exists()


def test_no_line_is_lost_when_several_add(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"

    def add(worker: int) -> None:
        own = rows_module.Rows(path, COLUMNS, KEY)
        for seed in range(50):
            own.add(row(f"selector-{worker}", seed, f"{worker}-{seed}"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    found = rows_of(path)
    assert {one["fingerprint"] for one in found} == {f"{worker}-{seed}" for worker in range(4) for seed in range(50)}
    assert len(found) == 200
