"""Over-selection and the round's deadline: who is late, how long the round takes, what selector and base are told."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg
from hypothesis import given
from hypothesis import strategies as st

from fedsel_flwr.report.summary import summarize
from fedsel_flwr.rounds.collecting import end_round
from fedsel_flwr.rounds.deadlines import Deadline
from fedsel_flwr.rounds.replies import Reply, read_reply
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import CSUCB, Everyone, Random, create, names
from fedsel_flwr.selectors.registry import example
from fedsel_flwr.strategies import SelectionStrategy, message
from fedsel_flwr.wireless import finish_times, round_time
from tests.rounds.written import MODEL, Written, core_of, facts, play_round, reply
from tests.strategies.helpers import FakeProxy, Federation, RecordingBase, fleet
from tests.strategies.message.helpers import FakeGrid, FakeNode, fedavg, play
from tests.strategies.scripted import Spy, play_still


def _result(seconds: float, error: str = "") -> Any:
    return read_reply(replace(reply(seconds), error=error), Settings(max_latency=60.0), client_id="x")


def _late(seconds: list[float], failed: tuple[int, ...] = (), **options: Any) -> tuple[list[int], float]:
    """Who is not completed, and the round's seconds; options: wanted, deadline, channels."""
    results = {str(i): _result(s, "no answer" if i in failed else "") for i, s in enumerate(seconds)}
    deadline = Deadline(options.get("deadline") or np.inf)
    settings = Settings(channels=options.get("channels"), wait_for=options.get("wait_for"))
    read, end, _ = end_round(results, settings, options.get("wanted"), deadline)
    return [i for i, one in enumerate(read.values()) if not one.completed], end


@pytest.mark.parametrize(
    ("seconds", "options", "late", "round_s"),
    [
        # three of five are wanted: those done after 1, 2 and 3 s; the round ends with the third
        ([5.0, 1.0, 3.0, 9.0, 2.0], {"wanted": 3}, [0, 3], 3.0),
        ([5.0, 1.0, 3.0], {"wanted": 3}, [], 5.0),
        # equal times: the lower rows
        ([2.0, 1.0, 2.0, 2.0], {"wanted": 2}, [2, 3], 2.0),
        # a client that failed is no answer: the fourth takes its place
        ([1.0, 2.0, 3.0, 4.0, 5.0], {"wanted": 3, "failed": (1,)}, [1, 4], 4.0),
        # too few came at all: the round waits for the one that never answers, as long as max_latency
        ([1.0, 2.0, 3.0], {"wanted": 3, "failed": (1,)}, [1], 60.0),
        # the deadline ends the round, whoever is missing
        ([5.0, 1.0, 3.0, 9.0, 2.0], {"deadline": 4.0}, [0, 3], 4.0),
        ([1.0, 2.0], {"deadline": 4.0}, [], 2.0),
        ([1.0, 2.0], {"deadline": 4.0, "failed": (0,)}, [0], 4.0),
        # both: the third usable answer comes after the deadline
        ([5.0, 1.0, 3.0, 9.0, 8.0], {"wanted": 3, "deadline": 4.0}, [0, 3, 4], 4.0),
        ([5.0, 1.0, 3.0, 9.0, 2.0], {"wanted": 2, "deadline": 4.0}, [0, 2, 3], 2.0),
        # with wait_for, equal times count: at least two
        ([2.0, 1.0, 2.0, 9.0], {"wanted": 2, "wait_for": 2}, [3], 2.0),
        # two channels: waves (5, 1), (3, 9), (2) end after 5, 14 and 16 s; done after 5, 1, 8, 14, 16 s
        ([5.0, 1.0, 3.0, 9.0, 2.0], {"wanted": 3, "channels": 2}, [3, 4], 8.0),
    ],
)  # fmt: skip
def test_who_is_late(seconds: list[float], options: dict[str, Any], late: list[int], round_s: float) -> None:
    failed = options.pop("failed", ())
    assert _late(seconds, failed, **options) == (late, round_s)


def test_a_late_client_holds_max_latency_and_says_why() -> None:
    results = {"a": _result(1.0), "b": _result(7.5)}
    said = "late: the update came after 7.5 s, but the round ended after {}"
    spare = end_round(results, Settings(), 1, Deadline())[0]["b"]
    assert (spare.latency_s, spare.latency_source, spare.spare) == (60.0, "max_latency", True)
    assert spare.problems == (said.format("1 s (enough other updates had arrived)"),)
    late = end_round(results, Settings(), None, Deadline(5.0))[0]["b"]
    assert (late.completed, late.spare) == (False, False)
    assert late.problems == (said.format("5 s (round_deadline_s = 5 s)"),)


