"""What an update weighs, in both APIs: max_examples, max_update_norm, papers without weights, numbers that overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import Random, RandomBySize, create
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.strategies import SelectionStrategy
from tests.strategies import helpers
from tests.strategies.either_api import Server, base_of, close, mean_of, play, selection
from tests.strategies.helpers import fleet, model, update
from tests.strategies.message.helpers import ProbeProxy

LIMITS = pytest.mark.parametrize(("limit", "counts"), [(20, 20), ("auto", 52)])
"""The claims are 10, 13 and 10^12: "auto" is four times the median of what the round's clients claim."""


def _play(
    api: str, selector: Any = None, rounds: int = 1, *, claim: int = 10**12, fault: str | None = None, **options: Any
) -> Server:
    """Three clients, of whom the last claims many examples, or has a fault."""
    proxies = fleet(3, "c")
    proxies[2].num_examples, proxies[2].fault = claim, fault
    return play(api, selector or Random(clients_per_round=3, seed=0), proxies, rounds, min_available=3, **options)


def test_without_a_limit_one_claim_is_the_model(api: str) -> None:
    close(_play(api).models[-1], update(2, model(), 1))


@LIMITS
@pytest.mark.parametrize("averaging", [None, "fedpdp"])
def test_a_claim_above_the_limit_counts_as_the_limit(api: str, limit: Any, counts: int, averaging: Any) -> None:
    played = _play(api, max_examples=limit, averaging=averaging)
    close(played.models[-1], mean_of(range(3), model(), 1, [10, 13, counts]))
    rows = played.strategy.history.clients
    assert [(row.completed, row.kept, row.num_examples) for row in rows] == [(True, True, n) for n in (10, 13, counts)]
    assert [row.problem for row in rows] == ["", "", f"max_examples: 1000000000000 claimed, counted as {counts}"]
    assert played.strategy.history.problem_counts() == {"max_examples": 1}
    if averaging is None:
        assert [metrics["num-examples"] for metrics in played.received()[0]] == [10, 13, counts]


@LIMITS
def test_a_selector_reads_the_limit_from_the_roll_call_on(api: str, limit: Any, counts: int, caplog: Any) -> None:
    played = _play(api, RandomBySize(clients_per_round=1, seed=0), 3, max_examples=limit)
    assert played.strategy.selector.state_dict()["size"].tolist() == [10, 13, counts]
    assert f"max_examples: client c2: 1000000000000 claimed, counted as {counts}" in caplog.messages


@LIMITS
def test_evaluations_by_clients_weigh_by_the_limit(api: str, limit: Any, counts: int) -> None:
    losses = []
    base = base_of(api, fraction_evaluate=1.0)
    aggregate = base.aggregate_evaluate
    base.aggregate_evaluate = lambda *args: losses.append(aggregate(*args)) or losses[-1]
    _play(api, base=base, max_examples=limit)
    loss = losses[-1][0] if api == "legacy" else losses[-1]["loss"]
    assert loss == pytest.approx((10 * 0.1 + 13 * 0.2 + counts * 0.3) / (23 + counts))


def test_auto_follows_what_clients_claim_and_keeps_it_over_a_restart() -> None:
    core = (strategy := _play("legacy", Random(clients_per_round=2, seed=0), max_examples="auto").strategy).core
    assert core.parts.registrar.max_examples() == 52
    core.parts.registrar.note_sizes(np.array([1, 2]), np.array([10, 10]))
    assert core.parts.registrar.max_examples() == 40
    assert core.parts.registrar.max_examples(np.array([3]), np.array([11])) == 40  # of two in the middle the lower
    again = SelectionStrategy(Random(clients_per_round=2, seed=0), max_latency=9.0, max_examples="auto")
    assert again.core.parts.registrar.max_examples() is None
    again.load_state_dict(strategy.state_dict())
    assert again.core.parts.registrar.max_examples() == 40


def _changed(api: str, change: Any, monkeypatch: Any, rounds: int = 1, **options: Any) -> Server:
    """Two honest clients and one whose arrays are changed."""
    monkeypatch.setitem(helpers.FAULTS, "changed", helpers.arrays_fault(lambda own: [change(a) for a in own]))
    return _play(api, rounds=rounds, claim=16, fault="changed", **options)


