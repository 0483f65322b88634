"""A mistake in a selector of one's own is said by class, method and way out."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import Random, RoundReport, Selector


def report(completed: list[bool], **columns: Any) -> RoundReport:
    """Report clients 0, 1, ..."""
    clients = np.arange(len(completed))
    return RoundReport(clients=clients, completed=completed, latency=np.ones(len(completed)), **columns)


# ---- when the class is made -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("needs", {"latancy"}, r"Mine\.needs names 'latancy', which is no column \(did you mean 'latency'\?\)"),
        ("needs", "latency", r"Mine\.needs must be a set of column names, got 'latency'"),
        ("requires", {"loss"}, r"Mine\.requires names 'loss', which is not in needs"),
        ("need", {"latency"}, r"Mine\.need looks like 'needs'"),
        ("Needs", {"latency"}, "looks like 'needs'"),
        ("require", {"loss"}, "looks like 'requires'"),
        ("client_states", {"_plays": 0}, "looks like 'client_state'"),
        ("scalar_states", ("_next",), "looks like 'scalar_state'"),
        ("by_clients", {"fairness"}, "looks like 'by_client'"),
        ("free_states", {}, "looks like 'free_state'"),
        ("paper_option", {}, "looks like 'paper_options'"),
        ("scalar_state", "_next", r"Mine\.scalar_state must be a tuple of names, got '_next'. Write \('_next',\)"),
        ("client_state", {"_name": "a"}, r"Mine\.client_state\['_name'\] must be"),
        ("client_state", {"_round": 0}, "declares the state '_round', but the base class already keeps"),
        ("client_state", {"_size": 0, "size": 0}, "declares the state '_size' twice"),
    ],
)
def test_a_class_with_a_typo_is_refused_when_it_is_made(attribute: str, value: object, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        type("Mine", (Random,), {attribute: value})


def test_a_column_that_clients_do_not_report_cannot_be_required() -> None:
    with pytest.raises(ParameterError, match=r"Mine\.requires names 'accuracy'"):
        type("Mine", (Random,), {"needs": {"accuracy"}, "requires": {"accuracy"}})


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


# ---- when an object has its own needs -------------------------------------------------------------------------------


def test_the_needs_of_an_object_are_looked_at_too() -> None:
    selector = Random(clients_per_round=1)
    selector.select(np.arange(2))
    selector.needs = frozenset({"latancy"})  # type: ignore[misc]
    with pytest.raises(ParameterError, match=r"Random\.needs names 'latancy'.*did you mean 'latency'"):
        selector.observe(report([True]))
    selector.needs = frozenset({"loss"})  # type: ignore[misc]
    with pytest.raises(ParameterError, match="random needs the report column 'loss', but it is missing"):
        selector.observe(report([True]))


# ---- what a completed client may lack -------------------------------------------------------------------------------


class Needy(Random):
    """Reads a column of each source and keeps what it saw."""

    needs = frozenset({"loss", "energy_score", "gradient", "accuracy"})
    requires = frozenset({"energy_score"})

    def _observe(self, report: RoundReport) -> None:
        self.seen = report


GOOD: dict[str, Any] = {
    "loss": [1.0, np.nan, np.nan],
    "energy_score": [0.5, 0.5, np.nan],
    "gradient": [[1.0, 2.0], [np.nan, np.nan], [np.nan, np.nan]],
    "accuracy": [0.5, 0.25, np.nan],
}


def test_a_completed_client_may_lack_what_clients_report() -> None:
    """Client 1 completed but reported no loss and no gradient; client 2 failed."""
    selector = Needy(clients_per_round=3)
    selector.select(np.arange(3))
    selector.observe(report([True, True, False], **GOOD))
    assert np.isnan(selector.seen.loss[1])  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "row"),
    [("energy_score", np.nan), ("accuracy", np.nan), ("loss", np.inf), ("gradient", [np.inf, 1.0])],
    ids=["required", "measured", "infinite", "infinite vector"],
)
def test_a_completed_client_may_not_lack_what_is_required_or_measured(name: str, row: Any) -> None:
    selector = Needy(clients_per_round=3)
    selector.select(np.arange(3))
    bad = [GOOD[name][0], row, GOOD[name][2]]
    with pytest.raises(ParameterError, match=f"report column '{name}' must be finite for completed clients"):
        selector.observe(report([True, True, False], **GOOD | {name: bad}))


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
        (None, "None"),
        ({1, 2}, "{1, 2}"),
        (2, "2"),
        ("12", "'12'"),
        ([[1], [2, 3]], "[[1], [2, 3]]"),
        (np.array([True, False, True]), "[True, False, True]"),
        (np.array([1.0, 2.0]), "[1.0, 2.0]"),
        (["1", "2"], "['1', '2']"),
    ],
    ids=str,
)
def test_a_choice_that_is_no_array_of_indices(choice: Any, said: str) -> None:
    with pytest.raises(RunError) as refused:
        Says(choice).select(np.array([1, 2, 3]))
    wanted = "must return a one-dimensional array of indices from `available`"
    assert str(refused.value).startswith(f"Says._select {wanted}, got {said}. End it")


@pytest.mark.parametrize("choice", [[3, 1], (3, 1), np.array([3, 1], dtype=np.int32), np.array([3, 1], np.uint8)])
def test_lists_tuples_and_integers_of_any_width_are_taken(choice: Any) -> None:
    chosen = Says(choice).select(np.array([1, 2, 3]))
    assert chosen.tolist() == [1, 3]
    assert chosen.dtype == np.int64


def test_nobody_may_be_chosen() -> None:
    assert Says([]).select(np.arange(2)).dtype == np.int64


# ---- state that was not declared ------------------------------------------------------------------------------------


class Undeclared(Random):
    """Keeps arrays of its own, and trips over them where it is told to."""

    needs = frozenset({"latency"})

    def __init__(self, where: str, how: str, *, seed: int | None = None) -> None:
        super().__init__(clients_per_round=2, seed=seed)
        self.where, self.how = where, how
        self._seen = np.zeros(0)
        self._table: dict[int, float] = {}
        self._log: list[float] = []

    def trip(self, method: str) -> None:
        if method != self.where:
            return
        if self.how == "row":
            self._seen[np.array([0])] += 1
        elif self.how == "sum":
            self._seen + np.zeros(self._registered.size)
        elif self.how == "dict":
            del self._seen, self._log
            self._table[0] += 1
        else:
            self._missing[0] += 1  # type: ignore[attr-defined]

    def _probe(self, available: Any) -> Any:
        self.trip("_probe")

    def _advance(self) -> None:
        self.trip("_advance")

    def _select(self, available: Any) -> Any:
        self.trip("_select")
        return super()._select(available)

    def _observe(self, report: Any) -> None:
        self.trip("_observe")

    def _inform(self, clients: Any, columns: Any) -> None:
        self.trip("_inform")

    def _admit(self, clients: Any) -> None:
        self.trip("_admit")


@pytest.mark.parametrize(
    ("how", "attribute", "cause"),
    [
        ("row", "_seen", IndexError),
        ("sum", "_seen", ValueError),
        ("dict", "_table", KeyError),
        ("never set", "_missing", AttributeError),
    ],
)
@pytest.mark.parametrize("where", ["_probe", "_advance", "_select", "_observe", "_inform"])
def test_undeclared_state_is_named_with_class_and_method(
    where: str, how: str, attribute: str, cause: type[Exception]
) -> None:
    selector = Undeclared(where, how)

    def a_round() -> None:
        selector.inform(np.arange(3))
        selector.probe(np.arange(3))
        chosen = selector.select(np.arange(3))
        selector.observe(RoundReport(clients=chosen, completed=[True, True], latency=[1.0, 1.0]))

    with pytest.raises(RunError) as refused:
        a_round()
    said = str(refused.value)
    assert said.startswith(f"Undeclared.{where} ended with {cause.__name__}")
    assert f"self.{attribute}" in said
    assert f"client_state = {{'{attribute}': 0.0}}" in said
    assert isinstance(refused.value.__cause__, cause)


def test_undeclared_state_where_clients_are_admitted() -> None:
    """The clients' rows are there already, but the clients are not registered: the table is the fleet's length."""
    with pytest.raises(RunError, match=r"Undeclared\._admit ended with AttributeError .*self\._missing, which nothing"):
        Undeclared("_admit", "never set").select(np.arange(3))


class Buggy(Random):
    """Has errors that undeclared state does not explain."""

    def __init__(self, error: Exception, held: Any) -> None:
        super().__init__(clients_per_round=1)
        self.error, self.held = error, held

    def _select(self, available: Any) -> Any:
        raise self.error


SHORT, LONG = np.zeros(1), np.zeros(4)


@pytest.mark.parametrize(
    ("error", "held"),
    [
        (IndexError("no array is kept"), 3.0),
        (IndexError("the array has a place for everybody"), LONG),
        (KeyError("as the table has"), dict.fromkeys(range(4))),
        (ValueError("could not be broadcast, but not for this array"), LONG),
        (ValueError("of another kind"), SHORT),
        (AttributeError("of another object", name="size", obj=[]), SHORT),
        (AttributeError("of nobody knows what"), SHORT),
        (ParameterError("our own"), SHORT),
        (OSError("not of Python's making"), SHORT),
    ],
    ids=str,
)
def test_other_errors_come_as_they_are(error: Exception, held: Any) -> None:
    with pytest.raises(type(error)) as came:
        Buggy(error, held).select(np.arange(3))
    assert came.value is error
