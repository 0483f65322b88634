"""Reproduction of figures: missing runs, pages, smoke tests, the list, and the recorded verdicts."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.reproductions import reproducing
from fedsel_flwr.simulations.reproductions.paper_figure import figure_names, load_figure, read_figure
from fedsel_flwr.simulations.reproductions.reproducing import (
    cells_of,
    named_figures,
    open_rows,
    packaged_verdicts,
    results_of,
)
from fedsel_flwr.simulations.reproductions.result_pages import (
    counts_table,
    mean_text,
    paper_page,
    verdict_facts,
    write_pages,
)

RESULTS = Path(__file__).parents[3] / "docs" / "results"
NAME = "xia-fig-1a"
WORDS = {
    "not run", "setting not given", "reproduced", "direction only", "not seen", "not settled", "illustration",
}  # fmt: skip


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def short() -> pytest.MonkeyPatch:
    """The figure with few rounds, so that its runs take milliseconds."""
    patch = pytest.MonkeyPatch()
    figure = load_figure(NAME)
    brief = figure.model_copy(update={"set": figure.set | {"rounds": 60}, "seeds": 3})
    patch.setattr(reproducing, "load_figure", lambda name: brief if name == NAME else load_figure(name))
    yield patch
    patch.undo()


@pytest.fixture(scope="module")
def played(short: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reproductions")
    assert main(["reproduce", NAME, "--out", str(folder)]) == 0
    return folder


def test_the_command_writes_rows_page_and_picture(played: Path) -> None:
    rows = rows_of(played / "xia-choices.csv")
    figure = reproducing.load_figure(NAME)
    assert len(rows) == 3 * len(figure.arms) * len(figure.cells)
    assert {row["seed"] for row in rows} == {"1", "2", "3"}
    assert (played / "README.md").exists()
    assert f"`fedsel reproduce {NAME}`" in (played / "xia.md").read_text("utf-8")


def test_a_repeated_command_simulates_only_the_missing_runs(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (played / "xia-choices.csv").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "xia-choices.csv").write_text("".join(lines[:1] + lines[2:]), "utf-8")
    capsys.readouterr()
    assert main(["reproduce", NAME, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(" took ") == 1
    again, before = rows_of(tmp_path / "xia-choices.csv"), rows_of(played / "xia-choices.csv")
    for row in (*again, *before):
        row.pop("cpu_s")
    assert again == before


def test_processes_give_the_same_rows(played: Path, tmp_path: Path) -> None:
    reproducing.reproduce([NAME], tmp_path, jobs=2, announce=lambda line: None)
    again, before = rows_of(tmp_path / "xia-choices.csv"), rows_of(played / "xia-choices.csv")
    for row in (*again, *before):
        row.pop("cpu_s")
    assert again == before


@pytest.mark.parametrize("name", ["xia-fig-1c", "bsfl-fig-4", "bsfl-fig-5-right"])
def test_a_second_run_gives_the_recorded_row(name: str) -> None:
    """One run of each runner. Recorded rows may lack outcomes that were added later."""
    cell = cells_of(load_figure(name), 1)[0]
    (recorded,) = open_rows(RESULTS, cell.figure).select([cell.fingerprint])
    row = cell.simulate()
    assert (row["run"], row["selector"], str(row["seed"])) == (recorded["run"], recorded["selector"], recorded["seed"])
    for column in ("outcomes", "curves"):
        before, again = json.loads(recorded[column]), json.loads(row[column])
        assert before.keys() <= again.keys()
        for key in before.keys() - {"solver_ms", "run_s", "run_s_200"}:
            np.testing.assert_allclose(again[key], before[key], rtol=1e-3, atol=1e-6, err_msg=key)


def test_a_picture_that_needs_runs_of_another_arm_waits_for_them(tmp_path: Path) -> None:
    """The rounds to FedAvg's accuracy are unknown without FedAvg. The page is written without this picture."""
    figure = load_figure("kim-table-5")
    cell = next(one for one in cells_of(figure, 1) if one.arm == "fedpdp")
    row = dict.fromkeys(("run", "selector"), "x") | {"seed": 1, "cpu_s": 1.0, "fingerprint": cell.fingerprint}
    outcomes, curves = {"accuracy_last10": 0.5}, {"at": [1, 2], "record_at": [1, 2], "record": [0.4, 0.6]}
    open_rows(tmp_path, figure).add(row | {"outcomes": json.dumps(outcomes), "curves": json.dumps(curves)})
    write_pages(tmp_path, {"kim"})
    assert "## Table 5: not run" in (tmp_path / "kim.md").read_text("utf-8")
    assert not (tmp_path / "kim-table-5.png").exists()


def test_a_missing_run_is_no_verdict(played: Path, tmp_path: Path) -> None:
    lines = (played / "xia-choices.csv").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "xia-choices.csv").write_text("".join(lines[:1] + lines[2:]), "utf-8")
    figure = reproducing.load_figure(NAME)
    assert verdict_facts(figure, results_of(figure, played))["verdict"] != "not run"
    assert verdict_facts(figure, results_of(figure, tmp_path))["verdict"] == "not run"


