"""The server waits for its clients, but not for ever; who is dispatched, and what the base aggregates. In both APIs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.common import Code, EvaluateRes, GetParametersIns, GetParametersRes, Parameters, Status
from flwr.server.client_manager import ClientManager, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import FedAvg

from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.selectors import BSFL, Random
from fedsel_flwr.strategies import SelectionStrategy
from fedsel_flwr.strategies.wrapping import waiting
from tests.strategies.either_api import Server, base_of, close, mean_of, private, selection
from tests.strategies.helpers import OK, FakeProxy, Federation, chosen, fleet, initial, model, run_rounds, within
from tests.strategies.message.helpers import FakeGrid, arrays_of, crowd

NODES = {"legacy": "clients", "message": "nodes"}
TOO_FEW: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "as many as the cohort": ({}, {}, 3, 5),
    "none": ({}, {}, 0, 5),
    "more than the base's": ({"min_available_nodes": 2}, {}, 3, 5),
    "the base's": ({"min_available_nodes": 50}, {}, 6, 50),
    "given": ({}, {"min_available": 20}, 6, 20),
    "one, and Flower wants two": ({}, {}, 1, 2),
}
"""Options of the base and of the strategy, clients that are connected, and clients that are waited for."""


def _meanwhile(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.mark.parametrize("case", TOO_FEW)
def test_too_few_clients_end_in_an_error_that_names_both_numbers_and_the_way_out(api: str, case: str) -> None:
    base, options, connected, wanted = TOO_FEW[case]
    cohort = 1 if case.startswith("one") else 5
    strategy = selection(api, cohort, base_of(api, **base), wait_timeout=0.1, **options)
    assert strategy.min_available == wanted
    told = rf"{wanted} {NODES[api]}.*{connected} (are|is) connected.*wait_timeout"
    with within(0.1, 3.0), pytest.raises(RunError, match=told):
        Server(api, strategy, fleet(connected)).play(1)


def test_a_base_that_trains_on_more_clients_than_there_are(api: str) -> None:
    """Flower's legacy sample never sees the number: the selector decides. The Message API's waits for it."""
    strategy = selection(api, 3, base_of(api, min_train_nodes=50))
    if api == "message":
        with pytest.raises(RunError, match=r"50 nodes.*6 are connected"):
            Server(api, strategy, fleet(6)).play(1)
    else:
        assert len(*Server(api, strategy, fleet(6)).play(1).dispatched()) == 3


def test_min_available_looks_inside_a_dp_wrapper_and_a_given_one_counts_even_below_the_bases(api: str) -> None:
    assert selection(api, 4, private(api, base_of(api, min_available_nodes=9))).min_available == 9
    strategy = selection(api, 4, base_of(api, min_available_nodes=50, min_train_nodes=50), min_available=2)
    assert Server(api, strategy, fleet(3)).play(2).dispatched() == [["0", "1", "2"]] * 2


def test_late_registrations_are_waited_for_before_round_one(api: str) -> None:
    """The round-1 race: FedAvg alone would scale its fraction by the nodes seen so far."""
    strategy = selection(api, 3, base_of(api, fraction_train=0.5), min_available=12, wait_timeout=10.0)
    server = Server(api, strategy, fleet(2))

    def arrive() -> None:
        for proxy in fleet(12)[2:]:
            time.sleep(0.02)
            server.connect(proxy)

    thread = _meanwhile(arrive)
    server.play(3)
    thread.join()
    assert [(r.num_available, r.num_selected) for r in strategy.history.rounds] == [(12, 3)] * 3
    assert strategy.selector.num_clients == 12


def test_clients_that_leave_are_not_chosen_and_their_return_is_noticed(api: str) -> None:
    """And the wait ends as soon as enough are there."""
    strategy = selection(api, 4, min_available=2, wait_timeout=60.0)
    proxies = fleet(4)
    server = Server(api, strategy, proxies)
    with within(0.0, 3.0):
        server.play(1)
        for proxy in proxies[:2]:
            server.disconnect(proxy)
        server.play(2)
        server.connect(proxies[0])
        server.play(1)
    assert chosen(strategy) == [["0", "1", "2", "3"], ["2", "3"], ["2", "3"], ["0", "2", "3"]]
    assert [r.client for r in strategy.history.clients if r.client_id == "0"] == [0, 0]  # the same row
    assert [proxy.asked for proxy in proxies] == [2, 1, 1, 1]


@pytest.mark.parametrize("base", ["FedAvg", "FedAdam", "FedMedian", "FedTrimmedAvg", "Krum", {"fraction_train": 0.1}])
def test_a_cohort_of_one_works_at_the_bases_defaults(api: str, base: Any) -> None:
    made = base_of(api, **base) if isinstance(base, dict) else base_of(api, base)
    server = Server(api, selection(api, 1, made), fleet(4)).play(2)
    assert [len(cohort) for cohort in server.dispatched()] == [1, 1]
    assert [r.num_completed for r in server.strategy.history.rounds] == [1, 1]


def test_what_is_no_base_of_the_api_is_refused() -> None:
    wrong: Any = [("message", LegacyFedAvg()), ("legacy", FedAvg()), ("legacy", "FedAvg"), ("legacy", LegacyFedAvg)]
    for api, base in wrong:
        with pytest.raises(ParameterError, match="base must be"):
            selection(api, 1, base)


class Polls(FedAvg):
    """Waits for nodes of its own accord."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        while len(list(grid.get_node_ids())) < 100:
            time.sleep(0.05)
        return super().configure_train(server_round, arrays, config, grid)


