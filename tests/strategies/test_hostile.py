"""Clients that lie, break or stay away, through Flower's own servers: the run goes on and nothing is poisoned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.constant import ErrorCode

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import CSUCB
from tests.strategies import helpers
from tests.strategies.either_api import BASES, RECORDING, Server, base_of, close, mean_of, private, selection
from tests.strategies.helpers import ABSENT, FAULTS, FakeProxy, Federation, fleet, initial, model, row_of, update
from tests.strategies.message import helpers as of_nodes
from tests.strategies.message.helpers import NAMES, arrays_of
from tests.strategies.scripted import Spy, play_scripted

MAX_LATENCY, TIMEOUT = 4.0, 0.05
KINDS = {
    **dict.fromkeys(helpers.UPDATE_FAULTS, "arrays"), **dict.fromkeys(helpers.EXAMPLE_FAULTS, "num_examples"),
    **dict.fromkeys(helpers.LATENCY_FAULTS, "latency"), "latency-infinite": "late", "raises": "exception",
    "status": "status", "straggler": "no answer within 0.05 s", "impostor": "identity", "energy-negative": "energy",
    "energy-text": "energy", **{name: kind for kind, faults in of_nodes.BY_KIND.items() for name in faults},
}  # fmt: skip
"""Fault -> its problem in the history."""
KEEPS_UPDATE = {*helpers.LATENCY_FAULTS, "latency-empty", "impostor", "energy-negative", "energy-text"}
STRUCTURAL = {
    *helpers.UPDATE_FAULTS, *of_nodes.BY_KIND["arrays"], *of_nodes.BY_KIND["metrics"],
} - {"nan", "infinite", "too-large"}  # fmt: skip
"""Faults with which a run ends if all clients have them in the first round."""
OWN_LATENCY = {"impostor", "energy-negative", "energy-text"}


def _fleet(server: Server, fault: str | None, numbers: range, name: str = "b") -> None:
    """Clients with a fault, of the proxy or of the node."""
    node: Any = {"fault": fault} if fault in {**of_nodes.FAULTS, **of_nodes.ODD_BUT_GOOD} else {}
    for k in numbers:
        server.connect(FakeProxy(f"{name}{k}", f"{name}{k}", number=k, fault=None if node else fault), **node)


def _names(api: str) -> list[str]:
    return [*FAULTS, *(of_nodes.FAULTS if api == "message" else ())]


@pytest.mark.parametrize("honest", [0, 3])
def test_every_fault_is_counted_named_and_kept_from_model_base_and_selector(api: str, honest: int, caplog: Any) -> None:
    for fault in _names(api):
        selector = CSUCB(clients_per_round=honest + 2, max_latency=MAX_LATENCY, seed=0)
        options: dict[str, Any] = {"max_latency": MAX_LATENCY, "busy_timeout": 0.0, "cooldown": False}
        options["missing_columns"] = "random"
        # Without honest replies, a base with its own aggregation takes what all clients agree on.
        base = RECORDING[api]() if honest or fault in KEEPS_UPDATE else base_of(api)
        server = Server(api, selection(api, selector, base, **options), timeout=TIMEOUT)
        _fleet(server, None, range(honest), "h")
        _fleet(server, fault, range(honest, honest + 2))
        caplog.clear()
        if not honest and fault in STRUCTURAL:
            with pytest.raises(RunError, match=r"round 1: no update has the structure .* compare_models"):
                server.play(2)
            continue
        server.play(2)
        history, kind = server.strategy.history, "exception" if (api, fault) == ("message", "status") else KINDS[fault]
        # If no client at all reports a latency, one line says so instead of a line per client.
        nobody = fault == "latency-missing" and not honest
        assert [r.num_selected for r in history.rounds] == [honest + 2] * 2, fault
        for row in history.clients:
            own, good = 0.5 + 0.125 * int(row.client_id[1:]), row.client_id.startswith("h")
            named = [text for text in caplog.messages if f", client {row.client_id}: " in text]
            assert len(named) == (0 if good or nobody else 2), caplog.messages
            # no claim moves an observation to another row
            assert selector.state_dict()["mean"][row.client] == pytest.approx(1 - row.latency_s / MAX_LATENCY)
            if good:
                assert (row.completed, row.problem, row.latency_s) == (True, "", own)
                continue
            assert row.problem.split(":")[0] == kind, row
            assert row.completed == (fault in KEEPS_UPDATE), row
            assert row.latency_s == (own if fault in OWN_LATENCY else MAX_LATENCY), row
            assert not row.energy_j < 0
        # no text of an exception makes another
        assert history.problem_counts() == {kind: 4} | ({"missing_columns": 2} if nobody else {})
        assert selector.state_dict()["plays"].tolist() == [2] * (honest + 2)
        usable = range(honest + (2 if fault in KEEPS_UPDATE else 0))
        current = model()
        for server_round, arrays in enumerate(server.models, start=1):
            close(arrays, mean_of(usable, current, server_round) if usable else model())
            assert [a.dtype for a in arrays] == [np.dtype(np.float32)] * 2
            current = arrays
        # Flower reports nothing of a node that does not answer
        silent = (api, fault) == ("message", "straggler")
        lost = 0 if fault in KEEPS_UPDATE or silent else 2
        recorded = server.given() if honest or fault in KEEPS_UPDATE else []
        given = [([client_id for client_id, _ in results], failures) for results, failures in recorded]
        ids = sorted(proxy.client_id for proxy in server.proxies if proxy.number in usable)
        assert given == [(ids, lost)] * (2 if usable else 0), fault


def test_what_is_not_usable_reaches_the_base_as_an_error_of_its_node() -> None:
    server = Server("message", selection("message", 4, RECORDING["message"]()), fleet(2, prefix="h"))
    _fleet(server, "nan", range(2, 3))
    _fleet(server, "error-unavailable", range(3, 4))
    server.play(1)
    (messages,) = server.strategy.base.given
    refused, gone = (m for m in messages if m.has_error())
    assert server.grid.nodes[refused.metadata.src_node_id].proxy.client_id == "b2"
    assert refused.error.reason.startswith("client b2: arrays")
    assert (gone.metadata.src_node_id, gone.error.code) == (1, ErrorCode.NODE_UNAVAILABLE)


@pytest.mark.parametrize("base", ["FedAvg", "FedMedian", "Krum"])
def test_no_single_fault_ends_the_run_of_any_base(api: str, base: str) -> None:
    for fault in [*_names(api), *(of_nodes.ODD_BUT_GOOD if api == "message" else ())]:
        strategy = selection(api, 4, base_of(api, base), busy_timeout=0.0)
        server = Server(api, strategy, fleet(3), timeout=TIMEOUT)
        _fleet(server, fault, range(3, 4))
        server.play(1)
        assert [r.round for r in strategy.history.rounds] == [1], fault
        good = fault in KEEPS_UPDATE or fault in of_nodes.ODD_BUT_GOOD
        assert [r.completed for r in strategy.history.clients] == [True, True, True, good], fault
        assert all(np.isfinite(array).all() for one in server.models for array in one), fault
        assert [a.dtype for a in server.models[-1]] == [np.dtype(np.float32)] * 2, fault


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int8, np.float16, np.bool_])
def test_another_dtype_changes_neither_model_nor_honest_updates(api: str, dtype: Any, monkeypatch: Any) -> None:
    """Refused or converted: but FedAvg, left alone, adds everyone into an array of the first client's type."""
    monkeypatch.setitem(FAULTS, "dtype", helpers.arrays_fault(lambda arrays: [a.astype(dtype) for a in arrays]))
    strategy = selection(api, 2)
    server = Server(api, strategy, [FakeProxy("a", "a", number=1, fault="dtype"), FakeProxy("h", "h", number=2)])
    (arrays,) = server.play(1).models
    assert [a.dtype for a in arrays] == [np.dtype(np.float32)] * 2
    rows = {r.client_id: r for r in strategy.history.clients}
    assert rows["h"].completed
    own, other = update(2, model(), 1), [a.astype(dtype) for a in update(1, model(), 1)]
    if rows["a"].completed:
        own = [(16 * h + 13 * a.astype(np.float32)) / 29 for h, a in zip(own, other, strict=True)]
    close(arrays, own)


