"""docs/tutorial.md runs as a notebook, and its outputs show what its prose says about them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.pages import ROOT
from tests.processes import environment

nbclient = pytest.importorskip("nbclient", reason="comes with the extra docs")
nbformat = pytest.importorskip("nbformat", reason="comes with the extra docs")
read_notebook = pytest.importorskip("myst_nb.core.read", reason="comes with the extra docs").read_myst_markdown_notebook

pytestmark = pytest.mark.slow  # the build of the site runs the notebook as well
PAGE = ROOT / "docs" / "tutorial.md"
NUMBERS = """
import json
facts = {name: json.loads(one.summary.set_index("selector").to_json(orient="index"))
         for name, one in {"first": first, "second": second, "third": third}.items()}
print(json.dumps(facts))
"""
Row = dict[str, Any]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after its run; the output of its last cell has the numbers of all comparisons."""
    found = read_notebook(PAGE.read_text("utf-8"))
    found.cells.append(nbformat.v4.new_code_cell(NUMBERS))
    folder = tmp_path_factory.mktemp("tutorial")
    client = nbclient.NotebookClient(found, timeout=250, resources={"metadata": {"path": str(folder)}})
    # As in docs/conf.py: tqdm warns if there are no widgets.
    client.execute(env=environment() | {"PYTHONWARNINGS": "ignore:IProgress not found"})
    return found


@pytest.fixture(scope="module")
def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def numbers(cells: list[Any]) -> dict[str, Any]:
    return dict(json.loads(cells[-1].outputs[-1].text))


@pytest.fixture(scope="module")
def rows(numbers: dict[str, Any]) -> Callable[[str, str], Row]:
    return lambda comparison, selector: dict(numbers[comparison][selector])


def outside(row: Row, name: str, value: float) -> bool:
    """Whether a value is outside the interval of a number."""
    return not row[f"{name}_low"] <= value <= row[f"{name}_high"]


def said(cells: list[Any], code: str) -> str:
    """The printed output of the cell that contains this code."""
    (cell,) = [cell for cell in cells if code in cell.source]
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_it_prints_no_warning(cells: list[Any]) -> None:
    assert [output.text for cell in cells for output in cell.outputs if output.get("name") == "stderr"] == []


def test_three_seeds_settle_nothing(cells: list[Any], rows: Callable[[str, str], Row]) -> None:
    verdict = said(cells, "print(first.verdict")
    assert "Compared with random, on the same 3 seeds and partitions" in verdict
    assert verdict.count("not settled") == 2
    for selector in ("bsfl", "oort"):
        assert rows("first", selector)["verdict"] == "not settled"
        assert not outside(rows("first", selector), "time_ratio", 1.0)
    assert 2 * rows("first", "bsfl")["seeds_to_settle"] < rows("first", "oort")["seeds_to_settle"]
    assert rows("first", "bsfl")["seeds_to_settle"] <= 10


def test_ten_new_seeds_settle_bsfl(cells: list[Any], rows: Callable[[str, str], Row]) -> None:
    assert "on the same 10 seeds and partitions" in said(cells, "print(second.verdict")
    bsfl, oort, random = (rows("second", name) for name in ("bsfl", "oort", "random"))
    assert (bsfl["verdict"], oort["verdict"]) == ("sooner", "not settled")
    assert bsfl["seconds_per_round_ratio_high"] < 1
    assert not outside(bsfl, "rounds_ratio", 1.0)
    assert oort["seconds_per_round_ratio_high"] < 1
    assert oort["rounds_ratio"] > 1.05
    assert oort["accuracy_high"] < 0
    assert not outside(bsfl, "accuracy", 0.0)
    assert bsfl["time_ratio"] == pytest.approx(bsfl["seconds_per_round_ratio"] * bsfl["rounds_ratio"])
    assert bsfl["jain"] > 0.95 > 0.6 > oort["jain"]
    assert random["jain"] > 0.8


def test_a_deadline_shortens_both_and_costs_accuracy(rows: Callable[[str, str], Row]) -> None:
    for selector in ("bsfl", "random"):
        before, after = rows("second", selector), rows("third", selector)
        assert after["time_to_target_s"] < before["time_to_target_s"]
        assert after["failed_clients"] > 5 * before["failed_clients"]
        assert after["accuracy"] < before["accuracy"] - 0.02
    assert rows("third", "bsfl")["time_ratio"] > rows("second", "bsfl")["time_ratio"] + 0.05


def test_every_run_reaches_the_target(numbers: dict[str, Any]) -> None:
    for name, count in (("first", 3), ("second", 10), ("third", 10)):
        for selector, row in numbers[name].items():
            assert row["time_to_target_s_seeds"] == count, (name, selector)


def test_it_shows_two_pictures_and_no_widget(cells: list[Any]) -> None:
    shown = [data for cell in cells for output in cell.outputs if (data := output.get("data"))]
    assert len(shown) == 2
    for data in shown:
        assert set(data) <= {"text/plain", "image/png"}
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
