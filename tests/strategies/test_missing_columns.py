"""What a selector needs of clients, in both APIs: it is asked for and arrives, or the run says that nothing came."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.selectors import CSUCB, Random, create
from fedsel_flwr.selectors.columns import COLUMNS
from fedsel_flwr.simulations import load_scenario, simulate, vectorized
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.worlds.world import world_of
from tests.rounds.written import core_of, play_round, reply
from tests.strategies.deployed import lines
from tests.strategies.either_api import RECORDING, Server, base_of, close, mean_of, play, selection
from tests.strategies.helpers import FAULTS, FakeProxy, fleet, model
from tests.strategies.message.helpers import FakeNode, ProbeProxy
from tests.strategies.scripted import MAX_LATENCY, Curious, Spy

CLIENTS = 4
PROBES = {"cpow-d": "batch_loss", "divfl": "gradient", "power-of-choice": "loss", "active-fl": "loss"}
REPLIES = {"oort": "rms_loss", "pisces": "rms_loss", "rpow-d": "train_loss"}
PARAMETERS = {name: {"candidates": CLIENTS} for name in ("cpow-d", "power-of-choice", "rpow-d")}


def usual(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation in Flower's own apps."""
    return {"eval_acc": 0.5, "eval_loss": 0.25 + proxy.number}


def only_its_own(node: Any, asked: Any, content: Any) -> Any:
    """An app of the Message API has no loss but the one among its metrics."""
    del content["metrics"]["loss"]
    return content


def served(api: str, selector: Any, extra: Any = None, answer: Any = usual, fault: str = "", **options: Any) -> Server:
    """Flower's server over clients that report a latency and further metrics."""
    given = {"latency_s": 0.5, "acc": 0.5} | (extra or {})
    told = {"extra": given, "answer": answer, "fault": fault or None}
    proxies = [ProbeProxy(f"node-{k}", k, number=k, **told) for k in range(CLIENTS)]
    server = Server(api, selection(api, selector, RECORDING[api](), min_available=CLIENTS, **options))
    for proxy in proxies:
        server.connect(proxy, evaluate_fault=only_its_own) if api == "message" else server.connect(proxy)
    return server


@pytest.mark.parametrize("name", [*PROBES, *REPLIES])
def test_a_selector_that_would_learn_nothing_ends_the_run_with_the_remedies(api: str, name: str) -> None:
    if api == "legacy" and PROBES.get(name) == "loss":
        pytest.skip("the result of every evaluation in the legacy API has a loss")
    column, own = PROBES.get(name) or REPLIES[name], PARAMETERS.get(name, {})
    server = served(api, create(name, clients_per_round=2, seed=0, **own))
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


