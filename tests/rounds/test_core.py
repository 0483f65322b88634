"""The course of a round: its order, its numbers, who is asked how often, who is forgotten."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.round import Stopwatch
from fedsel_flwr.rounds.run_length import RoundNumbering
from fedsel_flwr.selectors import PCZFL, create
from tests.golden.make_traces import selector_under_trace
from tests.rounds.written import MODEL, Written, core_of, facts, play_round, reply
from tests.strategies.scripted import two_examples

NODES = ["a", "b", "c"]


def test_a_round_is_collected_and_finished_once() -> None:
    core = core_of(create("random", clients_per_round=2, seed=0))
    with pytest.raises(RunError, match="finish was called before collect"):
        core.finish()
    with pytest.raises(RunError, match="collect was called before choose"):
        core.collect({})
    chosen = core.choose(NODES, MODEL, Written(facts(*NODES)))
    with pytest.raises(RunError, match="finish was called before collect"):
        core.finish()
    core.collect(dict.fromkeys(chosen, reply()))
    with pytest.raises(RunError, match="collect was called before choose, or twice"):
        core.collect(dict.fromkeys(chosen, reply()))
    core.finish(MODEL)
    with pytest.raises(RunError, match="finish was called before collect, or twice"):
        core.finish(MODEL)
    core.choose(NODES, MODEL, Written(facts(*NODES)))  # never collected: leaves nothing behind
    play_round(core, NODES, reply())
    assert [(record.round, record.num_selected) for record in core.parts.history.rounds] == [(1, 2), (3, 2)]


@pytest.mark.parametrize("name", ["random", "active-fl", "fedcs", "oort", "pisces", "rpow-d", "tifl"])
def test_a_round_without_clients_is_entered_at_once(name: str) -> None:
    """Nobody is connected, or nobody is available; also for selectors that read spares."""
    core = core_of(selector_under_trace(name), availability=lambda client, number, seconds: False)
    for nodes, model in (([], None), (NODES, MODEL)):
        assert core.choose(nodes, model, Written(facts(*nodes))) == []
    figures = [(record.num_selected, record.round_s, record.energy_j) for record in core.parts.history.rounds]
    assert figures == [(0, 0.0, 0.0)] * 2
    with pytest.raises(RunError, match="finish was called before collect, or twice"):
        core.finish()


def test_the_servers_steps_are_timed_without_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe 1 + 2, select 4, collect 16, aggregate 32, observe 8: 63 s; the clients 6,000 s, 7,000 s in round 1."""
    now = [0.0]  # of a clock that stands still unless somebody works

    def slow(owner: Any, method: str, seconds: float) -> None:
        call = getattr(owner, method)

        def worked(*given: Any) -> Any:
            now[0] += seconds
            return call(*given)

        monkeypatch.setattr(owner, method, worked)

    selector = create("local-accuracy", clients_per_round=3)
    transport = Written(facts(*NODES), {node: {"local_accuracy": 1.0, "latency_s": 1.0} for node in NODES})
    core = core_of(selector)
    core.stopwatch = Stopwatch(lambda: now[0])
    for method, seconds in (("_probe", 1), ("_select", 4), ("_observe", 8)):
        slow(selector, method, seconds)
    slow(core.parts.probing, "answer", 2)
    slow(core.collector, "collect", 16)
    slow(transport, "introduce", 1000)
    slow(transport, "probe", 2000)
    for number in (1, 2, 3):
        now[0] += 10_000  # between two rounds
        chosen = core.choose(NODES, MODEL, transport)
        now[0] += 4000
        if number == 2:
            continue  # never collected: its times are dropped
        core.collect(dict.fromkeys(chosen, reply()))
        now[0] += 32
        core.finish(MODEL)
    expected = {"probe": 3, "select": 4, "collect": 16, "aggregate": 32, "observe": 8}
    columns = core.stopwatch.columns(3)
    assert columns.pop("round").tolist() == [1, 2, 3]
    assert {name: column.tolist() for name, column in columns.items()} == {
        **{f"{name}_ms": pytest.approx([1e3 * s, math.nan, 1e3 * s], nan_ok=True) for name, s in expected.items()},
        "round_ms": pytest.approx([7063e3, math.nan, 6063e3], nan_ok=True),
    }
    core.load_state_dict(core.state_dict())
    assert np.isnan(core.stopwatch.columns(3)["round_ms"]).all(), "the rounds of a loaded state are of another process"


