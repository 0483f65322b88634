"""Clients that lie, break or stay away, through Flower's own server: the run goes on and nothing is poisoned."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.common import FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays

from fedsel_flwr import selectors
from fedsel_flwr.errors import FedSelError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import BSFL, CSUCB, MetricKeys, SelectionStrategy
from tests.strategies import helpers
from tests.strategies.helpers import (
    ABSENT,
    EXAMPLE_FAULTS,
    FAULTS,
    LATENCY_FAULTS,
    UPDATE_FAULTS,
    FakeProxy,
    Federation,
    RecordingBase,
    fedavg,
    fleet,
    initial,
    model,
    row_of,
    update,
)

pytestmark = pytest.mark.timeout(60)
MAX_LATENCY, MIN_LATENCY, COHORT, ROUNDS, TIMEOUT = 4.0, 0.1, 8, 16, 0.05
KEEPS_UPDATE = {*LATENCY_FAULTS, "impostor", "energy-negative", "energy-text"}


def _wobble(number: int) -> Callable[[int], float]:
    return lambda server_round: 0.3 + 0.17 * number + 0.05 * (server_round % 3)


def _crowd() -> list[FakeProxy]:
    """Six honest clients, one of each hostile kind, one that is late and one whose fit claims to be another."""
    honest = [FakeProxy(f"node-{k}", f"h{k}", number=k, latency=_wobble(k)) for k in range(6)]
    hostile = [
        FakeProxy(f"evil-{name}", f"bad-{name}", number=20 + i, latency=1.0, fault=name)
        for i, name in enumerate(FAULTS)
    ]  # fmt: skip
    return [*honest, *hostile, FakeProxy("evil-late", "bad-late", number=60, latency=3 * MAX_LATENCY)]


STRATEGIES: dict[str, tuple[Callable[[Any], SelectionStrategy], Callable[[float], float]]] = {
    "cs-ucb": (
        lambda base: CSUCB(clients_per_round=COHORT, max_latency=MAX_LATENCY, seed=4, base=base),
        lambda latency: 1.0 - min(latency, MAX_LATENCY) / MAX_LATENCY,
    ),
    "bsfl": (
        lambda base: BSFL(
            clients_per_round=COHORT, min_latency=MIN_LATENCY, alpha=2.0, max_latency=MAX_LATENCY, seed=4, base=base
        ),
        lambda latency: min(1.0, MIN_LATENCY / latency),
    ),
}


@pytest.fixture(scope="module", params=sorted(STRATEGIES))
def aftermath(request: pytest.FixtureRequest) -> Any:
    """One run with everyone at once; the tests below look at it from different sides."""
    build, reward = STRATEGIES[request.param]
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("fedsel_flwr")
    logger.addHandler(handler)
    try:
        base = RecordingBase()
        strategy, proxies = build(base), _crowd()
        federation = Federation(strategy, proxies, max_workers=COHORT, timeout=TIMEOUT).play(ROUNDS)
    finally:
        logger.removeHandler(handler)
    messages = [record.getMessage() for record in records]
    return strategy, proxies, federation, base, messages, reward


@pytest.mark.timeout(60)
def test_the_run_goes_on_and_every_kind_was_met(aftermath: Any) -> None:
    strategy, proxies, federation, *_ = aftermath
    assert [r.round for r in strategy.history.rounds] == list(range(1, ROUNDS + 1))
    assert {row.client_id for row in strategy.history.clients} == {p.client_id for p in proxies}
    assert all(np.isfinite(array).all() for array in federation.arrays())
    assert [a.shape for a in federation.arrays()] == [a.shape for a in model()]
    assert [a.dtype for a in federation.arrays()] == [a.dtype for a in model()]


def test_selected_minus_returned_failed_and_is_told_max_latency(aftermath: Any) -> None:
    strategy, *_ = aftermath
    for row in strategy.history.clients:
        if row.client_id.startswith("h"):
            assert row.completed, row
            assert row.problem == "", row
            continue
        kind = row.client_id.removeprefix("bad-")
        assert row.problem, row
        if kind != "latency-infinite":  # both readings are fair: unusable, or later than any deadline
            assert row.completed == (kind in KEEPS_UPDATE), row
        if not kind.startswith(("impostor", "energy")):
            assert row.latency_s == MAX_LATENCY, row
        assert not row.energy_j < 0


def test_each_fault_is_counted(aftermath: Any) -> None:
    strategy, *_ = aftermath
    met = Counter(row.client_id.removeprefix("bad-") for row in strategy.history.clients)
    counts = strategy.history.problem_counts()
    assert counts["arrays"] == sum(met[name] for name in UPDATE_FAULTS)
    assert counts["num_examples"] == sum(met[name] for name in EXAMPLE_FAULTS)
    assert counts["exception"] == met["raises"]
    assert counts["no answer within 0.05 s"] == met["straggler"]
    assert counts["status"] == met["status"]
    assert counts["identity"] == met["impostor"]
    assert counts["energy"] == met["energy-negative"] + met["energy-text"]
    late_or_unusable = sum(met[name] for name in LATENCY_FAULTS) + met["latency-infinite"] + met["late"]
    assert counts["latency"] + counts["late"] == late_or_unusable
    assert sum(counts.values()) == sum(met[name] for name in (*FAULTS, "late"))  # one fault each, nobody else


def test_each_fault_is_named_in_the_log_with_the_clients_id(aftermath: Any) -> None:
    strategy, _, _, _, messages, _ = aftermath
    for row in strategy.history.clients:
        naming = [m for m in messages if row.client_id in m.replace(",", " ").replace(":", " ").split()]
        if row.client_id.startswith("h"):
            assert not naming, naming
        else:
            assert len(naming) == sum(r.client_id == row.client_id for r in strategy.history.clients), naming


def test_the_selector_stays_finite_and_honest_statistics_come_from_honest_rows(aftermath: Any) -> None:
    strategy, proxies, _, _, _, reward = aftermath
    state = strategy.selector.state_dict()
    assert all(np.isfinite(np.asarray(value, dtype=float)).all() for value in state.values())
    for proxy in proxies:
        row = row_of(strategy, proxy.client_id)
        mine = [r.latency_s for r in strategy.history.clients if r.client_id == proxy.client_id]
        assert state["plays"][row] == len(mine) == len(proxy.fit_rounds)
        if proxy.fault is None and proxy.client_id.startswith("h"):
            assert mine == [_wobble(proxy.number)(r) for r in proxy.fit_rounds]  # what it said itself
            mean = 0.0
            for n, latency in enumerate(mine, start=1):
                mean += (reward(latency) - mean) / n
            assert state["mean"][row] == pytest.approx(mean, rel=1e-12)
        elif not str(proxy.fault).startswith(("impostor", "energy")):
            assert state["mean"][row] == pytest.approx(reward(MAX_LATENCY), abs=1e-12)


def test_honest_statistics_equal_those_of_a_selector_that_saw_honest_rows_alone(aftermath: Any) -> None:
    strategy, proxies, *_ = aftermath
    twin: Any = (
        selectors.CSUCB(clients_per_round=COHORT, max_latency=MAX_LATENCY)
        if isinstance(strategy, CSUCB)
        else selectors.BSFL(clients_per_round=COHORT, min_latency=MIN_LATENCY)
    )
    twin.inform(np.arange(len(proxies)))
    honest = sorted({row.client for row in strategy.history.clients if row.client_id.startswith("h")})
    for entry in strategy.history.rounds:
        rows = [r for r in strategy.history.clients if r.round == entry.round and r.client in honest]
        twin.observe(
            selectors.RoundReport(
                clients=np.array([r.client for r in rows], dtype=np.int64),
                completed=np.array([r.completed for r in rows], dtype=bool),
                latency=np.array([r.latency_s for r in rows]),
            )
        )
    for name in ("plays", "mean"):
        assert strategy.selector.state_dict()[name][honest].tolist() == twin.state_dict()[name][honest].tolist()


def test_failures_and_garbage_reach_the_base_as_failures(aftermath: Any) -> None:
    strategy, proxies, _, base, *_ = aftermath
    ids = {proxy.cid: proxy.client_id for proxy in proxies}
    entries = [r for r in strategy.history.rounds if r.num_completed]
    assert len(base.given) == len(entries)
    for entry, (results, failures) in zip(entries, base.given, strict=True):
        rows = [r for r in strategy.history.clients if r.round == entry.round]
        assert [ids[client.cid] for client, _ in results] == [r.client_id for r in rows if r.completed]
        assert all(isinstance(client, FakeProxy) for client, _ in results)
        assert len(failures) == sum(not r.completed for r in rows)
        for failure in failures:
            assert isinstance(failure, BaseException | tuple)
            if isinstance(failure, tuple):
                assert isinstance(failure[0], FakeProxy)
                assert isinstance(failure[1], FitRes)
        given = {ids[f[0].cid] for f in failures if isinstance(f, tuple)}
        assert given == {r.client_id for r in rows if r.client_id == "bad-status"}
        raised = Counter(type(f).__name__ for f in failures if isinstance(f, BaseException))
        assert raised["TypeError"] == sum(r.client_id == "bad-raises" for r in rows)
        assert raised["ValueError"] - sum(r.client_id == "bad-straggler" for r in rows) >= 0


def test_the_model_is_the_average_of_the_completed_rows(aftermath: Any) -> None:
    strategy, proxies, federation, *_ = aftermath
    numbers = {proxy.client_id: proxy.number for proxy in proxies}
    current = model()
    for entry in strategy.history.rounds:
        ks = [numbers[r.client_id] for r in strategy.history.clients if r.round == entry.round and r.completed]
        if ks:
            total = sum(10 + 3 * k for k in ks)
            updates = [update(k, current, entry.round) for k in ks]
            current = [
                sum(u[i] * ((10 + 3 * k) / total) for k, u in zip(ks, updates, strict=True)).astype(np.float32)
                for i in range(len(current))
            ]
        actual = federation.models[entry.round - 1]
        arrays = parameters_to_ndarrays(Parameters(tensors=actual, tensor_type="numpy.ndarray"))
        for a, b in zip(arrays, current, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        current = arrays


# ---- one fault at a time ------------------------------------------------------------------------------------------


@pytest.mark.timeout(30)
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_alone_with_nobody_else_does_not_stop_the_run(fault: str) -> None:
    strategy = BSFL(clients_per_round=2, min_latency=0.1, max_latency=5.0, seed=0, base=fedavg())
    proxies = [FakeProxy("a", "a", number=1, fault=fault), FakeProxy("b", "b", number=2, fault=fault)]
    federation = Federation(strategy, proxies, timeout=0.02).play(3)
    assert [r.num_selected for r in strategy.history.rounds] == [2, 2, 2]
    assert strategy.selector.state_dict()["plays"].tolist() == [3, 3]
    assert all(row.problem for row in strategy.history.clients)
    if fault not in KEEPS_UPDATE and fault != "latency-infinite":
        assert federation.models == [initial().tensors] * 3  # the global model stays


def test_an_update_that_the_model_cannot_hold_does_not_change_the_models_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad arrays (shape, dtype, non-finite) are not completed: 1e300 is not finite in a float32 model."""
    fault = helpers.arrays_fault(lambda arrays: [np.full(a.shape, 1e300, dtype=np.float64) for a in arrays])
    monkeypatch.setitem(FAULTS, "too-large", fault)
    strategy = CSUCB(clients_per_round=3, max_latency=5.0, seed=0, base=fedavg())
    proxies = [FakeProxy("a", "a", number=1, fault="too-large"), *fleet(2, prefix="h")]
    federation = Federation(strategy, proxies).play(2)
    assert [a.dtype for a in federation.arrays()] == [np.dtype(np.float32)] * 2
    assert all(np.isfinite(a).all() and np.abs(a).max() < 100 for a in federation.arrays())
    assert [r.completed for r in strategy.history.clients if r.client_id == "a"] == [False, False]


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int8, np.float16, np.bool_])
def test_another_dtype_changes_neither_the_models_type_nor_the_honest_updates(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused or converted: but FedAvg, left alone, adds everyone into an array of the first client's type."""
    monkeypatch.setitem(FAULTS, "dtype", helpers.arrays_fault(lambda arrays: [a.astype(dtype) for a in arrays]))
    strategy = CSUCB(clients_per_round=2, max_latency=5.0, seed=0, base=fedavg())
    proxies = [FakeProxy("a", "a", number=1, fault="dtype"), FakeProxy("h", "h", number=2)]
    federation = Federation(strategy, proxies).play(1)
    assert [a.dtype for a in federation.arrays()] == [np.dtype(np.float32)] * 2
    rows = {r.client_id: r for r in strategy.history.clients}
    assert rows["h"].completed
    own, other = update(2, model(), 1), [a.astype(dtype) for a in update(1, model(), 1)]
    if rows["a"].completed:
        own = [(16 * h + 13 * a.astype(np.float32)) / 29 for h, a in zip(own, other, strict=True)]
    for array, expected in zip(federation.arrays(), own, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


def test_honest_clients_are_not_refused_because_the_base_widened_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages of counters and of float32 weights may come back as float64; clients go on sending what they hold."""

    def as_held(arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [arrays[0].astype(np.float32), np.rint(arrays[1]).astype(np.int64)]

    class Widens(RecordingBase):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            parameters, metrics = super().aggregate_fit(server_round, results, failures)
            arrays = [a.astype(np.float64) for a in parameters_to_ndarrays(parameters)]
            return ndarrays_to_parameters(arrays), metrics

    start = ndarrays_to_parameters([np.zeros((3, 2), dtype=np.float32), np.zeros(2, dtype=np.int64)])
    monkeypatch.setitem(FAULTS, "as-held", helpers.arrays_fault(as_held))
    base = Widens(initial_parameters=start, inplace=False)
    strategy = CSUCB(clients_per_round=3, max_latency=5.0, seed=0, base=base)
    Federation(strategy, [FakeProxy(f"n{k}", k, number=k, fault="as-held") for k in range(3)]).play(3)
    assert [r.num_completed for r in strategy.history.rounds] == [3, 3, 3], strategy.history.problem_counts()


def test_a_claim_never_moves_an_observation_to_another_row() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=10.0, seed=0, base=fedavg())
    victim = FakeProxy("v", "h0", number=0, latency=1.0)
    thief = FakeProxy("t", "thief", number=1, latency=9.0, fault="impostor")  # its fits claim to be h0
    Federation(strategy, [victim, thief]).play(5)
    state = strategy.selector.state_dict()
    assert state["plays"].tolist() == [5, 5]
    assert state["mean"][row_of(strategy, "h0")] == pytest.approx(0.9)
    assert state["mean"][row_of(strategy, "thief")] == pytest.approx(0.1)
    assert strategy.history.problem_counts()["identity"] == 5


# ---- metric keys ----------------------------------------------------------------------------------------------


def test_other_strategies_keys_survive_and_only_our_faulty_keys_go() -> None:
    base = RecordingBase()
    extra = {"norm_bit": 1, "accuracy": float("nan"), "note": "fast", "num-examples": -1}
    strategy = CSUCB(clients_per_round=3, max_latency=5.0, seed=0, base=base)
    proxies = [
        FakeProxy("a", "a", number=0, extra=dict(extra)),
        FakeProxy("b", "b", number=1, fault="latency-text", extra=dict(extra)),
        FakeProxy("c", "c", number=2, fault="energy-text", extra={**extra, "train_loss": float("nan")}),
    ]
    Federation(strategy, proxies).play(1)
    ((results, failures),) = base.given
    assert failures == []
    keys = {client.cid: set(res.metrics) for client, res in results}
    ours = {"latency_s", "energy_j", "client_id"}
    assert keys["a"] == {*extra, *ours}
    assert keys["b"] == {*extra, *ours} - {"latency_s"}
    assert keys["c"] == {*extra, *ours, "train_loss"} - {"energy_j"}
    assert np.isnan(results[2][1].metrics["train_loss"])  # Flower's quickstarts report it: it is not ours alone
    assert strategy.history.problem_counts() == {"latency": 1, "energy": 1, "train_loss": 1}
    for client, res in results:
        assert res.metrics["note"] == "fast", client.cid
        assert res.metrics["norm_bit"] == 1
        assert np.isnan(res.metrics["accuracy"])


def test_cleaning_does_not_change_the_replies_it_was_given() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=5.0, seed=0, base=RecordingBase())
    federation = Federation(strategy, [FakeProxy("a", "a", fault="latency-text"), FakeProxy("b", "b", number=1)])
    pairs = strategy.configure_fit(server_round=1, parameters=initial(), client_manager=federation.manager)
    results = [(client, client.fit(ins, None, 1)) for client, ins in pairs]
    before = [dict(res.metrics) for _, res in results]
    given = list(results)
    strategy.aggregate_fit(1, results, [])
    assert [res.metrics for _, res in results] == before
    assert results == given


def test_metric_keys_can_be_renamed() -> None:
    base = RecordingBase()
    strategy = CSUCB(
        clients_per_round=2, max_latency=5.0, seed=0, base=base,
        metric_keys=MetricKeys(latency="seconds", energy="joules", client_id="name"),
    )  # fmt: skip
    proxies = [
        FakeProxy("b", number=0, latency=-1, extra={"seconds": 1.5, "joules": 2.0}),
        FakeProxy("a", number=1, latency=-1, extra={"seconds": "fast", "joules": 2.5}),
    ]
    Federation(strategy, proxies).play(1)
    rows = {row.client_id: row for row in strategy.history.clients}
    assert (rows["b"].latency_s, rows["b"].energy_j, rows["b"].problem) == (1.5, 2.0, "")
    assert rows["a"].latency_s == 5.0
    ((results, _),) = base.given
    assert all(res.metrics["latency_s"] == -1 for _, res in results)  # not ours here


def test_a_dead_client_is_not_asked_for_ever() -> None:
    strategy = BSFL(clients_per_round=2, min_latency=0.1, alpha=0.0, max_latency=5.0, seed=0, base=fedavg())
    proxies = [FakeProxy("dead", "dead", fault="raises"), *(
        FakeProxy(f"n{k}", f"h{k}", number=k, latency=0.12) for k in range(3)
    )]  # fmt: skip
    Federation(strategy, proxies).play(40)
    counts = Counter(row.client_id for row in strategy.history.clients)
    assert counts["dead"] < min(counts["h0"], counts["h1"], counts["h2"])


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "5", True])
def test_wrong_settings_are_refused(value: Any) -> None:
    with pytest.raises(FedSelError, match="max_latency"):
        SelectionStrategy(Random(clients_per_round=2), max_latency=value)
    with pytest.raises(FedSelError, match="min_completed"):
        SelectionStrategy(Random(clients_per_round=2), min_completed=value)
    with pytest.raises(FedSelError, match="channels"):
        SelectionStrategy(Random(clients_per_round=2), channels=value)


def test_exception_texts_cannot_forge_other_problems() -> None:
    """The text 'the battery; is: empty' holds both separators of the history's problem column."""
    strategy = CSUCB(clients_per_round=2, max_latency=5.0, seed=0, base=fedavg())
    Federation(strategy, [FakeProxy("a", "a", fault="raises"), FakeProxy("b", "b")]).play(2)
    assert dict(strategy.history.problem_counts()) == {"exception": 2}


# ---- metrics that the base reads by name ----------------------------------------------------------------------------


@pytest.mark.parametrize("bit", [ABSENT, "no", float("nan"), -1])
@pytest.mark.parametrize("name", ["DifferentialPrivacyClientSideAdaptiveClipping", "DPFedAvgAdaptive"])
def test_a_reply_without_a_norm_bit_is_a_failure_where_clipping_adapts_on_the_client(name: str, bit: Any) -> None:
    """Left in, Flower ends the run where it is missing, and takes a text for a yes."""
    from flwr.server import strategy as flower

    own_key = "norm_bit" if name.startswith("Diff") else "dpfedavg_norm_bit"
    base = getattr(flower, name)(RecordingBase(), noise_multiplier=0.0, num_sampled_clients=3)
    norm = vars(base).get("clipping_norm", vars(base).get("clip_norm"))
    strategy = CSUCB(clients_per_round=3, max_latency=5.0, seed=0, base=base)
    proxies = fleet(3, prefix="h", extra={own_key: True})
    federation = Federation(strategy, proxies).play(1)
    assert strategy.history.problem_counts() == {}
    changed = vars(base).get("clipping_norm", vars(base).get("clip_norm"))
    assert changed < norm  # every bit was set
    proxies[2].extra = {} if bit is ABSENT else {own_key: bit}
    federation.play(1)
    assert [r.completed for r in strategy.history.clients[3:]] == [True, True, False]
    assert strategy.history.clients[-1].problem.startswith("metrics: ")
    assert own_key in strategy.history.clients[-1].problem
    assert vars(base).get("clipping_norm", vars(base).get("clip_norm")) == changed  # a round with a failure is left out


def test_fedavgm_begins_in_the_first_round_that_has_an_update() -> None:
    """Flower's makes its momentum in round 1, and ends the run where nothing could be used then."""
    from flwr.server.strategy import FedAvgM

    base = FedAvgM(fraction_evaluate=0.0, initial_parameters=initial(), server_momentum=0.5)
    proxies = [FakeProxy(f"n{k}", k, number=k, fault="nan") for k in range(2)]
    strategy = CSUCB(clients_per_round=2, max_latency=5.0, seed=0, base=base)
    federation = Federation(strategy, proxies).play(2)
    assert federation.models == [initial().tensors] * 2
    for proxy in proxies:
        proxy.fault = None
    federation.play(1)
    first = [(10 * update(0, model(), 3)[i] + 13 * update(1, model(), 3)[i]) / 23 for i in range(2)]
    for array, expected in zip(federation.arrays(), first, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    federation.play(1)  # now with momentum
    assert [r.num_completed for r in strategy.history.rounds] == [0, 0, 2, 2]
