"""Who is dispatched and what the base aggregates, through Flower's own servers of both APIs."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ConfigRecord, Message
from flwr.common import EvaluateRes, FitRes, ndarrays_to_parameters
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import FedAvg

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import BSFL
from tests.strategies.either_api import Server, base_of, close, mean_of, private, selection
from tests.strategies.helpers import OK, FakeProxy, chosen, fedavg, fleet, initial, model, update
from tests.strategies.message.helpers import FakeGrid, crowd
from tests.strategies.message.models import arrays_of

COHORT, FLEET, ROUNDS = 5, 12, 3
AVERAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fraction-.1": {"fraction_train": 0.1},
    "fraction-2": {"fraction_train": 2.0},
    "wants-more": {"min_train_nodes": 9, "min_available_nodes": 9},
    "proximal": {"name": "FedProx", "proximal_mu": 0.1},
}
OF_ONE_API: dict[str, dict[str, dict[str, Any]]] = {
    "legacy": {"not-inplace": {"inplace": False}, "fraction-0": {"fraction_train": 0.0}},
    "message": {"other-names": {"arrayrecord_key": "weights", "configrecord_key": "settings"}},
}
CASES = [(api, name) for api in OF_ONE_API for name in [*AVERAGES, *OF_ONE_API[api], "private"]]


@pytest.mark.parametrize(("api", "name"), CASES)
def test_exactly_the_chosen_train_and_the_model_is_their_average(api: str, name: str) -> None:
    """Whatever number the base would ask; bases that are no averages are compared in test_wrapped_bases."""
    if name == "private":
        base = private(api, base_of(api, fraction_train=0.1), clients=COHORT)
    else:
        base = base_of(api, **{**AVERAGES, **OF_ONE_API[api]}[name])
    strategy = selection(api, BSFL(clients_per_round=COHORT, min_latency=0.1, alpha=1.0, seed=5), base)
    server = Server(api, strategy, fleet(FLEET)).play(ROUNDS)
    cohorts = chosen(strategy)
    assert [len(set(cohort)) for cohort in cohorts] == [COHORT] * ROUNDS
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert server.dispatched() == cohorts  # rows follow the ids
    assert all(row.completed and not row.problem for row in strategy.history.clients)
    current = model()
    for server_round, (cohort, arrays) in enumerate(zip(cohorts, server.models, strict=True), start=1):
        if name != "private":  # which clips the updates
            close(arrays, mean_of(map(int, cohort), current, server_round))
        current = arrays
    if api == "message":
        sent = [[str(server.grid.nodes[m.metadata.dst_node_id].proxy.client_id) for m in b] for b in server.batches()]
        assert sent == cohorts  # each once, in this order


@pytest.mark.parametrize("permutation", [[3, 2, 1, 0], [2, 0, 3, 1]])
def test_results_in_any_order_reach_the_base_by_row(permutation: list[int]) -> None:
    strategy = selection("legacy", 4)
    server = Server("legacy", strategy, fleet(4, cid=lambda k: f"node-{9 - k}"))
    pairs = strategy.configure_fit(server_round=1, parameters=initial(), client_manager=server.federation.manager)
    results = {client.cid: (client, client.fit(ins, None, 1)) for client, ins in pairs}
    parameters, _ = strategy.aggregate_fit(1, [results[f"node-{9 - k}"] for k in permutation], [])
    in_order: list[Any] = [
        (results[f"node-{9 - k}"][0], FitRes(OK, ndarrays_to_parameters(update(k, model(), 1)), 10 + 3 * k, {}))
        for k in range(4)
    ]
    reference, _ = fedavg().aggregate_fit(1, in_order, [])
    assert parameters is not None
    assert reference is not None
    assert parameters.tensors == reference.tensors


def test_a_base_that_dispatches_one_twice_is_refused() -> None:
    class Twice(LegacyFedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            pairs = super().configure_fit(server_round, parameters, client_manager)
            return [pairs[0], *pairs[:-1]]

    with pytest.raises(RunError, match="Twice"):
        Server("legacy", selection("legacy", 3, base_of("legacy", Twice)), fleet(6)).play(1)


def test_evaluations_are_aggregated_in_the_order_of_the_clients_ids() -> None:
    """Whatever their connections are called: sums of floats depend on the order."""

    class Ordered(LegacyFedAvg):
        def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
            order.append([client.cid for client, _ in results])
            return super().aggregate_evaluate(server_round, results, failures)

    order: list[list[str]] = []
    base = base_of("legacy", Ordered, fraction_evaluate=1.0, min_evaluate_nodes=3, min_available_nodes=3)
    strategy = selection("legacy", 3, base)
    Server("legacy", strategy, [FakeProxy("x", 10), FakeProxy("y", 9), FakeProxy("z", 2)]).play(1)
    answers = [(FakeProxy(cid), EvaluateRes(OK, 0.5, 3, {})) for cid in ("x", "z", "y")]
    strategy.aggregate_evaluate(1, answers, [])
    assert order[-1] == ["z", "y", "x"]


def test_message_type_and_group_of_the_bases_message_are_kept() -> None:
    class Grouped(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            for message in super().configure_train(server_round, arrays, config, grid):  # a generator, too
                to, group = message.metadata.dst_node_id, f"r{server_round}"
                yield Message(message.content, to, "train.special", ttl=77.0, group_id=group)

    strategy = selection("message", 2, base_of("message", Grouped))
    messages = strategy.configure_train(1, arrays_of(), ConfigRecord(), FakeGrid(crowd(4)))
    found = {(m.metadata.message_type, m.metadata.ttl, m.metadata.group_id) for m in messages}
    assert found == {("train.special", 77.0, "r1")}
