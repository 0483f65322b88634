"""What a selector needs of the clients, in both APIs: it is asked for, arrives, and no base strategy sees a vector."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from fedsel_flwr.selectors.base import Probe
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies import helpers
from tests.strategies.helpers import FakeProxy, Federation, model, update
from tests.strategies.message import helpers as message
from tests.strategies.message.helpers import FakeGrid, FakeNode, ProbeProxy, node_id
from tests.strategies.scripted import APIS, MAX_LATENCY, Spy

pytestmark = pytest.mark.timeout(30)
CLIENTS = 4
NAN = [float("nan")] * 3


class Asking(Spy):
    """Asks everybody before each choice, too."""

    def __init__(self, *columns: str) -> None:
        super().__init__()
        self.columns = columns

    def _probe(self, available: Any) -> Probe:
        return Probe(clients=available, columns=self.columns)


def _played(api: str, selector: Spy, proxies: list[Any], rounds: int = 1) -> tuple[Any, Any, list[np.ndarray]]:
    """The strategy, what the base was given (metrics, number of records of arrays), and the last model."""
    options: dict[str, Any] = {"max_latency": MAX_LATENCY, "min_available": len(proxies)}
    if api == "legacy":
        base: Any = helpers.RecordingBase()
        strategy: Any = LegacyStrategy(selector, base, **options)
        arrays = Federation(strategy, proxies).play(rounds).arrays()
        return strategy, [(dict(res.metrics), 1) for _, res in base.given[-1][0]], arrays
    base = message.RecordingBase()
    strategy = MessageStrategy(selector, base, **options)
    grid = FakeGrid({node_id(p.number): FakeNode(p, extra={}) for p in proxies})
    result, _ = message.play(strategy, grid, rounds)
    contents = [m.content for m in base.given[-1] if m.has_content()]
    given = [(dict(next(iter(c.metric_records.values()))), len(c.array_records)) for c in contents]
    return strategy, given, result.arrays.to_numpy_ndarrays()


def _vector(*numbers: float) -> bytes:
    return np.array(numbers, dtype=np.float32).tobytes()


def _own(k: int) -> list[float]:
    return [float(k), k + 0.5, -1.0]


ODD = pytest.mark.parametrize(
    ("odd", "problem"),
    [
        (_vector(1.0, 2.0), "gradient: expected 3 numbers, as most have, got 2"),
        (_vector(1.0, float("nan"), 2.0), "gradient: .* cannot be used"),
        (b"garbage", "gradient: .* cannot be used"),
        (b"", "gradient: .* cannot be used"),
        (None, "gradient: not reported"),
    ],
    ids=["length", "nan", "garbage", "empty", "missing"],
)


# ---- vectors ---------------------------------------------------------------------------------------------------------


@APIS
@pytest.mark.parametrize("name", ["gradient", "sketch"])
def test_vectors_arrive_with_the_reply_and_no_base_sees_them(api: str, name: str) -> None:
    spy = Spy(name)
    proxies = [FakeProxy(f"node-{k}", k, number=k, extra={name: _vector(*_own(k))}) for k in range(CLIENTS)]
    strategy, given, _ = _played(api, spy, proxies, rounds=2)
    for report in spy.reports:
        assert getattr(report, name).tolist() == [_own(k) for k in range(CLIENTS)]
    assert strategy.history.problem_counts() == {}
    assert [(name in metrics, arrays) for metrics, arrays in given] == [(False, 1)] * CLIENTS
    assert all({"latency_s", "energy_j"} <= metrics.keys() for metrics, _ in given)


@APIS
@ODD
def test_an_odd_vector_is_missing_in_its_row_alone_and_its_model_is_averaged(
    api: str, odd: bytes | None, problem: str
) -> None:
    spy = Spy("gradient")
    proxies = [FakeProxy(f"node-{k}", k, number=k, extra={"gradient": _vector(*_own(k))}) for k in range(CLIENTS)]
    proxies[2].extra = {} if odd is None else {"gradient": odd}
    strategy, given, arrays = _played(api, spy, proxies)
    (report,) = spy.reports
    expected = [_own(0), _own(1), NAN, _own(3)]
    np.testing.assert_array_equal(report.gradient, expected)
    assert report.completed.all()
    problems = [row.problem for row in strategy.history.clients]
    assert problems[:2] + problems[3:] == ["", "", ""]
    assert re.fullmatch(problem, problems[2]), problems
    assert strategy.history.problem_counts() == {"gradient": 1}
    assert not [metrics for metrics, _ in given if "gradient" in metrics]
    weights = [10 + 3 * k for k in range(CLIENTS)]
    updates = [update(k, model(), 1) for k in range(CLIENTS)]
    for array, own in zip(arrays, zip(*updates, strict=True), strict=True):
        np.testing.assert_allclose(array, np.average(own, axis=0, weights=weights), rtol=1e-5, atol=1e-5)


@APIS
def test_where_nobody_has_a_vector_the_round_goes_on(api: str) -> None:
    spy = Spy("gradient")
    strategy, _, _ = _played(api, spy, [FakeProxy(f"node-{k}", k, number=k) for k in range(2)])
    assert np.isnan(spy.reports[0].gradient).all()
    assert len(spy.reports[0].gradient) == 2
    assert strategy.history.problem_counts() == {"gradient": 2}


@APIS
@ODD
def test_vectors_arrive_with_the_answers_to_a_probe(
    api: str, odd: bytes | None, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
        sent = odd if proxy.number == 2 else _vector(*_own(proxy.number))
        return metrics if sent is None else {**metrics, "gradient": sent}

    asking = Asking("gradient")
    proxies = [ProbeProxy(f"node-{k}", k, number=k, answer=answer) for k in range(CLIENTS)]
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        _played(api, asking, proxies, rounds=2)
    said = [record.getMessage() for record in caplog.records if record.name == "fedsel_flwr"]
    why = problem if "expected" in problem else "no gradient"
    assert said == [f"round {n}, client 2: probe: {why}" for n in (1, 2)]
    told = [columns["gradient"] for _, columns in asking.informed if "gradient" in columns]
    assert len(told) == 2
    for gradients in told:
        np.testing.assert_array_equal(gradients, [_own(0), _own(1), NAN, _own(3)])


@APIS
def test_a_metric_of_that_name_that_nobody_asked_for_is_left_alone(api: str) -> None:
    """A number in either API; bytes, which only the legacy API has."""
    extra: dict[str, Any] = {"gradient": 0.5, **({"sketch": b"1234"} if api == "legacy" else {})}
    spy = Spy()
    strategy, given, _ = _played(api, spy, [FakeProxy(f"node-{k}", k, number=k, extra=extra) for k in range(2)])
    assert strategy.history.problem_counts() == {}
    assert [extra.items() <= metrics.items() for metrics, _ in given] == [True, True]


def _called(name: str) -> Any:
    def fault(node: FakeNode, sent: Any, content: Any) -> Any:
        content[name] = content["arrays"]
        del content["arrays"]
        return content

    return fault


@pytest.mark.parametrize(("name", "needs"), [("sketch", ()), ("sketch", ("loss",)), ("update", ("gradient",))])
def test_a_model_may_have_the_name_of_a_vector(name: str, needs: tuple[str, ...]) -> None:
    """The name of the record is the client's to choose; "update" is a vector that no client sends."""
    spy, extra = Spy(*needs), {"gradient": _vector(1.0, 2.0)} if "gradient" in needs else {"loss": 0.5}
    proxies = [FakeProxy(str(k), k, number=k, extra=extra) for k in range(2)]
    nodes = {node_id(p.number): FakeNode(p, extra={}, fault=_called(name)) for p in proxies}
    strategy = MessageStrategy(spy, message.fedavg(), max_latency=MAX_LATENCY, min_available=2)
    result, _ = message.play(strategy, FakeGrid(nodes), 1)
    assert strategy.history.problem_counts() == {}
    assert len(result.arrays.to_numpy_ndarrays()) == 2