def test_an_energy_score_follows_from_joules_or_else_the_mod_is_named(api: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(FAULTS, "no-joules", lambda answer, timeout: answer.metrics.pop("energy_j"))
    spy, again = (Spy("energy_score", requires=("energy_score",)) for _ in range(2))
    assert served(api, spy).play(1).strategy.history.problem_counts() == {}
    with pytest.raises(RunError, match=r"energy_score.* mod to the clients, ClientApp\(mods=\[telemetry\]\)"):
        served(api, again, fault="no-joules").play(1)


def test_a_latency_that_nobody_reports_ends_the_run_of_selectors_that_read_it(api: str) -> None:
    """On the server's clock nobody needs to report it, and no other selector needs it."""

    def play(selector: Any, clock: str = "virtual") -> Any:
        strategy = selection(api, selector, min_available=3, clock=clock)
        return Server(api, strategy, fleet(3, fault="latency-missing"), timeout=5.0).play(1).strategy.history

    def reads() -> CSUCB:
        return CSUCB(clients_per_round=3, max_latency=9.0, seed=0)

    with pytest.raises(RunError, match=r"no reply has latency \(metric 'latency_s'\).* clock=\"server\""):
        play(reads())
    assert play(reads(), "server").rounds[0].num_completed == 3
    history = play(Random(clients_per_round=3, seed=0))
    assert [row.latency_s for row in history.clients] == [9.0] * 3
    assert history.problem_counts() == {"latency": 3}


def test_a_round_without_usable_replies_decides_nothing(api: str) -> None:
    server = served(api, Spy("loss", requires=("loss",)), fault="raises", busy_timeout=0.0).play(2)
    for proxy in server.proxies:
        proxy.fault = None
    with pytest.raises(RunError, match="round 3: no reply has loss"):
        server.play(1)
    assert [one.num_completed for one in server.strategy.history.rounds] == [0, 0]


def test_a_run_that_goes_on_has_one_line_at_the_start_and_one_at_the_end_and_a_remark(api: str, caplog: Any) -> None:
    def report(record: Any) -> None:
        for proxy in server.proxies:
            proxy.extra = {"loss": 0.5} if record.round in (2, 3) else {}

    server = served(api, Spy("loss"), missing_columns="random", on_round=report)
    server.play(5)
    starts, ends = (f"round {n}: no reply has loss (metric 'loss'), which spy reads. Metrics that" for n in (1, 5))
    first, again, last = lines(caplog)
    assert first.startswith(starts)
    assert first.endswith("spy chooses without it")
    assert again == "round 3: clients report loss again"
    assert last.startswith(ends)
    remark = "missing_columns: no client reported loss"
    history = server.strategy.history
    assert [one.remark for one in history.rounds] == [remark, remark, "", "", remark]
    assert history.problem_counts() == {"loss": 3 * CLIENTS, "missing_columns": 3}
    assert history.remarks() == {remark: 3}


def test_a_column_that_came_once_ends_no_run(api: str, caplog: pytest.LogCaptureFixture) -> None:
    def stop_reporting(record: Any) -> None:
        for proxy in server.proxies:
            proxy.extra = {}

    server = served(api, Spy("loss", requires=("loss",)), {"loss": 0.5}, on_round=stop_reporting)
    server.play(3)
    (line,) = lines(caplog)
    assert line.startswith("round 2: no reply has loss")
    assert server.strategy.history.problem_counts() == {"loss": 2 * CLIENTS, "missing_columns": 2}


def test_what_a_selector_may_do_without_is_said_once(api: str, caplog: Any, monkeypatch: Any) -> None:
    """Nobody asked for it, and the selector does not require it."""
    monkeypatch.setitem(FAULTS, "no-joules", lambda answer, timeout: answer.metrics.pop("energy_j"))
    served(api, Spy("energy", "latency"), fault="no-joules").play(2)
    (line,) = lines(caplog)
    assert "no reply has energy (metric 'energy_j'), which spy reads" in line


def test_a_checkpoint_knows_which_columns_came(caplog: pytest.LogCaptureFixture) -> None:
    def play(core: Any, **metrics: Any) -> Any:
        play_round(core, ["a", "b"], reply(**metrics))
        return core

    first = play(play(core_of(Spy("loss")), loss=1.0))
    second = core_of(Spy("loss"))
    second.load_state_dict(first.state_dict())
    caplog.clear()
    play(second)
    assert lines(caplog) == [], "round 2 has said it"
    play(second, loss=1.0)
    assert lines(caplog) == ["round 4: clients report loss again"]
    with pytest.raises(RunError, match="no reply has loss"):
        play(core_of(Spy("loss")))


def test_the_vectorized_engine_and_scenarios_have_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorized, "asked_columns", lambda names: frozenset())
    keys = {"selector": "oort", "rounds": 2}
    with pytest.raises(RunError, match="round 1: no reply has rms_loss"):
        simulate(load_scenario("smoke", keys), engine="vectorized")
    scenario = load_scenario("smoke", keys | {"aggregation.missing_columns": "random"})
    assert make_strategy(world_of(scenario)).core.settings.missing_columns == "random"
    assert simulate(scenario, engine="vectorized").history.problem_counts()["missing_columns"] == 2


def test_every_column_that_clients_report_has_a_name_that_can_be_changed() -> None:
    reported = {name for name, column in COLUMNS.items() if column.source == "reply" or column.recorded}
    assert set(inspect.signature(MetricKeys).parameters) == reported | {"client_id", "energy_modelled"}
    assert {name: MetricKeys().of(name) for name in reported} == {name: COLUMNS[name].key for name in reported}
    with pytest.raises(TypeError, match="los"):
        MetricKeys(los="eval_loss")


@pytest.mark.parametrize("key", ["eval_loss", "loss"])
def test_a_mapped_name_is_that_of_the_answer_to_a_probe(api: str, key: str) -> None:
    """The client's own metric comes first; in the legacy API the result's loss stands for a missing one."""
    selector = create("power-of-choice", clients_per_round=2, candidates=CLIENTS, seed=0)
    answer = usual if key == "eval_loss" else lambda proxy, metrics: {"loss": 0.25 + proxy.number}
    server = served(api, selector, answer=answer, metric_keys=MetricKeys(loss=key))
    if api == "message" and key == "loss":
        for node in server.grid.nodes.values():
            node.evaluate_fault = None
    assert server.play(1).dispatched() == [["2", "3"]], "the largest losses"
    assert server.strategy.selector.state_dict()["loss"].tolist() == [0.25, 1.25, 2.25, 3.25]


