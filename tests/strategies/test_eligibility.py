"""Who may be asked, in both of Flower's APIs: answers owed, participation, cool-down, and ids that the user names."""

from __future__ import annotations

import inspect
import time
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds import eligibility
from fedsel_flwr.rounds.checkpoints import read_checkpoint
from fedsel_flwr.rounds.eligibility import SHARE_MIN_ROUNDS, SHARE_WINDOW, Busy, Participation
from fedsel_flwr.selectors import CSUCBQ, GPFL, PowerOfChoice, Random, Selector, names
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.worlds.availability import TraceAvailability
from fedsel_flwr.simulations.worlds.world import world_of
from fedsel_flwr.strategies import PCZFL
from fedsel_flwr.testing.in_process import play_round
from tests.golden.make_traces import selector_under_trace
from tests.rounds import written
from tests.rounds.written import core_of
from tests.strategies.deployed import Deployment, Node, SuperLink
from tests.strategies.either_api import base_of, make, play, selection
from tests.strategies.helpers import FakeProxy, fleet, within
from tests.strategies.scripted import play_still, two_examples


def busy(
    api: str, count: int, works: dict[int, dict[str, list[float]]], selector: Any = None, timeout: float = 0.25,
    **options: Any,
) -> Deployment:  # fmt: skip
    """Clients c0, c1, … at the nodes 2, 3, …, of whom some take their time; the selector asks everybody."""
    nodes = {
        2 + k: Node(api, {}, {"client_id": f"c{k}", "num_examples": 10}, {"latency_s": 1.0}, works=works.get(k))
        for k in range(count)
    }
    usual = {"identity": "claim", "clock": "virtual", "min_available": count, "wait_timeout": 2.0}
    selector = selector or Random(clients_per_round=count, seed=0)
    return Deployment(api, selector, nodes, SuperLink, timeout, **usual | options)


@pytest.mark.parametrize(("api", "clock"), [("legacy", "server"), ("message", "virtual"), ("message", "server")])
def test_a_client_that_hangs_is_asked_once(api: str, clock: Any) -> None:
    world = busy(api, 3, {1: {"train": [inf]}}, clock=clock).play(4)
    assert world.chosen() == [["c0", "c1", "c2"], *[["c0", "c2"]] * 3]
    assert world.asked("train") == [4, 1, 4]


@pytest.mark.parametrize(("api", "clock"), [("legacy", "virtual"), ("message", "server")])
def test_a_straggler_is_asked_again_when_its_answer_has_come(api: str, clock: Any) -> None:
    """Its first answer takes two rounds and more; the answer itself is dropped."""
    works = {0: {"train": [0.2, 0.25, 0.25, 0.0]}, 1: {"train": [0.7, 0.0]}}
    world = busy(api, 3, works, timeout=0.35, clock=clock).play(4)
    chosen, history = world.chosen(), world.strategy.history
    back = next(number for number, clients in enumerate(chosen) if number and "c1" in clients)
    assert 2 <= back <= 3
    assert [("c1" in clients) for clients in chosen] == [True, *[False] * (back - 1), *[True] * (4 - back)]
    assert [row.completed for row in history.clients if row.client_id == "c1"] == [False, *[True] * (4 - back)]
    assert [record.num_timeouts for record in history.rounds] == [1, 0, 0, 0]
    assert [record.num_available for record in history.rounds] == [2 + ("c1" in clients) for clients in chosen]


def test_a_node_that_was_away_and_came_back_is_asked(api: str) -> None:
    world = busy(api, 3, {1: {"train": [inf, 0.0]}}, min_available=2)
    node: Any = world.grid.nodes[3]

    def between(number: int) -> None:
        if number == 3:
            world.go(3)
        elif number == 4:
            node.free_at = 0.0  # another process
            world.come(3, node)

    assert [("c1" in clients) for clients in world.play(4, between).chosen()] == [True, False, False, True]


