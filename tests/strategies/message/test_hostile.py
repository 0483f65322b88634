"""Nodes that lie, break or stay away, through Flower's own ``Strategy.start``: the run goes on, nothing is poisoned."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum

from fedsel_flwr import selectors
from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies.message import BSFL, CSUCB, SelectionStrategy
from tests.strategies.helpers import ABSENT, FakeProxy, model, row_of, update
from tests.strategies.message.faults import (
    ERROR_FAULTS,
    FAULTS,
    LATENCY_FAULTS,
    METRIC_FAULTS,
    ODD_BUT_GOOD,
    OTHER_FAULTS,
    UPDATE_FAULTS,
    WEIGHT_FAULTS,
)
from tests.strategies.message.helpers import FakeGrid, FakeNode, RecordingBase, crowd, fedavg, node_id, play
from tests.strategies.message.models import NAMES, arrays_of

pytestmark = pytest.mark.timeout(60)
MAX_LATENCY, MIN_LATENCY, COHORT, ROUNDS = 4.0, 0.1, 8, 16
KEEPS_UPDATE = {*LATENCY_FAULTS, *OTHER_FAULTS}


def _wobble(number: int) -> Callable[[int], float]:
    return lambda server_round: 0.3 + 0.17 * number + 0.05 * (server_round % 3)


def _nodes() -> dict[int, FakeNode]:
    """Six honest nodes, one that is odd but good of each kind, one of each hostile kind, and one that is late."""
    proxies = [(FakeProxy(str(k), f"h{k}", number=k, latency=_wobble(k)), None) for k in range(6)]
    proxies += [
        (FakeProxy(str(10 + i), f"odd-{name}", number=10 + i, latency=1.0), name) for i, name in enumerate(ODD_BUT_GOOD)
    ]
    proxies += [
        (FakeProxy(str(20 + i), f"bad-{name}", number=20 + i, latency=1.0), name) for i, name in enumerate(FAULTS)
    ]
    proxies.append((FakeProxy("80", "bad-late", number=80, latency=3 * MAX_LATENCY), None))
    return {node_id(k): FakeNode(proxy, fault=fault) for k, (proxy, fault) in enumerate(proxies)}


STRATEGIES: dict[str, tuple[Callable[[Any], SelectionStrategy], Callable[[float], float], Callable[[], Any]]] = {
    "cs-ucb": (
        lambda base: CSUCB(clients_per_round=COHORT, max_latency=MAX_LATENCY, seed=4, base=base),
        lambda latency: 1.0 - min(latency, MAX_LATENCY) / MAX_LATENCY,
        lambda: selectors.CSUCB(clients_per_round=COHORT, max_latency=MAX_LATENCY),
    ),
    "bsfl": (
        lambda base: BSFL(
            clients_per_round=COHORT, min_latency=MIN_LATENCY, alpha=2.0, max_latency=MAX_LATENCY, seed=4, base=base
        ),
        lambda latency: min(1.0, MIN_LATENCY / latency),
        lambda: selectors.BSFL(clients_per_round=COHORT, min_latency=MIN_LATENCY),
    ),
}


def logged(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What an action returns, and what the package logged meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedsel_flwr")
    logger.addHandler(handler)
    try:
        return action(), messages
    finally:
        logger.removeHandler(handler)


@pytest.fixture(scope="module", params=sorted(STRATEGIES))
def aftermath(request: pytest.FixtureRequest) -> Any:
    """One run with everyone at once; the tests below look at it from different sides."""
    build, reward, twin = STRATEGIES[request.param]
    base = RecordingBase()
    strategy, grid = build(base), FakeGrid(_nodes())
    (_, models), messages = logged(lambda: play(strategy, grid, ROUNDS))
    return strategy, grid, base, models, messages, reward, twin()


def _kind(client_id: str) -> str:
    return client_id.removeprefix("bad-")


def test_the_run_goes_on_and_every_kind_was_met(aftermath: Any) -> None:
    strategy, grid, _, models, *_ = aftermath
    assert [r.round for r in strategy.history.rounds] == list(range(1, ROUNDS + 1))
    assert {row.client_id for row in strategy.history.clients} == {n.proxy.client_id for n in grid.nodes.values()}
    assert all(np.isfinite(np.frombuffer(a, dtype=np.float32)).all() for m in models for a in m)
    assert {tuple(map(len, m)) for m in models} == {(24, 8)}


def test_each_client_ends_as_its_kind_deserves(aftermath: Any) -> None:
    strategy, *_ = aftermath
    for row in strategy.history.clients:
        if not row.client_id.startswith("bad-"):
            assert (row.completed, row.problem) == (True, ""), row
            continue
        kind = _kind(row.client_id)
        assert row.problem, row
        assert row.completed == (kind in KEEPS_UPDATE), row
        if kind not in OTHER_FAULTS:
            assert row.latency_s == MAX_LATENCY, row
        assert not row.energy_j < 0


def test_each_fault_is_counted(aftermath: Any) -> None:
    strategy, *_ = aftermath
    met = Counter(_kind(row.client_id) for row in strategy.history.clients if row.client_id.startswith("bad-"))
    counts = strategy.history.problem_counts()
    primary = Counter(row.problem.split(":")[0].split(";")[0] for row in strategy.history.clients if row.problem)
    assert primary["arrays"] == sum(met[name] for name in UPDATE_FAULTS)
    assert primary["metrics"] == sum(met[name] for name in METRIC_FAULTS)
    assert primary["exception"] == met["error"] + met["error-silent"]
    assert primary["node unavailable"] == met["error-unavailable"]
    assert primary["no answer within 5 s"] == met["silent"]
    assert primary["identity"] == met["impostor"]
    assert primary["energy"] == met["energy-negative"] + met["energy-list"]
    weights = sum(met[name] for name in (*WEIGHT_FAULTS, "weight-missing"))
    assert primary["num_examples"] == weights
    late_or_unusable = sum(met[name] for name in LATENCY_FAULTS) + met["latency-infinite"] + met["late"]
    assert primary["latency"] + primary["late"] == late_or_unusable
    assert sum(primary.values()) == sum(met.values())
    assert sum(counts.values()) == sum(met.values()), counts  # one fault each, nobody else


def test_each_fault_is_named_in_the_log_with_the_clients_id(aftermath: Any) -> None:
    strategy, _, _, _, messages, *_ = aftermath
    for client_id in {row.client_id for row in strategy.history.clients}:
        naming = [m for m in messages if client_id in m.replace(",", " ").replace(":", " ").split()]
        met = sum(row.client_id == client_id for row in strategy.history.clients)
        assert len(naming) == (met if client_id.startswith("bad-") else 0), naming


def test_the_selector_stays_finite_and_honest_statistics_come_from_honest_rows(aftermath: Any) -> None:
    strategy, grid, _, _, _, reward, _ = aftermath
    state = strategy.selector.state_dict()
    assert all(np.isfinite(np.asarray(value, dtype=float)).all() for value in state.values())
    for proxy in (node.proxy for node in grid.nodes.values()):
        row = row_of(strategy, proxy.client_id)
        mine = [r.latency_s for r in strategy.history.clients if r.client_id == proxy.client_id]
        assert state["plays"][row] == len(mine) == len(proxy.fit_rounds)
        if proxy.client_id.startswith("h"):
            assert mine == [_wobble(proxy.number)(r) for r in proxy.fit_rounds]  # what it said itself
            mean = 0.0
            for n, latency in enumerate(mine, start=1):
                mean += (reward(latency) - mean) / n
            assert state["mean"][row] == pytest.approx(mean, rel=1e-12)
        elif proxy.client_id.startswith("bad-") and _kind(proxy.client_id) not in OTHER_FAULTS:
            assert state["mean"][row] == pytest.approx(reward(MAX_LATENCY), abs=1e-12)


def test_honest_statistics_equal_those_of_a_selector_that_saw_honest_rows_alone(aftermath: Any) -> None:
    strategy, grid, *_, twin = aftermath
    twin.inform(np.arange(len(grid.nodes)))
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


def test_failures_and_garbage_reach_the_base_as_error_messages(aftermath: Any) -> None:
    strategy, grid, base, *_ = aftermath
    ids = {node: fake.proxy.client_id for node, fake in grid.nodes.items()}
    entries = [r for r in strategy.history.rounds if r.num_completed]
    assert len(base.given) == len(entries)
    for entry, messages in zip(entries, base.given, strict=True):
        rows = [r for r in strategy.history.clients if r.round == entry.round]
        good = [m for m in messages if m.has_content()]
        assert [ids[m.metadata.src_node_id] for m in good] == [r.client_id for r in rows if r.completed]
        errors = [m for m in messages if m.has_error()]
        answered = [r.client_id for r in rows if not r.completed and r.client_id != "bad-silent"]
        assert len(errors) == len(answered)
        own = [m for m in errors if m.error.reason and m.error.reason.startswith("client ")]
        made = {c for c in answered if _kind(c) not in ERROR_FAULTS}
        assert {m.error.reason.split()[1].rstrip(":") for m in own} == made
        assert {ids[m.metadata.src_node_id] for m in own} == made
        gone = [m for m in errors if m.error.code == ErrorCode.NODE_UNAVAILABLE]
        assert [m.metadata.src_node_id for m in gone] == [1] * answered.count("bad-error-unavailable")


OURS = {"latency_s", "energy_j", "client_id"}
LACKS = {
    "odd-metrics-missing": {"acc"}, "odd-metrics-list": {"acc"}, "bad-latency-missing": {"latency_s"},
    "bad-latency-list": {"latency_s"}, "bad-latency-empty": {"latency_s"}, "bad-energy-list": {"energy_j"},
}  # fmt: skip
"""Metrics that a client does not report as the others do; of two of them in a round the kinds differ too."""


def _reported(client_id: str) -> set[str]:
    own = (
        {"aaa", "zzz"} if client_id == "odd-metrics-extra" else {"client_id"} if client_id == "bad-impostor" else set()
    )
    return {"num-examples", "acc", "latency_s", "energy_j", *own} - LACKS.get(client_id, set())


def test_the_base_sees_what_most_report_and_of_ours_what_all_report(aftermath: Any) -> None:
    strategy, _, base, *_ = aftermath
    entries, whole = [r for r in strategy.history.rounds if r.num_completed], 0
    for entry, messages in zip(entries, base.given, strict=True):
        ids = [r.client_id for r in strategy.history.clients if r.round == entry.round and r.completed]
        carried = Counter(key for client_id in ids for key in _reported(client_id))
        stays = {k for k, n in carried.items() if n == len(ids) or (k not in OURS and 2 * n > len(ids))}
        good = [m for m in messages if m.has_content()]
        for client_id, message in zip(ids, good, strict=True):
            (arrays,) = message.content.array_records.values()
            (metrics,) = message.content.metric_records.values()
            if len(ids) > 1:  # alone, a client decides what there is
                assert metrics.keys() == stays
                assert np.isnan(metrics.get("acc", np.nan)) == ("acc" not in stays & _reported(client_id))
                whole += OURS & stays == {"latency_s", "energy_j"}
            assert tuple(arrays.keys()) == NAMES
    assert whole  # there are rounds in which nothing of ours is dropped


def test_the_model_is_the_average_of_the_completed_rows(aftermath: Any) -> None:
    strategy, grid, _, models, *_ = aftermath
    numbers = {node.proxy.client_id: node.proxy.number for node in grid.nodes.values()}
    current = model()
    for entry, actual in zip(strategy.history.rounds, models, strict=True):
        ks = [numbers[r.client_id] for r in strategy.history.clients if r.round == entry.round and r.completed]
        if ks:
            total = sum(10 + 3 * k for k in ks)
            updates = [update(k, current, entry.round) for k in ks]
            current = [
                sum(u[i] * ((10 + 3 * k) / total) for k, u in zip(ks, updates, strict=True)).astype(np.float32)
                for i in range(len(current))
            ]
        arrays = [np.frombuffer(a, dtype=np.float32).reshape(c.shape) for a, c in zip(actual, current, strict=True)]
        for a, b in zip(arrays, current, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        current = arrays


# ---- one fault at a time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_alone_with_nobody_else_does_not_stop_the_run(fault: str) -> None:
    strategy = BSFL(clients_per_round=2, min_latency=0.1, max_latency=5.0, seed=0, base=fedavg())
    grid = FakeGrid({k: FakeNode(FakeProxy(str(k), f"b{k}", number=k), fault=fault) for k in (4, 5)})
    _, models = play(strategy, grid, 3, timeout=0.1)
    assert [r.num_selected for r in strategy.history.rounds] == [2, 2, 2]
    assert strategy.selector.state_dict()["plays"].tolist() == [3, 3]
    assert all(row.problem for row in strategy.history.clients)
    if fault not in KEEPS_UPDATE:
        assert models == [[array.tobytes() for array in model()]] * 3  # the global model stays


@pytest.mark.parametrize("base", [FedAvg, FedMedian, FedTrimmedAvg, Krum])
@pytest.mark.parametrize("fault", sorted({**FAULTS, **ODD_BUT_GOOD}))
def test_no_single_fault_ends_the_run_of_any_base(fault: str, base: type) -> None:
    strategy = SelectionStrategy(
        Random(clients_per_round=4, seed=0), base(fraction_evaluate=0.0, min_available_nodes=4), max_latency=9.0
    )
    nodes = crowd(3)
    nodes[node_id(3)] = FakeNode(FakeProxy("3", 3, number=3), fault=fault)
    result, models = play(strategy, FakeGrid(nodes), 2)
    assert [r.round for r in strategy.history.rounds] == [1, 2]
    assert all(r.completed for r in strategy.history.clients if r.client_id != "3")
    assert all(np.isfinite(np.frombuffer(a, dtype=np.float32)).all() for m in models for a in m)
    assert result.arrays is not None
    assert list(result.arrays.keys()) == list(NAMES)
    assert [a.dtype for a in result.arrays.to_numpy_ndarrays()] == [np.dtype(np.float32)] * 2


def test_a_weight_of_the_users_own_name_may_be_any_positive_number() -> None:
    nodes = {
        node_id(k): FakeNode(FakeProxy(str(k), k, number=k), extra={"share": share})
        for k, share in enumerate([0.25, 0.75, -1.0, float("nan"), [1.0]])
    }
    base = RecordingBase(weighted_by_key="share")
    strategy = SelectionStrategy(Random(clients_per_round=5, seed=0), base, max_latency=9.0)
    result, _ = play(strategy, FakeGrid(nodes), 1)
    assert [r.completed for r in strategy.history.clients] == [True, True, False, False, False]
    a, b = update(0, model(), 1), update(1, model(), 1)
    for array, x, y in zip(result.arrays.to_numpy_ndarrays(), a, b, strict=True):
        np.testing.assert_allclose(array, 0.25 * x + 0.75 * y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("averaging", "weights"), [("fedpdp", [0.25, 0.75]), ("mean", [1, 1])])
def test_an_averaging_scheme_weighs_with_the_bases_own_weights(averaging: str, weights: list[float]) -> None:
    nodes = {
        node_id(k): FakeNode(FakeProxy(str(k), k, number=k), extra={"share": share})
        for k, share in enumerate([0.25, 0.75])
    }
    base = RecordingBase(weighted_by_key="share")
    strategy = SelectionStrategy(Random(clients_per_round=2, seed=0), base, max_latency=9.0, averaging=averaging)
    result, _ = play(strategy, FakeGrid(nodes), 1)
    assert [message.content["metrics"]["share"] for message in base.given[0]] == weights
    a, b = update(0, model(), 1), update(1, model(), 1)
    for array, x, y in zip(result.arrays.to_numpy_ndarrays(), a, b, strict=True):
        np.testing.assert_allclose(array, np.average([x, y], axis=0, weights=weights), rtol=1e-6, atol=1e-7)


# ---- identity -----------------------------------------------------------------------------------------------------


def test_a_second_node_with_the_same_id_is_refused_and_named() -> None:
    nodes = crowd(3)
    nodes[node_id(9)] = FakeNode(FakeProxy("9", 1, number=9))
    strategy = SelectionStrategy(Random(clients_per_round=4, seed=0), fedavg(), max_latency=9.0, min_available=4)
    _, messages = logged(lambda: play(strategy, FakeGrid(nodes), 2))
    assert {r.client_id for r in strategy.history.clients} == {"0", "1", "2"}
    assert len([m for m in messages if "already connected" in m]) == 1


def test_a_node_without_a_query_function_takes_part_under_its_node_id() -> None:
    from flwr.app import Error

    nodes = crowd(2)
    nodes[5] = FakeNode(
        FakeProxy("5", ABSENT, number=5), query_fault=lambda n, m, c: Error(ErrorCode.UNKNOWN, "no query function")
    )
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), fedavg(), max_latency=9.0)
    play(strategy, FakeGrid(nodes), 2)
    assert {r.client_id for r in strategy.history.clients} == {"0", "1", "5"}
    assert all(r.completed for r in strategy.history.clients)


@pytest.mark.parametrize(("busy_timeout", "queries"), [(3600.0, 1), (0.0, 4)])  # 4: before rounds 1, 2, 4 and 8
def test_a_node_that_never_answers_the_roll_call_is_left_out_and_asked_ever_more_rarely(
    busy_timeout: float, queries: int
) -> None:
    nodes = crowd(3)
    nodes[5] = FakeNode(FakeProxy("5", "mute", number=5), query_fault=lambda n, m, c: None)
    strategy = SelectionStrategy(
        Random(clients_per_round=3, seed=0), fedavg(), max_latency=9.0, busy_timeout=busy_timeout
    )
    play(strategy, FakeGrid(nodes), 9)
    assert {r.client_id for r in strategy.history.clients} == {"0", "1", "2"}
    assert len(nodes[5].messages("query")) == queries
    assert [len(node.messages("query")) for key, node in nodes.items() if key != 5] == [1, 1, 1]


# ---- too few survivors, min_completed -----------------------------------------------------------------------------


def test_krum_with_too_few_survivors_is_a_clear_error() -> None:
    base = Krum(num_malicious_nodes=1, fraction_evaluate=0.0)
    strategy = CSUCB(clients_per_round=5, max_latency=5.0, seed=0, base=base)
    nodes = crowd(4) | {5: FakeNode(FakeProxy("5", 5, number=5), fault="nan")}
    with pytest.raises(RunError, match=r"Krum.*4 updates"):
        play(strategy, FakeGrid(nodes), 1)


def test_below_min_completed_the_global_model_stays_and_the_selector_still_observes() -> None:
    base = RecordingBase()
    strategy = CSUCB(clients_per_round=3, max_latency=5.0, seed=0, base=base, min_completed=2)
    nodes = crowd(1) | {k: FakeNode(FakeProxy(str(k), k, number=k), fault="nan") for k in (5, 6)}
    result, models = play(strategy, FakeGrid(nodes), 3)
    assert base.given == []
    assert models == [[array.tobytes() for array in model()]] * 3
    kept = [array.tobytes() for array in result.arrays.to_numpy_ndarrays()]
    assert kept in ([], models[0])  # no arrays up to flwr 1.42, the initial ones from 1.43 on
    assert strategy.selector.state_dict()["plays"].tolist() == [3, 3, 3]


def test_the_replies_themselves_are_not_changed() -> None:
    nodes = crowd(3)
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), FedMedian(fraction_evaluate=0.0), max_latency=9.0)
    grid = FakeGrid(nodes)
    messages = strategy.configure_train(1, arrays_of(), ConfigRecord(), grid)
    replies = list(grid.send_and_receive(messages))
    strategy.aggregate_train(1, replies)
    for reply in replies:
        assert "latency_s" in reply.content["metrics"]
        assert tuple(reply.content["arrays"].keys()) == NAMES