def test_an_evaluation_that_cannot_be_filled_is_skipped_as_flower_does() -> None:
    """Enough are connected for the base, but it asks for more than there are: Flower's sample returns nobody."""
    base = base_of("legacy", fraction_evaluate=1.0, min_evaluate_nodes=6, min_available_nodes=2)
    proxies = fleet(3)
    with within(0.0, 3.0):
        run_rounds(selection("legacy", 2, base), proxies, 2)
    assert not any(proxy.evaluations for proxy in proxies)


@pytest.mark.parametrize(
    ("api", "options", "said"),
    [
        ("legacy", {"min_available_nodes": 10**6}, "1000000"),
        *[("message", {option: 50}, "wait_timeout") for option in ("min_available_nodes", "min_evaluate_nodes")],
        ("message", {"fraction_evaluate": 2.0}, "wait_timeout"),
        ("message", {"name": Polls}, r"wait_timeout = 0\.4"),
    ],
)
def test_bases_that_wait_for_more_than_there_are_do_not_hang(api: str, options: dict[str, Any], said: str) -> None:
    """For training of their own accord, and for evaluations."""
    strategy = selection(api, 2, base_of(api, **{"fraction_evaluate": 0.5, **options}), min_available=2)
    with pytest.raises(RunError, match=said):
        Server(api, strategy, fleet(3)).play(1)


def test_evaluation_is_reproducible_though_node_ids_are_random() -> None:
    """Node sets are unordered and node ids random: sort by stable identity, own the generator."""
    asked = []
    for name in ("node-{}".format, "zz-{}".format, lambda k: str(7919 * (k + 3) % 101)):
        proxies = fleet(10, cid=name)
        np.random.default_rng(len(asked)).shuffle(proxies)  # type: ignore[arg-type]
        run_rounds(selection("legacy", 3, base_of("legacy", fraction_evaluate=0.4)), proxies, 3)
        asked.append([sorted(str(p.client_id) for p in proxies if r in p.evaluations) for r in (1, 2, 3)])
    assert asked[0] == asked[1] == asked[2]
    assert all(asked[0])


def test_the_initial_model_is_waited_for_and_a_client_that_fails_is_passed_over() -> None:
    class Broken(FakeProxy):
        def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> Any:
            if self.number == 0:
                raise ValueError("no model here")
            return GetParametersRes(Status(Code.GET_PARAMETERS_NOT_IMPLEMENTED, "no"), Parameters([], ""))

    proxies = [Broken("a", "a", number=0), Broken("b", "b", number=1), FakeProxy("c", "c", number=2)]
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), max_latency=9.0, wait_timeout=0.3)
    with pytest.raises(FedSelError, match="initial model"):
        run_rounds(strategy, [], 1)
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), max_latency=9.0, wait_timeout=5.0)
    federation = Federation(strategy)

    def arrive() -> None:
        time.sleep(0.2)
        for proxy in proxies:
            federation.manager.register(proxy)

    thread = _meanwhile(arrive)
    federation.play(1)
    thread.join()
    assert [ins.parameters for proxy in proxies for ins in proxy.fits] == [initial(7.0)] * 3