def test_an_update_above_the_limit_is_a_failure(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    played = _changed(api, lambda a: 1000 * a, monkeypatch, max_update_norm=20.0)
    last = played.strategy.history.clients[-1]
    assert (last.client_id, last.completed, last.latency_s) == ("c2", False, 9.0)
    norm = np.sqrt(sum((1e6 * array.astype(float) ** 2).sum() for array in update(2, model(), 1)))
    assert last.problem == f"update norm: {norm:.6g} is above max_update_norm = 20"
    assert played.strategy.history.problem_counts() == {"update norm": 1}
    metrics, failures = played.received()
    assert [one["num-examples"] for one in metrics] == [10, 13]
    assert failures == [f"client c2: {last.problem}"]
    close(played.models[-1], mean_of(range(2), model(), 1))


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedAvgM", "FedMedian"])
def test_finite_numbers_whose_squares_overflow_poison_no_base(api: str, name: str, monkeypatch: Any) -> None:
    """3e38 is a float32; let in, it made a model of NaN of FedAvgM's, and FedAdam's step 0 for ever."""
    own: dict[str, Any] = {"FedAvgM": {"server_momentum": 0.9}, "FedAvg": {"inplace": False}}
    base = base_of(api, name, **(own.get(name, {}) if api == "legacy" else {}))
    played = _changed(api, lambda a: np.full_like(a, 3e38), monkeypatch, 3, base=base)
    assert all(np.isfinite(array).all() and 0 < np.abs(array).max() < 100 for array in played.models[-1])
    kept = [value for key, value in vars(base).items() if key in ("m_t", "v_t", "momentum_vector") and value]
    held = [np.asarray(a) for value in kept for a in (value.values() if isinstance(value, dict) else value)]
    assert all(np.isfinite(array).all() for array in held)
    assert played.strategy.history.problem_counts() == {"arrays": 3}
    assert played.strategy.history.clients[-1].problem == "arrays: 3e+38 at 0, beyond 1e+18"


# ---- papers whose public codes average without weights ---------------------------------------------------------------

UNWEIGHTED = ("power-of-choice", "cpow-d", "rpow-d", "active-fl", "fedcor")
FLEET = 4


def after_a_round(api: str, name: str, **options: Any) -> list[np.ndarray]:
    """The global model after a round in which all four clients, with 10 to 19 examples, train."""
    clients = [ProbeProxy(f"node-{k}", k, number=k, extra={"loss": 1.0, "train_loss": 1.0}) for k in range(FLEET)]
    strategy = selection(api, create(name, clients_per_round=FLEET, seed=0), **options)
    return Server(api, strategy, clients).play(1).models[0]


@pytest.mark.parametrize("name", UNWEIGHTED)
def test_the_new_model_is_the_plain_mean_and_fedpdp_brings_the_weights_back(api: str, name: str) -> None:
    plain, weighted = after_a_round(api, name), after_a_round(api, name, averaging="fedpdp")
    close(plain, mean_of(range(FLEET), model(), 1, [1] * FLEET))
    close(weighted, mean_of(range(FLEET), model(), 1))
    assert all(np.abs(mean - by_size).max() > 1e-3 for mean, by_size in zip(plain, weighted, strict=True))


def test_a_scenario_s_own_averaging_overrules_the_paper_s() -> None:
    selector = create("rpow-d", clients_per_round=3)
    for given, expected in (
        ({}, ("mean", True)), ({"averaging": "fedpdp"}, ("fedpdp", False)), ({"averaging": "mean"}, ("mean", False)),
    ):  # fmt: skip
        resolved = resolve_settings(selector, **given)
        assert (resolved.averaging, resolved.averaging_is_papers) == expected
    assert resolve_settings(Random(clients_per_round=3)).averaging is None


@pytest.mark.parametrize("name", ["rpow-d", "cpow-d", "fedcor"])
def test_the_vectorized_engine_averages_so_too(name: str) -> None:
    """Ten clients of unequal sizes, all of whom train: with the weights the model is FedAvg's of random."""
    keys = {"num_clients": 10, "clients_per_round": 10, "rounds": 1, "partition.alpha": 0.3}

    def trained(selector: str, **more: Any) -> list[np.ndarray]:
        scenario = load_scenario("smoke", {**keys, "partition.kind": "dirichlet", "selector": selector, **more})
        return list(simulate(scenario, engine="vectorized").arrays)

    usual, plain = trained("random"), trained(name)
    close(usual, trained(name, **{"aggregation.averaging": "fedpdp"}))
    close(plain, trained("random", **{"aggregation.averaging": "mean"}))
    assert max(np.abs(a - c).max() for a, c in zip(usual, plain, strict=True)) > 1e-4
