"""Comparing one's own selectors: by class, callable, reference and entry point, with the same numbers each way."""

from __future__ import annotations

import html
import inspect
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.references import load_reference
from fedsel_flwr.selectors import PCZFL, Random, Selector, catalogue, names
from fedsel_flwr.simulations import Comparison, compare, load_scenario, vectorized
from fedsel_flwr.simulations.comparisons.contenders import read_contenders, runnable_selectors
from tests.simulations.cut_off_runs import FASTEST, parts, smoke

pytestmark = pytest.mark.usefixtures("no_pictures")
SEEDS = [1, 4]


@pytest.fixture
def own(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with mine.py, and an installed package that calls the same class "quickest"."""
    entries = "[fedsel.selectors]\nquickest = their_package.selection:Fastest\nbroken = their_package.nothing:X\n"
    files = {
        "mine.py": FASTEST,
        "site/their_package/__init__.py": "",
        "site/their_package/selection.py": FASTEST,
        "site/their_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: their-package\n",
        "site/their_package-1.0.dist-info/entry_points.txt": entries + "bsfl = their_package:Stolen\n",
    }
    for name, text in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    monkeypatch.syspath_prepend(here / "site")
    return here


def figures(comparison: Comparison, label: str) -> list[dict[str, Any]]:
    table = comparison.table()
    return table[table["selector"] == label].drop(columns="selector").fillna(-1).to_dict("records")


def test_the_same_numbers_by_class_reference_entry_point_and_command(own: Path, fedsel: Any) -> None:
    fastest = load_reference("./mine.py:Fastest", "selector")

    def made(clients_per_round: int, seed: int) -> Selector:
        return fastest(clients_per_round=clients_per_round, seed=seed)  # type: ignore[no-any-return]

    expected = figures(compare(smoke(), [fastest, "random"], seeds=SEEDS), "Fastest")
    assert [run["seed"] for run in expected] == SEEDS
    ways = {"reference": "./mine.py:Fastest", "installed": "quickest", "function": made, "fixed": partial(fastest)}
    other = compare(smoke(), ways, seeds=SEEDS)
    for label in other.selectors:
        assert figures(other, label) == expected, label
    argv = ["compare", "smoke", "--rounds", "6", "--selectors", "./mine.py:Fastest,quickest,random", "--seeds", "1,4"]
    said = json.loads(fedsel(*argv, "--engine", "vectorized", "--json"))
    for label in ("Fastest", "quickest"):
        runs = [run for run in said["summary"] if run["selector"] == label]
        assert runs == [{k: None if v == -1 else v for k, v in one.items()} | {"selector": label} for one in expected]
    assert said["verdict"]["sentence"].startswith("random ")
    (folder,) = (own / "runs").iterdir()
    assert figures(Comparison.load(folder), "Fastest") == expected
    assert json.loads(fedsel("report", folder, "--json"))["verdict"]["selectors"] == said["verdict"]["selectors"]


def test_parameters_of_ones_own_selector_by_its_name(own: Path, fedsel: Any, refused: Any) -> None:
    argv = ["compare", "smoke", "--rounds", "2", "--selectors", "mine.py:Fastest", "--seeds", "1", "--json"]
    fedsel(*argv, "--set", "selectors.Fastest.patience=2.0")
    assert "unknown key 'selectors.Fastest.patients'" in refused(*argv, "--set", "selectors.Fastest.patients=0.0")


def test_a_scenario_names_a_file_beside_it(own: Path) -> None:
    (own / "study").mkdir()
    (own / "mine.py").rename(own / "study" / "mine.py")
    (own / "study" / "s.toml").write_text('selector = "./mine.py:Fastest"\n[selectors.Fastest]\npatience = 2.0\n')
    assert load_scenario(str(own / "study" / "s.toml")).selector == f"{own}/study/mine.py:Fastest"
    with pytest.raises(ParameterError, match="there is no file"):  # in an override: of the working directory
        load_scenario(str(own / "study" / "s.toml"), {"selector": "./mine.py:Fastest"})


def test_installed_names_are_listed_and_ours_stay_ours(own: Path, fedsel: Any) -> None:
    assert {"quickest", "broken"} <= set(names())
    out = fedsel("list")
    assert re.search(r"^  quickest +The clients of the least mean latency", out, re.MULTILINE)
    assert re.search(r"^  broken +cannot be loaded: ", out, re.MULTILINE)
    assert read_contenders("bsfl")[0].name == "bsfl"
    assert "their_package" not in str(load_scenario("smoke", {"selector": "bsfl"}))


def test_ten_seeds_are_the_default_and_the_effort_comes_first(fedsel: Any, tmp_path: Path) -> None:
    assert inspect.signature(compare).parameters["seeds"].default == 10
    out = fedsel("compare", "smoke", "--rounds", 2, "--selectors", "random,round-robin", "--runs-dir", tmp_path)
    assert out.startswith("20 runs of 2 rounds\n")
    assert re.search(r"^all runs: about \d+ s$", out, re.MULTILINE)
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*-seed*"))) == 20
    assert "seeds are few" not in out


def test_python_shows_on_standard_error_what_the_command_shows(capsys: pytest.CaptureFixture[str]) -> None:
    compare(smoke(), ["bsfl", "random"], seeds=2)
    out, err = capsys.readouterr()
    first, *lines = err.splitlines()
    assert (out, first) == ("", "4 runs of 6 rounds")
    assert re.fullmatch(r"all runs: about \d+ s", lines[3])
    assert [line for line in lines if "seed" in line and "round 6/6" not in line]
    ends = [line.partition(": round 6/6  accuracy ")[0] for line in lines if "round 6/6" in line]
    assert ends == ["bsfl, seed 1", "random, seed 1", "bsfl, seed 2", "random, seed 2"]
    told: list[str] = []
    compare(smoke(), ["bsfl", "random"], seeds=1, start_run=lambda label, rounds: told.append(label))
    compare(smoke(), ["bsfl", "random"], seeds=1, quiet=True)
    assert told == ["bsfl", "random"]
    assert capsys.readouterr() == ("", "")


def test_the_effort_of_a_resumed_comparison_is_not_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for resume in (False, True):
        compare(smoke(), ["bsfl", "random"], seeds=1, folder=tmp_path, resume=resume)
        assert ("2 runs of 6 rounds\n" in (said := capsys.readouterr().err)) != resume
        assert "random: round 6/6" in said


def test_a_wait_that_is_too_short_is_remarked(tmp_path: Path, capsys: Any, fedsel: Any) -> None:
    """By both, for the worst seed of each selector; not if rounds end early by design."""
    comparison = compare(smoke(wireless__max_latency_s=0.15), ["round-robin", "random"], seeds=2, folder=tmp_path)
    remarks = comparison.remarks()
    assert [line.partition(",")[0] for line in remarks] == ["round-robin", "random"]
    for line in remarks:
        selector, seed, share = re.fullmatch(
            r"(.*), seed (\d): (\d+) % of the selected clients replied too late\. "
            r"This is the largest share of the 2 seeds\. "
            r"Raise wireless\.max_latency_s \(now 0\.15 s\)\?", line,
        ).groups()  # fmt: skip
        late = {
            run.scenario.seed: np.mean(["late: " in row.problem for row in run.history.clients])
            for run in comparison.runs if run.selector == selector
        }  # fmt: skip
        assert float(share) == pytest.approx(100 * max(late.values()), abs=0.5)
        assert late[int(seed)] == max(late.values())
    assert capsys.readouterr().err.splitlines()[-2:] == remarks
    assert set(remarks) < set(fedsel("report", tmp_path).splitlines())
    assert compare(smoke(), "random", seeds=1).remarks() == []
    early = smoke(wireless__max_latency_s=0.15, aggregation__over_selection=0.4)
    assert compare(early, "random", seeds=1).remarks() == []


def test_a_column_that_no_client_reported_is_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorized, "asked_columns", lambda names: frozenset())
    comparison = compare(smoke(aggregation__missing_columns="random"), "oort", seeds=1)
    rounds = len(comparison.runs[0].history.rounds)
    assert f"{comparison.runs[0].name}: no client reported rms_loss in {rounds} rounds" in comparison.remarks()


def test_a_target_that_tells_nothing_apart_is_remarked() -> None:
    """No run reaches it, or all in the first possible round; a target between the two is no remark."""
    said = {}
    for target in (0.999, 0.2, 0.7):
        comparison = compare(
            smoke(target_accuracy=target, target_rounds=2, rounds=20), ["bsfl", "random"], seeds=2, quiet=True
        )
        said[target] = comparison.remarks()
        if target == 0.7:
            assert 2 < max(one.rounds_to_target for one in comparison.summaries) < math.inf
    (never,), (at_once,), others = said.values()
    assert never.startswith("no run reached the target accuracy of 99.9 % as a mean of 2 measured rounds")
    assert at_once.startswith("every run reached the target accuracy of 20 % in the first 2 measured rounds")
    assert others == []


def test_what_is_saved_can_be_loaded_and_pooled(tmp_path: Path) -> None:
    both = compare(smoke(), ["bsfl", "random"], seeds=[1, 2])
    both.save(tmp_path / "both")
    compare(smoke(), ["bsfl", "random"], seeds=[3], folder=tmp_path / "third")
    pooled = Comparison.load(tmp_path / "both", tmp_path / "third")
    assert len(pooled.table()) == 6
    assert pooled.reference == "random"
    assert pooled.verdict.selectors[0].time.pairs == 3
    first = next(run for run in pooled.runs if (run.selector, run.scenario.seed) == ("bsfl", 1))
    assert parts(first.result) == parts(both.runs[0].result)
    compare(smoke(training__learning_rate=0.2), ["bsfl"], seeds=[9], folder=tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for folders, said in (
        (("both", "other"), r"training.learning_rate is 0.1 in .*both.* and 0.2 in .*other"),
        (("third", "third"), r"'bsfl' ran on seed 3 in .*third.* and in .*third"),
        (("empty",), "holds no run"),
    ):
        with pytest.raises(ParameterError, match=said):
            Comparison.load(*(tmp_path / name for name in folders))


def test_a_comparison_shows_itself() -> None:
    comparison = compare(smoke(4), {"50 % random & more": "random", "bsfl": "bsfl"}, seeds=2)
    comparison.reference = "bsfl"
    latex = comparison.to_latex()
    assert r"50 \% random \& more" in latex
    assert latex.count(r"\\") == 3
    assert latex.count("{tabular}") == 2
    assert comparison.to_csv().splitlines()[0].startswith("selector,seed,accuracy,")
    assert html.escape(comparison.verdict.sentence.splitlines()[0], quote=False) in comparison._repr_html_()
    assert "<table" in comparison._repr_html_()
    row = comparison.summary.iloc[0]
    found = comparison.verdict.selectors[0]
    assert (row["seeds"], row["verdict"]) == (2, found.word)
    assert row["time_ratio_high"] == pytest.approx(found.time.high, nan_ok=True)


def test_a_class_gets_what_it_takes_of_the_scenario() -> None:
    got: dict[str, Any] = {}

    class Curious(Random):
        def __init__(self, *, clients_per_round: int = 99, seed: int | None = None, total_rounds: int = 0) -> None:
            super().__init__(clients_per_round=clients_per_round, seed=seed)
            got.update(clients_per_round=clients_per_round, seed=seed, total_rounds=total_rounds)

    compare(smoke(2), [Curious], seeds=[8])
    assert got == {"clients_per_round": smoke().clients_per_round, "seed": 8, "total_rounds": 2}
    (pczfl,) = read_contenders([PCZFL])
    assert pczfl.label == "pczfl"


def test_a_folder_with_runs_of_another_comparison_is_refused(tmp_path: Path) -> None:
    compare(smoke(2), ["bsfl", "random"], seeds=2, folder=tmp_path)
    compare(smoke(3), ["bsfl", "random"], seeds=2, folder=tmp_path)  # written over
    for resume in (False, True):
        with pytest.raises(ParameterError, match=r"holds runs of another comparison \(bsfl-seed1, bsfl-seed2\)"):
            compare(smoke(3), ["oort", "random"], seeds=2, folder=tmp_path, resume=resume)
    assert len(Comparison.load(tmp_path).runs) == 4


# ---- `--selectors all`: every selector that the scenario can run ----------------------------------------------------


def test_all_are_the_selectors_but_those_that_cannot_run() -> None:
    able, left_out = runnable_selectors(load_scenario("digits"))
    assert sorted([*able, *left_out]) == sorted(names())
    assert {"bsfl", "cs-ucb", "divfl", "fedcs", "gpfl", "pczfl", "tifl"} < {*able}
    # Only a selector with a parameter that has no default, and that the scenario does not give.
    assert left_out.keys() <= catalogue.EXAMPLES.keys()
    assert all("needs the parameter" in why for why in left_out.values())
    keys = {"data.dataset": "synthetic-regression", "model.name": "linear", "partition.kind": "iid"}
    utility = {"selectors.divfl.accuracy_weight": 0.5}
    able, left_out = runnable_selectors(load_scenario("digits", {**keys, **utility, "aggregation.over_selection": 0.5}))
    assert sorted([*able, *left_out]) == sorted(names())
    assert {"bsfl", "active-fl"} < {*able}
    assert "divfl (accuracy) measures classifiers" in left_out["divfl"]
    assert "has numbers to predict" in left_out["gpfl"]
    assert "clients_per_round" in left_out["fedcs"]
    _, left_out = runnable_selectors(load_scenario("phones", {"num_clients": 1001, "partition.kind": "sampled"}))
    assert left_out["divfl"] == "takes at most 1000 clients, and there are 1001"
    assert left_out.keys() <= {"divfl", *catalogue.EXAMPLES}


def test_a_comparison_of_all_says_who_is_left_out() -> None:
    scenario = load_scenario("smoke", {"rounds": 1, "aggregation.over_selection": 0.4})
    comparison, (able, left_out) = compare(scenario, "all", seeds=1), runnable_selectors(scenario)
    assert (comparison.selectors, comparison.left_out) == (able, left_out)
    assert left_out


def test_the_command_says_who_is_left_out(tmp_path: Path, fedsel: Any) -> None:
    argv = ["compare", "smoke", "--selectors", "all", "--rounds", "1", "--seeds", "1", "--runs-dir", str(tmp_path)]
    out = fedsel(*argv, "--set", "aggregation.over_selection=0.4")
    assert "left out: pczfl: over_selection = 0.4" in out
    assert "\noort " in out