def test_honest_clients_are_not_refused_because_the_base_widened_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages of counters and of float32 weights may come back as float64; clients go on sending what they hold."""

    def as_held(arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [arrays[0].astype(np.float32), np.rint(arrays[1]).astype(np.int64)]

    class Widens(helpers.RecordingBase):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            parameters, metrics = super().aggregate_fit(server_round, results, failures)
            arrays = [a.astype(np.float64) for a in parameters_to_ndarrays(parameters)]
            return ndarrays_to_parameters(arrays), metrics

    start = ndarrays_to_parameters([np.zeros((3, 2), dtype=np.float32), np.zeros(2, dtype=np.int64)])
    monkeypatch.setitem(FAULTS, "as-held", helpers.arrays_fault(as_held))
    strategy = selection("legacy", 3, Widens(initial_parameters=start, inplace=False))
    Federation(strategy, [FakeProxy(f"n{k}", k, number=k, fault="as-held") for k in range(3)]).play(3)
    assert [r.num_completed for r in strategy.history.rounds] == [3, 3, 3], strategy.history.problem_counts()


def test_other_strategies_keys_survive_and_only_our_faulty_keys_go() -> None:
    extra = {"norm_bit": 1, "accuracy": -5.0, "note": "fast", "num-examples": -1}
    strategy = selection("legacy", 3, RECORDING["legacy"]())
    proxies = [
        FakeProxy("a", "a", number=0, extra=dict(extra)),
        FakeProxy("b", "b", number=1, fault="latency-text", extra=dict(extra)),
        FakeProxy("c", "c", number=2, fault="energy-text", extra={**extra, "train_loss": "low"}),
    ]
    ((results, failures),) = Server("legacy", strategy, proxies).play(1).given()
    assert failures == 0
    ours, given = {"latency_s", "energy_j", "client_id"}, dict(results)
    assert given["a"].keys() == {*extra, *ours}
    assert given["b"].keys() == {*extra, *ours} - {"latency_s"}
    assert given["c"].keys() == {*extra, *ours, "train_loss"} - {"energy_j"}
    assert given["c"]["train_loss"] == "low"  # Flower's quickstarts report it: it is not ours alone
    assert strategy.history.problem_counts() == {"latency": 1, "energy": 1, "train_loss": 1}
    for metrics in given.values():
        assert (metrics["note"], metrics["norm_bit"], metrics["accuracy"]) == ("fast", 1, -5.0)


def test_the_replies_themselves_are_not_changed() -> None:
    strategy = selection("legacy", 2, RECORDING["legacy"]())
    federation = Federation(strategy, [FakeProxy("a", "a", fault="latency-text"), FakeProxy("b", "b", number=1)])
    pairs = strategy.configure_fit(server_round=1, parameters=initial(), client_manager=federation.manager)
    results = [(client, client.fit(ins, None, 1)) for client, ins in pairs]
    before, given = [dict(res.metrics) for _, res in results], list(results)
    strategy.aggregate_fit(1, results, [])
    assert [res.metrics for _, res in results] == before
    assert results == given
    server = Server("message", selection("message", 3, base_of("message", "FedMedian")), fleet(3))
    messages = server.strategy.configure_train(1, arrays_of(), ConfigRecord(), server.grid)
    replies = list(server.grid.send_and_receive(messages))
    server.strategy.aggregate_train(1, replies)
    for reply in replies:
        assert "latency_s" in reply.content["metrics"]
        assert tuple(reply.content["arrays"].keys()) == NAMES


@pytest.mark.parametrize("bit", [ABSENT, "no", float("nan"), -1], ids=["absent", "text", "nan", "negative"])
@pytest.mark.parametrize("name", ["message", "legacy", "DPFedAvgAdaptive"])
def test_a_reply_without_a_norm_bit_is_a_failure_where_clipping_adapts_on_the_client(name: str, bit: Any) -> None:
    """Left in, Flower ends the run where it is missing, and takes a text for a yes."""
    api, older = "message" if name == "message" else "legacy", name.startswith("DPFedAvg")
    key, norm = ("dpfedavg_norm_bit", "clip_norm") if older else ("norm_bit", "clipping_norm")
    if older:
        base = BASES[api].DPFedAvgAdaptive(RECORDING[api](), noise_multiplier=0.0, num_sampled_clients=3)
    else:
        base = private(api, RECORDING[api](), "ClientSideAdaptive")
    before = vars(base)[norm]
    strategy, proxies = selection(api, 3, base), fleet(3, prefix="h", extra={key: 1})
    server = Server(api, strategy, proxies).play(1)
    assert strategy.history.problem_counts() == {}
    changed = vars(base)[norm]
    assert changed < before  # every bit was set
    proxies[2].extra = {} if bit is ABSENT else {key: bit}
    server.play(1)
    assert [r.completed for r in strategy.history.clients[3:]] == [True, True, False]
    problem = strategy.history.clients[-1].problem
    assert problem.startswith("metrics: ")
    assert key in problem
    assert vars(base)[norm] == changed  # a round with a failure is left out


def test_fedavgm_begins_in_the_first_round_that_has_an_update() -> None:
    """Flower's makes its momentum in round 1, and ends the run where nothing could be used then."""
    proxies = [FakeProxy(f"n{k}", k, number=k, fault="nan") for k in range(2)]
    strategy = selection("legacy", 2, base_of("legacy", "FedAvgM", server_momentum=0.5), cooldown=False)
    federation = Federation(strategy, proxies).play(2)
    assert federation.models == [initial().tensors] * 2
    for proxy in proxies:
        proxy.fault = None
    close(federation.play(1).arrays(), mean_of(range(2), model(), 3))
    federation.play(1)  # now with momentum
    assert [r.num_completed for r in strategy.history.rounds] == [0, 0, 2, 2]


