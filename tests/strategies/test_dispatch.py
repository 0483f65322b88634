"""Who is dispatched and what the base aggregates, through Flower's own server and client manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.common import EvaluateRes, FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager
from flwr.server.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbCyclic,
    FedYogi,
    Krum,
    Strategy,
)

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import CSUCB as CSUCBSelector
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import BSFL, CSUCB, SelectionStrategy
from tests.strategies.helpers import (
    OK,
    FakeProxy,
    Federation,
    chosen,
    fedavg,
    fleet,
    initial,
    model,
    run_rounds,
    update,
)

pytestmark = pytest.mark.timeout(60)
COHORT, FLEET, ROUNDS = 5, 12, 4


def _common(**kwargs: Any) -> dict[str, Any]:
    return {"fraction_evaluate": 0.0, "initial_parameters": initial(), **kwargs}


BASES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**_common()),
    "FedAvg-not-inplace": lambda: FedAvg(**_common(inplace=False)),
    "FedAvg-fraction-0": lambda: FedAvg(**_common(fraction_fit=0.0)),
    "FedAvg-fraction-.1": lambda: FedAvg(**_common(fraction_fit=0.1)),
    "FedAvg-wants-more": lambda: FedAvg(**_common(min_fit_clients=9, min_available_clients=9)),
    "FedProx": lambda: FedProx(**_common(proximal_mu=0.1)),
    "FedAdam": lambda: FedAdam(**_common()),
    "FedYogi": lambda: FedYogi(**_common()),
    "FedAvgM": lambda: FedAvgM(**_common(server_learning_rate=0.5, server_momentum=0.9)),
    "Krum": lambda: Krum(**_common(num_malicious_clients=1)),
    "MultiKrum": lambda: Krum(**_common(num_malicious_clients=1, num_clients_to_keep=3)),
    "FedTrimmedAvg": lambda: FedTrimmedAvg(**_common(beta=0.25)),
    "FedMedian": lambda: FedMedian(**_common()),
    "DP-fixed": lambda: DifferentialPrivacyServerSideFixedClipping(
        FedAvg(**_common(fraction_fit=0.1)), noise_multiplier=0.0, clipping_norm=1.0, num_sampled_clients=COHORT
    ),
    "DP-adaptive": lambda: DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(**_common()), noise_multiplier=0.0, num_sampled_clients=COHORT, clipped_count_stddev=0.0
    ),
}


def alone(base: Strategy, cohorts: list[list[str]]) -> list[Parameters]:
    """The models the base makes by itself from the same clients' results, in row order."""
    parameters = base.initialize_parameters(SimpleClientManager())
    assert parameters is not None
    models = []
    for server_round, ids in enumerate(cohorts, start=1):
        manager = SimpleClientManager()
        for proxy in fleet(FLEET):  # all of them: the base may ask for any number
            manager.register(proxy)
        base.configure_fit(server_round, parameters, manager)
        clients = {str(proxy.client_id): proxy for proxy in fleet(FLEET)}
        results = [
            (
                clients[client_id],
                FitRes(
                    OK,
                    ndarrays_to_parameters(update(int(client_id), parameters_to_ndarrays(parameters), server_round)),
                    clients[client_id].num_examples,
                    {},
                ),
            )
            for client_id in ids
        ]
        aggregated, _ = base.aggregate_fit(server_round, results, [])
        assert aggregated is not None
        parameters = aggregated
        models.append(parameters)
    return models


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BASES)
def test_exactly_the_chosen_train_and_the_model_is_the_bases_own(name: str) -> None:
    strategy = SelectionStrategy(Random(clients_per_round=COHORT, seed=3), BASES[name](), max_latency=60.0)
    proxies = fleet(FLEET)
    federation = Federation(strategy, proxies, max_workers=COHORT).play(ROUNDS)
    cohorts = chosen(strategy)
    assert [len(set(cohort)) for cohort in cohorts] == [COHORT] * ROUNDS
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    for server_round, cohort in enumerate(cohorts, start=1):
        dispatched = [str(p.client_id) for p in proxies for r in p.fit_rounds if r == server_round]
        assert sorted(dispatched) == sorted(cohort)
        assert cohort == sorted(cohort, key=int)  # rows follow the ids
    assert all(row.completed and not row.problem for row in strategy.history.clients)
    assert federation.models == [list(p.tensors) for p in alone(BASES[name](), cohorts)]


