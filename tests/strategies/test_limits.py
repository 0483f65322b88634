"""How many clients are admitted, and which rows are given up."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.strategies import CSUCB, SelectionStrategy
from tests.strategies.helpers import FakeProxy, Federation, all_in, chosen, fedavg, fleet, row_of

pytestmark = pytest.mark.timeout(30)


def test_max_clients_refuses_the_rest_and_says_so(caplog: Any) -> None:
    proxies = fleet(6)
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        strategy, federation = all_in(proxies, max_clients=4)
        federation.play(2)
    assert chosen(strategy) == [["0", "1", "2", "3"]] * 3
    for client_id in ("'4'", "'5'"):
        assert sum(client_id in record.getMessage() for record in caplog.records) == 1
    assert strategy.selector.num_clients == 4


def test_max_new_per_round_admits_a_few_at_a_time() -> None:
    strategy, federation = all_in(fleet(3), max_new_per_round=2)
    assert chosen(strategy)[-1] == ["0", "1", "2"]  # the first roll call is not limited
    for proxy in [FakeProxy(f"new-{k}", k, number=k) for k in range(3, 8)]:
        federation.manager.register(proxy)
    federation.play(4)
    assert [len(cohort) for cohort in chosen(strategy)] == [3, 5, 7, 8, 8]


def test_max_new_per_round_does_not_hold_back_known_clients() -> None:
    proxies = fleet(5)
    strategy, federation = all_in(proxies, max_new_per_round=1)
    for proxy in proxies:
        federation.manager.unregister(proxy)
    for k in range(5):
        federation.manager.register(FakeProxy(f"again-{k}", k, number=k))
    federation.play(1)
    assert chosen(strategy)[-1] == ["0", "1", "2", "3", "4"]


def _evicting(**kwargs: Any) -> tuple[SelectionStrategy, Federation, list[FakeProxy]]:
    proxies = fleet(3, prefix="c", latency=1.0)
    strategy = CSUCB(
        clients_per_round=10, max_latency=5.0, seed=0, base=fedavg(), min_available=1, max_clients=3, evict_after=2,
        **kwargs,
    )  # fmt: skip
    return strategy, Federation(strategy, proxies).play(2), proxies


def test_a_row_is_evicted_only_after_more_than_evict_after_rounds_away() -> None:
    strategy, federation, proxies = _evicting()
    federation.manager.unregister(proxies[1])  # last seen in round 2
    federation.play(2)  # away in rounds 3 and 4
    federation.manager.register(FakeProxy("new", "new", latency=3.0))
    federation.play(1)  # round 5: away for 3 rounds by now
    assert chosen(strategy)[-1] == ["c0", "new", "c2"]
    assert row_of(strategy, "new") == 1
    state = strategy.selector.state_dict()
    assert state["plays"].tolist() == [5, 1, 5]
    assert state["mean"][1] == pytest.approx(0.4)  # nothing of c1 is left


def test_a_client_that_is_only_briefly_away_keeps_its_row() -> None:
    strategy, federation, proxies = _evicting()
    federation.manager.unregister(proxies[1])
    federation.manager.register(FakeProxy("new", "new"))
    federation.play(1)
    federation.manager.register(proxies[1])
    federation.play(1)
    assert chosen(strategy)[-1] == ["c0", "c1", "c2"]
    assert strategy.selector.state_dict()["plays"].tolist() == [4, 3, 4]


def test_a_newcomer_that_waits_gets_the_row_once_it_may_be_evicted() -> None:
    """With max_clients reached, clients away for more than evict_after rounds are replaced."""
    strategy, federation, proxies = _evicting()
    federation.manager.unregister(proxies[1])
    federation.manager.register(FakeProxy("new", "new"))  # too early, but it stays
    federation.play(6)
    assert chosen(strategy)[-1] == ["c0", "new", "c2"]


def test_an_evicted_client_comes_back_as_a_newcomer() -> None:
    strategy, federation, proxies = _evicting()
    federation.manager.unregister(proxies[1])
    federation.play(3)
    newcomer = FakeProxy("new", "new")
    federation.manager.register(newcomer)
    federation.play(1)
    federation.manager.unregister(newcomer)
    federation.manager.register(proxies[1])
    federation.play(1)
    assert "c1" not in chosen(strategy)[-1]  # full: new was seen a round ago
    assert len(chosen(strategy)) == 7


def test_the_cooldown_of_an_evicted_client_is_not_the_newcomers() -> None:
    strategy, federation, proxies = _evicting(cooldown=True)
    proxies[1].fault = "raises"
    federation.play(12)
    federation.manager.unregister(proxies[1])
    federation.play(4)
    federation.manager.register(FakeProxy("new", "new", latency=1.0))
    federation.play(1)
    assert "new" in chosen(strategy)[-1]


def test_ids_of_a_flood_cannot_take_every_round() -> None:
    """New ids have infinite bounds and could capture every round."""
    strategy = CSUCB(clients_per_round=4, max_latency=5.0, seed=0, base=fedavg(), max_clients=12, max_new_per_round=1)
    federation = Federation(strategy, fleet(8)).play(2)
    for server_round in range(10):
        for k in range(5):
            federation.manager.register(FakeProxy(f"flood-{server_round}-{k}", f"f{server_round}-{k}"))
        federation.play(1)
    for cohort in chosen(strategy)[2:]:
        assert sum(client_id.startswith("f") for client_id in cohort) <= 4
        assert len(cohort) == 4
    new_ids = {client_id for cohort in chosen(strategy) for client_id in cohort if client_id.startswith("f")}
    assert len(new_ids) == 4
    first = {}
    for number, cohort in enumerate(chosen(strategy)):
        for client_id in cohort:
            first.setdefault(client_id, number)
    assert max(Counter(first[client_id] for client_id in new_ids).values()) == 1


Builder = Callable[..., SelectionStrategy]


@pytest.mark.parametrize("name", ["max_clients", "max_new_per_round", "evict_after"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", float("nan")])
def test_limits_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=name):
        CSUCB(clients_per_round=2, max_latency=5.0, **{name: value})
