"""Selector parameters given per client reach the right clients, whatever their connections are called."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.roster import ClientValues, Roster
from fedsel_flwr.strategies import BSFL, CSUCBQ, SelectionStrategy
from tests.strategies.helpers import FakeProxy, Federation, fedavg, fleet

pytestmark = pytest.mark.timeout(30)


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


def test_as_a_mapping_it_holds_the_clients_that_are_enrolled() -> None:
    roster = Roster()
    values = ClientValues("data_weights", {"a": 1.0, "b": 2.0}, roster)
    assert (len(values), list(values), dict(values), list(values.items())) == (0, [], {}, [])
    roster.register({"x": "b", "y": "stranger"}, 1)
    assert (len(values), list(values), dict(values), list(values.values())) == (1, [0], {0: 2.0}, [2.0])
    assert (0 in values, 1 in values, values.get(1)) == (True, False, None)
    roster.register({"z": "a"}, 2)
    assert (len(values), dict(values), sorted(values.keys())) == (2, {0: 2.0, 2: 1.0}, [0, 2])
    assert values.given == {"a": 1.0, "b": 2.0}
    with pytest.raises(KeyError):
        values[1]


def test_every_number_given_is_checked_before_anybody_is_enrolled() -> None:
    with pytest.raises(ParameterError, match=r"fairness cannot be met: its sum is 2\.1, but only m = 2"):
        CSUCBQ(clients_per_round=2, max_latency=5.0, fairness={"a": 0.7, "b": 0.7, "c": 0.7}, base=fedavg())
    with pytest.raises(ParameterError, match=r"every one of fairness must be at most 1, got 1\.5"):
        CSUCBQ(clients_per_round=2, max_latency=5.0, fairness={"a": 1.5}, base=fedavg())