@pytest.mark.parametrize("name", BASES)
def test_the_default_server_loop_runs_with_every_base(name: str) -> None:
    strategy = CSUCB(clients_per_round=COHORT, max_latency=60.0, seed=1, base=BASES[name]())
    server, _ = run_rounds(strategy, fleet(FLEET), 5, max_workers=COHORT)
    assert [r.num_completed for r in strategy.history.rounds] == [COHORT] * 5
    assert all(np.isfinite(array).all() for array in parameters_to_ndarrays(server.parameters))


def test_fedavg_equals_the_sum_by_hand_in_row_order() -> None:
    strategy = BSFL(clients_per_round=COHORT, min_latency=0.1, seed=5, base=fedavg(fraction_fit=0.1))
    federation = Federation(strategy, fleet(FLEET), max_workers=COHORT).play(ROUNDS)
    current = model()
    for server_round, cohort in enumerate(chosen(strategy), start=1):
        numbers = [int(client_id) for client_id in cohort]
        examples = [10 + 3 * n for n in numbers]
        updates = [update(n, current, server_round) for n in numbers]
        sums = [np.zeros_like(array) for array in current]
        for i, (arrays, count) in enumerate(zip(updates, examples, strict=True)):
            weight = np.float64(count / sum(examples))
            terms = [(array * weight).astype(np.float32) for array in arrays]
            sums = terms if i == 0 else [s + t for s, t in zip(sums, terms, strict=True)]
        current = sums
        assert federation.models[server_round - 1] == ndarrays_to_parameters(current).tensors


def test_clients_get_the_global_model_and_the_bases_config() -> None:
    base = FedProx(
        fraction_evaluate=0.0,
        initial_parameters=initial(),
        proximal_mu=0.25,
        on_fit_config_fn=lambda r: {"lr": 0.1 / r},
    )
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), base)
    proxies = fleet(6)
    federation = Federation(strategy, proxies).play(3)
    before = [initial().tensors, *federation.models]
    for proxy in proxies:
        for ins, server_round in zip(proxy.fits, proxy.fit_rounds, strict=True):
            assert ins.config == {"lr": 0.1 / server_round, "proximal_mu": 0.25}
            assert ins.parameters.tensors == before[server_round - 1]


def test_a_config_shared_by_all_rounds_is_not_changed() -> None:
    shared = {"epochs": 1, "lr": 0.1}
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), fedavg(on_fit_config_fn=lambda r: shared))
    proxies = fleet(6)
    Federation(strategy, proxies).play(3)
    assert shared == {"epochs": 1, "lr": 0.1}
    assert all(ins.config == shared for proxy in proxies for ins in proxy.fits)


@pytest.mark.timeout(60)
def test_the_order_of_replies_does_not_change_the_bits() -> None:
    models = []
    for sign in (1, -1):
        proxies = fleet(8)
        for proxy in proxies:
            proxy.delay = 0.04 + sign * 0.005 * proxy.number
        strategy = CSUCB(clients_per_round=8, max_latency=60.0, seed=0, base=fedavg())
        models.append(Federation(strategy, proxies, max_workers=8).play(3).models)
    assert models[0] == models[1]


