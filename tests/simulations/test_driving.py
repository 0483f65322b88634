"""The rounds of a scenario over a grid: nodes are counted first, and the server has threads enough."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from flwr.common import Context
from flwr.server import SimpleClientManager

from fedsel_flwr.errors import RunError
from fedsel_flwr.simulations.on_flower import driving, flower_apis
from fedsel_flwr.simulations.on_flower.app import ScenarioApp
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.on_flower.driving import drive
from fedsel_flwr.simulations.on_flower.flower_apis import make_server, server_arrays
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import world_of
from fedsel_flwr.strategies import RoundRecord
from tests.simulations.inprocess import AppGrid

SMOKE = load_scenario("smoke")


def grid_of(scenario: Scenario, num_nodes: int | None = None) -> AppGrid:
    def scenario_of(context: Context) -> Scenario:
        return scenario

    return AppGrid(ScenarioApp(scenario_of), scenario.num_clients if num_nodes is None else num_nodes)


@pytest.mark.parametrize("num_nodes", [9, 11])
def test_the_nodes_are_counted_before_the_data_are_read(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "SETTLED_S", 0.1)
    monkeypatch.setattr(driving, "world_of", lambda scenario: pytest.fail("the data were read"))
    with pytest.raises(RunError, match=f"'smoke' has 10 clients, but {num_nodes} SuperNodes are connected"):
        drive(grid_of(SMOKE, num_nodes), SMOKE)


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_drive_makes_the_strategy_and_tells_each_round(api: str) -> None:
    scenario, told = SMOKE.model_copy(update={"api": api}), list[RoundRecord]()
    result = drive(grid_of(scenario), scenario, on_round=told.append)
    assert [record.round for record in told] == [1, 2, 3]
    assert told == result.history.rounds
    assert told[-1].accuracy == world_of(scenario).test(result.arrays)[1]


def test_server_has_a_thread_for_each_client_that_may_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client waits for another, and its round trip holds the wait; GPFL asks everybody in round 1."""
    servers: list[Any] = []
    monkeypatch.setattr(flower_apis, "start_grid", lambda server, **kwargs: servers.append(server))
    monkeypatch.setattr(flower_apis, "server_arrays", lambda server: [])
    drive(grid_of(SMOKE), SMOKE)
    assert servers[0].max_workers == 10


def test_make_server_holds_strategy_and_model() -> None:
    strategy = make_strategy(world_of(SMOKE))
    server = make_server(strategy, 37)
    assert server.max_workers == 37
    assert server.strategy is strategy
    server.parameters = strategy.initialize_parameters(SimpleClientManager())
    for ours, first in zip(server_arrays(server), world_of(SMOKE).initial_arrays(), strict=True):
        np.testing.assert_array_equal(ours, first)


def test_threads_are_started_as_they_are_needed() -> None:
    """What Flower's server hands its instructions to: room for 10,000 clients costs nothing where 3 are asked."""
    before = threading.active_count()
    with ThreadPoolExecutor(max_workers=10_000) as pool:
        list(pool.map(abs, range(3)))
        assert threading.active_count() <= before + 3
