"""Clients that have not answered an earlier question are not asked again, in both of Flower's APIs."""

from __future__ import annotations

import time
from math import inf
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.rounds.checkpoints import read_checkpoint
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.selectors import PowerOfChoice, Random
from fedsel_flwr.strategies import SelectionStrategy
from tests.strategies.superlink import Fleet, SuperLink

APIS = pytest.mark.parametrize("api", ["legacy", "message"])
WAYS = pytest.mark.parametrize(("api", "clock"), [("legacy", "server"), ("message", "virtual"), ("message", "server")])
pytestmark = pytest.mark.timeout(60)


def _everybody(count: int) -> Random:
    return Random(clients_per_round=count, seed=0)


@WAYS
def test_a_client_that_hangs_is_asked_once(api: str, clock: Any) -> None:
    link = SuperLink(api, 3, {1: {"train": [inf]}})
    chosen = Fleet(link, _everybody(3), clock=clock).play(4)
    assert chosen == [["c0", "c1", "c2"], *[["c0", "c2"]] * 3]
    assert link.asked() == [4, 1, 4]


@pytest.mark.parametrize(("api", "clock"), [("legacy", "virtual"), ("message", "server")])
def test_a_straggler_is_asked_again_when_its_answer_has_come(api: str, clock: Any) -> None:
    """Its first answer takes two rounds and more; the answer itself is dropped."""
    link = SuperLink(api, 3, {0: {"train": [0.2, 0.25, 0.25, 0.0]}, 1: {"train": [0.7, 0.0]}})
    fleet = Fleet(link, _everybody(3), timeout=0.35, clock=clock)
    chosen = fleet.play(4)
    back = next(number for number, clients in enumerate(chosen) if number and "c1" in clients)
    assert 2 <= back <= 3
    assert [("c1" in clients) for clients in chosen] == [True, *[False] * (back - 1), *[True] * (4 - back)]
    rows = [row for row in fleet.strategy.history.clients if row.client_id == "c1"]
    assert [row.completed for row in rows] == [False, *[True] * (4 - back)]
    assert [record.num_timeouts for record in fleet.strategy.history.rounds] == [1, 0, 0, 0]
    assert [record.num_available for record in fleet.strategy.history.rounds] == [2 + ("c1" in c) for c in chosen]


@APIS
def test_a_node_that_was_away_and_came_back_is_asked(api: str) -> None:
    link = SuperLink(api, 3, {1: {"train": [inf, 0.0]}})
    node = link.connected[3]

    def between(number: int) -> None:
        if number == 3:
            del link.connected[3]
        elif number == 4:
            node._free_at = 0.0  # another process
            link.connected[3] = node

    chosen = Fleet(link, _everybody(3), min_available=2).play(4, between)
    assert [("c1" in clients) for clients in chosen] == [True, False, False, True]


def test_after_the_bound_it_is_asked_again() -> None:
    link = SuperLink("message", 3, {0: {"train": [0.1]}, 1: {"train": [inf]}})
    times: list[float] = []
    fleet = Fleet(link, _everybody(3), timeout=0.2, busy_timeout=0.25)
    chosen = fleet.play(5, lambda number: times.append(time.time()))
    again = next(number for number, clients in enumerate(chosen) if number and "c1" in clients)
    assert again > 1
    assert times[1] + 0.2 < times[again]  # c0 takes 0.1 s, so that rounds go by
    assert link.asked()[1] >= 2


def test_with_a_bound_of_zero_nobody_is_spared() -> None:
    link = SuperLink("legacy", 2, {1: {"train": [inf]}})
    assert Fleet(link, _everybody(2), timeout=0.1, busy_timeout=0.0).play(3) == [["c0", "c1"]] * 3


@APIS
def test_when_everybody_is_busy_the_round_waits_for_the_first(api: str) -> None:
    link = SuperLink(api, 2, {0: {"train": [0.7, 0.0]}, 1: {"train": [inf]}})
    start = time.monotonic()
    chosen = Fleet(link, _everybody(2), timeout=0.5, wait_timeout=20.0).play(2)
    assert chosen == [["c0", "c1"], ["c0"]]
    assert 0.6 < time.monotonic() - start < 5.0


@APIS
def test_when_everybody_hangs_they_are_asked_again_after_the_wait(api: str, caplog: pytest.LogCaptureFixture) -> None:
    link = SuperLink(api, 2, {k: {"train": [inf]} for k in range(2)})
    fleet = Fleet(link, _everybody(2), timeout=0.2, wait_timeout=0.3)
    assert fleet.play(2) == [["c0", "c1"]] * 2
    assert [record.num_timeouts for record in fleet.strategy.history.rounds] == [2, 2]
    assert any("2 of 2 clients" in message and "min_completed" in message for message in caplog.messages)