@pytest.mark.parametrize("permutation", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_results_in_any_order_reach_the_base_by_row(permutation: list[int]) -> None:
    strategy = SelectionStrategy(Random(clients_per_round=4, seed=0), fedavg())
    manager = SimpleClientManager()
    for proxy in fleet(4, cid=lambda k: f"node-{9 - k}"):
        manager.register(proxy)
    pairs = strategy.configure_fit(server_round=1, parameters=initial(), client_manager=manager)
    results = {client.cid: (client, client.fit(ins, None, 1)) for client, ins in pairs}
    ordered = [results[f"node-{9 - k}"] for k in permutation]
    parameters, _ = strategy.aggregate_fit(1, ordered, [])
    reference, _ = fedavg().aggregate_fit(
        1,
        [
            (client, FitRes(OK, ndarrays_to_parameters(update(k, model(), 1)), 10 + 3 * k, {}))
            for k, (client, _) in enumerate(results[f"node-{9 - k}"] for k in range(4))
        ],
        [],
    )
    assert parameters is not None
    assert reference is not None
    assert parameters.tensors == reference.tensors


def test_a_base_that_picks_its_own_client_is_refused_by_name() -> None:
    strategy = SelectionStrategy(
        Random(clients_per_round=3, seed=0), FedXgbCyclic(fraction_evaluate=0.0, initial_parameters=initial())
    )
    proxies = fleet(6)
    with pytest.raises(RunError, match="FedXgbCyclic"):
        run_rounds(strategy, proxies, 1)
    assert not any(proxy.fits for proxy in proxies)


def test_a_base_that_dispatches_nobody_or_one_twice_is_refused() -> None:
    class Nobody(FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            return []

    class Twice(FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            pairs = super().configure_fit(server_round, parameters, client_manager)
            return [pairs[0], *pairs[:-1]]

    for base in (Nobody(initial_parameters=initial()), Twice(initial_parameters=initial())):
        strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), base)
        with pytest.raises(RunError, match=type(base).__name__):
            run_rounds(strategy, fleet(6), 1)


def test_a_base_that_hands_out_instructions_in_its_own_order_keeps_them() -> None:
    class Personal(FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            pairs = super().configure_fit(server_round, parameters, client_manager)
            return [(c, type(i)(i.parameters, {"you": c.cid})) for c, i in reversed(pairs)]

    proxies = fleet(6)
    Federation(SelectionStrategy(Random(clients_per_round=3, seed=0), Personal(**_common())), proxies).play(2)
    assert all(ins.config == {"you": proxy.cid} for proxy in proxies for ins in proxy.fits)


def test_fewer_than_asked_for_all_train() -> None:
    strategy = SelectionStrategy(Random(clients_per_round=5, seed=0), fedavg(), min_available=2)
    Federation(strategy, fleet(3)).play(2)
    assert chosen(strategy) == [["0", "1", "2"]] * 2


def test_the_same_seed_chooses_the_same_and_the_selector_is_asked_once_a_round() -> None:
    runs = []
    for _ in range(2):
        selector = CSUCBSelector(clients_per_round=4, max_latency=10.0, seed=11)
        strategy = SelectionStrategy(selector, fedavg())
        Federation(strategy, fleet(10)).play(6)
        assert selector.round == 6
        assert int(selector.state_dict()["plays"].sum()) == 24
        runs.append(chosen(strategy))
    assert runs[0] == runs[1]


def test_evaluations_are_aggregated_in_the_order_of_the_clients_ids() -> None:
    """Whatever their connections are called: sums of floats depend on the order."""

    class Ordered(FedAvg):
        def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
            order.append([client.cid for client, _ in results])
            return super().aggregate_evaluate(server_round, results, failures)

    order: list[list[str]] = []
    base = Ordered(fraction_evaluate=1.0, min_evaluate_clients=3, min_available_clients=3, initial_parameters=initial())
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), base, max_latency=60.0)
    Federation(strategy, [FakeProxy("x", 10), FakeProxy("y", 9), FakeProxy("z", 2)]).play(1)
    answers = [(proxy, EvaluateRes(OK, 0.5, 3, {})) for proxy in (FakeProxy("x"), FakeProxy("z"), FakeProxy("y"))]
    strategy.aggregate_evaluate(1, answers, [])
    assert order[-1] == ["z", "y", "x"]
