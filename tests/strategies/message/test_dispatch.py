"""Who is dispatched and what the base aggregates, through Flower's own ``Strategy.start``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies.message import BSFL, CSUCB, CSUCBQ, SelectionStrategy
from tests.strategies.helpers import FakeProxy, chosen, model, parameters_to_ndarrays, update
from tests.strategies.message.helpers import FakeGrid, FakeNode, crowd, dispatched, fedavg, node_id, play
from tests.strategies.message.models import NAMES, arrays_of, named

pytestmark = pytest.mark.timeout(30)
COHORT, FLEET, ROUNDS = 5, 12, 4

BASES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": fedavg,
    "FedAvg-fraction-.1": lambda: fedavg(fraction_train=0.1),
    "FedAvg-wants-more": lambda: fedavg(min_train_nodes=9, min_available_nodes=9),
    "FedAvg-other-names": lambda: fedavg(arrayrecord_key="weights", configrecord_key="settings"),
    "FedProx": lambda: FedProx(fraction_evaluate=0.0, proximal_mu=0.25),
    "FedAdam": lambda: FedAdam(fraction_evaluate=0.0),
    "FedYogi": lambda: FedYogi(fraction_evaluate=0.0),
    "FedAvgM": lambda: FedAvgM(fraction_evaluate=0.0, server_learning_rate=0.5, server_momentum=0.9),
    "Krum": lambda: Krum(fraction_evaluate=0.0, num_malicious_nodes=1),
    "MultiKrum": lambda: MultiKrum(fraction_evaluate=0.0, num_malicious_nodes=1, num_nodes_to_select=3),
    "FedTrimmedAvg": lambda: FedTrimmedAvg(fraction_evaluate=0.0, beta=0.25),
    "FedMedian": lambda: FedMedian(fraction_evaluate=0.0),
    "DP-fixed": lambda: DifferentialPrivacyServerSideFixedClipping(
        fedavg(fraction_train=0.1), noise_multiplier=0.0, clipping_norm=1.0, num_sampled_clients=COHORT
    ),
    "DP-adaptive": lambda: DifferentialPrivacyServerSideAdaptiveClipping(
        fedavg(), noise_multiplier=0.0, num_sampled_clients=COHORT, clipped_count_stddev=0.0
    ),
}


class _Renaming(FakeNode):
    """Reads the records under whatever names the base gave them."""

    def handle(self, message: Message) -> Any:
        if message.metadata.message_type == MessageType.TRAIN:
            (arrays,) = message.content.array_records.values()
            (config,) = message.content.config_records.values()
            message.__dict__["_content"] = RecordDict({"arrays": arrays, "config": config})
        return super().handle(message)


def _fleet(count: int = FLEET, **kwargs: Any) -> dict[int, FakeNode]:
    return {key: _Renaming(node.proxy, **kwargs) for key, node in crowd(count).items()}


def alone(base: Strategy, cohorts: list[list[str]]) -> list[list[bytes]]:
    """The models the base makes by itself from the same clients' replies, in row order."""
    arrays, models = arrays_of(), []
    grid = FakeGrid(_fleet(), seed=None)
    for server_round, ids in enumerate(cohorts, start=1):
        list(base.configure_train(server_round, arrays, ConfigRecord(), grid))
        replies = []
        for k in map(int, ids):
            sent = Message(RecordDict(), dst_node_id=node_id(k), message_type=MessageType.TRAIN)
            content = RecordDict(
                {
                    "arrays": named(update(k, arrays.to_numpy_ndarrays(), server_round)),
                    "metrics": MetricRecord({"num-examples": 10 + 3 * k, "acc": 0.5}),
                }
            )
            replies.append(Message(content, reply_to=sent))
        aggregated, _ = base.aggregate_train(server_round, replies)
        assert aggregated is not None
        arrays = aggregated
        models.append([array.tobytes() for array in arrays.to_numpy_ndarrays()])
    return models


