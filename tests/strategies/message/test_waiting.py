"""The server waits for its nodes, and never for ever; bases that cannot work are refused (Message API)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    FedXgbCyclic,
    Krum,
    MultiKrum,
)

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy as LegacySelectionStrategy
from fedsel_flwr.strategies.message import SelectionStrategy
from tests.strategies.helpers import chosen
from tests.strategies.message.helpers import FakeGrid, crowd, dispatched, fedavg, node_id, play, wrapped

pytestmark = pytest.mark.timeout(30)


@pytest.mark.timeout(15)
@pytest.mark.parametrize("dp", [False, True])
def test_a_base_that_picks_its_own_node_is_refused_by_name(dp: bool) -> None:
    base: Any = FedXgbCyclic(fraction_evaluate=0.0)
    if dp:
        base = DifferentialPrivacyServerSideFixedClipping(base, 0.0, 1.0, 3)
    grid = FakeGrid(crowd(6))
    with pytest.raises((RunError, ParameterError), match=r"FedXgbCyclic|Clipping"):
        play(wrapped(base=base), grid, 1)
    assert dispatched(grid) == []


@pytest.mark.timeout(15)
@pytest.mark.parametrize("cohort", [1, 3])
def test_cyclic_is_refused_for_every_cohort(cohort: int) -> None:
    with pytest.raises((RunError, ParameterError), match="FedXgbCyclic"):
        play(wrapped(cohort, FedXgbCyclic(fraction_evaluate=0.0)), FakeGrid(crowd(4)), 1)


@pytest.mark.timeout(15)
def test_fraction_train_zero_is_an_error_that_names_it() -> None:
    with pytest.raises(RunError, match=r"FedAvg.*fraction_train.*0"):
        play(wrapped(base=fedavg(fraction_train=0.0)), FakeGrid(crowd(6)), 1)


@pytest.mark.timeout(15)
@pytest.mark.parametrize("name", ["min_available_nodes", "min_train_nodes"])
def test_a_base_that_wants_more_nodes_than_there_are_ends_in_an_error(name: str) -> None:
    strategy = wrapped(base=fedavg(**{name: 50}))
    assert strategy.min_available == 50
    start = time.monotonic()
    with pytest.raises(RunError, match=r"50 nodes.*6 are connected.*wait_timeout"):
        play(strategy, FakeGrid(crowd(6)), 1)
    assert 0.4 <= time.monotonic() - start < 3.0


@pytest.mark.timeout(15)
def test_min_available_looks_inside_a_dp_wrapper() -> None:
    base = DifferentialPrivacyServerSideFixedClipping(fedavg(min_available_nodes=9), 0.0, 1.0, 4)
    assert wrapped(4, base).min_available == 9


@pytest.mark.timeout(15)
@pytest.mark.parametrize("name", ["min_available_nodes", "min_train_nodes"])
def test_min_available_given_is_taken_even_below_the_bases(name: str) -> None:
    strategy = wrapped(base=fedavg(**{name: 50}), min_available=2)
    grid = FakeGrid(crowd(3))
    play(strategy, grid, 2)
    assert dispatched(grid) == [["0", "1", "2"]] * 2


@pytest.mark.timeout(15)
def test_min_available_above_the_fleet() -> None:
    with pytest.raises(RunError, match=r"20 nodes.*6 are connected"):
        play(wrapped(min_available=20), FakeGrid(crowd(6)), 1)


@pytest.mark.timeout(15)
def test_no_node_at_all() -> None:
    with pytest.raises(RunError, match=r"3 nodes.*0 are connected"):
        play(wrapped(), FakeGrid(), 1)


@pytest.mark.timeout(15)
@pytest.mark.parametrize("base", [FedAvg, FedAdam, FedMedian, FedTrimmedAvg, Krum, MultiKrum])
def test_a_cohort_of_one_works_at_the_bases_defaults(base: type) -> None:
    grid = FakeGrid(crowd(4))
    strategy = wrapped(1, base(fraction_evaluate=0.0))
    play(strategy, grid, 3)
    assert [len(cohort) for cohort in dispatched(grid)] == [1, 1, 1]
    assert [r.num_completed for r in strategy.history.rounds] == [1, 1, 1]


@pytest.mark.timeout(15)
@pytest.mark.parametrize("dp", [False, True])
def test_a_fleet_of_one(dp: bool) -> None:
    def base() -> Any:
        return DifferentialPrivacyServerSideFixedClipping(fedavg(), 0.0, 1.0, 1) if dp else fedavg()

    with pytest.raises(RunError, match=r"2 nodes.*1 are connected"):
        play(wrapped(1, base()), FakeGrid(crowd(1)), 1)
    strategy = wrapped(1, base(), min_available=1)
    play(strategy, FakeGrid(crowd(1)), 2)
    assert [r.num_completed for r in strategy.history.rounds] == [1, 1]


@pytest.mark.timeout(15)
def test_a_fraction_above_one_does_not_hang() -> None:
    with pytest.raises(RunError, match=r"wait_timeout = 0.4"):
        play(wrapped(base=fedavg(fraction_train=2.0)), FakeGrid(crowd(6)), 1)


@pytest.mark.timeout(15)
def test_a_base_that_polls_for_nodes_of_its_own_accord_does_not_hang() -> None:
    class Polls(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            while len(list(grid.get_node_ids())) < 100:
                time.sleep(0.05)
            return super().configure_train(server_round, arrays, config, grid)

    with pytest.raises(RunError, match="wait_timeout"):
        play(wrapped(base=Polls(fraction_evaluate=0.0)), FakeGrid(crowd(6)), 1)


def test_nodes_that_register_late_are_waited_for_before_round_one() -> None:
    grid, nodes = FakeGrid(), crowd(12)
    strategy = wrapped(3, fedavg(fraction_train=0.5), min_available=12, wait_timeout=10.0)

    def arrive() -> None:
        for key, node in nodes.items():
            time.sleep(0.02)
            grid.nodes = {**grid.nodes, key: node}

    thread = threading.Thread(target=arrive)
    thread.start()
    play(strategy, grid, 3)
    thread.join()
    assert [r.num_available for r in strategy.history.rounds] == [12, 12, 12]
    assert [r.num_selected for r in strategy.history.rounds] == [3, 3, 3]


def test_a_node_that_leaves_is_not_chosen_and_its_return_under_a_new_node_id_is_noticed() -> None:
    grid = FakeGrid(crowd(4))
    strategy = wrapped(4, min_available=2)
    play(strategy, grid, 1)
    gone = [grid.nodes.pop(node_id(k)) for k in (0, 1)]
    play(strategy, grid, 1)
    grid.nodes[99] = gone[0]
    play(strategy, grid, 1)
    assert chosen(strategy) == [["0", "1", "2", "3"], ["2", "3"], ["0", "2", "3"]]
    plays = [r.client for r in strategy.history.clients if r.client_id == "0"]
    assert plays == [0, 0]  # the same row


@pytest.mark.timeout(15)
def test_a_base_of_the_other_api_is_refused() -> None:
    with pytest.raises(ParameterError, match="base must be"):
        SelectionStrategy(Random(clients_per_round=1), LegacyFedAvg())
    with pytest.raises(ParameterError, match="base must be"):
        LegacySelectionStrategy(Random(clients_per_round=1), FedAvg())