def _shares(shares: list[Any], base: Any, **options: Any) -> tuple[Any, list[np.ndarray]]:
    proxies = [FakeProxy(f"{k}", k, number=k, extra={"share": share}) for k, share in enumerate(shares)]
    server = Server("message", selection("message", len(shares), base, **options), proxies).play(1)
    return server.strategy, server.models[0]


def test_a_weight_of_the_users_own_name_may_be_any_positive_number() -> None:
    base = RECORDING["message"](weighted_by_key="share")
    strategy, arrays = _shares([0.25, 0.75, -1.0, float("nan"), [1.0]], base)
    assert [r.completed for r in strategy.history.clients] == [True, True, False, False, False]
    close(arrays, mean_of((0, 1), model(), 1, [0.25, 0.75]))


@pytest.mark.parametrize(("averaging", "weights"), [("fedpdp", [0.25, 0.75]), ("mean", [1, 1])])
def test_an_averaging_scheme_weighs_with_the_bases_own_weights(averaging: str, weights: list[float]) -> None:
    base = RECORDING["message"](weighted_by_key="share")
    _, arrays = _shares([0.25, 0.75], base, averaging=averaging)
    assert [message.content["metrics"]["share"] for message in base.given[0]] == weights
    close(arrays, mean_of((0, 1), model(), 1, weights))


