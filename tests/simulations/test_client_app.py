"""The clients of a scenario as a Flower app: which client a node is."""

from __future__ import annotations

import pytest
from flwr.common import Context, RecordDict

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.on_flower.app import client_of
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import world_of

SMOKE = load_scenario("smoke")


def context(partition_id: object) -> Context:
    return Context(
        run_id=1, node_id=987654321, node_config={"partition-id": partition_id, "num-partitions": 10},
        state=RecordDict(), run_config={},
    )  # fmt: skip


@pytest.mark.parametrize("partition_id", [4, "4"])
def test_client_fn_goes_by_the_partition_of_the_node(partition_id: object) -> None:
    """An int or a str, depending on how the node was started."""
    properties = client_of(SMOKE, context(partition_id)).get_properties({})
    assert properties == {"client_id": 4, "num_examples": world_of(SMOKE).num_examples()[4]}


def test_a_node_beyond_the_scenarios_clients_is_told_so() -> None:
    with pytest.raises(ParameterError, match=r"partition-id must be below num_clients = 10, got 10"):
        client_of(SMOKE, context(10))
