"""Late clients, and the two clocks: what clients report, and what the server times itself."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.records import ClientRecord
from fedsel_flwr.rounds.replies import Reply, read_reply
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.strategies import BSFL, CSUCB, message
from tests.strategies.helpers import FakeProxy, Federation, RecordingBase, fedavg, initial
from tests.strategies.message import helpers as messages

pytestmark = pytest.mark.timeout(60)


def test_on_the_virtual_clock_a_client_at_max_latency_has_failed() -> None:
    base = RecordingBase()
    strategy = CSUCB(clients_per_round=3, max_latency=5.0, seed=0, base=base)
    proxies = [
        FakeProxy("a", "a", number=0, latency=4.999),
        FakeProxy("b", "b", number=1, latency=5.0),
        FakeProxy("c", "c", number=2, latency=500.0),
    ]
    Federation(strategy, proxies).play(1)
    assert [(r.client_id, r.completed, r.latency_s) for r in strategy.history.clients] == [
        ("a", True, 4.999), ("b", False, 5.0), ("c", False, 5.0)
    ]  # fmt: skip
    ((results, failures),) = base.given
    assert [client.cid for client, _ in results] == ["a"]
    assert len(failures) == 2
    assert strategy.selector.state_dict()["mean"].tolist() == pytest.approx([1 - 4.999 / 5, 0.0, 0.0])
    assert strategy.history.rounds[0].round_s == 5.0


@pytest.mark.timeout(30)
def test_on_the_servers_clock_reports_are_clipped_into_the_observed_window() -> None:
    slack, delay = 1.0, 1.2  # a second of room for a busy machine
    strategy = CSUCB(clients_per_round=6, max_latency=30.0, seed=0, base=fedavg(), clock="server", clock_slack=slack)
    proxies = [
        FakeProxy("boaster", "boaster", number=0, latency=0.001, delay=delay),
        FakeProxy("moaner", "moaner", number=1, latency=25.0, delay=delay),
        FakeProxy("absent", "absent", number=2, fault="latency-missing", delay=delay),
        FakeProxy("honest", "honest", number=3, latency=delay, delay=delay + 0.02),
        FakeProxy("text", "text", number=4, fault="latency-text", delay=delay),
        FakeProxy("minus", "minus", number=5, fault="latency-negative", delay=delay),
    ]
    federation = Federation(strategy, proxies, max_workers=6).play(2)
    rows = {row.client_id: row for row in strategy.history.clients if row.round == 2}  # each had its first time before
    assert all(row.completed for row in rows.values())  # each replacement counted, the update kept
    assert delay - slack <= rows["boaster"].latency_s < delay
    for name in ("moaner", "absent", "text", "minus"):
        assert delay <= rows[name].latency_s < delay + 1.0, name
    assert rows["honest"].latency_s == delay
    assert rows["honest"].problem == ""
    assert strategy.history.problem_counts() == {"latency": 8}  # that the server times a client is no problem
    assert {name: row.latency_source for name, row in rows.items()} == {
        "boaster": "clipped", "moaner": "observed", "absent": "observed", "honest": "reported", "text": "observed",
        "minus": "observed",
    }  # fmt: skip
    assert federation.models[-1] != initial().tensors


@pytest.mark.timeout(30)
def test_on_the_servers_clock_faults_fail_and_the_selector_stays_finite() -> None:
    strategy = BSFL(
        clients_per_round=6, min_latency=0.01, max_latency=2.0, seed=0, base=fedavg(), clock="server", clock_slack=0.1,
        identity="claim",
    )  # fmt: skip
    faults = ["nan", "raises", "status", "straggler", "latency-infinite"]
    proxies = [FakeProxy(name, f"bad-{name}", fault=name) for name in faults]
    proxies.append(FakeProxy("h", "h", number=1, delay=0.05, latency=0.05))
    Federation(strategy, proxies, max_workers=6, timeout=0.05).play(3)
    for row in strategy.history.clients:
        good = row.client_id in ("h", "bad-latency-infinite")
        assert row.completed == good, row
        assert row.latency_s == 2.0 or good
    assert all(np.isfinite(np.asarray(v, dtype=float)).all() for v in strategy.selector.state_dict().values())


def test_that_the_server_times_a_client_is_no_problem(caplog: pytest.LogCaptureFixture) -> None:
    """It is usual in a deployment; a column says where the time came from. Faults are named in every round."""
    strategy = CSUCB(clients_per_round=2, max_latency=5.0, seed=0, base=fedavg(), clock="server")
    proxies = [FakeProxy("a", "a", fault="latency-missing"), FakeProxy("b", "b", fault="nan")]
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        Federation(strategy, proxies).play(4)
    said = [record.getMessage() for record in caplog.records]
    assert not [text for text in said if "client a" in text]
    assert sum("client b: arrays: not finite" in text for text in said) == 4
    rows = [(row.problem, row.latency_source) for row in strategy.history.clients if row.client_id == "a"]
    assert rows == [("", "first"), *[("", "observed")] * 3]


@pytest.mark.parametrize("claim", [-1.0, -1e300, float("-inf"), float("nan"), 1e9])
def test_a_claim_outside_the_observed_time_earns_the_observed_time(claim: float) -> None:
    """Neither a second below nothing nor a year can be true: no liar is better off than who says nothing."""
    reply = Reply(arrays=[], num_examples=1, metrics={"latency_s": claim}, observed_s=2.0)
    result = read_reply(reply, Settings(clock="server"), client_id="7")
    assert (result.latency_s, result.latency_source, result.completed) == (2.0, "observed", True)
    assert len(result.problems) == 1
    assert result.problems[0].startswith("latency: ")


@pytest.mark.parametrize(
    ("claim", "slack", "expected"),
    [(0.0, None, 1.8), (1.9, None, 1.9), (1.5, None, 1.8), (0.0, 0.5, 1.5), (0.0, 9.0, 0.0), (2.0, 0.0, 2.0)],
)
def test_a_report_gains_no_more_than_the_slack(claim: float, slack: float | None, expected: float) -> None:
    """By default a tenth of the observed 2 s: 5 s would have hidden every difference below them."""
    reply = Reply(arrays=[], num_examples=1, metrics={"latency_s": claim}, observed_s=2.0)
    result = read_reply(reply, Settings(clock="server", clock_slack=slack), client_id="7")
    assert result.latency_s == pytest.approx(expected)
    assert result.latency_source == ("reported" if claim == expected else "clipped")


@pytest.mark.parametrize(
    ("reported", "expected"), [({"latency_s": 1.5}, (1.5, "reported")), ({}, (4.0, "max_latency"))]
)
def test_a_client_whom_nothing_timed_is_believed(reported: dict[str, float], expected: tuple[float, str]) -> None:
    """Under secure aggregation Flower's workflow asks the clients itself, and the server has no time of its own."""
    reply = Reply(arrays=[], num_examples=1, metrics=reported)
    result = read_reply(reply, Settings(clock="server", max_latency=4.0), client_id="7")
    assert (result.latency_s, result.latency_source) == expected


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_computing_and_transfer_are_told_apart(api: str) -> None:
    """What the client reports is computing, the rest of the round trip is transfer; nothing reported, nothing known."""
    delay, options = (
        0.3,
        dict[str, Any](clients_per_round=4, max_latency=30.0, seed=0, clock="server", identity="claim"),
    )
    told = {"apart": {"compute_s": 0.125}, "silent": {}, "liar": {"compute_s": 300.0}}
    proxies = [FakeProxy(name, name, fault="latency-missing", extra=extra) for name, extra in told.items()]
    proxies.append(FakeProxy("own", "own", latency=delay, extra={"compute_s": 0.125}))
    if api == "legacy":
        strategy: Any = CSUCB(base=fedavg(), **options)
        for proxy in proxies:
            proxy.delay = delay
        Federation(strategy, proxies, max_workers=4).play(2)
    else:
        strategy = message.CSUCB(base=messages.fedavg(), **options)
        nodes = {number: messages.FakeNode(proxy, ready=delay) for number, proxy in enumerate(proxies, start=1)}
        messages.play(strategy, messages.FakeGrid(nodes), 2)
    (first,) = [row for row in strategy.history.clients if row.client_id == "apart" and row.round == 1]
    assert (first.latency_source, first.transfer_s) == ("first", first.first_s - 0.125)
    assert first.latency_s <= delay < first.first_s
    rows = {row.client_id: row for row in strategy.history.clients if row.round == 2}  # each had its first time before
    assert all(row.completed for row in rows.values())
    apart = rows["apart"]
    assert (apart.latency_source, apart.compute_s) == ("observed", 0.125)
    assert apart.transfer_s == apart.latency_s - 0.125 > delay - 0.126
    for name in ("silent", "liar", "own"):  # a latency of the client's own was not observed
        assert math.isnan(rows[name].transfer_s), name
    assert math.isnan(rows["liar"].compute_s)
    assert rows["liar"].problem == (f"compute: 300 s cannot be used, the server waited {rows['liar'].latency_s:.6g} s")
    assert strategy.history.problem_counts()["compute"] == 2


