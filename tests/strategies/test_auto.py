"""Strategies that need no number on the server's clock, in both APIs: what is asked for, taken and learned.

The trial is that of ``benchmarks/polling_floor.py``: 5 clients, 2 a round, a floor of 4 to 7 s under every round trip,
2 s of their own and 3 s more for client 4. Nobody waits: what sleeps moves a clock, which the server reads.
"""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from flwr.common import FitIns, FitRes

from fedsel_flwr import strategies
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import create
from fedsel_flwr.strategies import BSFL, CSUCB, CSUCBQ, SelectionStrategy, message
from tests.strategies import helpers
from tests.strategies.helpers import FakeProxy, Federation, fedavg
from tests.strategies.message import helpers as message_helpers
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id

PAPERS = [(BSFL, "min_latency"), (CSUCB, "max_latency"), (CSUCBQ, "max_latency")]
CLIENTS, ROUNDS = 5, 200


@pytest.mark.parametrize(("strategy", "parameter"), PAPERS)
@pytest.mark.parametrize("api", ["legacy", "message"])
def test_no_number_is_needed_on_the_servers_clock(strategy: Any, parameter: str, api: str) -> None:
    made = (strategy if api == "legacy" else getattr(message, strategy.__name__))(clients_per_round=2, clock="server")
    assert getattr(made.selector, parameter) == "auto"
    assert made.core.settings.max_latency == 60.0
    assert inspect.signature(strategy).parameters[parameter].default is None


@pytest.mark.parametrize(("strategy", "parameter"), PAPERS)
def test_the_virtual_clock_needs_a_number_or_auto(strategy: Any, parameter: str) -> None:
    """Also where None is written out; the message says what may be given."""
    for params in ({}, {parameter: None}, {"clock": "virtual"}):
        with pytest.raises(ParameterError, match=rf'{strategy.__name__} needs {parameter} on the virtual .*"auto"'):
            strategy(clients_per_round=2, **params)
    assert getattr(strategy(clients_per_round=2, **{parameter: "auto"}).selector, parameter) == "auto"


@pytest.mark.parametrize(("strategy", "parameter"), PAPERS)
def test_a_number_is_used_as_it_is(strategy: Any, parameter: str) -> None:
    made = strategy(clients_per_round=2, clock="server", **{parameter: 7})
    assert getattr(made.selector, parameter) == 7.0
    with pytest.raises(ParameterError, match=f"{parameter} must be a finite number above 0, got 0"):
        strategy(clients_per_round=2, clock="server", **{parameter: 0})


def test_how_long_a_client_may_take_is_the_strategys() -> None:
    """Auto scales rewards only."""
    for cls in (CSUCB, CSUCBQ):
        assert cls(clients_per_round=2, clock="server", longest_wait=30).core.settings.max_latency == 30.0
        assert cls(clients_per_round=2, max_latency=5.0).core.settings.max_latency == 5.0
        assert cls(clients_per_round=2, max_latency="auto").core.settings.max_latency == 60.0
        with pytest.raises(ParameterError, match="longest_wait must be a finite number above 0"):
            cls(clients_per_round=2, clock="server", longest_wait=0)
        with pytest.raises(ParameterError, match=r"max_latency is 30.* for the strategy but 5.* for the selector"):
            cls(clients_per_round=2, max_latency=5.0, longest_wait=30)
    assert BSFL(clients_per_round=2, clock="server", max_latency=30.0).core.settings.max_latency == 30.0
    assert "longest_wait" not in inspect.signature(BSFL).parameters
    selector = create("cs-ucb", clients_per_round=2, max_latency="auto")
    assert SelectionStrategy(selector, max_latency=30.0).core.settings.max_latency == 30.0
    selector = create("cs-ucb", clients_per_round=2, max_latency="auto")
    assert SelectionStrategy(selector).core.settings.max_latency == 60.0


class Clock(threading.local):
    """Stands in for the module ``time``; every thread has its own."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Deployed(FakeProxy):
    """A client that reports no time, and takes that of the trial."""

    def round_trip(self) -> float:
        floor = np.random.default_rng([self.number, len(self.fits)]).uniform(4.0, 7.0)
        return float(floor) + 2.0 + 3.0 * (self.number == CLIENTS - 1)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        self.delay = self.round_trip()
        result = super().fit(ins, timeout, group_id)
        del result.metrics["latency_s"]
        return result


class DeployedNode(FakeNode):
    """A node around it, which has its answer ready after a round trip."""

    def handle(self, message: Message) -> Any:
        assert isinstance(self.proxy, Deployed)
        self.ready = self.proxy.round_trip()
        return super().handle(message)


def ratio(strategy: Any) -> float:
    """How often client 4 was asked against the mean other one."""
    plays = np.bincount([int(row.client_id) for row in strategy.history.clients], minlength=CLIENTS)
    assert plays.sum() == 2 * ROUNDS
    sources = [row.latency_source for row in strategy.history.clients]
    assert sources.count("first") == CLIENTS
    assert set(sources) == {"first", "observed"}
    return float(plays[-1] / plays[:-1].mean())


def play_legacy(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from fedsel_flwr.strategies.wrapping import client_manager

    clock = Clock()
    monkeypatch.setattr(helpers, "time", clock)
    monkeypatch.setattr(client_manager.TimedProxy.__init__, "__defaults__", (clock.monotonic,))
    strategy = make(strategies, fedavg())
    Federation(strategy, [Deployed(str(k), k, number=k) for k in range(CLIENTS)]).play(ROUNDS)
    return strategy


def play_message(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from fedsel_flwr.strategies.wrapping import grids

    clock = Clock()
    monkeypatch.setattr(grids, "time", clock)
    monkeypatch.setattr(message_helpers, "time", clock)
    monkeypatch.setattr(helpers, "time", Clock())  # here the node's answer takes its time, not the client in it
    strategy = make(message, message_helpers.fedavg())
    nodes: dict[int, FakeNode] = {node_id(k): DeployedNode(Deployed(str(k), k, number=k)) for k in range(CLIENTS)}
    message_helpers.play(strategy, FakeGrid(nodes), ROUNDS, timeout=60.0)
    return strategy


@pytest.mark.parametrize(
    ("play", "name"),
    [
        (play_legacy, "BSFL"),
        (play_message, "CSUCB"),
        pytest.param(play_legacy, "CSUCB", marks=pytest.mark.slow),
        pytest.param(play_message, "BSFL", marks=pytest.mark.slow),
    ],
)
def test_the_slow_client_is_found_without_any_number(play: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(api: Any, base: Any) -> Any:
        return getattr(api, name)(clients_per_round=2, clock="server", identity="claim", seed=0, base=base)

    assert ratio(play(make, monkeypatch)) <= 0.65


def test_a_checkpoint_of_a_fixed_number_is_not_taken(tmp_path: Path) -> None:
    """What was learned at one scale means nothing at another, and the rows hold something else under auto."""
    proxies = [FakeProxy(str(k), k, number=k) for k in range(3)]
    options: dict[str, Any] = {"clients_per_round": 2, "seed": 0, "clock": "server", "checkpoint_dir": tmp_path}
    Federation(CSUCB(max_latency=60.0, base=fedavg(), **options), proxies).play(2)
    again = CSUCB(base=fedavg(), resume="must", **options)
    with pytest.raises(RunError, match=r"selector.max_latency = 60.0, this one has 'auto'"):
        Federation(again, proxies).play(1)