def test_when_everybody_is_busy_the_round_waits_for_the_first(api: str) -> None:
    with within(0.6, 5.0):
        world = busy(api, 2, {0: {"train": [0.7, 0.0]}, 1: {"train": [inf]}}, timeout=0.5, wait_timeout=20.0).play(2)
    assert world.chosen() == [["c0", "c1"], ["c0"]]


def test_when_everybody_hangs_they_are_asked_again_after_the_wait(api: str, caplog: pytest.LogCaptureFixture) -> None:
    world = busy(api, 2, {k: {"train": [inf]} for k in range(2)}, timeout=0.2, wait_timeout=0.3).play(2)
    assert world.chosen() == [["c0", "c1"]] * 2
    assert [record.num_timeouts for record in world.strategy.history.rounds] == [2, 2]
    assert any("2 of 2 clients" in message and "min_completed" in message for message in caplog.messages)


def test_a_probe_or_an_evaluation_that_was_not_answered_leaves_a_client_busy(api: str) -> None:
    selector = PowerOfChoice(clients_per_round=2, candidates=3, seed=0)
    world = busy(api, 3, {1: {"evaluate": [inf]}}, selector, roll_call_timeout=0.4).play(3)
    assert (world.chosen(), world.asked("evaluate")) == ([["c0", "c2"]] * 3, [3, 1, 3])
    world = busy(api, 2, {1: {"evaluate": [inf]}}, evaluating=1.0).play(3)
    assert (world.chosen(), world.asked("evaluate")) == ([["c0", "c1"], ["c0"], ["c0"]], [3, 1])


def test_a_roll_call_that_was_not_answered_leaves_a_node_busy_until_the_answer(api: str) -> None:
    works = {1: {"query": [0.5, 0.0]}, 0: {"train": [0.2]}}
    world = busy(api, 3, works, timeout=2.0, roll_call_timeout=0.2).play(5)
    assert [("c1" in clients) for clients in world.chosen()][:: len(world.chosen()) - 1] == [False, True]
    assert world.asked("query") == [1, 2, 1]


def test_late_answers_that_cannot_be_fetched_end_nothing(api: str, caplog: pytest.LogCaptureFixture) -> None:
    world = busy(api, 3, {1: {"train": [inf]}})
    link: Any = world.grid
    pull = link.pull_messages

    def broken(ids: Any) -> Any:
        if any(link._replies.get(one, (0.0,))[0] == inf for one in ids) and len(link.nodes[2].received) > 2:
            raise ConnectionError("the SuperLink is away")
        return pull(ids)

    link.pull_messages = broken
    assert world.play(3).chosen() == [["c0", "c1", "c2"], ["c0", "c2"], ["c0", "c2"]]
    assert "ConnectionError: the SuperLink is away" in caplog.text


def test_over_selection_on_the_servers_clock_leaves_the_others_in_peace_until_they_are_done() -> None:
    works = {2: {"train": [1.0, 0.0]}}
    selector = Random(clients_per_round=2, seed=0)
    world = busy("message", 3, works, selector, timeout=5.0, clock="server", over_selection=0.5)
    assert world.play(2).chosen() == [["c0", "c1", "c2"], ["c0", "c1"]]


def test_a_resumed_run_asks_those_that_were_busy(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "clock": "server"}
    world = busy("message", 2, {1: {"train": [inf, 0.0]}}, **options).play(2)
    assert world.asked("train") == [2, 1]
    node: Any = world.grid.nodes[3]
    node.free_at = 0.0  # the run has ended
    assert read_checkpoint(tmp_path / "round-000002.safetensors").state["busy"]["until"].keys() == {"3"}
    again = busy("message", 2, {}, resume=True, **options)
    again.come(3, node)
    assert again.play(3).asked("train") == [1, 2]


