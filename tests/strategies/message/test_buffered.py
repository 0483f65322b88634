"""Buffered rounds of a deployment: on the server's clock, a slow node holds nobody up, and nothing counts twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies.wrapping import grids
from tests.strategies.deployed import Deployment, Node, SuperLink


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "POLL_S", 0.01)


def deployment(seconds: list[list[float]], m: int = 2, **options: Any) -> Deployment:
    """Nodes that take so many seconds for each training; a list's last number counts for all later ones."""
    nodes = {2 + k: Node("message", {"name": f"site-{k}"}, works={"train": own}) for k, own in enumerate(seconds)}
    given = {"concurrency": len(seconds), **options}
    return Deployment("message", Random(clients_per_round=m, seed=1), nodes, grid=SuperLink, timeout=9.0, **given)


def test_steps_go_on_while_a_slow_node_works() -> None:
    """Three nodes take .02 s, one .6 s: it arrives once, with the steps that it missed, and its update counts."""
    played = deployment([[0.02], [0.02], [0.02], [0.6]]).play(30)
    history = played.strategy.history
    slow = [row for row in history.clients if row.client_id == "site-3"]
    assert all(row.completed for row in history.clients)
    assert len(history.rounds) == 30
    assert {record.num_selected for record in history.rounds} == {2}
    assert slow
    assert slow[0].staleness >= 5
    assert slow[0].first_s >= 0.6
    # Every answer counts once; at most three are still at work at the end.
    trained = sum(node.asked("train") for node in played.grid.nodes.values())
    assert 0 <= trained - len(history.clients) <= 3
    times = [record.simulated_s for record in history.rounds]
    assert times == sorted(times)


def test_answers_beyond_the_buffer_stay_for_the_next_step() -> None:
    """All four answer at once, two a step: none is asked again before its answer was used."""
    history = deployment([[0.0]] * 4).play(4).strategy.history
    assert [record.num_selected for record in history.rounds] == [2] * 4
    assert [row.staleness for row in history.clients] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert set(Counter(row.client_id for row in history.clients).values()) == {2}


def test_a_node_that_hangs_is_a_failure_after_max_latency() -> None:
    played = deployment([[0.01], [0.01], [0.01], [float("inf")]], m=1, concurrency=4, max_latency=0.3).play(60)
    (row,) = [row for row in played.strategy.history.clients if row.client_id == "site-3"]
    assert (row.completed, row.timed_out, row.problem) == (False, True, "no answer within 0.3 s")
    assert row.staleness > 3
    assert all(row.completed for row in played.strategy.history.clients if row.client_id != "site-3")


def test_an_error_frees_its_place() -> None:
    played = deployment([[0.01]] * 3, m=1, concurrency=3)
    played.grid.nodes[3].fails = True
    history = played.play(9).strategy.history
    assert len(history.rounds) == 9
    assert {row.client_id for row in history.clients if not row.completed} == {"site-1"}


def test_only_free_nodes_evaluate() -> None:
    played = deployment([[0.01], [0.01], [0.01], [0.5]], evaluating=1.0).play(3)
    (first, *_) = [row.round for row in played.strategy.history.clients if row.client_id == "site-3"] or [99]
    assert first > 3
    assert played.grid.nodes[5].asked("evaluate") == 0
    assert all(played.grid.nodes[node].asked("evaluate") for node in (2, 3, 4))


def test_in_a_second_run_the_clients_of_the_first_are_free() -> None:
    """The replies to the first run never come. Two clients were at work at its end, and are asked again."""
    played = deployment([[0.02]] * 4).play(6).play(6)
    history = played.strategy.history
    assert [record.round for record in history.rounds] == [*range(1, 13)]
    assert {record.num_selected for record in history.rounds} == {2}
    assert {row.client_id for row in history.clients if row.round > 6} == {f"site-{k}" for k in range(4)}
    assert max(row.staleness for row in history.clients if row.round == 7) == 0
