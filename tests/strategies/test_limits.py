"""How many clients are admitted, and which rows are given up."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fedsel_flwr.selectors import CSUCB
from tests.strategies.either_api import BOTH, Server, selection
from tests.strategies.helpers import FakeProxy, chosen, fleet, row_of


@BOTH
def test_max_clients_refuses_the_rest_and_says_so(api: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = selection(api, 100, max_clients=4, min_available=1)
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        Server(api, strategy, fleet(6)).play(3)
    assert chosen(strategy) == [["0", "1", "2", "3"]] * 3
    for client_id in ("'4'", "'5'"):
        assert sum(client_id in text for text in caplog.messages) == 1
    assert strategy.selector.num_clients == 4


@BOTH
def test_max_new_per_round_admits_a_few_at_a_time_and_does_not_hold_back_known_clients(api: str) -> None:
    strategy, proxies = selection(api, 100, max_new_per_round=2, min_available=1), fleet(3)
    server = Server(api, strategy, proxies).play(1)
    assert chosen(strategy)[-1] == ["0", "1", "2"]  # the first roll call is not limited
    for proxy in proxies:
        server.disconnect(proxy)
    for k in range(8):
        server.connect(FakeProxy(f"again-{k}", k, number=k))
    server.play(4)
    assert [len(cohort) for cohort in chosen(strategy)] == [3, 5, 7, 8, 8]


def _evicting(api: str = "legacy") -> tuple[Any, Server, list[FakeProxy]]:
    proxies = fleet(3, prefix="c", latency=1.0)
    selector = CSUCB(clients_per_round=10, max_latency=5.0, seed=0)
    strategy = selection(api, selector, max_latency=5.0, min_available=1, max_clients=3, evict_after=2)
    return strategy, Server(api, strategy, proxies).play(2), proxies


@BOTH
def test_a_row_is_evicted_only_after_more_than_evict_after_rounds_away(api: str) -> None:
    strategy, server, proxies = _evicting(api)
    server.disconnect(proxies[1])  # last seen in round 2
    server.play(2)  # away in rounds 3 and 4
    newcomer = FakeProxy("new", "new", latency=3.0)
    server.connect(newcomer)
    server.play(1)  # round 5: away for 3 rounds by now
    assert chosen(strategy)[-1] == ["c0", "new", "c2"]
    assert row_of(strategy, "new") == 1
    state = strategy.selector.state_dict()
    assert state["plays"].tolist() == [5, 1, 5]
    assert state["mean"][1] == pytest.approx(0.4)  # nothing of c1 is left
    server.disconnect(newcomer)
    server.connect(proxies[1])
    server.play(1)
    assert chosen(strategy)[5:] == [["c0", "c2"]]  # c1 is a newcomer, and full: new was seen a round ago


def test_a_client_that_is_only_briefly_away_keeps_its_row() -> None:
    strategy, server, proxies = _evicting()
    server.disconnect(proxies[1])
    server.connect(FakeProxy("new", "new"))
    server.play(1)
    server.connect(proxies[1])
    server.play(1)
    assert chosen(strategy)[-1] == ["c0", "c1", "c2"]
    assert strategy.selector.state_dict()["plays"].tolist() == [4, 3, 4]


def test_a_newcomer_that_waits_gets_the_row_once_it_may_be_evicted() -> None:
    strategy, server, proxies = _evicting()
    server.disconnect(proxies[1])
    server.connect(FakeProxy("new", "new"))  # too early, but it stays
    server.play(6)
    assert chosen(strategy)[-1] == ["c0", "new", "c2"]
