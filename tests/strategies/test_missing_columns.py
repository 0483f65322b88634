"""A selector that learns nothing says so, in both APIs: columns that no client reports, and names of metrics."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.selectors import CSUCB, Random, create
from fedsel_flwr.selectors.columns import COLUMNS
from fedsel_flwr.simulations import load_scenario, simulate, vectorized
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.worlds.world import world_of
from tests.rounds.written import Written, core_of, facts
from tests.strategies.either_api import BOTH, RECORDING, Server, selection
from tests.strategies.helpers import FAULTS, FakeProxy, model
from tests.strategies.message.helpers import ProbeProxy
from tests.strategies.scripted import Spy

CLIENTS = 4
PROBES = {"cpow-d": "batch_loss", "divfl": "gradient", "power-of-choice": "loss", "active-fl": "loss"}
REPLIES = {"oort": "rms_loss", "pisces": "rms_loss", "rpow-d": "train_loss"}
PARAMETERS = {name: {"candidates": CLIENTS} for name in ("cpow-d", "power-of-choice", "rpow-d")}


def unchanged(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation in Flower's own apps."""
    return {"eval_acc": 0.5, "eval_loss": 0.25 + proxy.number}


def only_its_own(node: Any, asked: Any, content: Any) -> Any:
    """An app of the Message API has no loss but the one among its metrics."""
    del content["metrics"]["loss"]
    return content


def server_of(api: str, selector: Any, extra: Any = None, answer: Any = unchanged, **options: Any) -> Server:
    """Flower's server over clients that report a latency and further metrics."""
    given = {"latency_s": 0.5, "acc": 0.5} | (extra or {})
    proxies = [ProbeProxy(f"node-{k}", k, number=k, extra=given, answer=answer) for k in range(CLIENTS)]
    server = Server(api, selection(api, selector, RECORDING[api](), min_available=CLIENTS, **options))
    for proxy in proxies:
        server.connect(proxy, evaluate_fault=only_its_own) if api == "message" else server.connect(proxy)
    return server


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "fedsel_flwr" and one.levelno >= logging.WARNING]


@BOTH
@pytest.mark.parametrize("name", [*PROBES, *REPLIES])
def test_a_selector_that_would_learn_nothing_ends_the_run_with_the_remedies(api: str, name: str) -> None:
    if api == "legacy" and PROBES.get(name) == "loss":
        pytest.skip("the result of every evaluation in the legacy API has a loss")
    column, own = PROBES.get(name) or REPLIES[name], PARAMETERS.get(name, {})
    server = server_of(api, create(name, clients_per_round=2, seed=0, **own))
    with pytest.raises(RunError) as ended:
        server.play(2)
    told = str(ended.value)
    asked = "answer to the probe" if name in PROBES else "reply"
    assert told.startswith(f"round 1: no {asked} has {column} (metric {column!r}), which {name} reads. "), told
    arrived = ["eval_acc", "eval_loss"] if name in PROBES else ["acc", "client_id", "energy_j", "latency_s"]
    arrived += ["loss"] if api == "legacy" and name in PROBES else []
    assert f"Metrics that arrived: {', '.join(arrived)}" in told
    # The result of an evaluation in the legacy API has a loss itself.
    likely = "loss" if api == "legacy" else "eval_loss"
    assert name in REPLIES or column == "gradient" or f"MetricKeys({column}={likely!r})" in told
    remedies = [told.index(one) for one in ("metric_keys=MetricKeys(", "Else ", "another selector", "missing_columns=")]
    assert remedies == sorted(remedies)
    assert server.strategy.history.rounds == []


