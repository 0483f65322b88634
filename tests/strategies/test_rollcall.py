"""Who a connection is: ids, claims, reconnects."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
from flwr.common import Code, GetPropertiesRes, Status

from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import BSFL, CSUCB, SelectionStrategy
from tests.strategies.helpers import ABSENT, FakeProxy, Federation, all_in, chosen, fedavg, fleet

pytestmark = pytest.mark.timeout(30)


def _everyone(strategy: SelectionStrategy) -> list[str]:
    return chosen(strategy)[-1]


# ---- ids ----------------------------------------------------------------------------------------------------------


def test_ids_are_canonical_strings_and_rows_follow_them_digits_as_integers() -> None:
    claims = [10, "9", 2, "beta", "alpha", np.int64(100), "11"]
    strategy, _ = all_in([FakeProxy(f"node-{i}", claim, number=i) for i, claim in enumerate(claims)])
    assert _everyone(strategy) == ["2", "9", "10", "11", "100", "alpha", "beta"]
    assert [row.client for row in strategy.history.clients] == list(range(7))


def test_the_same_id_as_an_integer_and_as_text_is_one_client() -> None:
    strategy, federation = all_in([FakeProxy("a", 7)])
    federation.manager.unregister(federation.manager.all()["a"])
    federation.manager.register(FakeProxy("b", "7"))
    federation.play(1)
    assert chosen(strategy) == [["7"], ["7"]]
    assert strategy.selector.num_clients == 1


@pytest.mark.parametrize("claim", [ABSENT, None, "", "   ", True, float("nan"), 1.5, b"bytes", "a\nb", "x" * 5000])
def test_without_a_usable_id_the_connection_serves_as_one(claim: Any) -> None:
    strategy, _ = all_in([FakeProxy("12345", claim), FakeProxy("other", "named")])
    assert _everyone(strategy) == ["12345", "named"]


def test_a_client_without_get_properties_takes_part_under_its_connection() -> None:
    class Old(FakeProxy):
        def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
            return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, "no"), {"client_id": "liar"})

    strategy, _ = all_in([Old("424242"), FakeProxy("b", "b")])
    assert _everyone(strategy) == ["424242", "b"]


def test_a_client_whose_get_properties_raises_takes_part_under_its_connection(caplog: Any) -> None:
    def broken(proxy: FakeProxy) -> None:
        raise ValueError("Message contains an Error")

    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        strategy, federation = all_in([FakeProxy("31337", "a", on_properties=broken), FakeProxy("b", "b")])
    assert _everyone(strategy) == ["31337", "b"]
    assert any("31337" in record.getMessage() for record in caplog.records)
    federation.play(2)
    assert _everyone(strategy) == ["31337", "b"]


def test_one_failed_question_is_asked_again_at_once() -> None:
    def hiccup(proxy: FakeProxy) -> None:
        if proxy.asked == 1:
            raise ConnectionError("try again")

    strategy, _ = all_in([FakeProxy("31337", "a", on_properties=hiccup)])
    assert _everyone(strategy) == ["a"]


def test_a_client_that_does_not_answer_in_time_is_left_out_and_asked_again(caplog: Any) -> None:
    def slow_once(proxy: FakeProxy) -> None:
        if proxy.asked == 1:
            time.sleep(0.6)

    slow = FakeProxy("slow-node", "slow", number=1, on_properties=slow_once)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        strategy, federation = all_in([FakeProxy("a", "a"), slow], roll_call_timeout=0.2)
    assert time.monotonic() - start < 0.55
    assert chosen(strategy) == [["a"]]
    assert any("slow-node" in record.getMessage() for record in caplog.records)
    federation.play(1)
    assert (chosen(strategy)[-1], slow.asked) == (["a"], 1)  # it has not answered yet
    time.sleep(0.6)
    federation.play(1)
    assert chosen(strategy)[-1] == ["a", "slow"]
    assert slow.asked == 2


def test_a_client_that_fails_and_then_hangs_is_asked_again_in_a_later_round() -> None:
    """It may yet say who it is: its connection does not become its id."""

    def fails_then_hangs(proxy: FakeProxy) -> None:
        if proxy.asked == 1:
            raise ConnectionError("try again")
        if proxy.asked == 2:
            time.sleep(0.6)

    proxy = FakeProxy("31337", "a", on_properties=fails_then_hangs)
    strategy, federation = all_in([proxy, FakeProxy("b", "b")], roll_call_timeout=0.2)
    assert chosen(strategy) == [["b"]]
    time.sleep(0.5)
    federation.play(1)
    assert sorted(chosen(strategy)[-1]) == ["a", "b"]


def test_many_that_never_answer_do_not_keep_the_others_out() -> None:
    """However many questions are asked at the same time, those that hang must not use up every place for ever."""

    def hangs(proxy: FakeProxy) -> None:
        time.sleep(2.0)

    mute = [FakeProxy(str(k), f"mute-{k}", on_properties=hangs) for k in range(40)]
    honest = [FakeProxy(f"z-{k}", f"honest-{k}", number=k) for k in range(3)]
    strategy, federation = all_in([*mute, *honest], roll_call_timeout=0.15)
    federation.play(2)
    assert _everyone(strategy) == ["honest-0", "honest-1", "honest-2"]


def test_known_clients_are_not_asked_again() -> None:
    proxies = fleet(4)
    _, federation = all_in(proxies)
    federation.play(3)
    assert [proxy.asked for proxy in proxies] == [1, 1, 1, 1]


# ---- claims ---------------------------------------------------------------------------------------------------------


def test_a_second_connection_with_the_same_id_is_refused_and_named(caplog: Any) -> None:
    strategy, federation = all_in([FakeProxy("first", "x", number=1), FakeProxy("o", "o", number=2)])
    thief = FakeProxy("second", "x", number=3, latency=0.001)
    federation.manager.register(thief)
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        federation.play(3)
    assert thief.fits == []
    assert chosen(strategy) == [["o", "x"]] * 4
    naming = [r.getMessage() for r in caplog.records if "second" in r.getMessage()]
    assert len(naming) == 1
    assert "'x'" in naming[0]
    assert len(strategy.roster.refused) == 1  # refused and counted


def test_two_with_one_id_in_the_same_roll_call() -> None:
    for order in (["n1", "n2"], ["n2", "n1"]):
        proxies = {cid: FakeProxy(cid, "twin", number=i) for i, cid in enumerate(["n1", "n2"])}
        strategy, federation = all_in([proxies[cid] for cid in order])
        federation.play(2)
        assert chosen(strategy) == [["twin"]] * 3
        assert [len(proxies["n1"].fits), len(proxies["n2"].fits)] == [3, 0]  # never by who came first


def test_a_reconnected_client_keeps_its_row_and_statistics() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=10.0, seed=0, base=fedavg())
    old = FakeProxy("before", "phone", number=1, latency=1.0)
    federation = Federation(strategy, [old, FakeProxy("o", "other", number=2, latency=5.0)]).play(3)
    federation.manager.unregister(old)
    federation.manager.register(FakeProxy("after", "phone", number=1, latency=3.0))
    federation.play(1)
    assert {row.client for row in strategy.history.clients if row.client_id == "phone"} == {1}
    state = strategy.selector.state_dict()
    assert state["plays"].tolist() == [4, 4]
    assert state["mean"][1] == pytest.approx((3 * 0.9 + 0.7) / 4)
    assert strategy.selector.num_clients == 2


def test_a_restarted_client_is_taken_back_once_its_old_connection_is_gone() -> None:
    """A SuperNode killed and restarted gets a new node id while the server still lists the old one (up to 60 s)."""
    old = FakeProxy("before", "phone", number=1)
    strategy, federation = all_in([old, FakeProxy("o", "other", number=2)])
    new = FakeProxy("after", "phone", number=1)
    federation.manager.register(new)
    federation.play(1)
    assert new.fits == []  # for now there are two
    federation.manager.unregister(old)
    federation.play(2)
    assert chosen(strategy)[-1] == ["other", "phone"]
    assert len(new.fits) >= 1
    assert strategy.selector.num_clients == 2


# ---- nothing depends on the order of arrival -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cs-ucb", "bsfl", "random"])
def test_registration_order_and_node_ids_do_not_change_the_choices_nor_the_model(name: str) -> None:
    def build() -> SelectionStrategy:
        if name == "cs-ucb":
            return CSUCB(clients_per_round=3, max_latency=9.0, seed=6, base=fedavg())
        if name == "bsfl":
            return BSFL(clients_per_round=3, min_latency=0.1, seed=6, base=fedavg())
        return SelectionStrategy(Random(clients_per_round=3, seed=6), fedavg())

    runs = []
    generator = np.random.default_rng(0)
    for _ in range(4):
        nodes = generator.choice(10**15, size=11, replace=False)
        proxies = fleet(11, cid=lambda k, nodes=nodes: str(nodes[k]))
        generator.shuffle(proxies)
        strategy = build()
        federation = Federation(strategy, proxies).play(8)
        runs.append((chosen(strategy), federation.models))
    assert all(run == runs[0] for run in runs)