@given(
    st.lists(st.floats(0, 59), min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 12),
    st.none() | st.floats(0.1, 200),
)  # fmt: skip
def test_against_the_definition(seconds: list[float], wanted: int, channels: int, deadline: float | None) -> None:
    """Walk through the moments at which somebody is done, one by one."""
    done = finish_times(seconds, channels).tolist()
    here: list[int] = []
    end = 0.0
    for moment, i in sorted((moment, i) for i, moment in enumerate(done)):
        if len(here) == wanted or (deadline is not None and moment > deadline):
            break
        here.append(i)
        end = moment
    complete = len(here) in (wanted, len(seconds))
    expected = end if complete else min(max(done), deadline or 1e9)
    late, round_s = _late(seconds, wanted=wanted, channels=channels, deadline=deadline)
    assert late == [i for i in range(len(seconds)) if i not in here]
    assert round_s == expected
    assert max(done) == pytest.approx(round_time(seconds, channels))


@pytest.mark.parametrize(("share", "asked"), [(0.0, 10), (0.1, 11), (0.25, 13), (0.3, 13), (1.0, 20), (0.01, 11)])
def test_how_many_are_asked(share: float, asked: int) -> None:
    core = core_of(Random(clients_per_round=10, seed=0), over_selection=share)
    nodes = [f"{k:02}" for k in range(40)]
    assert len(core.choose(nodes, MODEL, Written(facts(*nodes)))) == asked
    assert core.settings.channels == asked


@pytest.mark.parametrize("name", sorted(set(names()) - {"pczfl"}))
def test_every_selector_chooses_as_many_as_are_asked(name: str) -> None:
    options = {"deadline": 100.0} if name == "fedcs" else {}
    selector = create(name, clients_per_round=4, seed=0, **example(name) | options)
    selector.plan_rounds(over_selection=0.5)
    available = np.arange(30)
    selector.inform(available, num_examples=np.arange(1.0, 31.0))
    counts = set()
    for _ in range(12):
        expected = selector.expected_count(30)
        size = selector.select(available).size
        assert expected in (None, size)
        counts.add(size)
    assert counts & {6, 30}, counts


def test_the_bandits_constants_keep_m() -> None:
    """CS-UCB's radius is sqrt((m + 1) ln t / N): with another m in it another client comes last of three."""
    orders = {}
    learned = {"round": 100, "plays": np.array([50, 20, 10]), "mean": np.array([0.9, 0.75, 0.2])}
    for share in (0.0, 1.0):
        selector = CSUCB(clients_per_round=1, max_latency=1.0, seed=0)
        selector.plan_rounds(over_selection=share)
        selector.inform(np.arange(3))
        selector.load_state_dict(selector.state_dict() | learned)
        orders[share] = selector.select(np.arange(3)).tolist()
    # m = 1: .9 + sqrt(2 ln 101 / 50) = 1.330, .75 + sqrt(2 ln 101 / 20) = 1.429, .2 + sqrt(2 ln 101 / 10) = 1.161;
    # with m = 4 the last would be .2 + sqrt(5 ln 101 / 10) = 1.719, before the first's 1.579
    assert orders == {0.0: [1], 1.0: [0, 1]}


@pytest.mark.parametrize("cooldown", [False, True])
def test_the_base_sees_neither_result_nor_failure_and_the_energy_counts(cooldown: bool) -> None:
    base, selector = RecordingBase(accept_failures=False), CSUCB(clients_per_round=2, max_latency=9.0, seed=0)
    strategy = SelectionStrategy(selector, base, over_selection=1.0, cooldown=cooldown)
    Federation(strategy, fleet(4)).play(2)  # latencies .5, .625, .75 and .875 s
    for (results, failures), record in zip(base.given, strategy.history.rounds, strict=True):
        assert [proxy.cid for proxy, _ in results] == ["node-0", "node-1"]
        assert failures == []
        assert (record.num_selected, record.num_completed, record.num_kept) == (4, 2, 2)
        assert (record.round_s, record.energy_j) == (0.625, 4 * 0.25)
    assert [row.completed for row in strategy.history.clients] == [True, True, False, False] * 2
    assert selector.state_dict()["mean"].tolist() == pytest.approx([1 - 0.5 / 9, 1 - 0.625 / 9, 0, 0])
    assert strategy.history.problem_counts() == {"late": 4}