# ---- numbers ---------------------------------------------------------------------------------------------------------


@APIS
@pytest.mark.parametrize("name", ["loss", "rms_loss", "local_accuracy"])
def test_numbers_arrive_and_a_missing_one_is_missing_in_its_row_alone(api: str, name: str) -> None:
    spy = Spy(name)
    proxies = [FakeProxy(f"node-{k}", k, number=k, extra={name: 0.125 * (k + 1)}) for k in range(CLIENTS)]
    proxies[1].extra = {}
    proxies[3].extra = {name: float("nan")}
    strategy, _, _ = _played(api, spy, proxies)
    (report,) = spy.reports
    np.testing.assert_array_equal(getattr(report, name), [0.125, np.nan, 0.375, np.nan])
    assert report.completed.tolist() == [True] * 4
    problems = [row.problem for row in strategy.history.clients]
    assert problems == ["", f"{name}: not reported", "", f"{name}: nan cannot be used"]
    assert strategy.history.problem_counts() == {name: 2}
    assert strategy.history.rounds[0].num_completed == 4


@APIS
@pytest.mark.parametrize("name", ["loss", "gradient"])
def test_what_a_selector_requires_makes_a_client_a_failed_one_for_the_selector(api: str, name: str) -> None:
    spy = Spy(name, requires=(name,))
    value: Any = _vector(1.0, 2.0) if name == "gradient" else 0.5
    proxies = [FakeProxy(f"node-{k}", k, number=k, extra={name: value}) for k in range(3)]
    proxies[1].extra = {}
    strategy, given, _ = _played(api, spy, proxies)
    (report,) = spy.reports
    assert report.completed.tolist() == [True, False, True]
    assert report.latency.tolist() == [0.5, MAX_LATENCY, 0.75]
    assert len(given) == 3  # its model is averaged all the same
    assert [row.completed for row in strategy.history.clients] == [True] * 3


# ---- asking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "asked"),
    [
        ((), None), (("latency", "energy", "num_examples", "energy_score"), None), (("loss",), "loss"),
        (("sketch", "energy", "gradient", "loss"), "gradient,loss,sketch"),
    ],
)  # fmt: skip
@APIS
def test_the_train_config_asks_for_what_must_be_asked_for_in_copies(
    api: str, needs: tuple[str, ...], asked: str | None
) -> None:
    spy, options = Spy(*needs), {"max_latency": MAX_LATENCY, "min_available": 2}
    proxies = [FakeProxy(f"node-{k}", k, number=k) for k in range(2)]
    shared: dict[str, Any] = {"lr": 0.5}
    if api == "legacy":
        base = helpers.RecordingBase(on_fit_config_fn=lambda server_round: shared)
        Federation(LegacyStrategy(spy, base, **options), proxies).play(2)
    else:
        record = ConfigRecord({"lr": 0.5})
        strategy = MessageStrategy(spy, message.fedavg(), **options)
        message.play(strategy, FakeGrid({node_id(p.number): FakeNode(p) for p in proxies}), 2, train_config=record)
        shared = {key: value for key, value in record.items() if key != "server-round"}
    assert shared == {"lr": 0.5}
    seen = [ins.config for proxy in proxies for ins in proxy.fits]
    assert len(seen) == 4
    for config in seen:
        assert config["lr"] == 0.5
        assert config.get("needs") == asked