@pytest.mark.parametrize(("busy_timeout", "queries"), [(3600.0, 1), (0.0, 4)])  # 4: before rounds 1, 2, 4 and 8
def test_a_node_that_never_answers_the_roll_call_is_asked_ever_more_rarely(busy_timeout: float, queries: int) -> None:
    server = Server("message", selection("message", 3, busy_timeout=busy_timeout, roll_call_timeout=0.1), fleet(3))
    server.connect(FakeProxy("5", "mute", number=5), query_fault=lambda n, m, c: None)
    server.play(9)
    assert {r.client_id for r in server.strategy.history.clients} == {"0", "1", "2"}
    assert [len(node.messages("query")) for node in server.grid.nodes.values()] == [1, 1, 1, queries]


# ---- too few usable updates ------------------------------------------------------------------------------------------


def _mixed(api: str, good: int, bad: int, base: Any, fault: str = "nan", **options: Any) -> Server:
    """A server whose clients all train; the last ones are bad."""
    selector = CSUCB(clients_per_round=good + bad, max_latency=5.0, seed=0)
    proxies = [*fleet(good, prefix="h"), *(FakeProxy(f"x{k}", f"x{k}", number=k, fault=fault) for k in range(bad))]
    options = {"max_latency": 5.0, "cooldown": False, "busy_timeout": 0.0, **options}
    return Server(api, selection(api, selector, base, **options), proxies)