@pytest.mark.parametrize("name", BASES)
def test_exactly_the_chosen_train_and_the_model_is_the_bases_own(name: str) -> None:
    strategy = SelectionStrategy(Random(clients_per_round=COHORT, seed=3), BASES[name](), max_latency=60.0)
    grid = FakeGrid(_fleet())
    _, models = play(strategy, grid, ROUNDS)
    cohorts = chosen(strategy)
    assert [len(set(cohort)) for cohort in cohorts] == [COHORT] * ROUNDS
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert dispatched(grid) == cohorts
    assert cohorts == [sorted(cohort, key=int) for cohort in cohorts]  # rows follow the ids
    assert all(row.completed and not row.problem for row in strategy.history.clients)
    assert models == alone(BASES[name](), cohorts)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("paper", ["cs-ucb", "cs-ucb-q", "bsfl"])
def test_every_paper_with_every_base(paper: str, name: str) -> None:
    build: Any = {
        "cs-ucb": lambda **k: CSUCB(max_latency=60.0, **k),
        "cs-ucb-q": lambda **k: CSUCBQ(max_latency=60.0, **k),
        "bsfl": lambda **k: BSFL(min_latency=0.1, **k),
    }[paper]
    strategy = build(clients_per_round=COHORT, seed=1, base=BASES[name]())
    grid = FakeGrid(_fleet())
    result, _ = play(strategy, grid, 3)
    assert dispatched(grid) == chosen(strategy)
    assert [r.num_completed for r in strategy.history.rounds] == [COHORT] * 3
    assert result.arrays is not None
    assert all(np.isfinite(array).all() for array in result.arrays.to_numpy_ndarrays())