def test_in_the_legacy_api_the_results_own_loss_has_the_mapped_name() -> None:
    selector = create("power-of-choice", clients_per_round=2, candidates=CLIENTS, seed=0)
    served("legacy", selector, answer=lambda proxy, metrics: {}, metric_keys=MetricKeys(loss="eval_loss")).play(1)
    assert selector.state_dict()["loss"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_mapped_names_are_those_of_replies_and_no_base_sees_a_vector(api: str) -> None:
    keys = MetricKeys(rms_loss="my_rms", gradient="my_gradient", num_examples="size")
    told = {"my_rms": 0.5, "my_gradient": vector_of(1.0, 2.0)}
    server = served(api, spy := Spy("rms_loss", "gradient"), told, metric_keys=keys).play(1)
    assert spy.reports[0].rms_loss.tolist() == [0.5] * CLIENTS
    assert spy.reports[0].gradient.tolist() == [[1.0, 2.0]] * CLIENTS
    ((given, _),) = server.given()
    assert [("my_gradient" in metrics, metrics["my_rms"]) for _, metrics in given] == [(False, 0.5)] * CLIENTS
    assert server.strategy.history.problem_counts() == {}


def test_one_line_a_round_names_the_chosen_and_the_start_names_the_selector(api: str, aloud: Any) -> None:
    server = Server(api, selection(api, create("round-robin", clients_per_round=12), min_available=13), fleet(13))
    server.play(2)
    first = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
    assert [line for line in lines(aloud) if "chooses clients" in line] == [
        f"round 1: round-robin chooses clients {first} and 2 more",
        f"round 2: round-robin chooses clients {first} and 2 more",
    ]
    (start,) = lines(aloud, "strategy: ")
    assert start == 'strategy: selector RoundRobin(clients_per_round=12), base FedAvg, clock "virtual"'


# ---- what was asked for arrives --------------------------------------------------------------------------------------

NAN = [float("nan")] * 3


def _played(api: str, spy: Spy, reported: list[dict[str, Any]], rounds: int = 1, **options: Any) -> Server:
    """Clients with these metrics in their replies."""
    proxies = [FakeProxy(f"node-{k}", k, number=k, extra=extra) for k, extra in enumerate(reported)]
    return play(api, spy, proxies, rounds, min_available=len(proxies), **options)


def vector_of(*numbers: float) -> bytes:
    return np.array(numbers, dtype=np.float32).tobytes()


def _own(k: int) -> list[float]:
    return [float(k), k + 0.5, -1.0]


ODD = pytest.mark.parametrize(
    ("odd", "problem"),
    [
        (vector_of(1.0, 2.0), "gradient: expected 3 numbers, as most have, got 2"),
        (vector_of(1.0, float("nan"), 2.0), "gradient: .* cannot be used"),
        (b"garbage", "gradient: .* cannot be used"),
        (b"", "gradient: .* cannot be used"),
        (None, "gradient: not reported"),
    ],
    ids=["length", "nan", "garbage", "empty", "missing"],
)


@pytest.mark.parametrize("name", ["gradient", "sketch"])
def test_vectors_arrive_with_the_reply_and_no_base_sees_them(api: str, name: str) -> None:
    played = _played(api, spy := Spy(name), [{name: vector_of(*_own(k))} for k in range(CLIENTS)], rounds=2)
    for report in spy.reports:
        assert getattr(report, name).tolist() == [_own(k) for k in range(CLIENTS)]
    assert played.strategy.history.problem_counts() == {}
    ours = {"latency_s", "energy_j"}
    assert [metrics.keys() & {name, *ours} for metrics in played.received()[0]] == [ours] * CLIENTS


@ODD
def test_an_odd_vector_is_missing_and_its_model_is_averaged(api: str, odd: bytes | None, problem: str) -> None:
    reported: list[dict[str, Any]] = [{"gradient": vector_of(*_own(k))} for k in range(CLIENTS)]
    reported[2] = {} if odd is None else {"gradient": odd}
    played = _played(api, spy := Spy("gradient"), reported)
    (report,) = spy.reports
    np.testing.assert_array_equal(report.gradient, [_own(0), _own(1), NAN, _own(3)])
    assert report.completed.all()
    problems = [row.problem for row in played.strategy.history.clients]
    assert problems[:2] + problems[3:] == ["", "", ""]
    assert re.fullmatch(problem, problems[2]), problems
    assert played.strategy.history.problem_counts() == {"gradient": 1}
    assert not [metrics for metrics in played.received()[0] if "gradient" in metrics]
    close(played.models[-1], mean_of(range(CLIENTS), model(), 1))


def test_where_nobody_has_a_vector_the_round_goes_on(api: str) -> None:
    played = _played(api, spy := Spy("gradient"), [{}, {}], missing_columns="random")
    assert np.isnan(spy.reports[0].gradient).all()
    assert len(spy.reports[0].gradient) == 2
    assert played.strategy.history.problem_counts() == {"gradient": 2, "missing_columns": 1}


@ODD
def test_vectors_arrive_with_the_answers_to_a_probe(api: str, odd: bytes | None, problem: str, caplog: Any) -> None:
    def answer(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
        sent = odd if proxy.number == 2 else vector_of(*_own(proxy.number))
        return metrics if sent is None else {**metrics, "gradient": sent}

    proxies = [ProbeProxy(f"node-{k}", k, number=k, answer=answer) for k in range(CLIENTS)]
    play(api, asking := Curious("gradient"), proxies, 2, min_available=CLIENTS)
    why = problem if "expected" in problem else "no gradient"
    assert lines(caplog) == [f"round {n}, client 2: probe: {why}" for n in (1, 2)]
    told = [columns["gradient"] for _, columns in asking.informed if "gradient" in columns]
    np.testing.assert_array_equal(told, [[_own(0), _own(1), NAN, _own(3)]] * 2)


def test_a_metric_of_that_name_that_nobody_asked_for_is_left_alone(api: str) -> None:
    """A number in either API; bytes, which only the legacy API has."""
    extra: dict[str, Any] = {"gradient": 0.5, **({"sketch": b"1234"} if api == "legacy" else {})}
    played = _played(api, Spy(), [extra, extra])
    assert played.strategy.history.problem_counts() == {}
    assert [extra.items() <= metrics.items() for metrics in played.received()[0]] == [True, True]


@pytest.mark.parametrize(("name", "needs"), [("sketch", ()), ("sketch", ("loss",)), ("update", ("gradient",))])
def test_a_model_may_have_the_name_of_a_vector(name: str, needs: tuple[str, ...]) -> None:
    """The name of the record is the client's to choose; "update" is a vector that no client sends."""

    class Renaming(FakeNode):
        def _train(self, message: Any) -> Any:
            content = super()._train(message)
            content[name] = content.pop("arrays")
            return content

    extra: dict[str, Any] = {"gradient": vector_of(1.0, 2.0)} if "gradient" in needs else {"loss": 0.5}
    proxies = [FakeProxy(str(k), k, number=k, extra=extra) for k in range(2)]
    played = play("message", Spy(*needs), proxies, base=base_of("message"), node=Renaming, min_available=2)
    assert played.strategy.history.problem_counts() == {}
    assert len(played.models[-1]) == 2


@pytest.mark.parametrize("name", ["loss", "rms_loss", "local_accuracy"])
def test_numbers_arrive_and_a_missing_one_is_missing_in_its_row_alone(api: str, name: str) -> None:
    played = _played(api, spy := Spy(name), [{name: 0.125}, {}, {name: 0.375}, {name: float("nan")}])
    (report,) = spy.reports
    np.testing.assert_array_equal(getattr(report, name), [0.125, np.nan, 0.375, np.nan])
    assert report.completed.tolist() == [True] * 4
    history = played.strategy.history
    assert [row.problem for row in history.clients] == ["", f"{name}: not reported", "", f"{name}: nan cannot be used"]
    assert (history.problem_counts(), history.rounds[0].num_completed) == ({name: 2}, 4)


@pytest.mark.parametrize(("name", "value"), [("loss", 0.5), ("gradient", vector_of(1.0, 2.0))])
def test_what_a_selector_requires_makes_a_client_a_failed_one_for_the_selector(api: str, name: str, value: Any) -> None:
    played = _played(api, spy := Spy(name, requires=(name,)), [{name: value}, {}, {name: value}])
    (report,) = spy.reports
    assert report.completed.tolist() == [True, False, True]
    assert report.latency.tolist() == [0.5, MAX_LATENCY, 0.75]
    assert len(played.received()[0]) == 3  # its model is averaged all the same
    assert [row.completed for row in played.strategy.history.clients] == [True] * 3


@pytest.mark.parametrize(
    ("needs", "asked"),
    [
        ((), None), (("latency", "energy", "num_examples", "energy_score"), None), (("loss",), "loss"),
        (("sketch", "energy", "gradient", "loss"), "gradient,loss,sketch"),
    ],
)  # fmt: skip
def test_the_train_config_asks_for_columns_in_copies(api: str, needs: tuple[str, ...], asked: str | None) -> None:
    proxies, shared = fleet(2), ConfigRecord({"lr": 0.5})
    base = base_of(api, **({"on_fit_config_fn": lambda server_round: shared} if api == "legacy" else {}))
    strategy = selection(api, Spy(*needs), base, min_available=2, missing_columns="random")
    Server(api, strategy, proxies).play(2, **({"train_config": shared} if api == "message" else {}))
    assert {key: value for key, value in shared.items() if key != "server-round"} == {"lr": 0.5}
    seen = [ins.config for proxy in proxies for ins in proxy.fits]
    assert [(config["lr"], config.get("needs")) for config in seen] == [(0.5, asked)] * 4