def test_figures_with_the_same_runs_share_their_rows(played: Path) -> None:
    figure = reproducing.load_figure(NAME)
    other = read_figure(
        (Path(reproducing.__file__).parent / "figures/xia/fig-1a.toml").read_text("utf-8"), "xia-fig-99"
    ).model_copy(update={"set": figure.set, "seeds": 3})
    assert [cell.fingerprint for cell in cells_of(other)] == [cell.fingerprint for cell in cells_of(figure)]
    assert all(open_rows(played, other).done(cell.fingerprint) for cell in cells_of(other))


def test_figures_with_another_regret_keep_their_own_rows(played: Path) -> None:
    """Their runs have the same scenario and keys, and the file keeps both after it is sorted."""
    figure = reproducing.load_figure(NAME)
    other = figure.model_copy(update={"regret": figure.regret.model_copy(update={"kind": "none"}), "seeds": 1})
    rows = open_rows(played, figure)
    before, cell = len(rows), cells_of(other)[0]
    assert not rows.done(cell.fingerprint)
    rows.add(cell.simulate())
    rows.sort()
    assert len(rows) == before + 1
    assert not results_of(figure, played).missing


def test_fingerprints_depend_on_arm_cell_and_seed() -> None:
    cells = cells_of(load_figure(NAME), 2)
    assert len({cell.fingerprint for cell in cells}) == len(cells)


def test_a_smoke_test_prints_no_verdict_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", NAME, "--smoke"]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"{NAME}: [0-9]+ short runs, [0-9]+ s", said)
    assert not any(word in said for word in WORDS - {"illustration"})
    assert list(tmp_path.iterdir()) == []


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
def test_all_figures_pass_their_smoke_test(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "all", "--smoke"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == list(figure_names())


def test_the_list_has_a_line_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(figure_names())
    for line in lines:
        _, word, minutes, claim = re.split(" {2,}", line, maxsplit=3)
        assert word in WORDS
        assert minutes.endswith(" min")
        assert claim.endswith(".")
        assert line.isascii() or "─" not in line


def test_names_of_papers_stand_for_their_figures() -> None:
    assert named_figures(["all"]) == list(figure_names())
    assert named_figures(["xia", NAME]) == [name for name in figure_names() if name.startswith("xia-")]
    with pytest.raises(ParameterError, match="there is no figure or paper 'xiao'"):
        named_figures(["xiao"])
    with pytest.raises(ParameterError, match="no figure is named"):
        named_figures([])


@pytest.mark.parametrize("name", figure_names())
def test_the_recorded_verdicts_follow_from_the_rows(name: str) -> None:
    figure = load_figure(name)
    assert packaged_verdicts()[name] == verdict_facts(figure, results_of(figure, RESULTS))


@pytest.mark.parametrize("name", figure_names())
def test_errors_of_ours_are_looked_for_before_a_claim_is_not_seen(name: str) -> None:
    figure = load_figure(name)
    assert bool(figure.checked) == (packaged_verdicts()[name]["verdict"] == "not seen")
    for part in ("Our code:", "Setting:") if figure.checked and "The checks are those of" not in figure.checked else ():
        assert part in figure.checked or part.lower() in figure.checked


@pytest.mark.parametrize(
    ("values", "text"),
    [([0.5], "0.500"), ([2.0, 2.0], "2.00"), ([1.0, 2.0, 3.0], "2.00 (1.00 to 3.00)"), ([], "none"),
     ([1.0, math.inf], "finite on 1 of 2 seeds")],
)  # fmt: skip
def test_means_are_printed_with_their_range(values: list[float], text: str) -> None:
    assert mean_text(np.array(values)) == text


def test_every_outcome_on_the_pages_is_explained() -> None:
    page = (RESULTS / "README.md").read_text("utf-8").split("## The outcomes")[1]
    explained = {name for line in page.splitlines() for name in re.findall(r"`([\w.]+)`", line)}
    shown = set()
    for figure in map(load_figure, figure_names()):
        shown |= {check.outcome for check in figure.checks}
        shown |= {name for question in figure.questions for name in question.outcomes}
    # The table explains margin_1 and margin_2, and stands for the others.
    assert {name for name in shown if not re.fullmatch(r"(margin|violated)_\d", name)} <= explained


@pytest.mark.parametrize("paper", sorted({name.partition("-")[0] for name in figure_names()}))
def test_the_pages_follow_from_the_rows(paper: str) -> None:
    figures = [load_figure(name) for name in named_figures([paper])]
    found = {one.name: results_of(one, RESULTS) for one in figures}
    text = paper_page(paper, figures, found, RESULTS)
    assert (RESULTS / f"{paper}.md").read_text("utf-8") == text, "python -m tests.verdicts writes the page again"


def test_the_page_of_all_verdicts_counts_them() -> None:
    text = (RESULTS / "README.md").read_text("utf-8")
    assert counts_table(RESULTS) in text, "python -m tests.verdicts writes the counts again"
