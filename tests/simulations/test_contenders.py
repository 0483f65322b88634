"""`--selectors all`: every selector that a scenario can run, and why the others cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsel_flwr.selectors import catalogue, names
from fedsel_flwr.simulations import compare, load_scenario
from fedsel_flwr.simulations.comparisons.contenders import runnable_selectors


def test_all_but_those_that_cannot() -> None:
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


def test_on_the_command_line(tmp_path: Path, fedsel: Any) -> None:
    argv = ["compare", "smoke", "--selectors", "all", "--rounds", "1", "--seeds", "1", "--runs-dir", str(tmp_path)]
    out = fedsel(*argv, "--set", "aggregation.over_selection=0.4")
    assert "left out: pczfl: over_selection = 0.4" in out
    assert "\noort " in out
