"""The rounds of a scenario over a grid: nodes are counted first, and the server has enough threads."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.common import Context, RecordDict

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.simulations.on_flower import driving, flower_apis
from fedsel_flwr.simulations.on_flower.app import client_of
from fedsel_flwr.simulations.on_flower.driving import drive
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import world_of
from fedsel_flwr.strategies import RoundRecord
from tests.simulations.inprocess import grid_of

SMOKE = load_scenario("smoke")


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


@pytest.mark.parametrize("partition_id", [4, "4"])
def test_a_client_goes_by_the_partition_of_its_node(partition_id: object) -> None:
    """An int or a str, depending on how the node was started."""

    def properties_of(node: object) -> Any:
        config: Any = {"partition-id": node, "num-partitions": 10}
        context = Context(run_id=1, node_id=9, node_config=config, state=RecordDict(), run_config={})
        return client_of(SMOKE, context).get_properties({})

    assert properties_of(partition_id) == {"client_id": 4, "num_examples": world_of(SMOKE).num_examples()[4]}
    with pytest.raises(ParameterError, match=r"partition-id must be below num_clients = 10, got 10"):
        properties_of(10)