def _stays(server: Server) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(server.models[-1], model(), strict=True))


def test_fewer_than_min_completed_keeps_the_model_and_still_observes(api: str) -> None:
    server = _mixed(api, 2, 2, RECORDING[api](), min_completed=3).play(2)
    assert _stays(server)
    assert server.given() == []
    state = server.strategy.selector.state_dict()
    assert state["plays"].tolist() == [2, 2, 2, 2]
    assert state["mean"][row_of(server.strategy, "h0")] == pytest.approx(0.9)
    assert [r.num_completed for r in server.strategy.history.rounds] == [2, 2]
    server.proxies[2].fault = None
    assert not _stays(server.play(1))  # exactly min_completed is enough


@pytest.mark.parametrize("kind", ["ServerSideFixed", "ServerSideAdaptive"])
def test_a_dp_wrapper_sees_every_failure_and_drops_the_round(api: str, kind: str) -> None:
    """The noise is calibrated for three clients: two must not be averaged."""
    for fault in ("nan", "raises", "status"):
        server = _mixed(api, 2, 1, private(api, RECORDING[api](), kind), fault).play(2)
        assert server.given() == []
        assert _stays(server)
        assert server.strategy.selector.state_dict()["plays"].tolist() == [2, 2, 2]
        assert [r.num_completed for r in server.strategy.history.rounds] == [2, 2]


@pytest.mark.parametrize(
    ("api", "base", "good", "bad"), [("legacy", "Krum", 3, 2), ("message", "Krum", 4, 1), ("legacy", "Bulyan", 6, 1)]
)
def test_too_few_survivors_are_a_clear_error(api: str, base: str, good: int, bad: int) -> None:
    with pytest.raises(RunError, match=rf"{base}.*{good} updates"):
        _mixed(api, good, bad, base_of(api, base, num_malicious_nodes=1)).play(1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_cohort_that_can_never_suffice_is_refused_before_round_one(api: str, wrapped: bool) -> None:
    base = base_of(api, "Krum", num_malicious_nodes=1)
    with pytest.raises(ParameterError, match=r"Krum.*clients_per_round"):
        selection(api, 3, private(api, base) if wrapped else base)


def test_who_fails_for_the_selector_alone_cools_down_and_its_model_is_averaged(api: str) -> None:
    """Client 1 reports no score in round 1: it is out in rounds 2 and 3, and completed round 1 in the history."""
    spy = Spy("energy_score", requires=("energy_score",))
    strategy, models = play_scripted(
        api, spy, lambda k, t, w: w + k, 4, start=[0.0], cooldown=True,
        report=lambda k, t: {} if k == 1 and t == 1 else {"energy_score": 0.5},
    )  # fmt: skip
    asked = [(row.round, row.client) for row in strategy.history.clients]
    assert asked == [(1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1)]
    assert all(row.completed for row in strategy.history.clients)
    assert models[0] == [0.5]