def test_a_bound_passes_and_who_is_gone_owes_nothing() -> None:
    now = [0.0]
    owed = Busy(10.0, lambda: now[0])
    owed.owe(["a", "b"])
    now[0] = 9.5
    owed.owe(["b"])
    owed.release(["b", "c"])
    assert owed.free(["a", "b", "c"]) == ["a", "c"]
    now[0] = 19.5
    assert "b" not in owed
    forever = Busy(None, lambda: now[0])
    forever.owe(["a"])
    now[0] = 1e12
    assert "a" in forever


def test_a_change_of_the_machines_date_and_a_restart_move_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes back a day, and the monotonic clock begins anew."""
    wall, monotonic = [1.8e9], [500.0]
    clocks = SimpleNamespace(time=lambda: wall[0], monotonic=lambda: monotonic[0])
    monkeypatch.setattr(eligibility, "time", clocks)
    assert inspect.signature(Busy).parameters["clock"].default is time.monotonic
    owed = Busy(60.0, clocks.monotonic)
    owed.owe(["a"])
    wall[0], monotonic[0] = wall[0] - 86_400, monotonic[0] + 20
    state = owed.state_dict()
    assert owed.free(["a", "b"]) == ["b"]
    monotonic[0] += 41
    assert owed.free(["a", "b"]) == ["a", "b"]
    monotonic[0] = 3.0  # the machine has restarted
    restarted = Busy(60.0, clocks.monotonic)
    restarted.load_state_dict(state)
    assert restarted.free(["a", "b"]) == ["b"]
    monotonic[0] += 41
    assert restarted.free(["a", "b"]) == ["a", "b"]
    with pytest.raises(StateError, match="until must be a mapping"):
        restarted.load_state_dict({"until": 3})
    restarted.load_state_dict({"until": {"a": 1.8e9}})  # of an earlier version, which wrote times
    monotonic[0] += 61
    assert restarted.free(["a", "b"]) == ["a", "b"]


class First(Selector):
    """Chooses the first clients there are, or all of them in its opening, and keeps whom it was offered."""

    may_exceed_clients_per_round = True

    def __init__(self, clients_per_round: int | None = 1, opening: int = 0) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=0)
        self.opening = opening
        self.offered: list[list[int]] = []

    def _select(self, available: Any) -> Any:
        self.offered.append(available.tolist())
        return available if self.round <= self.opening else available[: self.clients_per_round or 1]


def asked(core: Any, rounds: int, connected: str = "abcd") -> list[list[str]]:
    """Whom the core asks in some rounds; nobody answers."""
    return [written.play_round(core, list(connected), model=None) for _ in range(rounds)]


def test_no_client_is_asked_above_the_cap(api: str) -> None:
    """By hand, cap .5: 0 in rounds 1 to 5, then 5/5 > .5; 1 in 6 to 10 (0: 5/10); 0 in 11 (6/11); 1 in 12."""
    strategy, _ = play_still(api, First(), 60, clients=4, max_participation=0.5)
    rows = np.array([row.client for row in strategy.history.clients])
    assert rows[:12].tolist() == [0] * 5 + [1] * 5 + [0, 1]
    assert np.bincount(rows[20:], minlength=4).max() <= 0.55 * 40
    core = core_of(First())  # without a cap nothing is kept
    assert asked(core, 10) == [["a"]] * 10
    assert core.parts.participation.state_dict()["rounds"].size == 0


def test_the_share_counts_from_the_fifth_round_and_over_the_last_twenty() -> None:
    cap, everybody = Participation(0.25), np.arange(2)
    for number in range(1, SHARE_MIN_ROUNDS + 1):
        assert cap.eligible(everybody, 1).all()
        cap.note(everybody, np.array([0]))
        assert cap.eligible(everybody, 1).tolist() == [number < SHARE_MIN_ROUNDS, True]
    for number in range(SHARE_MIN_ROUNDS + 1, SHARE_WINDOW + 1):
        cap.note(everybody, np.array([1]))
        assert cap.eligible(everybody, 0)[0] == (number == SHARE_WINDOW), number  # 5 of 20 at last
    cap.note(everybody, np.array([0]))  # one more, and one of 20 rounds ago that no longer counts
    assert cap.eligible(everybody, 0).tolist() == [True, False]


def test_only_rounds_in_which_a_client_was_available_count() -> None:
    cap = Participation(0.5)
    for _ in range(5):
        cap.note(np.arange(2), np.array([0]))
    for _ in range(50):
        cap.note(np.array([1, 2]), np.array([1]))
    assert cap.eligible(np.arange(3), 1).tolist() == [False, False, True]


def test_rounds_that_ask_everybody_do_not_count() -> None:
    core = core_of(First(opening=30), max_participation=0.5)
    assert asked(core, 31)[-2:] == [["a", "b", "c", "d"], ["a"]]
    warm = core_of(First(), max_participation=0.5, warmup_rounds=30)
    assert asked(warm, 36)[-7:] == [["a", "b", "c", "d"], *[["a"]] * 5, ["b"]]
    selector = GPFL(clients_per_round=1, total_rounds=10, seed=0)  # its opening does so
    core = core_of(selector, max_participation=0.5, learning_rate=0.1, validation=two_examples())
    assert written.play_round(core, ["a", "b"], model=[np.eye(2)]) == ["a", "b"]
    assert core.parts.participation.state_dict()["rounds"].tolist() == [0, 0]


def test_enough_clients_are_offered_whatever_the_cap() -> None:
    """Three of four places a round under a cap of .1: of those above it the least asked are offered too."""
    found = asked(core_of(First(3), max_participation=0.1), 60)
    assert {len(chosen) for chosen in found} == {3}
    counts = [sum(client in chosen for chosen in found) for client in "abcd"]
    assert max(counts) - min(counts) <= 6, counts
    lonely = First(None)  # no clients_per_round: one is enough
    asked(core_of(lonely, max_participation=0.1), 30)
    assert min(map(len, lonely.offered)) == 1
    core = core_of(First(2), max_participation=0.1, over_selection=0.5)
    core.parts.selector._select = lambda available: available[:3]  # type: ignore[method-assign]
    assert {len(chosen) for chosen in asked(core, 30)} == {3}


def test_a_resumed_run_keeps_the_shares_and_a_newcomer_has_none() -> None:
    whole, before, after = (core_of(First(), max_participation=0.3) for _ in range(3))
    half = asked(before, 23)
    after.load_state_dict(before.state_dict())
    assert half + asked(after, 17) == asked(whole, 40)
    cap = after.parts.participation
    cap.note(np.arange(4), np.array([0]))
    cap.forget(np.array([0, 99]))
    assert cap.state_dict()["asked"][0] == cap.state_dict()["rounds"][0] == 0


def test_a_cap_below_a_clients_fairness_is_refused(api: str) -> None:
    given = {"clients_per_round": 1, "max_latency": 5.0, "fairness": {"a": 0.4, "b": 0.2}}
    make(api, "CSUCBQ", **given, max_participation=0.4)
    with pytest.raises(ParameterError, match=r"max_participation = 0.3 is below the fairness 0.4 of client a"):
        make(api, "CSUCBQ", **given, max_participation=0.3)
    selector = CSUCBQ(clients_per_round=1, max_latency=5.0, fairness=[0.2, 0.4])
    with pytest.raises(ParameterError, match="of client 1"):
        make(api, selector, max_latency=5.0, max_participation=0.3)
    make(api, CSUCBQ(clients_per_round=1, max_latency=5.0), max_latency=5.0, max_participation=0.3)


FOR_EVER = {name for name in names() if selector_class(name).asks_failed_for_ever}


class Stubborn(First):
    """Would choose it for ever."""

    asks_failed_for_ever = True


@pytest.mark.parametrize("cooldown", [{}, {"cooldown": "auto"}, {"cooldown": True}, {"cooldown": False}])
def test_a_stubborn_selector_leaves_a_failing_client_out_by_default(cooldown: Any) -> None:
    """Client 0 fails in rounds 1 and 4: it is out for 2, then for 4 rounds."""
    proxies = [FakeProxy("a", 0, fault="raises"), FakeProxy("b", 1)]
    played = play("legacy", Stubborn(), proxies, 7, min_available=1, **cooldown)
    spared = "0110111" if cooldown.get("cooldown", True) else "0000000"
    assert "".join(row.client_id for row in played.strategy.history.clients) == spared


@pytest.mark.parametrize("name", names())
def test_auto_asks_the_selectors_class(api: str, name: str) -> None:
    options = {"validation": two_examples(), "learning_rate": 0.1, "max_latency": 60.0}
    expected = {None: name in FOR_EVER, "auto": name in FOR_EVER, True: True, False: False}
    for given, on in expected.items():
        own = options if given is None else options | {"cooldown": given}
        selector = selector_under_trace(name)
        own["max_latency"] = getattr(selector, "max_latency", 60.0)
        assert make(api, selector, **own).core.settings.cooldown is on, given


@pytest.mark.parametrize("given", [None, "auto", True, False])
def test_a_papers_strategy_and_a_scenario_say_it_too(given: Any) -> None:
    own = {} if given is None else {"cooldown": given}
    assert PCZFL(validation=two_examples(), **own).core.settings.cooldown is (given is not False)
    for selector, on in (("divfl", given is not False), ("bsfl", given is True)):
        scenario = load_scenario("smoke", {"selector": selector, "aggregation.cooldown": given})
        assert make_strategy(world_of(scenario)).core.settings.cooldown is on


@pytest.mark.parametrize("ids", [["1", "3"], (1, 3), {"3", "1", "not there"}], ids=("list", "numbers", "set"))
@pytest.mark.parametrize("clock", ["virtual", "server"])
def test_only_these_are_asked(api: str, ids: Any, clock: Any) -> None:
    options = {"availability": ids, "clock": clock, "identity": "claim", "min_available": 5}
    history = play(api, Random(clients_per_round=3, seed=0), fleet(5), 3, **options).strategy.history
    assert {(row.round, row.client_id) for row in history.clients} == {(t, k) for t in (1, 2, 3) for k in ("1", "3")}
    assert [record.num_available for record in history.rounds] == [2] * 3


def test_a_list_that_names_nobody_ends_the_run_at_the_first_roll_call(api: str) -> None:
    """Not "02", but "2" is the id of the third client."""
    strategy = selection(api, 2, availability=["02", "x"], min_available=1)
    with pytest.raises(RunError, match=r"names 2 clients: 0 known, 2 unknown, such as '02'.* the history, such as '0'"):
        play_round(strategy, [lambda model, config: (model, 10, {"latency_s": 0.5})] * 3, [np.zeros(2)])


def test_what_a_list_or_a_trace_names_in_vain_is_one_warning(api: str, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "trace.csv").write_text("round,client,state\n1,0.0,down\n1,1.0,down\n1,2,down\n")
    trace = TraceAvailability(tmp_path / "trace.csv")
    for given, numbers, expected in (
        (["0", "02"], "names 2 clients: 1 known, 1 unknown, such as '02'. Use the ids in the history", [1, 1]),
        (trace, "names 3 clients: 1 known, 2 unknown, such as '0.0'. Use the ids in the history", [2, 2]),
        (["2", "1", "0"], "", [3, 3]),
    ):
        caplog.clear()
        strategy = make(api, Random(clients_per_round=3, seed=0), base_of(api), availability=given, min_available=1)
        for number in (1, 2):
            clients = [lambda model, config: (model, 10, {"latency_s": 0.5})] * 3
            play_round(strategy, clients, [np.zeros(2)], number)
        assert [row.num_available for row in strategy.history.rounds] == expected
        said = [record.message for record in caplog.records if "availability" in record.message]
        assert len(said) == bool(numbers)
        assert all(numbers in one for one in said)
