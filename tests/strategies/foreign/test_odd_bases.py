"""Bases as their authors write them, alone and wrapped with all nodes: what each sees, and keeps over a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as legacy
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy

from fedsel_flwr.flower import task_identity
from fedsel_flwr.selectors import create
from fedsel_flwr.testing.in_process import Functions, InProcessGrid, record_of
from tests.strategies.either_api import selection
from tests.strategies.helpers import fleet, run_rounds

SEEN: list[Any] = []


class Clients(Functions):
    def evaluation_reply(self, node: str, config: Any) -> Any:
        return 0.5, 10, {}

    def nodes(self) -> Any:
        return [SimpleNamespace(node_id=int(n), name=f"site-{n}", public_key=b"") for n in self.connected]


class Grid(InProcessGrid):
    budget = 3


def train(model: Any, config: Any) -> Any:
    SEEN.append(config.get("told"))
    return [array + np.float32(1) for array in model], 10, {"latency_s": 1.0}


def start(strategy: Any, rounds: int = 3, clients: int = 3, **given: Any) -> Any:
    SEEN.clear()
    functions = Clients([train] * clients, [np.zeros(2, np.float32)])
    with task_identity(7, 1, 1):
        return strategy.start(Grid(functions), record_of(functions.arrays), num_rounds=rounds, **given)


def wrapped(base: Any, clients: int = 3, api: str = "message", **options: Any) -> Any:
    return selection(api, create("random", clients_per_round=clients, seed=1), base, **options)


class Own(FedAvg):
    strategy, names, budget = "greedy", list[str](), 0

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.names, self.budget = sorted(node.name for node in grid.get_nodes()), grid.budget
        return super().configure_train(server_round, arrays, config, grid)

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        content = {"arrays": arrays, "config": ConfigRecord({"server-round": server_round})}
        return [Message(RecordDict(content), dst_node_id=n, message_type="evaluate") for n in grid.get_node_ids()]


def passed_on(name: str) -> Any:
    return lambda self, *args: getattr(self.inner, name)(*args)


class Around(Strategy):
    """A wrapper by composition, whose attribute has a name of its own."""

    configure_train, aggregate_train, summary = map(passed_on, ("configure_train", "aggregate_train", "summary"))
    configure_evaluate, aggregate_evaluate = map(passed_on, ("configure_evaluate", "aggregate_evaluate"))

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner


@pytest.mark.parametrize("clock", ["virtual", "server"])
@pytest.mark.parametrize("make", [Own, lambda **k: Around(Own(**k))])
def test_what_a_base_of_the_message_api_does_alone_it_does_wrapped(make: Any, clock: str) -> None:
    alone, inside = make(fraction_evaluate=0.0), make(fraction_evaluate=0.0)
    expected, found = start(alone), start(wrapped(inside, clock=clock))
    assert str(found.evaluate_metrics_clientapp) == str(expected.evaluate_metrics_clientapp)
    assert [array.numpy().tolist() for array in found.arrays.values()] == [[3.0, 3.0]]
    assert getattr(inside, "inner", inside).names == getattr(alone, "inner", alone).names
    start(few := wrapped(Own(fraction_evaluate=0.0), clients=2, wait_timeout=0.5))
    assert (len(few.names), few.budget) == (2, 3)
    assert few.configure_evaluate(4, record_of([]), ConfigRecord(), Grid(Clients([], []))) == [], "all have left"
    # A base by composition asks for the connected nodes, not for the chosen.
    start(one := wrapped(Around(FedAvg(min_available_nodes=4)), clients=1, wait_timeout=1.0), clients=5)
    assert [record.num_completed for record in one.history.rounds] == [1, 1, 1]


class Prepares(legacy.FedAvgM):
    def initialize_parameters(self, client_manager: Any) -> Any:
        self.shapes, self.rounds = [(2,)], list[int]()
        return ndarrays_to_parameters([np.zeros(2)])

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        assert [array.shape for array in parameters_to_ndarrays(results[0][1].parameters)] == self.shapes
        self.rounds.append(server_round)
        return super().aggregate_fit(server_round, results, failures)

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def test_a_legacy_base_prepares_itself_in_a_resumed_run_too_and_knows_the_round(tmp_path: Path) -> None:
    for rounds, expected in ((3, [1, 2, 3]), (5, [4, 5])):
        options = {"checkpoint_dir": tmp_path, "resume": True, "total_rounds": rounds}
        strategy = wrapped(Prepares(fraction_evaluate=0.0), api="legacy", **options)
        run_rounds(strategy, fleet(3), rounds)
        assert strategy.rounds == expected


class Halving(FedAvg):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        config["told"] = config.get("told", 8.0) / 2
        return super().configure_train(server_round, arrays, config, grid)


class Adaptive(FedProx):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.proximal_mu /= 2
        return super().configure_train(server_round, arrays, ConfigRecord({"told": self.proximal_mu}), grid)


@pytest.mark.parametrize("config", [dict, lambda: {"train_config": ConfigRecord({"told": 8.0, "other": 1})}])
@pytest.mark.parametrize("kind", [Halving, Adaptive])
def test_what_a_base_changes_itself_outlives_a_crash(kind: Any, config: Callable[[], Any], tmp_path: Path) -> None:
    def crash(number: int, arrays: Any) -> None:
        if number == 2:
            raise KeyboardInterrupt

    def make(**options: Any) -> Any:
        options |= {"proximal_mu": 8.0} if kind is Adaptive else {}
        return wrapped(kind(fraction_evaluate=0.0, **options), checkpoint_dir=tmp_path, resume=True)

    with pytest.raises(KeyboardInterrupt):
        start(make(), 4, evaluate_fn=crash, **config())
    told = SEEN[::3]
    start(again := make(min_train_nodes=3), 4, **config())
    assert told + SEEN[::3] == [4.0, 2.0, 1.0, 0.5]
    assert again.base.min_train_nodes == 3, "what the user changes between two starts is the user's"