@BOTH
def test_an_energy_score_follows_from_joules_or_else_the_mod_is_named(api: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(FAULTS, "no-joules", lambda answer, timeout: answer.metrics.pop("energy_j"))
    server = server_of(api, Spy("energy_score", requires=("energy_score",)))
    assert server.play(1).strategy.history.problem_counts() == {}
    server = server_of(api, Spy("energy_score", requires=("energy_score",)))
    for proxy in server.proxies:
        proxy.fault = "no-joules"
    with pytest.raises(RunError, match=r"energy_score.* mod to the clients, ClientApp\(mods=\[telemetry\]\)"):
        server.play(1)


@BOTH
def test_a_latency_that_nobody_reports_ends_the_run_of_selectors_that_read_it(api: str) -> None:
    """On the server's clock nobody needs to report it, and no other selector needs it."""

    def play(selector: Any, clock: str = "virtual") -> Any:
        proxies = [FakeProxy(f"node-{k}", k, number=k, fault="latency-missing") for k in range(3)]
        server = Server(api, selection(api, selector, min_available=3, clock=clock), proxies, timeout=5.0)
        return server.play(1).strategy.history

    def reads() -> CSUCB:
        return CSUCB(clients_per_round=3, max_latency=9.0, seed=0)

    with pytest.raises(RunError, match=r"no reply has latency \(metric 'latency_s'\).* clock=\"server\""):
        play(reads())
    assert play(reads(), "server").rounds[0].num_completed == 3
    history = play(Random(clients_per_round=3, seed=0))
    assert [row.latency_s for row in history.clients] == [9.0] * 3
    assert history.problem_counts() == {"latency": 3}


@BOTH
def test_a_round_without_usable_replies_decides_nothing(api: str) -> None:
    server = server_of(api, Spy("loss", requires=("loss",)), busy_timeout=0.0)
    for proxy in server.proxies:
        proxy.fault = "raises"
    server.play(2)
    for proxy in server.proxies:
        proxy.fault = None
    with pytest.raises(RunError, match="round 3: no reply has loss"):
        server.play(1)
    assert [one.num_completed for one in server.strategy.history.rounds] == [0, 0]


@BOTH
def test_a_run_that_goes_on_has_one_line_at_the_start_and_one_at_the_end_and_a_remark(api: str, caplog: Any) -> None:
    def report(record: Any) -> None:
        for proxy in server.proxies:
            proxy.extra = {"loss": 0.5} if record.round in (2, 3) else {}

    spy = Spy("loss")
    server = server_of(api, spy, missing_columns="random", on_round=report)
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        server.play(5)
    starts, ends = (f"round {n}: no reply has loss (metric 'loss'), which spy reads. Metrics that" for n in (1, 5))
    lines = said(caplog)
    assert [lines[0].startswith(starts), lines[1], lines[2].startswith(ends)] == [
        True, "round 3: clients report loss again", True,
    ]  # fmt: skip
    assert len(lines) == 3
    assert lines[0].endswith("spy chooses without it")
    remark = "missing_columns: no client reported loss"
    history = server.strategy.history
    assert [one.remark for one in history.rounds] == [remark, remark, "", "", remark]
    assert history.problem_counts() == {"loss": 3 * CLIENTS, "missing_columns": 3}
    assert history.remarks() == {remark: 3}


@BOTH
def test_a_column_that_came_once_ends_no_run(api: str, caplog: pytest.LogCaptureFixture) -> None:
    def stop_reporting(record: Any) -> None:
        for proxy in server.proxies:
            proxy.extra = {}

    server = server_of(api, Spy("loss", requires=("loss",)), {"loss": 0.5}, on_round=stop_reporting)
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        server.play(3)
    (line,) = said(caplog)
    assert line.startswith("round 2: no reply has loss")
    assert server.strategy.history.problem_counts() == {"loss": 2 * CLIENTS, "missing_columns": 2}


@BOTH
def test_what_a_selector_may_do_without_is_said_once(api: str, caplog: Any, monkeypatch: Any) -> None:
    """Nobody asked for it, and the selector does not require it."""
    monkeypatch.setitem(FAULTS, "no-joules", lambda answer, timeout: answer.metrics.pop("energy_j"))
    server = server_of(api, Spy("energy", "latency"))
    for proxy in server.proxies:
        proxy.fault = "no-joules"
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        server.play(2)
    (line,) = said(caplog)
    assert "no reply has energy (metric 'energy_j'), which spy reads" in line


def test_a_checkpoint_knows_which_columns_came(caplog: pytest.LogCaptureFixture) -> None:
    nodes = ["a", "b"]

    def play(core: Any, **metrics: Any) -> Any:
        chosen = core.choose(nodes, model(), Written(facts(*nodes)))
        one = Reply(arrays=model(), num_examples=1, metrics={"latency_s": 1.0, **metrics})
        core.collect(dict.fromkeys(chosen, one))
        core.finish(model())
        return core

    first = play(play(core_of(Spy("loss")), loss=1.0))
    second = core_of(Spy("loss"))
    second.load_state_dict(first.state_dict())
    caplog.clear()
    play(second)
    assert said(caplog) == [], "round 2 has said it"
    play(second, loss=1.0)
    assert said(caplog) == ["round 4: clients report loss again"]
    with pytest.raises(RunError, match="no reply has loss"):
        play(core_of(Spy("loss")))


def test_the_vectorized_engine_and_scenarios_have_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorized, "asked_columns", lambda names: frozenset())
    keys = {"selector": "oort", "rounds": 2}
    with pytest.raises(RunError, match="round 1: no reply has rms_loss"):
        simulate(load_scenario("smoke", keys), engine="vectorized")
    scenario = load_scenario("smoke", keys | {"aggregation.missing_columns": "random"})
    assert make_strategy(world_of(scenario)).core.settings.missing_columns == "random"
    history = simulate(scenario, engine="vectorized").history
    assert history.problem_counts()["missing_columns"] == 2


