"""What a selector needs of the clients, in both APIs: it is asked for, arrives, and no base strategy sees a vector."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from fedsel_flwr.selectors.base import Probe
from tests.strategies.either_api import BOTH, Played, Server, base_of, play, selection
from tests.strategies.helpers import FakeProxy, fleet, model, update
from tests.strategies.message.helpers import FakeNode, ProbeProxy
from tests.strategies.scripted import MAX_LATENCY, Spy

CLIENTS = 4
NAN = [float("nan")] * 3


class Asking(Spy):
    """Asks everybody before each choice, too."""

    def __init__(self, *columns: str) -> None:
        super().__init__()
        self.columns = columns

    def _probe(self, available: Any) -> Probe:
        return Probe(clients=available, columns=self.columns)


def _played(api: str, spy: Spy, reported: list[dict[str, Any]], rounds: int = 1, **options: Any) -> Played:
    """Clients with these metrics in their replies."""
    proxies = [FakeProxy(f"node-{k}", k, number=k, extra=extra) for k, extra in enumerate(reported)]
    return play(api, spy, proxies, rounds, min_available=len(proxies), **options)


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


@BOTH
@pytest.mark.parametrize("name", ["gradient", "sketch"])
def test_vectors_arrive_with_the_reply_and_no_base_sees_them(api: str, name: str) -> None:
    played = _played(api, spy := Spy(name), [{name: _vector(*_own(k))} for k in range(CLIENTS)], rounds=2)
    for report in spy.reports:
        assert getattr(report, name).tolist() == [_own(k) for k in range(CLIENTS)]
    assert played.strategy.history.problem_counts() == {}
    assert [metrics.keys() & {name, "latency_s", "energy_j"} for metrics in played.given()[0]] == [
        {"latency_s", "energy_j"}
    ] * CLIENTS


@BOTH
@ODD
def test_an_odd_vector_is_missing_and_its_model_is_averaged(api: str, odd: bytes | None, problem: str) -> None:
    reported: list[dict[str, Any]] = [{"gradient": _vector(*_own(k))} for k in range(CLIENTS)]
    reported[2] = {} if odd is None else {"gradient": odd}
    played = _played(api, spy := Spy("gradient"), reported)
    (report,) = spy.reports
    np.testing.assert_array_equal(report.gradient, [_own(0), _own(1), NAN, _own(3)])
    assert report.completed.all()
    problems = [row.problem for row in played.strategy.history.clients]
    assert problems[:2] + problems[3:] == ["", "", ""]
    assert re.fullmatch(problem, problems[2]), problems
    assert played.strategy.history.problem_counts() == {"gradient": 1}
    assert not [metrics for metrics in played.given()[0] if "gradient" in metrics]
    updates = [update(k, model(), 1) for k in range(CLIENTS)]
    for array, own in zip(played.arrays, zip(*updates, strict=True), strict=True):
        np.testing.assert_allclose(array, np.average(own, axis=0, weights=[10, 13, 16, 19]), rtol=1e-5, atol=1e-5)


@BOTH
def test_where_nobody_has_a_vector_the_round_goes_on(api: str) -> None:
    played = _played(api, spy := Spy("gradient"), [{}, {}], missing_columns="random")
    assert np.isnan(spy.reports[0].gradient).all()
    assert len(spy.reports[0].gradient) == 2
    assert played.strategy.history.problem_counts() == {"gradient": 2, "missing_columns": 1}


@BOTH
@ODD
def test_vectors_arrive_with_the_answers_to_a_probe(api: str, odd: bytes | None, problem: str, caplog: Any) -> None:
    def answer(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
        sent = odd if proxy.number == 2 else _vector(*_own(proxy.number))
        return metrics if sent is None else {**metrics, "gradient": sent}

    proxies = [ProbeProxy(f"node-{k}", k, number=k, answer=answer) for k in range(CLIENTS)]
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        play(api, asking := Asking("gradient"), proxies, 2, min_available=CLIENTS)
    said = [record.getMessage() for record in caplog.records if record.name == "fedsel_flwr"]
    why = problem if "expected" in problem else "no gradient"
    assert said == [f"round {n}, client 2: probe: {why}" for n in (1, 2)]
    told = [columns["gradient"] for _, columns in asking.informed if "gradient" in columns]
    np.testing.assert_array_equal(told, [[_own(0), _own(1), NAN, _own(3)]] * 2)


@BOTH
def test_a_metric_of_that_name_that_nobody_asked_for_is_left_alone(api: str) -> None:
    """A number in either API; bytes, which only the legacy API has."""
    extra: dict[str, Any] = {"gradient": 0.5, **({"sketch": b"1234"} if api == "legacy" else {})}
    played = _played(api, Spy(), [extra, extra])
    assert played.strategy.history.problem_counts() == {}
    assert [extra.items() <= metrics.items() for metrics in played.given()[0]] == [True, True]


@pytest.mark.parametrize(("name", "needs"), [("sketch", ()), ("sketch", ("loss",)), ("update", ("gradient",))])
def test_a_model_may_have_the_name_of_a_vector(name: str, needs: tuple[str, ...]) -> None:
    """The name of the record is the client's to choose; "update" is a vector that no client sends."""

    class Renaming(FakeNode):
        def _train(self, message: Any) -> Any:
            content = super()._train(message)
            content[name] = content.pop("arrays")
            return content

    extra: dict[str, Any] = {"gradient": _vector(1.0, 2.0)} if "gradient" in needs else {"loss": 0.5}
    proxies = [FakeProxy(str(k), k, number=k, extra=extra) for k in range(2)]
    played = play("message", Spy(*needs), proxies, base=base_of("message"), node=Renaming, min_available=2)
    assert played.strategy.history.problem_counts() == {}
    assert len(played.arrays) == 2


