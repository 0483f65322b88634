"""``availability=`` as client ids: exactly these take part, in simulations and deployments."""

from __future__ import annotations

from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy, message
from tests.strategies.helpers import Federation, fedavg, fleet
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id
from tests.strategies.message.helpers import fedavg as message_fedavg
from tests.strategies.message.helpers import play as play_message


def asked(strategy: Any) -> list[set[str]]:
    """Who was asked in each round."""
    rows = strategy.history.clients
    return [{row.client_id for row in rows if row.round == record.round} for record in strategy.history.rounds]


@pytest.mark.parametrize("ids", [["1", "3"], (1, 3), {"3", "1", "not there"}], ids=("list", "numbers", "set"))
@pytest.mark.parametrize("clock", ["virtual", "server"])
def test_only_these_are_asked(ids: Any, clock: Any) -> None:
    options = {"availability": ids, "clock": clock, "identity": "claim", "min_available": 5}
    legacy = SelectionStrategy(Random(clients_per_round=3, seed=0), fedavg(), **options)
    Federation(legacy, fleet(5)).play(3)
    grid = FakeGrid({node_id(proxy.number): FakeNode(proxy) for proxy in fleet(5)})
    modern = message.SelectionStrategy(Random(clients_per_round=3, seed=0), message_fedavg(), **options)
    play_message(modern, grid, 3)
    for strategy in (legacy, modern):
        assert asked(strategy) == [{"1", "3"}] * 3
        assert [record.num_available for record in strategy.history.rounds] == [2] * 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("clinic-a", "'clinic-a'"),
        ([], "no client"),
        ([True], "True"),
        (5, " 5"),
        ([""], "''"),
    ],
)
def test_what_are_no_ids_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=f"^availability .*{said}"):
        SelectionStrategy(Random(clients_per_round=1), availability=wrong)
