"""A selector that chooses more clients than its clients_per_round is refused, unless its class declares it."""

from __future__ import annotations

import io
from typing import ClassVar

import numpy as np
import pytest
from rich.console import Console

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report import aggregate
from fedsel_flwr.report.tables import latex_table, render_table
from fedsel_flwr.selectors import Selector, create
from fedsel_flwr.simulations import compare, load_scenario
from fedsel_flwr.testing import check_selector


class Greedy(Selector):
    """Asks everybody, whatever the number says."""

    def _select(self, available: IntArray) -> IntArray:
        return available


class Declared(Greedy):
    name: ClassVar[str] = "declared"
    may_exceed_clients_per_round: ClassVar[bool] = True


@pytest.mark.parametrize(("over_selection", "most"), [(0.0, 5), (0.2, 6)])
def test_too_many_are_refused_with_what_to_declare(over_selection: float, most: int) -> None:
    """Over-selection is no over-choice."""
    selector, declared = (cls(clients_per_round=5, seed=0) for cls in (Greedy, Declared))
    selector.plan_rounds(over_selection=over_selection)
    assert selector.select(np.arange(most)).size == most
    said = (
        rf"Greedy\._select chose {most + 1} clients, .* at most {most} .*may_exceed_clients_per_round = True in Greedy"
    )
    with pytest.raises(RunError, match=said):
        selector.select(np.arange(most + 1))
    assert declared.select(np.arange(6)).size == 6


def test_a_class_without_a_number_declares_that_it_decides_itself() -> None:
    with pytest.raises(ParameterError, match="may_exceed_clients_per_round = True in Greedy"):
        Greedy(clients_per_round=None)
    assert Declared(clients_per_round=None, seed=0).select(np.arange(9)).size == 9


def test_the_selectors_that_declare_it() -> None:
    from fedsel_flwr.selectors.registry import names, selector_class

    declaring = {name for name in names() if selector_class(name).may_exceed_clients_per_round}
    assert declaring >= {"pczfl", "gpfl", "fedcs"}
    assert create("gpfl", clients_per_round=2, total_rounds=9, seed=0).select(np.arange(7)).size == 7
    assert create("pczfl", clients_per_round=2, warmup_rounds=1, seed=0).select(np.arange(7)).size == 7


def test_the_conformance_suite_names_the_promise() -> None:
    with pytest.raises(AssertionError, match="no more clients are chosen than clients_per_round says: Greedy"):
        check_selector(lambda seed: Greedy(clients_per_round=2, seed=seed))


def test_a_comparison_shows_how_many_a_round_asked() -> None:
    scenario = load_scenario("smoke", {"rounds": 1})
    comparison = compare(scenario, ["random", Declared], seeds=1)
    asked = comparison.table().set_index("selector")["asked_per_round"]
    assert asked.to_dict() == {"random": float(scenario.clients_per_round), "declared": float(scenario.num_clients)}
    assert comparison.summary["asked_per_round"].tolist() == asked.tolist()
    out = io.StringIO()
    render_table(aggregate(comparison.summaries), 0.5, Console(file=out, width=140))
    lines = out.getvalue().splitlines()
    assert lines[0].split()[-1] == "asked"
    assert lines[1].split()[-2:] == ["a", "round"]
    assert [line.split()[-1] for line in lines[3:5]] == [str(scenario.clients_per_round), str(scenario.num_clients)]
    assert "clients a round" in latex_table(comparison.summaries, None, 0.5).splitlines()[2]
