"""A scenario played with Flower's own server and the real torch clients, in this process: no grid and no Ray."""

from __future__ import annotations

import random
import threading

from flwr.common import (
    DisconnectRes,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    ReconnectIns,
)
from flwr.server.client_proxy import ClientProxy

from fedsel_flwr.simulations.federation import RunResult, make_server, make_strategy, server_arrays
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.world import World


class LocalProxy(ClientProxy):
    """A torch client of this process; one works at a time, as they share the world's scratch model.

    Args:
        cid: The connection's name, which says nothing about the partition.
        world: Where the client lives.
        partition_id: Which client it is.
        turn: Held while it works.
    """

    def __init__(self, cid: str, world: World, partition_id: int, turn: threading.Lock) -> None:
        super().__init__(cid)
        self._world, self._partition_id, self._turn = world, partition_id, turn

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        with self._turn:
            return self._world.client(self._partition_id).to_client().fit(ins)

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        with self._turn:
            return self._world.client(self._partition_id).to_client().get_properties(ins)

    def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> GetParametersRes:
        raise NotImplementedError("the scenario has an initial model")

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        with self._turn:
            return self._world.client(self._partition_id).to_client().evaluate(ins)

    def reconnect(self, ins: ReconnectIns, timeout: float | None, group_id: int | None) -> DisconnectRes:
        raise NotImplementedError


def play(scenario: Scenario, world: World | None = None, *, shuffle: int = 0) -> RunResult:
    """Run every round of a scenario.

    Args:
        scenario: The scenario.
        world: Its world; built if None.
        shuffle: Draws the names of the connections and the order in which they are made.
    """
    world = world or World(scenario)
    strategy = make_strategy(scenario, world)
    server = make_server(strategy, scenario.clients_per_round)
    drawn, turn = random.Random(shuffle), threading.Lock()
    names = drawn.sample(range(10**9), scenario.num_clients)
    proxies = [LocalProxy(str(name), world, k, turn) for k, name in enumerate(names)]
    drawn.shuffle(proxies)
    for proxy in proxies:
        server.client_manager().register(proxy)
    server.fit(num_rounds=scenario.rounds, timeout=None)
    return RunResult(history=strategy.history, arrays=server_arrays(server))
