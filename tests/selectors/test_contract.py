"""A mistake in an author's selector is an error that names class, method and cure; what fits is left alone."""

from __future__ import annotations

import io
from functools import partial
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from rich.console import Console

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report import aggregate
from fedsel_flwr.report.tables import latex_table, render_table
from fedsel_flwr.selectors import Random, RoundReport, Selector, create
from fedsel_flwr.simulations import compare, load_scenario
from tests.selectors.rounds import play, report

# ---- when the class is made -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"needs": {"latancy"}}, r"Mine\.needs names 'latancy', .*'latency'\?\)"),
        ({"needs": "latency"}, r"Mine\.needs must be a set of column names, got 'latency'"),
        ({"needs": {"loss": 1}}, "set of column names"),
        ({"needs": {3}}, "names 3, .* Choose from accuracy, "),
        ({"requires": {"loss"}}, r"Mine\.requires names 'loss', which is not in needs"),
        ({"needs": {"accuracy"}, "requires": {"accuracy"}}, r"Mine\.requires names 'accuracy'"),
        ({"remembers": {"lozz": "_loss"}}, r"Mine\.remembers names 'lozz'"),
        ({"need": {"latency"}}, r"Mine\.need looks like 'needs'"),
        ({"Needs": {"latency"}}, "'needs'"),
        ({"paper_option": {}}, "'paper_options'"),
        ({"scalar_state": "_next"}, r"Mine\.scalar_state .* got '_next'\. Write \('_next',\)"),
        ({"scalar_state": {"_now": 0}}, r"Mine\.scalar_state .* Write \('_now',\)"),
        ({"client_state": {"_name": "a"}}, r"Mine\.client_state\['_name'\] must be"),
        ({"client_state": {"_round": 0}}, r"'_round', .* already keeps .*self\.round is"),
        ({"client_state": {"_size": 0, "size": 0}}, "'_size' twice"),
    ],
    ids=str,
)
def test_a_class_with_a_typo_is_refused_when_it_is_made(attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        type("Mine", (Random,), attributes)


def test_names_of_ones_own_are_left_alone() -> None:
    class Mine(Random):
        """Has settings, methods and private names that resemble nothing, or are functions."""

        temperature = 0.5
        label = "mine"
        needs: ClassVar[Any] = ["latency", "loss"]

        def need(self) -> int:
            return 3

    assert Mine.needs == frozenset({"latency", "loss"})
    assert isinstance(Mine.needs, frozenset)
    assert (Mine.name, Says.name) == ("Mine", "Says")  # without a name of its own, not its parent's


def test_a_selector_shows_its_parameters() -> None:
    bsfl = partial(create, "bsfl", clients_per_round=2, min_latency=0.1)
    assert repr(bsfl()) == (
        "BSFL(clients_per_round=2, min_latency=0.1, alpha=1.0, beta=1, data_weights=None, solver='exact', "
        "solver_steps=1000, exploration=1.0)"
    )
    assert len(repr(bsfl(data_weights=dict.fromkeys(range(500), 1.0)))) < 200


# ---- what a report must have ----------------------------------------------------------------------------------------


def test_the_needs_of_an_object_are_checked_in_observe() -> None:
    selector = Random(clients_per_round=1)
    selector.select(np.arange(2))
    for needs, said in (("latancy", r"Random\.needs names 'latancy'"), ("loss", "needs the report column 'loss'")):
        selector.needs = frozenset({needs})  # type: ignore[misc]
        with pytest.raises(ParameterError, match=said):
            selector.observe(report([0]))


class Needy(Random):
    """Reads a column of each source and keeps what it saw."""

    needs = frozenset({"loss", "energy_score", "gradient", "accuracy"})
    requires = frozenset({"energy_score"})

    def _observe(self, report: RoundReport) -> None:
        self.seen = report


@pytest.mark.parametrize(
    ("lacking", "row"),
    [("energy_score", np.nan), ("accuracy", np.nan), ("loss", np.inf), ("gradient", [np.inf, 1.0]), (None, None)],
    ids=["required", "measured", "infinite", "infinite vector", "reported"],
)
def test_a_completed_client_may_lack_only_what_clients_report(lacking: str | None, row: Any) -> None:
    """Client 1 completed but reported no loss and no gradient; client 2 failed."""
    nothing = [np.nan, np.nan]
    columns: dict[str, Any] = {
        "loss": [1.0, np.nan, np.nan], "energy_score": [0.5, 0.5, np.nan], "accuracy": [0.5, 0.25, np.nan],
        "gradient": [[1.0, 2.0], nothing, nothing],
    }  # fmt: skip
    selector = Needy(clients_per_round=3)
    selector.select(np.arange(3))
    if lacking is None:
        selector.observe(report(range(3), failed=[2], **columns))
        assert np.isnan(selector.seen.loss[1])  # type: ignore[index]
        return
    columns[lacking][1] = row
    with pytest.raises(ParameterError, match=f"column '{lacking}' must be finite for completed clients"):
        selector.observe(report(range(3), failed=[2], **columns))


# ---- what _select may return ----------------------------------------------------------------------------------------


class Says(Selector):
    """Chooses what it was told to."""

    def __init__(self, choice: Any) -> None:
        super().__init__(clients_per_round=2, seed=0)
        self.choice = choice

    def _select(self, available: Any) -> Any:
        return self.choice


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (None, "got None"), ({1, 2}, r"got \{1, 2\}"), (2, "got 2"), ("12", "got '12'"),
        ([[1], [2, 3]], r"got \[\[1\], \[2, 3\]\]"), ([[1], [2]], r"got \[\[1\], \[2\]\]"),
        (np.array([True, False, True]), r"got \[True, False, True\]"), (np.array([1.0, 2.0]), r"got \[1\.0, 2\.0\]"),
        (["1", "2"], r"got \['1', '2'\]"), ([1, 1000], r"got \[1, 1000\]"), ([0, 1], r"got \[0, 1\]"),
        ([2, 2], r"different indices .*got \[2, 2\]"), ([1, 2, 3], "chose 3 clients, but may choose at most 2"),
    ],
    ids=str,
)  # fmt: skip
def test_a_choice_that_cannot_be_asked_is_an_error_that_shows_it(choice: Any, said: str) -> None:
    with pytest.raises(RunError, match=rf"^Says\._select .*{said}"):
        Says(choice).select(np.array([3, 1, 2]))