@APIS
def test_a_probe_that_was_not_answered_leaves_a_client_busy(api: str) -> None:
    link = SuperLink(api, 3, {1: {"evaluate": [inf]}})
    selector = PowerOfChoice(clients_per_round=2, candidates=3, seed=0)
    chosen = Fleet(link, selector, roll_call_timeout=0.4).play(3)
    assert chosen == [["c0", "c2"]] * 3
    assert link.asked("evaluate") == [3, 1, 3]


@APIS
def test_a_roll_call_that_was_not_answered_leaves_a_node_busy_until_the_answer(api: str) -> None:
    link = SuperLink(api, 3, {1: {"query": [0.5, 0.0]}, 0: {"train": [0.2]}})
    fleet = Fleet(link, _everybody(3), timeout=2.0, roll_call_timeout=0.2)
    chosen = fleet.play(5)
    assert "c1" not in chosen[0]
    assert "c1" in chosen[-1]
    assert link.asked("query") == [1, 2, 1]


@APIS
def test_an_evaluation_that_was_not_answered_leaves_a_client_busy(api: str) -> None:
    """The hanging client is neither evaluated nor trained again; the others are."""
    link = SuperLink(api, 2, {1: {"evaluate": [inf]}})
    chosen = Fleet(link, _everybody(2), evaluating=1.0).play(3)
    assert chosen == [["c0", "c1"], ["c0"], ["c0"]]
    assert link.asked("evaluate") == [3, 1]


@APIS
def test_late_answers_that_cannot_be_fetched_end_nothing(api: str, caplog: pytest.LogCaptureFixture) -> None:
    link = SuperLink(api, 3, {1: {"train": [inf]}})
    pull = link.pull_messages

    def broken(ids: Any) -> Any:
        if any(link._waiting.get(one, (0.0,))[0] == inf for one in ids) and len(link.clients[0].received) > 2:
            raise ConnectionError("the SuperLink is away")
        return pull(ids)

    link.pull_messages = broken  # type: ignore[method-assign]
    chosen = Fleet(link, _everybody(3)).play(3)
    assert chosen == [["c0", "c1", "c2"], ["c0", "c2"], ["c0", "c2"]]
    assert "ConnectionError: the SuperLink is away" in caplog.text


def test_over_selection_on_the_servers_clock_leaves_the_others_in_peace_until_they_are_done() -> None:
    link = SuperLink("message", 3, {2: {"train": [1.0, 0.0]}})
    chosen = Fleet(link, _everybody(2), timeout=5.0, clock="server", over_selection=0.5).play(2)
    assert chosen == [["c0", "c1", "c2"], ["c0", "c1"]]


def test_who_is_late_in_simulated_time_has_answered() -> None:
    strategy = SelectionStrategy(_everybody(1), max_latency=0.5, round_deadline_s=0.25)
    busy = strategy.core.parts.busy
    busy.owe(["a"])
    assert (busy.free(["a", "b"]), busy.eligible(["a", "b"]).tolist()) == (["b"], [False, True])
    other = SelectionStrategy(_everybody(1), max_latency=0.5)
    other.load_state_dict(strategy.state_dict())
    assert other.core.parts.busy.free(["a", "b"]) == ["b"]
    with pytest.raises(StateError, match="busy: until must be a mapping"):
        other.load_state_dict(strategy.state_dict() | {"busy": {"until": 3}})


def test_a_run_that_goes_on_asks_those_that_were_busy(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "clock": "server"}
    link = SuperLink("message", 2, {1: {"train": [inf, 0.0]}})
    Fleet(link, _everybody(2), **options).play(2)
    assert link.asked() == [2, 1]
    link.clients[1]._free_at = 0.0  # the run has ended
    newest = read_checkpoint(tmp_path / "round-000002.safetensors")
    assert newest.state["busy"]["until"].keys() == {"3"}
    Fleet(link, _everybody(2), resume=True, **options).play(3)
    assert link.asked() == [3, 2]


def test_a_bound_passes_and_who_is_gone_owes_nothing() -> None:
    now = [0.0]
    busy = Busy(10.0, lambda: now[0])
    busy.owe(["a", "b"])
    now[0] = 9.5
    busy.owe(["b"])
    busy.release(["b", "c"])
    assert busy.free(["a", "b", "c"]) == ["a", "c"]
    now[0] = 19.5
    assert "b" not in busy
    forever = Busy(None, lambda: now[0])
    forever.owe(["a"])
    now[0] = 1e12
    assert "a" in forever


@pytest.mark.parametrize("value", [-1.0, float("nan"), "1", True])
def test_other_bounds_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ParameterError, match="busy_timeout"):
        SelectionStrategy(_everybody(1), busy_timeout=value)
