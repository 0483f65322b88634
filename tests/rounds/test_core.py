"""The course of a round: its order, its numbers, who is asked how often, who is forgotten."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.round import Stopwatch
from fedsel_flwr.rounds.run_length import RoundNumbering
from fedsel_flwr.selectors import PCZFL, Probe, create
from tests.rounds.written import MODEL, Written, core_of, facts, play_round, reply
from tests.strategies.scripted import Spy, two_examples

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


def test_a_round_without_clients_is_entered_at_once() -> None:
    core = core_of(create("random", clients_per_round=2, seed=0), availability=lambda client, number, seconds: False)
    assert core.choose(NODES, MODEL, Written(facts(*NODES))) == []
    record = core.parts.history.rounds[0]
    assert (record.num_selected, record.round_s, record.energy_j) == (0, 0.0, 0.0)
    with pytest.raises(RunError, match="finish was called before collect, or twice"):
        core.finish()


class Clock:
    """A clock that stands still unless somebody works."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


class SlowSelector(Spy):
    """Takes 1 s for its question, 2 s for the answers, 4 s for its choice, and 8 s for what came back."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("loss")
        self._clock = clock

    def _probe(self, available: Any) -> Probe:
        self._clock.work(1)
        return Probe(clients=available, columns=("loss",))

    def _inform(self, clients: Any, columns: Any) -> None:
        self._clock.work(2 if columns else 0)

    def _select(self, available: Any) -> Any:
        self._clock.work(4)
        return available

    def _observe(self, report: Any) -> None:
        self._clock.work(8)


class SlowClients(Written):
    """Takes 1,000 s to introduce the clients, and 2,000 s to probe them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(facts(*NODES), {node: {"loss": 1.0, "latency_s": 1.0} for node in NODES})
        self._clock = clock

    def introduce(self, nodes: list[str]) -> Any:
        self._clock.work(1000)
        return super().introduce(nodes)

    def probe(self, nodes: list[str], config: Any) -> Any:
        self._clock.work(2000)
        return super().probe(nodes, config)


def test_the_servers_steps_are_timed_without_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe 1 + 2, select 4, collect 16, aggregate 32, observe 8: 63 s; the clients 6,000 s, 7,000 s in round 1."""
    clock = Clock()
    core, transport = core_of(SlowSelector(clock)), SlowClients(clock)
    core.stopwatch, collect = Stopwatch(clock), core.collector.collect

    def slow(*given: Any) -> Any:
        clock.work(16)
        return collect(*given)

    monkeypatch.setattr(core.collector, "collect", slow)
    for number in (1, 2, 3):
        clock.work(10_000)  # between two rounds
        chosen = core.choose(NODES, MODEL, transport)
        clock.work(4000)
        if number == 2:
            continue  # never collected: its times are dropped
        core.collect(dict.fromkeys(chosen, reply(loss=1.0)))
        clock.work(32)
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


class Trace:
    """Availability that is asked for everybody at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int, float]] = []
        self.answer: Any = [True, False, True]

    def __call__(self, client_id: str, number: int, seconds: float) -> bool:
        raise AssertionError

    def at(self, ids: list[str], number: int, seconds: float) -> Any:
        self.calls.append((list(ids), number, seconds))
        return np.array(self.answer)


def test_availability_may_be_asked_for_everybody_at_once() -> None:
    trace = Trace()
    core = core_of(create("random", clients_per_round=3, seed=0), availability=trace)
    for _ in range(2):
        play_round(core, NODES, reply())
    assert trace.calls == [(["a", "b", "c"], 1, 0.0), (["a", "b", "c"], 2, 1.0)]
    assert {record.client_id for record in core.parts.history.clients} == {"a", "c"}
    trace.answer = [True]
    with pytest.raises(RunError, match=r"a boolean for each of 3 clients, got shape \(1,\)"):
        play_round(core, NODES)


def test_eviction_forgets_that_a_client_lacked_the_first_models_accuracy() -> None:
    """The global model cannot be decoded for three rounds, in which b gives way to c in one row."""
    selector = PCZFL(seed=0)
    roster = Roster(max_clients=2, evict_after=1)
    core = core_of(selector, validation=two_examples(), roster=roster, cooldown=False)
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