def test_every_column_that_clients_report_has_a_name_that_can_be_changed() -> None:
    reported = {name for name, column in COLUMNS.items() if column.source == "reply" or column.recorded}
    assert set(inspect.signature(MetricKeys).parameters) == reported | {"client_id", "energy_modelled"}
    assert {name: MetricKeys().of(name) for name in reported} == {name: COLUMNS[name].key for name in reported}
    with pytest.raises(TypeError, match="los"):
        MetricKeys(los="eval_loss")


@BOTH
@pytest.mark.parametrize("key", ["eval_loss", "loss"])
def test_a_mapped_name_is_that_of_the_answer_to_a_probe(api: str, key: str) -> None:
    """The client's own metric comes first; in the legacy API the result's loss stands for a missing one."""
    selector = create("power-of-choice", clients_per_round=2, candidates=CLIENTS, seed=0)
    answer = unchanged if key == "eval_loss" else lambda proxy, metrics: {"loss": 0.25 + proxy.number}
    server = server_of(api, selector, answer=answer, metric_keys=MetricKeys(loss=key))
    if api == "message" and key == "loss":
        for node in server.grid.nodes.values():
            node.evaluate_fault = None
    server.play(1)
    assert server.dispatched() == [["2", "3"]], "the largest losses"
    assert server.strategy.selector.state_dict()["loss"].tolist() == [0.25, 1.25, 2.25, 3.25]


def test_in_the_legacy_api_the_results_own_loss_has_the_mapped_name() -> None:
    selector = create("power-of-choice", clients_per_round=2, candidates=CLIENTS, seed=0)
    keys = MetricKeys(loss="eval_loss")
    server = server_of("legacy", selector, answer=lambda proxy, metrics: {}, metric_keys=keys).play(1)
    assert server.strategy.selector.state_dict()["loss"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])


@BOTH
def test_mapped_names_are_those_of_replies_and_no_base_sees_a_vector(api: str) -> None:
    keys = MetricKeys(rms_loss="my_rms", gradient="my_gradient", num_examples="size")
    vector = np.array([1.0, 2.0], dtype=np.float32).tobytes()
    server = server_of(
        api, spy := Spy("rms_loss", "gradient"), {"my_rms": 0.5, "my_gradient": vector}, metric_keys=keys
    )
    server.play(1)
    assert spy.reports[0].rms_loss.tolist() == [0.5] * CLIENTS
    assert spy.reports[0].gradient.tolist() == [[1.0, 2.0]] * CLIENTS
    ((given, _),) = server.given()
    assert [("my_gradient" in metrics, metrics["my_rms"]) for _, metrics in given] == [(False, 0.5)] * CLIENTS
    assert server.strategy.history.problem_counts() == {}


@BOTH
def test_one_line_a_round_names_the_chosen_and_the_start_names_the_selector(api: str, caplog: Any) -> None:
    proxies = [FakeProxy(f"node-{k}", k, number=k) for k in range(13)]
    server = Server(api, selection(api, create("round-robin", clients_per_round=12), min_available=13), proxies)
    with caplog.at_level(logging.INFO, logger="fedsel_flwr"):
        server.play(2)
    lines = [one.getMessage() for one in caplog.records if one.name == "fedsel_flwr"]
    first = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
    assert [line for line in lines if "chooses clients" in line] == [
        f"round 1: round-robin chooses clients {first} and 2 more",
        f"round 2: round-robin chooses clients {first} and 2 more",
    ]
    (start,) = [line for line in lines if line.startswith("strategy: ")]
    assert start == 'strategy: selector RoundRobin(clients_per_round=12), base FedAvg, clock "virtual"'
