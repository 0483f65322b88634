"""A client whose process must start is asked again as soon as others, in both APIs.

Nobody waits: what sleeps moves a clock, which the server reads, as in ``test_auto``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr import strategies
from fedsel_flwr.strategies import message
from tests.strategies import helpers
from tests.strategies.helpers import FakeProxy, Federation, fedavg
from tests.strategies.message import helpers as message_helpers
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id
from tests.strategies.test_auto import Clock

CLIENTS, ROUNDS = 10, 16
OPTIONS: dict[str, Any] = {"clients_per_round": 2, "clock": "server", "identity": "claim", "seed": 0}


def seconds(proxy: FakeProxy, trained: int) -> float:
    """Client 0 takes 13 s more for its first training; each takes .25 s and some hundredths."""
    return 0.25 + 0.01 * proxy.number + 13.0 * (proxy.number == 0 and trained == 0)


class Starting(FakeProxy):
    """A client of the legacy API."""

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        self.delay = seconds(self, len(self.fits))
        result = super().fit(ins, timeout, group_id)
        del result.metrics["latency_s"]
        return result


class Silent(FakeProxy):
    """A client of the Message API, in a node whose answer takes the time."""

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        result = super().fit(ins, timeout, group_id)
        del result.metrics["latency_s"]
        return result


class StartingNode(FakeNode):
    """The node around it."""

    def handle(self, message: Any) -> Any:
        self.ready = seconds(self.proxy, len(self.proxy.fits))
        return super().handle(message)


@pytest.fixture(params=["legacy", "message"])
def played(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[FakeProxy]]:
    """A strategy after its rounds, and its clients."""
    clock, extra = Clock(), {"compute_s": 0.2}
    if request.param == "legacy":
        from fedsel_flwr.strategies.wrapping import client_manager

        monkeypatch.setattr(helpers, "time", clock)
        monkeypatch.setattr(client_manager.TimedProxy.__init__, "__defaults__", (clock.monotonic,))
        proxies: list[FakeProxy] = [Starting(str(k), k, number=k, extra=extra) for k in range(CLIENTS)]
        strategy: Any = strategies.CSUCB(base=fedavg(), **OPTIONS)
        Federation(strategy, proxies).play(ROUNDS)
        return strategy, proxies
    from fedsel_flwr.strategies.wrapping import grids

    monkeypatch.setattr(grids, "time", clock)
    monkeypatch.setattr(message_helpers, "time", clock)
    proxies = [Silent(str(k), k, number=k, extra=extra) for k in range(CLIENTS)]
    strategy = message.CSUCB(base=message_helpers.fedavg(), **OPTIONS)
    nodes: dict[int, FakeNode] = {node_id(k): StartingNode(proxies[k]) for k in range(CLIENTS)}
    message_helpers.play(strategy, FakeGrid(nodes), ROUNDS, timeout=60.0)
    return strategy, proxies


def test_a_client_that_had_to_start_is_asked_again_as_soon_as_others(played: tuple[Any, list[FakeProxy]]) -> None:
    strategy, proxies = played
    asked = [len(proxy.fits) for proxy in proxies]
    assert sum(asked) == 2 * ROUNDS  # no training was repeated
    rounds = [row.round for row in strategy.history.clients if row.client_id == "0"]
    assert rounds[1] - rounds[0] <= 6
    assert strategy.selector.state_dict()["plays"].tolist() == [asked[int(k)] for k in strategy.roster.ids]


def test_each_client_has_one_first_time(played: tuple[Any, list[FakeProxy]]) -> None:
    strategy, _ = played
    for client in strategy.roster.ids:
        rows = [row for row in strategy.history.clients if row.client_id == client]
        assert [row.latency_source for row in rows] == ["first", *["observed"] * (len(rows) - 1)]
        assert max(row.latency_s for row in rows) < 1.0
    assert max(record.round_s for record in strategy.history.rounds) > 13.0  # the round took its time
    assert np.isfinite(strategy.selector.state_dict()["mean"]).all()
