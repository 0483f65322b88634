"""Scenarios with the real torch clients in this process, without Ray.

:func:`play` has Flower's own server and no grid; :class:`AppGrid` is a grid of nodes that answer with a ``ClientApp``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Error, Message
from flwr.client import ClientApp
from flwr.common import Context, RecordDict
from flwr.server.client_proxy import ClientProxy

from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.app import ScenarioApp
from fedsel_flwr.simulations.on_flower.building import make_server, make_strategy, server_arrays
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.strategies.message.helpers import FakeGrid, FakeNode, ProbeProxy, node_id

WAYS = ("legacy", "message", "vectorized")
"""Ways to simulate a scenario: with one of Flower's APIs, or in the vectorized engine."""


def simulated(scenario: Scenario, way: str, **options: Any) -> RunResult:
    """A scenario by one of :data:`WAYS`; without Ray if the test has the fixture ``without_ray``."""
    if way == "vectorized":
        return simulate(scenario, engine=way, **options)
    return simulate(scenario.model_copy(update={"api": way}), engine="ray", **options)


def choices(result: RunResult) -> list[tuple[Any, ...]]:
    """Who was chosen, and what it took."""
    return [(row.round, row.client_id, row.completed, row.latency_s, row.energy_j) for row in result.history.clients]


def distance(one: RunResult, other: RunResult) -> float:
    """The largest difference between two final models; NaN if a number is none."""
    return float(np.max([np.abs(a - b).max() for a, b in zip(one.arrays, other.arrays, strict=True)]))


class LocalProxy(ClientProxy):
    """A torch client of this process; one works at a time, as they share the world's scratch model.

    ``cid``, the connection's name, says nothing about the partition; ``turn`` is held while the client works.
    """

    def __init__(self, cid: str, world: World, partition_id: int, turn: threading.Lock) -> None:
        super().__init__(cid)
        self._world, self._partition_id, self._turn = world, partition_id, turn

    def _answer(self, method: str, ins: Any) -> Any:
        with self._turn:
            return getattr(self._world.client(self._partition_id).to_client(), method)(ins)

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self._answer("fit", ins)

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self._answer("get_properties", ins)

    def evaluate(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        return self._answer("evaluate", ins)

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise NotImplementedError("the scenario has an initial model")

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise NotImplementedError


def play(
    scenario: Scenario,
    world: World | None = None,
    *,
    shuffle: int = 0,
    selector: Selector | None = None,
    strategy: Any = None,
) -> RunResult:
    """Run every round of a scenario; ``shuffle`` draws the connections' names, and the order in which they are made."""
    world = world or World(scenario)
    strategy = strategy or make_strategy(world, selector=selector)
    server = make_server(strategy, scenario.num_clients)
    drawn, turn = random.Random(shuffle), threading.Lock()
    names = drawn.sample(range(10**9), scenario.num_clients)
    proxies = [LocalProxy(str(name), world, k, turn) for k, name in enumerate(names)]
    drawn.shuffle(proxies)
    for proxy in proxies:
        server.client_manager().register(proxy)
    server.fit(num_rounds=scenario.rounds, timeout=None)
    return RunResult(history=strategy.history, arrays=server_arrays(server))


class AppNode(FakeNode):
    def __init__(self, app: ClientApp, partition_id: int) -> None:
        super().__init__(ProbeProxy(str(partition_id), partition_id))
        self._app = app
        node = {"partition-id": partition_id}
        self._context = Context(7, partition_id + 2, node_config=node, state=RecordDict(), run_config={})

    def handle(self, message: Message) -> RecordDict | Error | None:
        reply = self._app(message, self._context)
        return reply.error if reply.has_error() else reply.content


class AppGrid(FakeGrid):
    """A grid of nodes with one app; one message at a time, as the clients share the world's scratch model."""

    def __init__(self, app: ClientApp, num_nodes: int) -> None:
        super().__init__({node_id(k): AppNode(app, k) for k in range(num_nodes)})
        self._turn = threading.Lock()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        with self._turn:
            return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        with self._turn:
            return super().pull_messages(message_ids)


def grid_of(scenario: Scenario, num_nodes: int | None = None) -> AppGrid:
    """A grid of as many nodes as the scenario has clients, or of another number."""
    return AppGrid(ScenarioApp(lambda context: scenario), scenario.num_clients if num_nodes is None else num_nodes)


def in_process(**kwargs: Any) -> None:
    """As Flower's ``run_simulation``, without Ray."""
    context = Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={})
    kwargs["server_app"](AppGrid(kwargs["client_app"], kwargs["num_supernodes"]), context)
