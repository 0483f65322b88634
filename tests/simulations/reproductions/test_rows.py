"""Rows of finished runs: found by fingerprint, added as whole lines, sorted; shared runs; outcomes of rows."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.reproductions import rows as rows_module
from fedsel_flwr.simulations.reproductions.claims import judge
from fedsel_flwr.simulations.reproductions.paper_figure import PaperFigure, figure_names, load_figure, read_figure
from fedsel_flwr.simulations.reproductions.rows import FINGERPRINT, Results, _selector_text, cells_of

COLUMNS = ("selector", "seed", "fingerprint", "seconds", "curve")
KEY = ("selector", "seed")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
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
    rows_module.Rows(path, COLUMNS, KEY).add(row("bsfl", 1))
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
    rows_module.Rows(path, (*COLUMNS, "joules"), KEY).add(row("bsfl", 2, "b") | {"joules": 7})
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


# ---- the runs of figures ---------------------------------------------------------------------------------------------


def fingerprints(name: str, seeds: int | None = None) -> set[str]:
    return {cell.fingerprint for cell in cells_of(load_figure(name), seeds)}


def test_fingerprints_depend_on_arm_cell_and_seed() -> None:
    assert len(fingerprints("xia-fig-1a", 2)) == len(cells_of(load_figure("xia-fig-1a"), 2))


def test_figures_share_their_runs() -> None:
    # The table has twelve more runs: three for a question, and nine for its second reading.
    assert len(fingerprints("gpfl-table-2") - fingerprints("gpfl-fig-3")) == 12
    assert fingerprints("gpfl-fig-3") < fingerprints("gpfl-table-2")
    assert fingerprints("gpfl-fig-6a") < fingerprints("gpfl-fig-5") == fingerprints("gpfl-fig-4")
    # Only rho = 1 on ten seeds is a run of Fig. 4.
    assert len(fingerprints("gpfl-fig-7b") & fingerprints("gpfl-fig-4")) == 10


def test_runs_with_different_fingerprints_have_different_descriptions() -> None:
    """The file of rows holds one row for each description, selector and seed."""
    described: dict[tuple[object, ...], str] = {}
    for figure in map(load_figure, figure_names()):
        if figure.left_out or figure.illustration:
            continue
        for cell in cells_of(figure, 1):
            key = figure.paper, figure.runner, cell.run, _selector_text(cell.scenario), cell.scenario.seed
            assert described.setdefault(key, cell.fingerprint) == cell.fingerprint, (figure.name, key)


def test_another_regret_is_another_run_and_another_name_is_not() -> None:
    figure = load_figure("xia-fig-1a")
    plain = figure.model_copy(update={"regret": figure.regret.model_copy(update={"kind": "none"})})
    named = figure.model_copy(update={"name": "xia-fig-99", "claim": "Another."})
    first, other, same = (cells_of(one, 1)[0].fingerprint for one in (figure, plain, named))
    assert first == same != other


# ---- outcomes --------------------------------------------------------------------------------------------------------

FIGURE = """
paper = "kim"
figure = "Table 5"
claim = "FedCM reaches FedAvg's accuracy in a quarter of the rounds."
scenario = "digits"
seeds = 2
arms = {{ fedavg = {{ selector = "random" }}, fedcm = {{ selector = "fedcm-ts" }} }}
checks = [{{ says = "it", outcome = "rounds_to.{other}", left = "fedcm", right = 100.0, relation = "below" }}]
"""


def _figure(other: str = "fedavg") -> PaperFigure:
    return read_figure(FIGURE.format(other=other), "kim-table-5")


def _results(figure: PaperFigure, final: dict[int, float], records: dict[int, dict[str, list[float]]]) -> Results:
    """Return results in which FedAvg has these final accuracies, and FedCM these records, by seed."""
    rows = []
    for cell in cells_of(figure):
        seed = cell.scenario.seed
        own = ({"accuracy_last10": final[seed]}, {}) if cell.arm == "fedavg" else ({}, {"at": [1, 100]} | records[seed])
        outcomes, curves = map(json.dumps, own)
        rows.append({FINGERPRINT: cell.fingerprint, "cpu_s": "1", "outcomes": outcomes, "curves": curves})
    return Results(cells_of(figure), rows)  # type: ignore[arg-type]


def test_the_first_round_with_the_other_arms_final_accuracy_on_the_same_seed() -> None:
    figure = _figure()
    # Seed 1: the target 0.6 is reached exactly, in round 20. Seed 2: 0.8 is reached in round 31 by 0.85.
    records = {
        1: {"record_at": [1, 4, 20, 60], "record": [0.2, 0.59, 0.6, 0.9]},
        2: {"record_at": [2, 31], "record": [0.3, 0.85]},
    }
    results = _results(figure, {1: 0.6, 2: 0.8}, records)
    assert results.values("rounds_to.fedavg", "fedcm", "") == {1: 20, 2: 31}
    (finding,) = judge(figure, results.values).findings
    assert finding.effect.estimate == pytest.approx(math.sqrt(0.20 * 0.31))


def test_an_arm_that_never_has_the_accuracy_has_no_number_of_rounds() -> None:
    records = {seed: {"record_at": [1, 9], "record": [0.2, 0.7]} for seed in (1, 2)}
    found = _results(_figure(), {1: 0.7001, 2: math.nan}, records).values("rounds_to.fedavg", "fedcm", "")
    assert found[1] == math.inf
    assert math.isnan(found[2])


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(ParameterError, match="there is no arm 'fedavgm'"):
        _figure("fedavgm")


def test_a_run_counts_once_in_the_processor_time() -> None:
    """Two arms with the same selector are the same runs: one for each seed."""
    cells = cells_of(read_figure(FIGURE.format(other="fedavg").replace("fedcm-ts", "random"), "kim-table-5"))
    row = {"cpu_s": "1800", "outcomes": '{"accuracy_last10":0.5}', "curves": "{}"}
    results = Results(cells, [row | {FINGERPRINT: cell.fingerprint} for cell in cells])  # type: ignore[arg-type]
    assert (len(cells), sum(results.seconds.values())) == (4, 3600)
