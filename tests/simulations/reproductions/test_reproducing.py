"""Reproduction of figures: missing runs, the files of the command, smoke tests, the list, and the recorded verdicts."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.comparisons.cluster import Cluster
from fedsel_flwr.simulations.comparisons.parallel_runs import Processes
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.reproductions import reproducing
from fedsel_flwr.simulations.reproductions.claims import CHECK_COLUMNS, VERDICTS, verdict_of
from fedsel_flwr.simulations.reproductions.paper_figure import figure_names, load_figure, read_figure
from fedsel_flwr.simulations.reproductions.reproducing import named_figures, packaged_verdicts
from fedsel_flwr.simulations.reproductions.rows import Cell, cells_of, open_rows, results_of

RESULTS = Path(__file__).parents[3] / "docs" / "results"
NAME = "xia-fig-1a"


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows, without the processor time, which differs from run to run."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: text for key, text in row.items() if key != "cpu_s"} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a command, with few rounds, so that the runs take milliseconds."""
    patch, folder, figure = pytest.MonkeyPatch(), tmp_path_factory.mktemp("reproductions"), load_figure(NAME)
    brief = figure.model_copy(update={"set": figure.set | {"rounds": 60}, "seeds": 3})
    patch.setattr(reproducing, "load_figure", lambda name: brief if name == NAME else load_figure(name))
    assert main(["reproduce", NAME, "--out", str(folder)]) == 0
    yield folder
    patch.undo()


def test_the_command_leaves_rows_checks_and_picture(played: Path) -> None:
    figure = reproducing.load_figure(NAME)
    assert {path.name for path in played.iterdir()} == {"xia-choices.csv", "xia-checks.csv", f"{NAME}.png"}
    rows = rows_of(played / "xia-choices.csv")
    assert len(rows) == 3 * len(figure.arms) * len(figure.cells)
    assert {int(row["seed"]) for row in rows} == {figure.first_seed + k for k in range(3)}
    checks = rows_of(played / "xia-checks.csv")
    assert tuple(checks[0]) == CHECK_COLUMNS
    verdict = verdict_of(figure, results_of(figure, played))
    own = [row for row in checks if row["figure"] == NAME]
    assert [row["word"] for row in own] == [one.word for one in verdict.findings]
    assert {row["verdict"] for row in own} == {verdict.word}
    assert float(own[0]["estimate"]) == pytest.approx(verdict.findings[0].effect.estimate, rel=1e-3)
    others = [row for row in checks if row["figure"] != NAME]
    assert {row["figure"] for row in others} == {name for name in figure_names() if name.startswith("xia-")} - {NAME}
    assert {row["verdict"] for row in others} <= {"not run", "illustration"}


def test_a_repeated_command_simulates_only_the_missing_runs(played: Path, tmp_path: Path, fedsel: Any) -> None:
    lines = (played / "xia-choices.csv").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "xia-choices.csv").write_text("".join(lines[:1] + lines[2:]), "utf-8")
    figure = reproducing.load_figure(NAME)
    assert verdict_of(figure, results_of(figure, tmp_path)).word == "not run"
    assert fedsel("reproduce", NAME, "--out", tmp_path).count(" took ") == 1
    assert rows_of(tmp_path / "xia-choices.csv") == rows_of(played / "xia-choices.csv")