def test_fedavg_equals_the_weighted_mean_by_hand() -> None:
    strategy = BSFL(clients_per_round=COHORT, min_latency=0.1, seed=5, base=fedavg(fraction_train=0.1))
    _, models = play(strategy, FakeGrid(crowd(FLEET)), ROUNDS)
    current = model()
    for server_round, (cohort, actual) in enumerate(zip(chosen(strategy), models, strict=True), start=1):
        numbers = [int(client_id) for client_id in cohort]
        examples = np.array([10.0 + 3 * n for n in numbers])
        updates = [update(n, current, server_round) for n in numbers]
        current = [np.average([u[i] for u in updates], axis=0, weights=examples) for i in range(2)]
        current = [array.astype(np.float32) for array in current]
        arrays = [np.frombuffer(a, dtype=np.float32).reshape(c.shape) for a, c in zip(actual, current, strict=True)]
        for a, b in zip(arrays, current, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        current = arrays


def test_configure_train_returns_a_list_of_messages_with_configs_of_their_own() -> None:
    strategy = SelectionStrategy(Random(clients_per_round=4, seed=0), FedProx(proximal_mu=0.5), max_latency=9.0)
    grid, config = FakeGrid(crowd(8)), ConfigRecord({"lr": 0.1, "sizes": [1, 2]})
    messages = strategy.configure_train(1, arrays_of(2.0), config, grid)
    assert type(messages) is list
    assert len({m.metadata.dst_node_id for m in messages}) == len(messages) == 4
    configs = [m.content["config"] for m in messages]
    assert len({id(c) for c in configs} | {id(config)}) == 5
    configs[0]["lr"] = 9.0
    configs[0]["sizes"].append(3)
    assert [dict(c) for c in configs[1:]] == [{"lr": 0.1, "sizes": [1, 2], "server-round": 1, "proximal-mu": 0.5}] * 3
    assert config["lr"] == 0.1
    assert config["sizes"] == [1, 2]
    assert {m.metadata.message_type for m in messages} == {MessageType.TRAIN}
    for message in messages:
        assert [a.tolist() for a in message.content["arrays"].to_numpy_ndarrays()] == [a.tolist() for a in model(2.0)]
    assert len({id(m.content) for m in messages}) == 4


def test_message_type_and_group_of_the_bases_message_are_kept() -> None:
    class Grouped(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            for message in super().configure_train(server_round, arrays, config, grid):  # a generator, too
                yield Message(
                    message.content,
                    message.metadata.dst_node_id,
                    "train.special",
                    ttl=77.0,
                    group_id=f"r{server_round}",
                )

    strategy = SelectionStrategy(Random(clients_per_round=2, seed=0), Grouped(fraction_evaluate=0.0), max_latency=9.0)
    messages = strategy.configure_train(1, arrays_of(), ConfigRecord(), FakeGrid(crowd(4)))
    found = {(m.metadata.message_type, m.metadata.ttl, m.metadata.group_id) for m in messages}
    assert found == {("train.special", 77.0, "r1")}


def test_the_order_of_replies_and_of_nodes_does_not_change_the_bits() -> None:
    runs = []
    for seed in (None, 1, 2, 3):
        strategy = CSUCB(clients_per_round=6, max_latency=60.0, seed=0, base=fedavg())
        nodes = crowd(10)
        if seed:
            nodes = dict(sorted(nodes.items(), key=lambda item: (item[0] * 7919 * seed) % 1013))
        _, models = play(strategy, FakeGrid(nodes, seed=seed), 5)
        runs.append((chosen(strategy), models, repr(strategy.history.rounds)))
    assert all(run == runs[0] for run in runs)


def test_node_ids_do_not_change_the_choices_nor_the_model() -> None:
    runs = []
    for factor in (1, 7, 10**6):
        nodes = {2 + (k * factor * 37) % 10**9: node for k, node in enumerate(crowd(10).values())}
        strategy = BSFL(clients_per_round=4, min_latency=0.1, seed=0, base=fedavg())
        _, models = play(strategy, FakeGrid(nodes), 6)
        runs.append((chosen(strategy), models))
    assert all(run == runs[0] for run in runs)


def test_qfedavg_finds_the_training_loss_it_reads() -> None:
    """Its ``train_loss_key`` is one of our keys: what the base itself reads must stay."""
    strategy = SelectionStrategy(
        Random(clients_per_round=3, seed=0), QFedAvg(client_learning_rate=0.1, q=0.1, fraction_evaluate=0.0),
        max_latency=9.0,
    )  # fmt: skip
    _, models = play(strategy, FakeGrid(crowd(3, extra={"train_loss": 0.5})), 2)
    assert len(models) == 2
    assert [r.train_loss for r in strategy.history.clients] == [0.5] * 6


def test_the_users_aggregation_function_may_get_lists_of_any_length() -> None:
    def gather(contents: Any, weight_key: str) -> MetricRecord:
        return MetricRecord({"n": sum(len(c["metrics"]["per_class"]) for c in contents)})

    nodes = {
        node_id(k): FakeNode(FakeProxy(str(k), k, number=k), extra={"per_class": [0.5] * (k + 1)}) for k in range(3)
    }
    base = fedavg(train_metrics_aggr_fn=gather, evaluate_metrics_aggr_fn=gather)
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), base, max_latency=9.0)
    result, _ = play(strategy, FakeGrid(nodes), 1)
    assert [r.num_completed for r in strategy.history.rounds] == [3]
    assert dict(result.train_metrics_clientapp[1]) == {"n": 6}


def test_history_holds_the_central_evaluation_and_on_round_is_told_once() -> None:
    told: list[tuple[int, float, float]] = []
    strategy = SelectionStrategy(
        Random(clients_per_round=2, seed=0), fedavg(), max_latency=9.0,
        on_round=lambda record: told.append((record.round, record.loss, record.accuracy)),
    )  # fmt: skip
    play(strategy, FakeGrid(crowd(4)), 3)
    assert told == [(1, 0.5, 0.1), (2, pytest.approx(1 / 3), 0.2), (3, 0.25, pytest.approx(0.3))]
    assert [(r.round, r.loss, r.accuracy) for r in strategy.history.rounds] == told


def test_the_helpers_read_and_write_the_same_model() -> None:
    """The fake node's round trip through legacy parameters loses nothing."""
    proxy = FakeProxy("x", 0, number=3)
    fit = proxy.fit(FitIns(ndarrays_to_parameters(model(1.0)), {}), None, 2)
    record = ArrayRecord({k: Array(v) for k, v in zip(NAMES, parameters_to_ndarrays(fit.parameters), strict=True)})
    for a, b in zip(record.to_numpy_ndarrays(), update(3, model(1.0), 2), strict=True):
        assert a.tobytes() == b.tobytes()