@pytest.mark.parametrize(
    ("clock", "observed", "usable"),
    [
        ("server", 2.5, True),
        ("server", 2.0, True),
        ("server", 1.999, False),
        ("server", None, True),
        ("virtual", 1.0, True),
    ],
)
def test_nobody_computes_longer_than_the_server_waited(clock: Any, observed: float | None, usable: bool) -> None:
    metrics = {"compute_s": 2.0, "latency_s": 1.0}
    reply = Reply(arrays=[], num_examples=1, metrics=metrics, observed_s=observed)
    result = read_reply(reply, Settings(clock=clock), client_id="7")
    assert result.completed
    assert (result.values["compute"] == 2.0) == usable
    assert ("compute_s" in result.faulty_keys) != usable
    assert any(text.startswith("compute: ") for text in result.problems) != usable


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.5),
        ({"latency_source": "reported"}, math.nan),
        ({"latency_source": "clipped"}, math.nan),
        ({"latency_source": "max_latency", "completed": False}, math.nan),
        ({"compute_s": math.nan}, math.nan),
        ({"compute_s": 9.0}, 0.0),  # latency_s was cut at max_latency
    ],
)
def test_the_transfer_of_a_record(changes: dict[str, Any], expected: float) -> None:
    row = ClientRecord(
        round=1, client_id="a", client=0, completed=True, problem="", latency_s=2.0, energy_j=1.0, download_s=math.nan,
        compute_s=0.5, upload_s=math.nan, train_loss=1.0, num_examples=3, latency_source="observed",
    )  # fmt: skip
    assert replace(row, **changes).transfer_s == pytest.approx(expected, nan_ok=True)


def test_a_least_latency_above_the_longest_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        BSFL(clients_per_round=2, min_latency=100.0, max_latency=5.0, base=fedavg())
    assert "min_latency is 100 s and max_latency 5 s" in caplog.text