@BOTH
@pytest.mark.parametrize("name", ["loss", "rms_loss", "local_accuracy"])
def test_numbers_arrive_and_a_missing_one_is_missing_in_its_row_alone(api: str, name: str) -> None:
    played = _played(api, spy := Spy(name), [{name: 0.125}, {}, {name: 0.375}, {name: float("nan")}])
    (report,) = spy.reports
    np.testing.assert_array_equal(getattr(report, name), [0.125, np.nan, 0.375, np.nan])
    assert report.completed.tolist() == [True] * 4
    history = played.strategy.history
    assert [row.problem for row in history.clients] == ["", f"{name}: not reported", "", f"{name}: nan cannot be used"]
    assert (history.problem_counts(), history.rounds[0].num_completed) == ({name: 2}, 4)


@BOTH
@pytest.mark.parametrize(("name", "value"), [("loss", 0.5), ("gradient", _vector(1.0, 2.0))])
def test_what_a_selector_requires_makes_a_client_a_failed_one_for_the_selector(api: str, name: str, value: Any) -> None:
    played = _played(api, spy := Spy(name, requires=(name,)), [{name: value}, {}, {name: value}])
    (report,) = spy.reports
    assert report.completed.tolist() == [True, False, True]
    assert report.latency.tolist() == [0.5, MAX_LATENCY, 0.75]
    assert len(played.given()[0]) == 3  # its model is averaged all the same
    assert [row.completed for row in played.strategy.history.clients] == [True] * 3


@pytest.mark.parametrize(
    ("needs", "asked"),
    [
        ((), None), (("latency", "energy", "num_examples", "energy_score"), None), (("loss",), "loss"),
        (("sketch", "energy", "gradient", "loss"), "gradient,loss,sketch"),
    ],
)  # fmt: skip
@BOTH
def test_the_train_config_asks_for_columns_in_copies(api: str, needs: tuple[str, ...], asked: str | None) -> None:
    proxies, shared = fleet(2), ConfigRecord({"lr": 0.5})
    base = base_of(api, **({"on_fit_config_fn": lambda server_round: shared} if api == "legacy" else {}))
    strategy = selection(api, Spy(*needs), base, min_available=2, missing_columns="random")
    Server(api, strategy, proxies).play(2, **({"train_config": shared} if api == "message" else {}))
    assert {key: value for key, value in shared.items() if key != "server-round"} == {"lr": 0.5}
    seen = [ins.config for proxy in proxies for ins in proxy.fits]
    assert [(config["lr"], config.get("needs")) for config in seen] == [(0.5, asked)] * 4