def test_a_base_that_samples_a_client_for_its_initial_model_is_bounded_too() -> None:
    class Asks(LegacyFedAvg):
        def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
            return client_manager.sample(1)[0].get_parameters(GetParametersIns({}), None, None).parameters

    strategy = selection("legacy", 2, Asks(fraction_evaluate=0.0))
    with pytest.raises(RunError, match="0 are connected"):
        run_rounds(strategy, [], 1)
    Federation(strategy, fleet(3)).play(1)
    assert strategy.history.rounds[0].num_completed == 2


def test_the_live_dict_is_not_walked_while_it_changes() -> None:
    """``SimpleClientManager.all()`` is the dict itself: copy it before walking it."""

    class Impatient(dict[str, ClientProxy]):
        """Another thread registers a client as soon as someone walks through the dict."""

        arrivals = 0

        def __iter__(self) -> Any:
            for key in super().__iter__():
                yield key
                if Impatient.arrivals < 50:
                    Impatient.arrivals += 1
                    self[f"late-{Impatient.arrivals}"] = FakeProxy(f"late-{Impatient.arrivals}")

    manager = SimpleClientManager()
    manager.clients = Impatient()
    for proxy in fleet(6):
        dict.__setitem__(manager.clients, proxy.cid, proxy)
    there = {proxy.cid for proxy in fleet(6)}
    pairs = selection("legacy").configure_fit(server_round=1, parameters=initial(), client_manager=manager)
    assert len(pairs) == 3
    assert {client.cid for client, _ in pairs} <= there


def test_a_wait_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once after a while, and again now and then; a short one is not."""
    monkeypatch.setattr(waiting, "WARN_AFTER_S", 0.1)
    monkeypatch.setattr(waiting, "WARN_EVERY_S", 0.2)
    monkeypatch.setattr(waiting, "CONNECTED_POLL_S", 0.01)
    words = {"what": "nodes", "reason": "min_available"}
    with pytest.raises(RunError, match=r"waited 0\.4 s for 4 nodes"):
        waiting.wait_for(lambda: [1], 4, 0.4, **words)
    told = "1 of 4 nodes are connected (min_available); waiting for at most 0.4 s (wait_timeout)"
    assert caplog.messages == [told] * 2
    caplog.clear()
    assert waiting.wait_for(lambda: [1], 1, 9.0, **words) == [1]
    assert caplog.messages == []


# ---- who is dispatched -----------------------------------------------------------------------------------------------

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
    if api == "message":  # each once, in this order
        ids = {node: str(one.proxy.client_id) for node, one in server.grid.nodes.items()}
        training = [batch for batch in server.grid.sent if batch and batch[0].metadata.message_type == "train"]
        assert [[ids[m.metadata.dst_node_id] for m in batch] for batch in training] == cohorts


@pytest.mark.parametrize("permutation", [[3, 2, 1, 0], [2, 0, 3, 1]])
def test_results_in_any_order_reach_the_base_by_row(permutation: list[int]) -> None:
    strategy = selection("legacy", 4)
    server = Server("legacy", strategy, fleet(4, cid=lambda k: f"node-{9 - k}"))
    pairs = strategy.configure_fit(server_round=1, parameters=initial(), client_manager=server.federation.manager)
    results = {client.cid: (client, client.fit(ins, None, 1)) for client, ins in pairs}
    parameters, _ = strategy.aggregate_fit(1, [results[f"node-{9 - k}"] for k in permutation], [])
    reference, _ = base_of("legacy").aggregate_fit(1, [results[f"node-{9 - k}"] for k in range(4)], [])
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
    strategy.aggregate_evaluate(1, [(FakeProxy(cid), EvaluateRes(OK, 0.5, 3, {})) for cid in ("x", "z", "y")], [])
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