@pytest.mark.parametrize(("seen", "first", "offset"), [(0, 1, 0), (5, 6, 0), (5, 1, 5), (1, 2, 0), (1, 1, 1)])
def test_the_first_round_of_a_run_fixes_the_offset(seen: int, first: int, offset: int) -> None:
    numbering = RoundNumbering()
    for i in range(3):
        numbering.check(first + i, seen + i)
        assert numbering.absolute(first + i) == seen + i + 1 == first + i + offset
    with pytest.raises(RunError, match=f"starts round {seen + 9}, but round {4 + seen - offset} was"):
        numbering.check(seen + 9, seen + 3)
    numbering.begin_run()
    numbering.check(seen + 9, seen + 8)


@pytest.mark.parametrize(("seen", "first"), [(0, 2), (0, 0), (5, 2), (5, 5), (5, 7)])
def test_a_run_that_begins_anywhere_else_is_refused(seen: int, first: int) -> None:
    expected = "1 was" if not seen else f"1 or {seen + 1} was"
    with pytest.raises(RunError, match=f"starts round {first}, but round {expected} .* has seen {seen} rounds"):
        RoundNumbering().check(first, seen)


def test_availability_is_asked_once_per_client_and_round() -> None:
    """Also where the selector asks before it chooses."""
    asked: Counter[tuple[str, int]] = Counter()

    def there(client_id: str, number: int, seconds: float) -> bool:
        asked[client_id, number] += 1
        return client_id != "b"

    core = core_of(create("local-accuracy", clients_per_round=2), availability=there)
    for _ in range(3):
        play_round(core, NODES, reply())
    assert asked == Counter({(node, number): 1 for node in NODES for number in (1, 2, 3)})
    assert {record.client_id for record in core.parts.history.clients} == {"a", "c"}


def test_availability_may_be_asked_for_everybody_at_once() -> None:
    trace = Mock(spec=["at"], side_effect=AssertionError)
    trace.at.return_value = np.array([True, False, True])
    core = core_of(create("random", clients_per_round=3, seed=0), availability=trace)
    for _ in range(2):
        play_round(core, NODES, reply())
    assert trace.at.call_args_list == [call(NODES, 1, 0.0), call(NODES, 2, 1.0)]
    assert {record.client_id for record in core.parts.history.clients} == {"a", "c"}
    trace.at.return_value = np.array([True])
    with pytest.raises(RunError, match=r"a boolean for each of 3 clients, got shape \(1,\)"):
        play_round(core, NODES)


def test_eviction_forgets_that_a_client_lacked_the_first_models_accuracy() -> None:
    """The global model cannot be decoded for three rounds, in which b gives way to c in one row."""
    selector = PCZFL(seed=0)
    core = core_of(selector, validation=two_examples(), roster=Roster(max_clients=2, evict_after=1), cooldown=False)
    everyone = Written(facts("a", "b", "c", energy_score=0.5))
    for connected, model in ((["a", "b"], None), (["a"], None), (["a"], None), (["a"], None), (["a", "c"], MODEL)):
        play_round(core, connected, model=model, transport=everyone)
    assert core.parts.roster.ids == ["a", "c"]
    assert selector.state_dict()["accuracy"].tolist() == [0.5, 0.5]  # the initial model is right on one of two


def test_a_newcomer_in_an_evicted_row_starts_afresh_everywhere() -> None:
    """b failed twice and sits out; c, in b's row, is chosen at once."""
    roster = Roster(max_clients=2, evict_after=1)
    core = core_of(create("round-robin", clients_per_round=2), cooldown=True, roster=roster)
    transport = Written(facts("a", "b", "c", num_examples=7))
    for connected in (["a", "b"], ["a"], ["a"], ["a"]):
        play_round(core, connected, {"a": reply()}, transport=transport)
    assert core.parts.cooldown.state_dict()["failures"].tolist() == [0, 1]
    assert core.choose(["a", "c"], MODEL, transport) == roster.ids == ["a", "c"]
    assert core.parts.cooldown.state_dict()["failures"].tolist() == [0, 0]