@pytest.mark.parametrize(
    ("options", "failures", "round_s"), [({"round_deadline_s": 0.7}, 1, 0.7), ({"over_selection": 0.5}, 0, 0.625)]
)
def test_beyond_the_deadline_is_a_failure_and_named_in_the_log_a_spare_is_neither(
    options: dict[str, float], failures: int, round_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients of .5, .625 and .75 s."""
    base = RecordingBase()
    strategy = SelectionStrategy(Random(clients_per_round=3 - (failures == 0), seed=0), base, **options)  # type: ignore[arg-type]
    proxies = [FakeProxy(f"node-{k}", k, number=k, latency=0.5 + k / 8, energy=-1.0) for k in range(3)]
    Federation(strategy, proxies).play(1)
    ((results, failed),) = base.given
    assert (len(results), len(failed)) == (2, failures)
    record = strategy.history.rounds[0]
    assert (record.round_s, record.num_failed, record.num_spares) == (round_s, failures, 1 - failures)
    assert [row.spare for row in strategy.history.clients] == [False, False, not failures]
    summary = summarize(strategy.history, selector="random", seed=0, num_clients=3, target_accuracy=0.9)
    assert summary.failed_clients == failures
    assert len([message for message in caplog.messages if "client 2: late" in message]) == failures
    assert sum("energy" in message for message in caplog.messages) == 3


@pytest.mark.parametrize(
    ("needs", "last_s", "completed", "spare", "latency"),
    [
        (("loss", "spare"), 4.0, [True] * 4, [False, True, False, True], [2.0, 8.0, 1.0, 4.0]),
        # for a selector that reads no spares they have failed
        (("loss",), 4.0, [True, False, True, False], [False] * 4, [2.0, 9.0, 1.0, 9.0]),
        # client 3 takes longer than max_latency = 9 s, so that it is no spare
        (("loss", "spare"), 40.0, [True, True, True, False], [False, True, False, False], [2.0, 8.0, 1.0, 9.0]),
    ],
)
def test_what_a_selector_is_told_of_spares(
    api: str, needs: tuple[str, ...], last_s: float, completed: list[bool], spare: list[bool], latency: list[float]
) -> None:
    """Clients 0 to 3 take 2, 8, 1 and 4 s or more; the first two answers are needed, those of 0 and 2."""
    spy, seconds = Spy(*needs, clients_per_round=2), (2.0, 8.0, 1.0, last_s)
    answers = [{"latency_s": own, "loss": k / 10} for k, own in enumerate(seconds)]
    play_still(api, spy, clients=4, over_selection=1.0, report=lambda k, t: answers[k])
    (one,) = spy.reports
    assert [column.tolist() for column in (one.completed, one.spare, one.latency)] == [completed, spare, latency]  # type: ignore[union-attr]
    assert one.loss.tolist() == [0.0, 0.1, 0.2, 0.3]  # type: ignore[union-attr]
    assert one.failed.tolist() == [not done for done in completed]


def _on_the_servers_clock(selector: Any, ready: list[float], rounds: int = 1, base: Any = None, **options: Any) -> Any:
    """The history of rounds, and the nodes of clients that are ready after these seconds."""
    given = {"clock": "server", "identity": "claim", "max_latency": 60.0, **options}
    strategy = message.SelectionStrategy(selector, base or fedavg(), **given)
    nodes = [FakeNode(FakeProxy(str(k + 5), k, number=k), ready=seconds) for k, seconds in enumerate(ready)]
    begin = time.monotonic()
    play(strategy, FakeGrid({k + 5: node for k, node in enumerate(nodes)}), rounds)
    assert time.monotonic() - begin < 5.0 * rounds
    return strategy.history, nodes


def test_on_the_servers_clock_the_server_goes_on_when_enough_are_there() -> None:
    """A spare that has not answered took at least as long as the server waited."""
    spy = Spy("spare", clients_per_round=2)
    history, _ = _on_the_servers_clock(spy, [0.0, 30.0, 0.4], over_selection=0.5)
    assert [row.completed for row in history.clients] == [True, False, True]
    assert history.clients[1].problem.startswith("late: no answer after 0.")
    assert history.clients[1].latency_s == 60.0
    assert 0.4 <= history.rounds[0].round_s < 2.0
    (one,) = spy.reports
    assert (one.completed.tolist(), one.spare.tolist()) == ([True, False, True], [False, True, False])  # type: ignore[union-attr]
    assert 0.4 <= one.latency[1] < 2.0


def test_on_the_servers_clock_the_deadline_ends_the_wait() -> None:
    history, _ = _on_the_servers_clock(Random(clients_per_round=3, seed=0), [0.0, 30.0, 0.1], round_deadline_s=0.6)
    assert history.clients[1].problem == "late: no answer within round_deadline_s = 0.6 s"
    assert history.rounds[0].round_s == 0.6


@pytest.mark.parametrize(("option", "completed"), [({"wait_for": 2}, 4), ({"over_selection": 1.0}, 2)])
def test_on_the_servers_clock_replies_that_have_arrived_are_used(option: dict[str, Any], completed: int) -> None:
    """All four arrive in the same request. Over-selection uses exactly two, and ``wait_for`` at least two."""
    selector = Everyone() if "wait_for" in option else Random(clients_per_round=2, seed=0)
    history, _ = _on_the_servers_clock(selector, [0.0] * 4, **option)
    assert (history.rounds[0].num_selected, history.rounds[0].num_completed) == (4, completed)


@pytest.mark.parametrize("late", ["use", "damped"])
def test_on_the_servers_clock_a_late_reply_counts_and_its_node_is_asked_again(late: str, caplog: Any) -> None:
    caplog.set_level("INFO", "flwr")
    replies: list[Any] = []

    def note(contents: list[Any], key: str) -> Any:
        replies.append(copy.deepcopy(contents))
        return contents[0]["metrics"]

    base = fedavg(train_metrics_aggr_fn=note)
    history, (*_, slow) = _on_the_servers_clock(Everyone(), [0.25, 0.25, 0.8], 7, base, wait_for=2, late=late)
    used = [one.round for one in history.rounds if one.num_late]
    assert used
    # Until its reply it is not asked. After it its failure is forgotten, so that it is asked in the next round.
    asked = [row.round for row in history.clients if row.client_id == "2"]
    assert asked[0] == 1
    assert asked[1] in (used[0], used[0] + 1)
    assert used[0] > 1
    for record, contents in zip(history.rounds, replies, strict=True):
        assert len(contents) == record.num_kept + record.num_late
        assert len({tuple(sorted(one)) for one in contents}) == 1
        assert len({tuple(sorted(one["metrics"])) for one in contents}) == 1
        if record.num_late:
            assert "; 2: late by " in record.note
            assert f"round {record.round}: {record.note}" in caplog.messages
            factor, examples = float(record.note.split("weight ")[1]), slow.proxy.num_examples
            weight = contents[-1]["metrics"]["num-examples"] / examples
            assert weight == pytest.approx(1.0 if late == "damped" else factor, abs=0.006)
    assert len(slow.messages("train")) == len(asked)


def test_on_the_servers_clock_a_round_without_clients_ends_at_once() -> None:
    """Nobody is available in round 2, and the base configures nobody in round 3."""

    class Skips(FedAvg):
        def configure_train(self, server_round: int, *args: Any) -> Any:
            return [] if server_round == 3 else super().configure_train(server_round, *args)

    history, _ = _on_the_servers_clock(
        Everyone(), [0.0] * 3, 4, Skips(fraction_evaluate=0.0), wait_for=2, round_deadline_s="auto", late="use",
        availability=lambda client, number, seconds: number != 2,
    )  # fmt: skip
    assert [one.num_completed for one in history.rounds] == [3, 0, 0, 3]


def test_on_the_servers_clock_late_replies_set_the_deadline() -> None:
    """The first deadline is 9 s after the first two replies, so that the slow node is waited for."""
    history, _ = _on_the_servers_clock(Everyone(), [0.25, 0.25, 0.9], 4, round_deadline_s="auto")
    assert all(one.num_completed == 3 for one in history.rounds)
    assert all(9.2 < one.deadline_s < 12.0 for one in history.rounds)


def test_on_the_servers_clock_the_time_of_a_late_reply_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin is 0 here: the node of 1.2 s misses rounds of .25 s until its own time counts."""
    monkeypatch.setattr("fedsel_flwr.rounds.deadlines.LEAST_S", 0.1)
    history, _ = _on_the_servers_clock(Everyone(), [0.25, 0.25, 1.2], 9, round_deadline_s="auto")
    rows = [row.completed for row in history.clients if row.client_id == "2"]
    assert (rows[0], rows[-1]) == (False, True)
    assert history.rounds[-1].deadline_s > 1.2


def test_a_dead_site_is_no_reply_and_is_not_asked_in_the_next_round() -> None:
    core = core_of(Everyone(), wait_for=2, max_latency=9.0)
    replies = {"a": Reply(error="gone"), "b": reply(1.0), "c": reply(2.0)}
    assert [play_round(core, ["a", "b", "c"], replies) for _ in range(3)] == [["a", "b", "c"], ["b", "c"], ["b", "c"]]
    assert [record.round_s for record in core.parts.history.rounds] == [2.0] * 3
    assert [row.completed for row in core.parts.history.clients] == [False, True, True, True, True, True, True]
