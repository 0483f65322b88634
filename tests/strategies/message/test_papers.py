"""The papers' strategies of the Message API choose and average as the docstrings of their legacy twins say."""

from __future__ import annotations

import numpy as np

from fedsel_flwr.strategies.message import BSFL, CSUCB, CSUCBQ, GPFL, PCZFL, FedCA, FedCM, SelectionStrategy, Validation
from fedsel_flwr.testing.in_process import play_round

CLIENTS = [lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5 + k}) for k in range(4)]
HELD_OUT = Validation(lambda model, inputs: inputs * model[0], np.eye(2), np.array([0, 1]))


def asked(strategy: SelectionStrategy, rounds: int) -> list[str]:
    model = [np.zeros(2)]
    for number in range(1, rounds + 1):
        model = play_round(strategy, CLIENTS, model, number)
    return [row.client_id for row in strategy.history.clients]


def test_bsfl_trains_everybody_once_and_then_the_two_fastest() -> None:
    strategy = BSFL(clients_per_round=2, min_latency=0.5, alpha=0.1, max_latency=5.0, seed=1)
    assert asked(strategy, 3) == ["0", "1", "2", "3", "0", "1"]


def test_cs_ucb_trains_everybody_once_and_then_the_two_fastest() -> None:
    assert asked(CSUCB(clients_per_round=2, max_latency=5.0, seed=1), 3) == ["0", "1", "2", "3", "0", "1"]


def test_cs_ucb_q_trains_the_slowest_client_as_often_as_its_share_asks_for() -> None:
    shares = {"0": 0.0, "1": 0.0, "2": 0.0, "3": 0.9}
    strategy = CSUCBQ(clients_per_round=2, max_latency=5.0, fairness=shares, queue_weight=0.9, seed=1)
    assert asked(strategy, 5) == ["0", "1", "0", "3", "0", "3", "2", "3", "1", "3"]


def test_fedca_keeps_the_largest_model_which_has_the_smallest_loss() -> None:
    strategy = FedCA(clients_per_round=3, validation=HELD_OUT, seed=1)
    assert play_round(strategy, CLIENTS, [np.zeros(2)])[0].tolist() == [2.0, 2.0]
    kept = [(row.client_id, row.kept) for row in strategy.history.clients]
    assert kept == [("0", False), ("1", False), ("2", True)]


def test_fedcm_trains_the_client_with_the_largest_steps_most_often() -> None:
    chosen = asked(FedCM(clients_per_round=2, validation=HELD_OUT, seed=1), 10)
    assert [chosen.count(str(number)) for number in range(4)] == [2, 4, 4, 10]


def test_gpfl_measures_everybody_in_round_1_and_keeps_the_model() -> None:
    strategy = GPFL(clients_per_round=2, total_rounds=10, learning_rate=0.1, validation=HELD_OUT, seed=1)
    model = play_round(strategy, CLIENTS, [np.zeros(2)])
    assert (model[0].tolist(), strategy.history.rounds[0].num_selected) == ([0.0, 0.0], 4)
    assert play_round(strategy, CLIENTS, model, 2)[0].tolist() == [2.5, 2.5]


def test_pczfl_averages_the_clients_on_the_front() -> None:
    clients = [
        lambda model, config, k=k: ([model[0] + k], 10, {"latency_s": 0.5, "energy_score": k / 4}) for k in range(4)
    ]
    assert play_round(PCZFL(validation=HELD_OUT, seed=1), clients, [np.zeros(2)])[0].tolist() == [1.5, 1.5]