@pytest.mark.parametrize(
    "choice", [[3, 1], (3, 1), np.array([3, 1], np.int32), np.array([3, 1], np.uint8), []], ids=str
)
def test_lists_tuples_and_integers_of_any_width_are_taken(choice: Any) -> None:
    chosen = Says(choice).select(np.array([3, 1, 2]))
    assert chosen.tolist() == sorted(choice)
    assert chosen.dtype == np.int64


# ---- state that was not declared ------------------------------------------------------------------------------------


def _index(self: Any, *_: Any) -> None:
    self._seen[np.array([0])] += 1


def _read(self: Any, *_: Any) -> None:
    self._missing[0] += 1


@pytest.mark.parametrize("where", ["_probe", "_advance", "_join", "_select", "_observe", "_inform", "_admit"])
@pytest.mark.parametrize(("fault", "cause"), [(_index, IndexError), (_read, AttributeError)])
def test_an_error_in_an_authors_method_says_how_state_is_declared(where: str, fault: Any, cause: Any) -> None:
    selector = type("Undeclared", (Random,), {where: fault})(clients_per_round=2)
    selector._seen = np.zeros(0)
    selector.plan_rounds(warmup_rounds=int(where == "_join"))
    with pytest.raises(cause) as raised:  # noqa: PT012
        selector.inform(np.arange(3))
        selector.probe(np.arange(3))
        play(selector, range(3))
    (note,) = raised.value.__notes__
    assert "If Undeclared did not declare this state" in note
    assert "client_state = {'_name': 0.0}" in note


@pytest.mark.parametrize("error", [ParameterError("our own"), OSError("not of state")], ids=str)
def test_other_errors_come_as_they_are(error: Exception) -> None:
    selector = Random(clients_per_round=1)
    vars(selector)["_select"] = Mock(side_effect=error)
    with pytest.raises(type(error)) as came:
        selector.select(np.arange(3))
    assert came.value is error
    assert not hasattr(error, "__notes__")


# ---- over-choice -----------------------------------------------------------------------------------------------------


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
