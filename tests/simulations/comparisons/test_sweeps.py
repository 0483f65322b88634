"""Sweeps: each value of a selector's parameter is a row, with the seeds and rounds of all others."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.arguments import read_sweep
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.summary import settings_tried, value_texts
from fedsel_flwr.selectors import BSFL, PowerOfChoice
from fedsel_flwr.simulations import Comparison, compare
from tests.simulations.cut_off_runs import FASTEST, Stop, content, parts, smoke, stop_after

pytestmark = pytest.mark.usefixtures("no_pictures")
ALPHAS = {"selectors.bsfl.alpha": [0.0, 30]}


def test_a_value_is_a_row_with_the_runs_of_a_selector_made_with_it() -> None:
    sweep = {"selectors.power-of-choice.candidates": [3, 9]}
    swept = compare(smoke(), ["power-of-choice", "random"], sweep=sweep, seeds=[1, 4])
    rows = ["power-of-choice candidates=3", "power-of-choice candidates=9", "random"]
    by_hand = {label: partial(PowerOfChoice, candidates=n) for label, n in zip(rows, (3, 9), strict=False)}
    made = compare(smoke(), by_hand | {"random": "random"}, seeds=[1, 4])
    assert swept.selectors == made.selectors == rows
    assert [(run.selector, run.scenario.seed) for run in swept.runs] == [(row, seed) for seed in (1, 4) for row in rows]
    for own, other in zip(swept.runs, made.runs, strict=True):
        assert parts(own.result) == parts(other.result), own.name
    assert parts(swept.runs[0].result) != parts(swept.runs[1].result)
    assert swept.scenario.selectors == smoke().selectors


def test_several_parameters_give_every_combination_and_a_selector_only_its_own() -> None:
    sweep = {"selectors.bsfl.alpha": [0.3, 1], "selectors.oort.penalty": [1.5, 2], "selectors.bsfl.beta": [1, 2]}
    comparison = compare(smoke(1), {"mine": "bsfl", "random": "random", "oort": "oort"}, sweep=sweep, seeds=1)
    rows = [f"mine alpha={alpha} beta={beta}" for alpha in (0.3, 1) for beta in (1, 2)]
    assert comparison.selectors == [*rows, "random", "oort penalty=1.5", "oort penalty=2"]


def test_holm_counts_every_row_and_the_verdict_warns_of_the_best() -> None:
    found = compare(smoke(), ["bsfl", "random"], sweep=ALPHAS, seeds=6).verdict
    assert [one.selector for one in found.selectors] == ["bsfl alpha=0", "bsfl alpha=30"]
    assert "Holm's correction for 2 selectors" in found.sentence
    assert "The best of the 2 settings of bsfl looks better than it is" in found.sentence
    assert "looks better" not in compare(smoke(), ["bsfl", "oort", "random"], seeds=2).verdict.sentence


def test_a_class_is_swept_by_its_label_and_keeps_the_scenarios_parameters() -> None:
    got: list[tuple[float, int]] = []

    class Mine(BSFL):
        name = "mine"

        def __init__(self, *, clients_per_round: int, seed: int, alpha: float, beta: int = 1) -> None:
            super().__init__(clients_per_round=clients_per_round, seed=seed, min_latency=0.05, alpha=alpha, beta=beta)
            got.append((alpha, beta))

    scenario = smoke(1).model_copy(update={"selectors": {"mine": {"beta": 2}}})
    comparison = compare(scenario, [Mine, "random"], sweep={"selectors.mine.alpha": np.array([0.5, 2.0])}, seeds=1)
    assert comparison.selectors == ["mine alpha=0.5", "mine alpha=2", "random"]
    assert set(got) == {(0.5, 2), (2.0, 2)}


def test_on_the_command_line(tmp_path: Path, fedsel: Any) -> None:
    argv = ["compare", "smoke", "--rounds", "6", "--selectors", "bsfl,random", "--seeds", "2", "--runs-dir"]
    out = fedsel(*argv, tmp_path, "--sweep", "selectors.bsfl.alpha=0.0,30")
    assert out.startswith("6 runs of 6 rounds\n")
    assert "\nSettings tried: 2 of bsfl.\n" in out
    assert "\nThe best of the 2 settings of bsfl looks better than it is" in out
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "plan.json").read_text())["selectors"] == [
        {"label": "bsfl alpha=0", "name": "bsfl", "params": {"alpha": 0.0}},
        {"label": "bsfl alpha=30", "name": "bsfl", "params": {"alpha": 30}},
        {"label": "random", "name": "random", "params": {}},
    ]
    expected = compare(smoke(), ["bsfl", "random"], sweep=ALPHAS, seeds=2)
    assert Comparison.load(folder).table().sort_values(["seed", "selector"]).to_csv(index=False) == expected.to_csv()
    assert "\nSettings tried: 2 of bsfl.\n" in fedsel("report", folder)


def test_a_sweep_is_resumed_by_its_plan_and_values_may_be_added(tmp_path: Path, fedsel: Any, refused: Any) -> None:
    """On the command line, and with the same arguments in Python."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    options: dict[str, Any] = {"sweep": ALPHAS, "seeds": 2}
    compare(smoke(), ["bsfl", "random"], **options, folder=whole)
    for resumed in ("by its plan", "in Python"):
        place = half / resumed
        with pytest.raises(Stop):
            compare(smoke(), ["bsfl", "random"], **options, folder=place, update=stop_after(10))
        if resumed == "in Python":
            compare(smoke(), ["bsfl", "random"], **options, folder=place, resume=True)
        else:
            fedsel("compare", "--resume", place, "--quiet")
        assert {name: text for name, text in content(place).items() if name != "flower.log"} == content(whole)
    assert "Leave out --sweep" in refused("compare", "--resume", whole, "--sweep", "selectors.bsfl.alpha=1,2")
    more = compare(smoke(), ["bsfl", "random"], seeds=2, sweep={"selectors.bsfl.alpha": [0.0, 1, 30]}, folder=whole,
                   resume=True)  # fmt: skip
    assert more.selectors == ["bsfl alpha=0", "bsfl alpha=1", "bsfl alpha=30", "random"]


