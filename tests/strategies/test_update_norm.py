"""max_update_norm and numbers that overflow, in both of Flower's APIs: refused, a failure for the base, and named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.common import ndarrays_to_parameters
from flwr.server import strategy as legacy_bases
from flwr.serverapp import strategy as message_bases

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies import helpers
from tests.strategies.helpers import FakeProxy, Federation, RecordingBase, initial, model, update
from tests.strategies.message import faults
from tests.strategies.message.helpers import FakeGrid, FakeNode, crowd, node_id, play
from tests.strategies.message.helpers import RecordingBase as RecordingMessages

APIS = pytest.mark.parametrize("api", ["legacy", "message"])
BASES = ["FedAvg", "FedAdam", "FedYogi", "FedAdagrad", "FedAvgM", "FedMedian", "FedTrimmedAvg", "Krum"]


def _play(api: str, change: Any, monkeypatch: Any, base: Any = None, rounds: int = 1, **options: Any) -> Any:
    """Two honest clients and one whose arrays are changed; returns the strategy, its base and the last model."""
    options = {"max_latency": 9.0, "min_available": 3, **options}
    if api == "legacy":
        monkeypatch.setitem(helpers.FAULTS, "changed", helpers.arrays_fault(lambda own: [change(a) for a in own]))
        base = base or RecordingBase()
        strategy: Any = LegacyStrategy(Random(clients_per_round=3, seed=0), base, **options)
        proxies = [FakeProxy(f"n{k}", f"c{k}", number=k, fault="changed" if k == 2 else None) for k in range(3)]
        return strategy, base, Federation(strategy, proxies).play(rounds).arrays()
    base = base or RecordingMessages()
    strategy = MessageStrategy(Random(clients_per_round=3, seed=0), base, **options)
    nodes = crowd(2, prefix="c")
    fault = faults._arrays(lambda own: {key: change(a) for key, a in own.items()})
    nodes[node_id(2)] = FakeNode(FakeProxy("2", "c2", number=2), fault=fault)
    result, _ = play(strategy, FakeGrid(nodes), rounds)
    return strategy, base, result.arrays.to_numpy_ndarrays() if result.arrays is not None else []


@APIS
def test_an_update_above_the_limit_is_a_failure(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, base, arrays = _play(api, lambda a: 1000 * a, monkeypatch, max_update_norm=20.0)
    last = strategy.history.clients[-1]
    norm = np.sqrt(sum((1000.0 * a.astype(float)).ravel() @ (1000.0 * a.astype(float)).ravel() for a in _third()))
    assert (last.client_id, last.completed, last.latency_s) == ("c2", False, 9.0)
    assert last.problem == f"update norm: {norm:.6g} is above max_update_norm = 20"
    assert strategy.history.problem_counts() == {"update norm": 1}
    (given,) = base.given
    if api == "legacy":
        results, failures = given
        assert [client.cid for client, _ in results] == ["n0", "n1"]
        assert [str(one) for one in failures] == [f"client c2: {last.problem}"]
    else:
        assert [message.has_error() for message in given] == [False, False, True]
        assert given[-1].error.reason == f"client c2: {last.problem}"
    mean = [(10 * update(0, model(), 1)[i] + 13 * update(1, model(), 1)[i]) / 23 for i in range(2)]
    for array, expected in zip(arrays, mean, strict=True):
        np.testing.assert_allclose(array.ravel(), expected.ravel(), rtol=1e-5, atol=1e-6)


def _third() -> list[Any]:
    return update(2, model(), 1)


@APIS
def test_an_update_at_the_limit_counts(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = float(np.sqrt(sum(float((a.astype(float) ** 2).sum()) for a in _third())))
    strategy, *_ = _play(api, lambda a: a, monkeypatch, max_update_norm=norm * (1 + 1e-9))
    assert strategy.history.problem_counts() == {}
    strategy, *_ = _play(api, lambda a: a, monkeypatch, max_update_norm=norm * (1 - 1e-9))
    assert strategy.history.clients[-1].problem.startswith("update norm: ")


def test_under_secure_aggregation_there_is_no_norm_of_a_client() -> None:
    strategy = LegacyStrategy(Random(clients_per_round=2, seed=0), RecordingBase(), max_latency=9.0, max_update_norm=1)
    federation = Federation(strategy, [FakeProxy("a", "a"), FakeProxy("b", "b", number=1)])
    pairs = strategy.configure_fit(server_round=1, parameters=initial(), client_manager=federation.manager)
    results = [(client, client.fit(ins, None, 1)) for client, ins in pairs]
    shared = ndarrays_to_parameters(model(1.0))
    for _, res in results:
        res.parameters = shared
    with pytest.raises(RunError, match=r"max_update_norm reads each client's update.*SecAgg"):
        strategy.aggregate_fit(1, results, [])


@pytest.mark.parametrize("name", BASES)
@APIS
def test_finite_numbers_whose_squares_overflow_poison_no_base(
    api: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3e38 is a float32; let in, it made a model of NaN of FedAvgM's, and FedAdam's step 0 for ever."""
    if api == "legacy":
        options: dict[str, Any] = {"initial_parameters": initial()}
        options |= {"server_momentum": 0.9} if name == "FedAvgM" else {"inplace": False} if name == "FedAvg" else {}
        base = getattr(legacy_bases, name)(fraction_evaluate=0.0, **options)
    else:
        base = getattr(message_bases, name)(fraction_evaluate=0.0)
    strategy, _, arrays = _play(api, lambda a: np.full_like(a, 3e38), monkeypatch, base, rounds=3)
    assert arrays
    assert all(np.isfinite(array).all() and 0 < np.abs(array).max() < 100 for array in arrays)
    kept = [value for key, value in vars(base).items() if key in ("m_t", "v_t", "momentum_vector") and value]
    held = [np.asarray(a) for value in kept for a in (value.values() if isinstance(value, dict) else value)]
    assert all(np.isfinite(array).all() for array in held)
    assert strategy.history.problem_counts() == {"arrays": 3}
    assert strategy.history.clients[-1].problem == "arrays: 3e+38 at 0, beyond 1e+18"
