"""Clients are asked who they are only where that is of use, and one first where those that cannot say it are loud."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fedsel_flwr.rounds.roll_call import NO_PROPERTIES, RollCall
from fedsel_flwr.selectors import CSUCBQ, Random
from tests.strategies.deployed import APIS, Deployment, InMemoryGrid, Node, lines

pytestmark = pytest.mark.timeout(30)
BOTH = pytest.mark.parametrize("api", APIS)
NO_QUERY = (
    "roll call: the clients' app has no query function, which Flower reports as an error; that is no fault"
)  # fmt: skip


def fair() -> CSUCBQ:
    return CSUCBQ(clients_per_round=100, max_latency=9.0, seed=0)


def everybody() -> Random:
    return Random(clients_per_round=100, seed=0)


def nodes(api: str, count: int = 20, **options: Any) -> dict[int, Node]:
    return {100 + k: Node(api, {"name": f"part-{k:02d}"}, **options) for k in range(count)}


# ---- an app without a query function ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "selector"),
    [({"clock": "virtual"}, everybody), ({"grid": InMemoryGrid}, everybody), ({}, fair), ({"identity": "node"}, fair)],
)
def test_of_twenty_nodes_whose_app_knows_no_query_one_is_asked(
    options: dict[str, Any], selector: Any, caplog: Any
) -> None:
    """Flower prints 40 lines for each that is asked. One line says what follows, and nothing is wrong with anybody."""
    caplog.set_level(logging.INFO, logger="fedsel_flwr")
    world = Deployment("message", selector(), nodes("message"), **options).play(2)
    assert world.questions() == 1
    (line,) = lines(caplog, "roll call")
    assert line.startswith(f"{NO_QUERY}, ")
    assert [len(chosen) for chosen in world.chosen()] == [20, 20]
    assert not [record for record in caplog.records if record.name == "fedsel_flwr" and "errors" in record.getMessage()]


def test_newcomers_with_that_app_are_not_asked_either() -> None:
    world = Deployment("message", everybody(), nodes("message", 3), clock="virtual").play(1)
    world.come(7, Node("message", {}))
    assert len(world.play(1).chosen()[-1]) == 4
    assert world.questions() == 1


def test_a_server_that_was_restarted_asks_one_again() -> None:
    """The app may be another one by now."""
    world = Deployment("message", everybody(), nodes("message", 3), clock="virtual").play(1)
    again = Deployment("message", everybody(), nodes("message", 3), clock="virtual")
    again.strategy.load_state_dict(world.strategy.state_dict())
    for node_id in (7, 8, 9):
        again.come(node_id, Node("message", {}, says={"client_id": node_id}))
    assert again.play(1).chosen()[-1] == ["100", "101", "102", "7", "8", "9"]
    assert again.questions() == 3


def test_who_wants_claims_has_everybody_asked(caplog: Any) -> None:
    """One client that says it cannot answer must not make strangers of the others."""
    caplog.set_level(logging.INFO, logger="fedsel_flwr")
    honest = {k: Node("message", {}, says={"client_id": f"client-{k}"}) for k in range(10, 13)}
    world = Deployment("message", everybody(), {5: Node("message", {}), **honest}, identity="claim").play(1)
    assert world.chosen() == [["5", "client-10", "client-11", "client-12"]]
    silent = Deployment("message", everybody(), nodes("message", 4), identity="claim").play(1)
    assert silent.questions() == 4
    assert lines(caplog, "roll call") == [NO_QUERY]


# ---- an app with one ----------------------------------------------------------------------------------------------


@BOTH
def test_nobody_is_asked_where_the_server_knows_them_and_nobody_reads_more(api: str) -> None:
    world = Deployment(api, everybody(), nodes(api, says={"client_id": "x", "num_examples": 12})).play(2)
    assert world.questions() == 0


@BOTH
def test_the_numbers_of_examples_are_asked_for_where_the_selector_reads_them(api: str) -> None:
    crowd = {k: Node(api, {"name": f"part-{k}"}, says={"client_id": "x", "num_examples": 10 * k}) for k in (1, 2, 3)}
    world = Deployment(api, selector := fair(), crowd).play(1)
    assert world.questions() == 3
    assert world.strategy.roster.ids == ["part-1", "part-2", "part-3"]
    assert selector.state_dict()["size"].tolist() == [10.0, 20.0, 30.0]


@BOTH
@pytest.mark.parametrize(("averaging", "asked"), [("fedpdp", 0), ("fedavg-absent", 4)])
def test_so_they_are_for_averaging_over_everybody(api: str, averaging: str, asked: int) -> None:
    crowd = nodes(api, 4, says={"num_examples": 12})
    assert Deployment(api, everybody(), crowd, averaging=averaging).play(2).questions() == asked


def test_one_is_asked_first_and_then_the_others_at_once() -> None:
    world = Deployment("message", everybody(), nodes("message", 5, says={"client_id": 1}), clock="virtual").play(1)
    assert [len(batch) for batch in world.grid.sent if batch][:2] == [1, 4]


# ---- the roll call itself -----------------------------------------------------------------------------------------


class Told:
    """Answers from a table; who is not in it does not answer."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said, self.batches = said, list[list[str]]()

    def __call__(self, asked: list[str]) -> tuple[dict[str, Any], list[str]]:
        self.batches.append(asked)
        return {n: self.said[n] for n in asked if n in self.said}, [n for n in asked if n not in self.said]


def test_a_first_one_that_does_not_answer_or_errs_keeps_nobody_from_being_asked() -> None:
    hang = Told({"c": {"client_id": "c"}, "d": NO_PROPERTIES})
    assert RollCall().call("abcd", 1, hang, one_first=True) == {"c": {"client_id": "c"}, "d": {}}
    assert hang.batches == [["a"], ["b"], ["c", "d"]]
    errs = Told({"a": None, "b": {"client_id": "b"}, "c": {}, "d": {}})
    assert RollCall().call("abcd", 1, errs, one_first=True) == {"a": {}, "b": {"client_id": "b"}, "c": {}, "d": {}}
    assert errs.batches == [["a"], ["b"], ["c", "d"], ["a"]]


def test_where_the_first_one_hangs_the_second_one_may_say_that_nobody_can() -> None:
    """A simulation whose processes take long to start must not be loud for that; who hung takes part later."""
    calls, said = RollCall(), Told(dict.fromkeys("bcd", NO_PROPERTIES))
    assert calls.call("abcd", 1, said, one_first=True) == {"b": {}, "c": {}, "d": {}}
    assert said.batches == [["a"], ["b"]]
    assert calls.call("a", 2, said, one_first=True) == {"a": {}}


def test_once_somebody_has_answered_a_liar_silences_nobody() -> None:
    calls, first = RollCall(), Told({"a": {"client_id": "a"}})
    calls.call("a", 1, first, one_first=True)
    later = Told({"b": NO_PROPERTIES, "c": {"client_id": "c"}})
    assert calls.call("bc", 2, later, one_first=True) == {"b": {}, "c": {"client_id": "c"}}
    assert later.batches == [["b", "c"]]


def test_one_alone_is_asked_once() -> None:
    calls, lone = RollCall(), Told({"a": NO_PROPERTIES, "b": NO_PROPERTIES})
    assert calls.call("a", 1, lone, one_first=True) == {"a": {}}
    assert calls.call("b", 2, lone, one_first=True) == {"b": {}}
    assert lone.batches == [["a"]]
    assert calls.call([], 3, lone, one_first=True) == {}
