"""max_examples in both of Flower's APIs: a claim above it counts as so many, is named, and the update is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Random, RandomBySize
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.helpers import FakeProxy, Federation, RecordingBase, model, update
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id, play
from tests.strategies.message.helpers import RecordingBase as RecordingMessages

APIS = pytest.mark.parametrize("api", ["legacy", "message"])
CLAIMS = (10, 13, 10**12)


def _play(api: str, selector: Any = None, rounds: int = 1, base: Any = None, **options: Any) -> Any:
    """Three clients, of whom the last claims 10^12 examples; returns the strategy, its base and the last model."""
    options = {"max_latency": 9.0, "min_available": 3, **options}
    selector = selector or Random(clients_per_round=3, seed=0)
    proxies = [FakeProxy(f"n{k}", f"c{k}", number=k) for k in range(3)]
    for proxy, claim in zip(proxies, CLAIMS, strict=True):
        proxy.num_examples = claim
    if api == "legacy":
        base = base or RecordingBase()
        strategy: Any = LegacyStrategy(selector, base, **options)
        return strategy, base, Federation(strategy, proxies).play(rounds).arrays()
    base = base or RecordingMessages()
    strategy = MessageStrategy(selector, base, **options)
    result, _ = play(strategy, FakeGrid({node_id(k): FakeNode(proxies[k]) for k in range(3)}), rounds)
    return strategy, base, result.arrays.to_numpy_ndarrays()


def _mean(weights: tuple[int, ...]) -> list[Any]:
    updates = [update(k, model(), 1) for k in range(3)]
    return [sum(w * one[i] for w, one in zip(weights, updates, strict=True)) / sum(weights) for i in range(2)]


@APIS
def test_without_a_limit_one_claim_is_the_model_and_with_it_it_counts_as_the_limit(api: str) -> None:
    _, _, free = _play(api)
    for array, alone in zip(free, update(2, model(), 1), strict=True):
        np.testing.assert_allclose(array, alone, rtol=1e-5, atol=1e-6)
    strategy, base, arrays = _play(api, max_examples=20)
    for array, expected in zip(arrays, _mean((10, 13, 20)), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    rows = strategy.history.clients
    assert [(row.completed, row.kept, row.num_examples) for row in rows] == [(True, True, n) for n in (10, 13, 20)]
    assert [row.problem for row in rows] == ["", "", "max_examples: 1000000000000 claimed, counts as 20"]
    assert strategy.history.problem_counts() == {"max_examples": 1}
    (given,) = base.given
    if api == "legacy":
        assert [res.num_examples for _, res in given[0]] == [10, 13, 20]
    else:
        assert [message.content["metrics"]["num-examples"] for message in given] == [10, 13, 20]


@APIS
def test_a_selector_reads_the_limit_from_the_roll_call_on(api: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy, *_ = _play(api, RandomBySize(clients_per_round=1, seed=0), max_examples=20, rounds=3)
    sizes = strategy.selector.state_dict()["size"]
    assert sizes.tolist() == [10, 13, 20]
    assert "max_examples: client c2: 1000000000000 claimed, counts as 20" in caplog.messages


@APIS
def test_averaging_schemes_weigh_by_the_limit(api: str) -> None:
    strategy, _, arrays = _play(api, averaging="fedpdp", max_examples=20)
    for array, expected in zip(arrays, _mean((10, 13, 20)), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    assert strategy.history.problem_counts() == {"max_examples": 1}


@APIS
def test_evaluations_by_clients_weigh_by_the_limit(api: str) -> None:
    from flwr.server.strategy import FedAvg as LegacyFedAvg
    from flwr.serverapp.strategy import FedAvg as MessageFedAvg

    losses = []
    base: Any = (LegacyFedAvg if api == "legacy" else MessageFedAvg)(fraction_evaluate=1.0)
    aggregate = base.aggregate_evaluate
    base.aggregate_evaluate = lambda *args: losses.append(aggregate(*args)) or losses[-1]
    _play(api, base=base, max_examples=20)
    loss = losses[-1][0] if api == "legacy" else losses[-1]["loss"]
    assert loss == pytest.approx((10 * 0.1 + 13 * 0.2 + 20 * 0.3) / 43)


@APIS
def test_auto_is_four_times_the_median_claim_and_counted_when_it_cuts(api: str) -> None:
    """The claims are 10, 13 and 10^12: nobody was asked before, and the median of the round's claims is 13."""
    strategy, base, arrays = _play(api, max_examples="auto")
    for array, expected in zip(arrays, _mean((10, 13, 52)), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    assert [row.num_examples for row in strategy.history.clients] == [10, 13, 52]
    assert strategy.history.problem_counts() == {"max_examples": 1}
    assert strategy.history.clients[2].problem == "max_examples: 1000000000000 claimed, counts as 52"
    (given,) = base.given
    if api == "legacy":
        assert [res.num_examples for _, res in given[0]] == [10, 13, 52]
    else:
        assert [message.content["metrics"]["num-examples"] for message in given] == [10, 13, 52]


@APIS
def test_a_selector_reads_the_automatic_limit_from_the_roll_call_on(api: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy, *_ = _play(api, RandomBySize(clients_per_round=1, seed=0), max_examples="auto", rounds=3)
    assert strategy.selector.state_dict()["size"].tolist() == [10, 13, 52]
    assert "max_examples: client c2: 1000000000000 claimed, counts as 52" in caplog.messages


def test_auto_follows_what_clients_claim_and_keeps_it_over_a_restart() -> None:
    """Clients 1 and 2 claim as many as client 0 later on; a run that goes on has the same limit."""
    strategy, *_ = _play("legacy", Random(clients_per_round=2, seed=0), max_examples="auto")
    assert strategy.core.max_examples == 52
    core = strategy.core
    core.parts.registrar.note_sizes(np.array([1, 2]), np.array([10, 10]))
    assert core.max_examples == 40
    assert core.parts.registrar.max_examples(np.array([3]), np.array([11])) == 40  # of two in the middle the lower
    again = LegacyStrategy(Random(clients_per_round=2, seed=0), max_latency=9.0, min_available=3, max_examples="auto")
    assert again.core.max_examples is None
    again.load_state_dict(strategy.state_dict())
    assert again.core.max_examples == strategy.core.max_examples


@APIS
def test_evaluations_by_clients_weigh_by_the_automatic_limit(api: str) -> None:
    from flwr.server.strategy import FedAvg as LegacyFedAvg
    from flwr.serverapp.strategy import FedAvg as MessageFedAvg

    losses = []
    base: Any = (LegacyFedAvg if api == "legacy" else MessageFedAvg)(fraction_evaluate=1.0)
    aggregate = base.aggregate_evaluate
    base.aggregate_evaluate = lambda *args: losses.append(aggregate(*args)) or losses[-1]
    _play(api, base=base, max_examples="auto")
    loss = losses[-1][0] if api == "legacy" else losses[-1]["loss"]
    assert loss == pytest.approx((10 * 0.1 + 13 * 0.2 + 52 * 0.3) / 75)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "20"])
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ParameterError, match="max_examples"):
        LegacyStrategy(Random(clients_per_round=1), max_examples=value)