@pytest.mark.parametrize("executor", [Processes, Cluster])
def test_processes_give_the_same_rows(
    executor: Any, played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the calls end in another order."""

    def map_backwards(self: Any, call: Any, given: list[Cell], names: list[str]) -> Iterator[tuple[int, Any]]:
        for index in reversed(range(len(given))):
            yield index, call(given[index], None, lambda rounds: None)

    monkeypatch.setattr(executor, "map", map_backwards)
    monkeypatch.setattr(reproducing, "cluster_for_runs", lambda address: address and RayResources(ray_address=address))
    address = "head:6379" if executor is Cluster else None
    reproducing.reproduce([NAME], tmp_path, jobs=2, ray_address=address, announce=lambda line: None)
    assert rows_of(tmp_path / "xia-choices.csv") == rows_of(played / "xia-choices.csv")


@pytest.mark.parametrize("name", ["xia-fig-1b", "bsfl-fig-4", "bsfl-fig-5-right"])
def test_a_second_run_gives_the_recorded_row(name: str) -> None:
    """One run of each runner. Recorded rows may lack outcomes that were added later."""
    cell = cells_of(load_figure(name), 1)[0]
    (recorded,) = open_rows(RESULTS, cell.figure).select([cell.fingerprint])
    row = cell.simulate()
    assert (row["run"], row["selector"], str(row["seed"])) == (recorded["run"], recorded["selector"], recorded["seed"])
    for column in ("outcomes", "curves"):
        before, again = json.loads(recorded[column]), json.loads(row[column])
        assert before.keys() <= again.keys()
        for key in before.keys() - {"solver_ms", "run_s"}:
            np.testing.assert_allclose(again[key], before[key], rtol=1e-3, atol=1e-6, err_msg=key)


def test_a_smoke_test_prints_no_verdict_and_writes_nothing(here: Path, fedsel: Any) -> None:
    said = fedsel("reproduce", NAME, "--smoke")
    assert re.search(rf"{NAME}: [0-9]+ short runs?, [0-9]+ s", said)
    assert not any(word in said for word in set(VERDICTS) - {"illustration"})
    assert list(here.iterdir()) == []


def test_a_smoke_test_plays_digits_if_the_data_set_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = read_figure(
        'paper = "gpfl"\nfigure = "Fig. 99"\nclaim = "A claim."\nscenario = "gpfl-fashion"\n'
        "[arms.random]\n[arms.gpfl]\n"
        '[[checks]]\nsays = "it"\noutcome = "accuracy"\nleft = "gpfl"\nright = "random"\nrelation = "above"\n',
        "gpfl-fig-99",
    )
    monkeypatch.setattr(reproducing, "load_figure", lambda name: figure)
    reproducing.smoke(["gpfl-fig-99"], str(tmp_path), print)
    assert "gpfl-fig-99: 2 short runs on digits, because the data set is missing" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_figures_pass_their_smoke_test(fedsel: Any) -> None:
    assert [line.split(":")[0] for line in fedsel("reproduce", "all", "--smoke").splitlines()] == list(figure_names())


def test_the_list_has_a_line_for_each_figure(fedsel: Any) -> None:
    lines = fedsel("reproduce", "--list").splitlines()
    assert [line.split()[0] for line in lines] == list(figure_names())
    assert {re.split(" {2,}", line)[1] for line in lines} <= {*VERDICTS}


def test_names_of_papers_stand_for_their_figures() -> None:
    assert named_figures(["all"]) == list(figure_names())
    assert named_figures(["xia", NAME]) == [name for name in figure_names() if name.startswith("xia-")]
    with pytest.raises(ParameterError, match="there is no figure or paper 'xiao'"):
        named_figures(["xiao"])
    with pytest.raises(ParameterError, match="no figure is named"):
        named_figures([])


@pytest.mark.parametrize("name", figure_names())
def test_the_recorded_verdicts_follow_from_the_rows(name: str) -> None:
    figure, recorded = load_figure(name), packaged_verdicts()[name]
    verdict = verdict_of(figure, results_of(figure, RESULTS))
    assert (recorded["verdict"], recorded["seeds"]) == (verdict.word, figure.seeds)


def test_smoke_runs_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[str] = []

    def simulate_run(cell: Cell) -> tuple[dict[str, float], dict[str, object]]:
        simulated.append(cell.fingerprint)
        return {"accuracy": 0.5}, {}

    monkeypatch.setattr(reproducing, "simulate_run", simulate_run)
    lines: list[str] = []
    reproducing.smoke(["gpfl-fig-4", "gpfl-fig-5"], announce=lines.append)
    # Five arms on one seed.
    assert len(simulated) == 5
    assert [line.split(":")[0] for line in lines] == ["gpfl-fig-4", "gpfl-fig-5"]
