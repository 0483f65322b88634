"""Who a connection is: ids, claims, reconnects, limits and parameters given per client."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.common import Code, EvaluateRes, GetPropertiesRes, Status
from flwr.server.strategy import FedAvg

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import BSFL, CSUCB, SelectionStrategy
from tests.strategies.helpers import ABSENT, OK, FakeProxy, Federation, chosen, fedavg, fleet, initial, row_of

pytestmark = pytest.mark.timeout(30)


def _everyone(strategy: SelectionStrategy) -> list[str]:
    return chosen(strategy)[-1]


def _all_in(proxies: list[FakeProxy], **kwargs: Any) -> tuple[SelectionStrategy, Federation]:
    """A strategy that trains everyone it knows, after one round."""
    strategy = SelectionStrategy(
        Random(clients_per_round=100, seed=0), fedavg(), **{"min_available": 1, "max_latency": 60.0, **kwargs}
    )
    return strategy, Federation(strategy, proxies).play(1)


# ---- ids ----------------------------------------------------------------------------------------------------------


def test_ids_are_canonical_strings_and_rows_follow_them_digits_as_integers() -> None:
    claims = [10, "9", 2, "beta", "alpha", np.int64(100), "11"]
    strategy, _ = _all_in([FakeProxy(f"node-{i}", claim, number=i) for i, claim in enumerate(claims)])
    assert _everyone(strategy) == ["2", "9", "10", "11", "100", "alpha", "beta"]
    assert [row.client for row in strategy.history.clients] == list(range(7))


def test_the_same_id_as_an_integer_and_as_text_is_one_client() -> None:
    strategy, federation = _all_in([FakeProxy("a", 7)])
    federation.manager.unregister(federation.manager.all()["a"])
    federation.manager.register(FakeProxy("b", "7"))
    federation.play(1)
    assert chosen(strategy) == [["7"], ["7"]]
    assert strategy.selector.num_clients == 1


@pytest.mark.parametrize("claim", [ABSENT, None, "", "   ", True, float("nan"), 1.5, b"bytes", "a\nb", "x" * 5000])
def test_without_a_usable_id_the_connection_serves_as_one(claim: Any) -> None:
    strategy, _ = _all_in([FakeProxy("12345", claim), FakeProxy("other", "named")])
    assert _everyone(strategy) == ["12345", "named"]


def test_a_client_without_get_properties_takes_part_under_its_connection() -> None:
    class Old(FakeProxy):
        def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
            return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, "no"), {"client_id": "liar"})

    strategy, _ = _all_in([Old("424242"), FakeProxy("b", "b")])
    assert _everyone(strategy) == ["424242", "b"]


def test_a_client_whose_get_properties_raises_takes_part_under_its_connection(caplog: Any) -> None:
    def broken(proxy: FakeProxy) -> None:
        raise ValueError("Message contains an Error")

    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        strategy, federation = _all_in([FakeProxy("31337", "a", on_properties=broken), FakeProxy("b", "b")])
    assert _everyone(strategy) == ["31337", "b"]
    assert any("31337" in record.getMessage() for record in caplog.records)
    federation.play(2)
    assert _everyone(strategy) == ["31337", "b"]


def test_one_failed_question_is_asked_again_at_once() -> None:
    def hiccup(proxy: FakeProxy) -> None:
        if proxy.asked == 1:
            raise ConnectionError("try again")

    strategy, _ = _all_in([FakeProxy("31337", "a", on_properties=hiccup)])
    assert _everyone(strategy) == ["a"]


def test_a_client_that_does_not_answer_in_time_is_left_out_and_asked_again(caplog: Any) -> None:
    def slow_once(proxy: FakeProxy) -> None:
        if proxy.asked == 1:
            time.sleep(0.6)

    slow = FakeProxy("slow-node", "slow", number=1, on_properties=slow_once)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        strategy, federation = _all_in([FakeProxy("a", "a"), slow], roll_call_timeout=0.2)
    assert time.monotonic() - start < 0.55
    assert chosen(strategy) == [["a"]]
    assert any("slow-node" in record.getMessage() for record in caplog.records)
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
    strategy, federation = _all_in([proxy, FakeProxy("b", "b")], roll_call_timeout=0.2)
    assert chosen(strategy) == [["b"]]
    time.sleep(0.5)
    federation.play(1)
    assert sorted(chosen(strategy)[-1]) == ["a", "b"]


def test_evaluations_are_aggregated_in_the_order_of_the_clients_ids() -> None:
    """Whatever their connections are called: sums of floats depend on the order."""

    class Ordered(FedAvg):
        def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
            order.append([client.cid for client, _ in results])
            return super().aggregate_evaluate(server_round, results, failures)

    order: list[list[str]] = []
    base = Ordered(fraction_evaluate=1.0, min_evaluate_clients=3, min_available_clients=3, initial_parameters=initial())
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), base, max_latency=60.0)
    Federation(strategy, [FakeProxy("x", 10), FakeProxy("y", 9), FakeProxy("z", 2)]).play(1)
    answers = [(proxy, EvaluateRes(OK, 0.5, 3, {})) for proxy in (FakeProxy("x"), FakeProxy("z"), FakeProxy("y"))]
    strategy.aggregate_evaluate(1, answers, [])
    assert order[-1] == ["z", "y", "x"]


def test_many_that_never_answer_do_not_keep_the_others_out() -> None:
    """However many questions are asked at the same time, those that hang must not use up every place for ever."""

    def hangs(proxy: FakeProxy) -> None:
        time.sleep(2.0)

    mute = [FakeProxy(str(k), f"mute-{k}", on_properties=hangs) for k in range(40)]
    honest = [FakeProxy(f"z-{k}", f"honest-{k}", number=k) for k in range(3)]
    strategy, federation = _all_in([*mute, *honest], roll_call_timeout=0.15)
    federation.play(2)
    assert _everyone(strategy) == ["honest-0", "honest-1", "honest-2"]


def test_known_clients_are_not_asked_again() -> None:
    proxies = fleet(4)
    _, federation = _all_in(proxies)
    federation.play(3)
    assert [proxy.asked for proxy in proxies] == [1, 1, 1, 1]


# ---- claims ---------------------------------------------------------------------------------------------------------


def test_a_second_connection_with_the_same_id_is_refused_and_named(caplog: Any) -> None:
    strategy, federation = _all_in([FakeProxy("first", "x", number=1), FakeProxy("o", "o", number=2)])
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
        strategy, federation = _all_in([proxies[cid] for cid in order])
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
    strategy, federation = _all_in([old, FakeProxy("o", "other", number=2)])
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


# ---- parameters given per client --------------------------------------------------------------------------------


def _weighted(weights: Any, **kwargs: Any) -> SelectionStrategy:
    return BSFL(
        clients_per_round=2, min_latency=0.1, alpha=1000.0, data_weights=weights, seed=0,
        **{"base": fedavg(), "min_available": 2, **kwargs},
    )  # fmt: skip


def test_data_weights_by_client_id_reach_the_right_clients() -> None:
    weights = {"d": 2.0, "a": 1.0, "c": 3.0, "b": 2.0}
    strategy = _weighted(weights)
    proxies = [FakeProxy(f"node-{i}", client_id, number=i) for i, client_id in enumerate("cdba")]
    Federation(strategy, proxies).play(80)
    counts = Counter(row.client_id for row in strategy.history.clients)
    for client_id, weight in weights.items():  # m t d_k / sum(d)
        assert counts[client_id] == pytest.approx(2 * 80 * weight / 8, abs=2)


def test_data_weights_as_an_array_go_by_client_id_not_by_connection() -> None:
    strategy = _weighted([1.0, 3.0, 2.0, 2.0])
    proxies = fleet(4, cid=lambda k: f"node-{9 - k}")
    Federation(strategy, proxies[::-1]).play(80)
    assert strategy.history.selection_counts(4).tolist() == pytest.approx([20, 60, 40, 40], abs=2)


def test_integer_keys_mean_the_same_clients() -> None:
    strategy = _weighted({0: 1.0, "1": 3.0, 2: 2.0, 3: 2.0})
    Federation(strategy, fleet(4)).play(40)
    assert strategy.history.selection_counts(4).tolist() == pytest.approx([10, 30, 20, 20], abs=2)


@pytest.mark.parametrize(
    ("weights", "ids"),
    [
        ([1.0, 2.0, 3.0], ["a", "b", "c"]),
        ([1.0, 2.0, 3.0], [1, 2, 3]),
        ([1.0, 2.0], [0, 1, 2]),
        ({"a": 1.0, "b": 2.0}, ["a", "b", "c"]),
    ],
)
def test_data_weights_that_do_not_fit_the_ids_are_refused_clearly(weights: Any, ids: list[Any]) -> None:
    strategy = _weighted(weights, min_available=3)
    with pytest.raises(ParameterError, match="data_weights"):
        Federation(strategy, [FakeProxy(f"node-{i}", client_id, number=i) for i, client_id in enumerate(ids)]).play(1)


@pytest.mark.parametrize("weights", [{"a": -1.0, "b": 2.0}, {"a": 0.0, "b": 0.0}, [[1.0, 2.0]], {0: 1.0, "0": 2.0}])
def test_impossible_data_weights_are_refused_at_once(weights: Any) -> None:
    with pytest.raises(ParameterError, match="data_weights"):
        _weighted(weights)


def test_the_callers_data_weights_are_not_changed() -> None:
    weights, array = {"0": 1.0, "1": 2.0, "2": 1.0}, np.array([1.0, 2.0, 1.0])
    for given in (weights, array):
        Federation(_weighted(given), fleet(3)).play(5)
    assert weights == {"0": 1.0, "1": 2.0, "2": 1.0}
    assert array.tolist() == [1.0, 2.0, 1.0]


def test_a_newcomer_without_a_weight_is_refused_and_the_run_goes_on(caplog: Any) -> None:
    strategy = _weighted({"0": 1.0, "1": 1.0, "2": 2.0, "9": 1.0})
    federation = Federation(strategy, fleet(3)).play(3)
    stranger, expected = FakeProxy("node-s", "stranger", number=5), FakeProxy("node-9", "9", number=9)
    federation.manager.register(stranger)
    federation.manager.register(expected)
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        federation.play(5)
    assert len(strategy.history.rounds) == 8
    assert stranger.fits == []
    assert expected.fits
    assert any("stranger" in record.getMessage() for record in caplog.records)


def test_one_broken_client_in_the_first_roll_call_does_not_stop_everyone() -> None:
    """A client that fails is data, not an exception: one that cannot say who it is must not end the run."""

    def broken(proxy: FakeProxy) -> None:
        raise ValueError("Message contains an Error")

    strategy = _weighted({"0": 1.0, "1": 1.0, "2": 2.0})
    Federation(strategy, [*fleet(3), FakeProxy("31337", "3", on_properties=broken)]).play(3)
    assert [r.num_selected for r in strategy.history.rounds] == [2, 2, 2]


# ---- limits -------------------------------------------------------------------------------------------------------


def test_max_clients_refuses_the_rest_and_says_so(caplog: Any) -> None:
    proxies = fleet(6)
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        strategy, federation = _all_in(proxies, max_clients=4)
        federation.play(2)
    assert chosen(strategy) == [["0", "1", "2", "3"]] * 3
    for client_id in ("'4'", "'5'"):
        assert sum(client_id in record.getMessage() for record in caplog.records) == 1
    assert strategy.selector.num_clients == 4


def test_max_new_per_round_admits_a_few_at_a_time() -> None:
    strategy, federation = _all_in(fleet(3), max_new_per_round=2)
    assert chosen(strategy)[-1] == ["0", "1", "2"]  # the first roll call is not limited
    for proxy in [FakeProxy(f"new-{k}", k, number=k) for k in range(3, 8)]:
        federation.manager.register(proxy)
    federation.play(4)
    assert [len(cohort) for cohort in chosen(strategy)] == [3, 5, 7, 8, 8]


def test_max_new_per_round_does_not_hold_back_known_clients() -> None:
    proxies = fleet(5)
    strategy, federation = _all_in(proxies, max_new_per_round=1)
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