def test_a_selector_of_the_users_file_is_swept_by_the_name_of_its_class(here: Path, fedsel: Any, refused: Any) -> None:
    (here / "mine.py").write_text(FASTEST)
    argv = ["compare", "smoke", "--rounds", "2", "--selectors", "./mine.py:Fastest,random", "--seeds", "1", "--quiet"]
    fedsel(*argv, "--sweep", "selectors.Fastest.patience=1.0,2.5")
    (folder,) = (here / "runs").iterdir()
    assert Comparison.load(folder).selectors == ["Fastest patience=1", "Fastest patience=2.5", "random"]
    refused("compare", "--resume", folder, "--quiet")
    fedsel("compare", "--resume", folder, "--quiet", "--trust")
    fedsel(*argv, "--sweep", "selectors.Fastest.patience=1.0,2.5", "--resume")
    assert list((here / "runs").iterdir()) == [folder]


def test_values_on_the_command_line() -> None:
    texts = ["selectors.bsfl.alpha=0.3,1, selectors.bsfl.solver=exact, alsa", "selectors.oort.alpha=2"]
    assert read_sweep(texts) == {
        "selectors.bsfl.alpha": [0.3, 1],
        "selectors.bsfl.solver": ["exact", "alsa"],
        "selectors.oort.alpha": [2],
    }
    with pytest.raises(ParameterError, match=r"--sweep has selectors\.oort\.alpha twice"):
        read_sweep([texts[1], texts[1]])
    with pytest.raises(ParameterError, match="--sweep expects KEY=VALUE"):
        read_sweep(["selectors.oort.alpha"])


def test_labels_are_short_different_and_counted() -> None:
    assert value_texts([*np.logspace(-1, 0, 3).tolist(), "a b"]) == ["0.1", "0.316228", "1", "a_b"]
    assert settings_tried(["bsfl, alpha = 2", "bsfl, alpha = 3", "oort a=1", "oort a=2 b=3", "oort"]) == {"oort": 3}
