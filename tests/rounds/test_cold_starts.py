"""The first time that the server measures of a client: the play counts, and the selector does not learn from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.state_dicts import pack_state, unpack_state
from fedsel_flwr.selectors import create
from tests.rounds.written import MODEL, Written, core_of, play_round, reply
from tests.strategies.scripted import Spy

START, USUAL = 13.0, 0.25
NODES = [f"n{k}" for k in range(6)]
Took = Callable[[str, int], float | None]


def server(selector: Any, **options: Any) -> SelectionCore:
    return core_of(selector, clock="server", identity="claim", **options)


def play(core: SelectionCore, rounds: int, seconds: Took, nodes: Any = NODES, **metrics: Any) -> SelectionCore:
    """Rounds in which a client's n-th training, counted from 1 over all calls, takes ``seconds(client, n)``.

    None: it fails. ``nodes`` are clients, or connection -> client.
    """
    asked = Counter(row.client_id for row in core.parts.history.clients)
    said = {node: {"client_id": nodes[node] if isinstance(nodes, dict) else node} for node in nodes}
    for _ in range(rounds):
        replies = {}
        for node in core.choose(list(nodes), MODEL, Written(said)):
            who = core.parts.roster.name(node)
            asked[who] += 1
            if (took := seconds(who, asked[who])) is not None:
                replies[node] = Reply(arrays=MODEL, num_examples=10, metrics=dict(metrics), observed_s=took)
        core.collect(replies)
        core.finish(MODEL)
    return core


def starting(client: str, number: int) -> float:
    """The first training of a client starts its process."""
    return (START if number == 1 else USUAL) + 0.01 * int(client[1:])


def sources(core: SelectionCore, client: str) -> list[str]:
    return [row.latency_source for row in core.parts.history.clients if row.client_id == client]


def cs_ucb(m: int = 6) -> Any:
    return create("cs-ucb", clients_per_round=m, max_latency=60.0, seed=0)


def test_the_play_counts_and_there_is_one_first_time_a_row_also_after_a_restart() -> None:
    core = play(server(cs_ucb()), 3, starting)
    history = core.parts.history
    assert core.parts.selector.state_dict()["plays"].tolist() == [3] * 6
    assert all(sources(core, node) == ["first", "observed", "observed"] for node in NODES)
    assert [record.round_s for record in history.rounds] == pytest.approx([13.05, 0.3, 0.3])
    assert [row.first_s for row in history.clients[:6]] == pytest.approx([START + 0.01 * k for k in range(6)])
    assert all(np.isnan(row.first_s) for row in history.clients[6:])
    other = server(cs_ucb())
    arrays: dict[str, Any] = {}
    said = pack_state(core.state_dict(), "state", arrays)
    other.load_state_dict(unpack_state(json.loads(json.dumps(said)), arrays))
    play(other, 1, starting)
    assert {row.latency_source for row in other.parts.history.clients[-6:]} == {"observed"}


def test_all_first_times_of_a_round_count_the_same() -> None:
    """Of 13.00 ... 13.05 s no client is the faster one; those that report what they computed count as their median."""
    for metrics, expected in (({}, 13.0), ({"compute_s": 0.2}, 0.2), ({"compute_s": 1e-9}, 0.13)):
        core = play(server(Spy()), 1, starting, **metrics)
        (report,) = core.parts.selector.reports  # type: ignore[attr-defined]
        assert report.latency.tolist() == pytest.approx([expected] * 6)
        assert [row.latency_s for row in core.parts.history.clients] == report.latency.tolist()


def test_one_liar_does_not_set_the_seconds_of_the_others() -> None:
    core, honest = server(Spy()), Reply(arrays=MODEL, num_examples=1, metrics={"compute_s": 0.2}, observed_s=13.0)
    liar = replace(honest, metrics={"compute_s": 1e-12})
    play_round(core, NODES, dict.fromkeys(NODES, honest) | {NODES[0]: liar})
    assert [row.latency_s for row in core.parts.history.clients] == [0.2] * 6


def test_known_times_stand_for_a_newcomers_first_time() -> None:
    """The median of the last times of n0 ... n4 is .27 s; no client counts more than it took."""
    core = play(server(Spy()), 2, starting, NODES[:5])
    play(core, 1, starting)
    (last,) = [row for row in core.parts.history.clients if row.client_id == "n5"]
    assert (last.latency_s, last.latency_source) == (pytest.approx(0.27), "first")
    quick = play(play(server(Spy()), 2, starting, NODES[:5]), 1, lambda *_: 0.1)
    assert quick.parts.history.clients[-1].latency_s == 0.1


def test_a_reconnection_is_no_first_time() -> None:
    """The clients come back under other connections, and take long once more: that is learnt."""
    core = play(server(cs_ucb()), 2, starting)
    play(core, 1, lambda *_: 14.0, {f"other-{node}": node for node in NODES})
    last = core.parts.history.clients[-6:]
    assert {(row.latency_s, row.latency_source) for row in last} == {(14.0, "observed")}


def test_a_failure_counts_and_the_first_time_is_still_to_come() -> None:
    took = {"n0": [None, 13.0, 0.25], "n1": [None] * 3}
    core = play(server(cs_ucb(2)), 3, lambda who, number: took[who][number - 1], NODES[:2], compute_s=0.2)
    assert sources(core, "n0") == ["max_latency", "first", "observed"]
    assert sources(core, "n1") == ["max_latency"] * 3
    state = core.parts.selector.state_dict()
    assert state["plays"].tolist() == [3, 3]
    assert state["mean"].tolist() == pytest.approx([(0 + 1 - 0.2 / 60 + 1 - 0.25 / 60) / 3, 0.0])


def test_a_report_that_agrees_with_the_server_is_believed_at_once() -> None:
    core = play(server(Spy()), 1, lambda *_: 1.0, latency_s=0.95)
    assert {(row.latency_s, row.latency_source) for row in core.parts.history.clients} == {(0.95, "reported")}
    play(core, 1, lambda *_: 1.0)
    assert {row.latency_source for row in core.parts.history.clients[-6:]} == {"observed"}


@pytest.mark.parametrize(("clock", "observed"), [("virtual", 2.0), ("server", None)])
def test_without_the_servers_time_there_is_no_first_time(clock: Any, observed: float | None) -> None:
    core = core_of(Spy(), clock=clock, identity="claim")
    play_round(core, ["n0"], replace(reply(1.5), observed_s=observed))
    assert [(row.latency_s, row.latency_source) for row in core.parts.history.clients] == [(1.5, "reported")]
    assert core.parts.cold_starts.state_dict()["timed"].tolist() == []


def test_tifl_profiles_a_client_by_a_later_time() -> None:
    core = server(create("tifl", clients_per_round=6, tiers=2, seed=0))
    for profile in ([-1.0] * 6, [USUAL + 0.01 * k for k in range(6)]):
        play(core, 1, starting)
        assert core.parts.selector.state_dict()["profile"].tolist() == pytest.approx(profile)


def test_who_takes_a_row_over_has_the_first_time_before_it() -> None:
    roster = Roster(max_clients=2, evict_after=1)
    core = play(server(Spy(), roster=roster), 2, starting, ["n0", "n1"])
    play(core, 3, starting, ["n0"])
    play(core, 2, starting, ["n0", "n2"])
    assert roster.ids == ["n0", "n2"]
    assert sources(core, "n2") == ["first", "observed"]
    assert sources(core, "n0").count("first") == 1
