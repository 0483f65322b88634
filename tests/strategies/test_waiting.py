"""The server waits for its clients, and never for ever."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from flwr.common import Code, GetParametersIns, GetParametersRes, Parameters, Status, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from fedsel_flwr.errors import FedSelError, RunError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import BSFL, CSUCB, SelectionStrategy
from fedsel_flwr.strategies.wrapping import waiting
from tests.strategies.helpers import FakeProxy, Federation, chosen, fedavg, fleet, initial, model, run_rounds

pytestmark = pytest.mark.timeout(20)


def _strategy(cohort: int = 3, base: Any = None, **kwargs: Any) -> SelectionStrategy:
    return SelectionStrategy(
        Random(clients_per_round=cohort, seed=0), fedavg() if base is None else base, **{"wait_timeout": 0.4, **kwargs}
    )


def test_too_few_clients_end_in_an_error_that_names_both_numbers_and_the_way_out() -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match=r"5 clients.*3 are connected.*wait_timeout"):
        run_rounds(_strategy(5), fleet(3), 1)
    assert 0.4 <= time.monotonic() - start < 2.0


def test_no_client_at_all() -> None:
    with pytest.raises(RunError, match=r"2 clients.*0 are connected"):
        run_rounds(_strategy(2), [], 1)


@pytest.mark.parametrize("base_waits_for", [2, 7])
def test_min_available_is_the_larger_of_the_bases_and_the_cohort(base_waits_for: int) -> None:
    strategy = _strategy(4, fedavg(min_available_clients=base_waits_for))
    assert strategy.min_available == max(4, base_waits_for)
    with pytest.raises(RunError, match=f"{max(4, base_waits_for)} clients.*3 are connected"):
        run_rounds(strategy, fleet(3), 1)


def test_min_available_looks_inside_a_dp_wrapper() -> None:
    base = DifferentialPrivacyServerSideFixedClipping(fedavg(min_available_clients=9), 0.0, 1.0, 4)
    assert _strategy(4, base).min_available == 9


def test_min_available_given_is_taken_even_below_the_bases() -> None:
    strategy = _strategy(4, fedavg(min_available_clients=50, min_fit_clients=50), min_available=2)
    Federation(strategy, fleet(3)).play(2)
    assert chosen(strategy) == [["0", "1", "2"]] * 2


def test_min_available_above_the_fleet() -> None:
    with pytest.raises(RunError, match=r"20 clients.*6 are connected"):
        run_rounds(_strategy(3, min_available=20), fleet(6), 1)


def test_late_registrations_are_waited_for_before_round_one() -> None:
    """The round-1 race: FedAvg alone would scale its fraction by the nodes seen so far."""
    strategy = _strategy(3, fedavg(fraction_fit=0.5), min_available=12, wait_timeout=10.0)
    federation = Federation(strategy, fleet(2), max_workers=3)
    proxies = fleet(12)

    def arrive() -> None:
        for proxy in proxies[2:]:
            time.sleep(0.03)
            federation.manager.register(proxy)

    thread = threading.Thread(target=arrive)
    thread.start()
    federation.play(3)
    thread.join()
    assert [r.num_available for r in strategy.history.rounds] == [12, 12, 12]
    assert [r.num_selected for r in strategy.history.rounds] == [3, 3, 3]
    assert strategy.selector.num_clients == 12


def test_the_wait_ends_as_soon_as_enough_are_there() -> None:
    strategy = _strategy(3, wait_timeout=60.0)
    start = time.monotonic()
    Federation(strategy, fleet(3)).play(1)
    assert time.monotonic() - start < 2.0


def test_clients_that_leave_are_not_chosen_and_their_return_is_noticed() -> None:
    strategy = _strategy(3, min_available=2)
    proxies = fleet(4)
    federation = Federation(strategy, proxies).play(1)
    for proxy in proxies[:2]:
        federation.manager.unregister(proxy)
    federation.play(2)
    federation.manager.register(proxies[0])
    federation.play(1)
    assert chosen(strategy)[1:] == [["2", "3"], ["2", "3"], ["0", "2", "3"]]
    assert [proxy.asked for proxy in proxies] == [2, 1, 1, 1]


def test_too_few_in_a_later_round_is_an_error_too() -> None:
    strategy = _strategy(3)
    proxies = fleet(4)
    federation = Federation(strategy, proxies).play(2)
    for proxy in proxies[:3]:
        federation.manager.unregister(proxy)
    with pytest.raises(RunError, match=r"3 clients.*1 (are|is) connected"):
        federation.play(1)


@pytest.mark.timeout(15)
@pytest.mark.parametrize("name", ["min_available_clients", "min_fit_clients"])
def test_a_base_that_wants_more_clients_than_there_are(name: str) -> None:
    strategy = SelectionStrategy(Random(clients_per_round=3, seed=0), fedavg(**{name: 50}), wait_timeout=0.4)
    if name == "min_available_clients":
        with pytest.raises(RunError, match=r"50 clients.*6 are connected"):
            run_rounds(strategy, fleet(6), 1)
    else:  # the selector decides how many train: Flower's legacy sample never sees the number
        run_rounds(strategy, fleet(6), 1)
        assert [r.num_completed for r in strategy.history.rounds] == [3]


@pytest.mark.timeout(15)
@pytest.mark.parametrize("fraction", [0.0, 0.1, 2.0])
def test_a_cohort_of_one_at_the_bases_defaults(fraction: float) -> None:
    strategy = SelectionStrategy(Random(clients_per_round=1, seed=0), fedavg(fraction_fit=fraction), wait_timeout=0.4)
    run_rounds(strategy, fleet(4), 2)
    assert [r.num_completed for r in strategy.history.rounds] == [1, 1]


@pytest.mark.timeout(15)
def test_a_fleet_of_one() -> None:
    with pytest.raises(RunError, match=r"2 clients.*1 are connected"):
        run_rounds(
            SelectionStrategy(Random(clients_per_round=1, seed=0), fedavg(), wait_timeout=0.3),
            fleet(1), 1,
        )  # fmt: skip
    strategy = SelectionStrategy(Random(clients_per_round=1, seed=0), fedavg(), wait_timeout=0.3, min_available=1)
    run_rounds(strategy, fleet(1), 2)
    assert [r.num_completed for r in strategy.history.rounds] == [1, 1]


# ---- evaluation ---------------------------------------------------------------------------------------------------


def test_an_evaluation_that_cannot_be_filled_is_skipped_as_flower_does() -> None:
    """Enough are connected for the base, but it asks for more than there are: Flower's sample returns nobody."""
    base = FedAvg(initial_parameters=initial(), fraction_evaluate=1.0, min_evaluate_clients=6, min_available_clients=2)
    proxies = fleet(3)
    start = time.monotonic()
    run_rounds(_strategy(2, base), proxies, 2)
    assert time.monotonic() - start < 3.0
    assert not any(proxy.evaluations for proxy in proxies)


def test_evaluation_waits_for_min_available_and_no_longer_than_the_bound() -> None:
    base = FedAvg(initial_parameters=initial(), fraction_evaluate=0.5, min_available_clients=10**6)
    with pytest.raises(RunError, match="1000000"):
        run_rounds(_strategy(2, base, min_available=2), fleet(3), 1)


def test_evaluation_reaches_the_number_the_base_asks_for() -> None:
    base = FedAvg(initial_parameters=initial(), fraction_evaluate=0.5, min_evaluate_clients=1)
    proxies = fleet(8)
    _, history = run_rounds(_strategy(2, base), proxies, 3)
    for server_round in (1, 2, 3):
        assert sum(proxy.evaluations.count(server_round) for proxy in proxies) == 4
    assert [r for r, _ in history.losses_distributed] == [1, 2, 3]


def test_evaluation_does_not_disturb_the_choice_of_training_clients() -> None:
    runs = []
    for fraction in (0.0, 1.0):
        base = FedAvg(initial_parameters=initial(), fraction_evaluate=fraction)
        strategy = CSUCB(clients_per_round=3, max_latency=9.0, seed=2, base=base)
        Federation(strategy, fleet(9)).play(5)
        runs.append(chosen(strategy))
    assert runs[0] == runs[1]


def test_evaluation_is_reproducible_though_node_ids_are_random() -> None:
    """Node sets are unordered and node ids random: sort by stable identity, own the generator."""
    losses = []
    for cids in ("node-{}", "zz-{}", None):
        base = FedAvg(initial_parameters=initial(), fraction_evaluate=0.4)
        naming = (lambda k: str(7919 * (k + 3) % 101)) if cids is None else cids.format
        proxies = fleet(10, cid=naming)
        np.random.default_rng(len(losses)).shuffle(proxies)
        _, history = run_rounds(_strategy(3, base), proxies, 3)
        losses.append([sorted(str(p.client_id) for p in proxies if r in p.evaluations) for r in (1, 2, 3)])
        assert history.losses_distributed
    assert losses[0] == losses[1]
    assert losses[0] == losses[2]


# ---- the initial model ----------------------------------------------------------------------------------------------


def test_the_initial_model_comes_from_a_client_when_the_base_has_none() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, wait_timeout=1.0)
    proxies = fleet(3)
    Federation(strategy, proxies).play(1)
    expected = [array.tolist() for array in model(7.0)]
    seen = [parameters_to_ndarrays(ins.parameters) for proxy in proxies for ins in proxy.fits]
    assert seen
    assert all([array.tolist() for array in arrays] == expected for arrays in seen)


def test_the_initial_model_is_waited_for_and_a_client_that_fails_is_passed_over() -> None:
    class Broken(FakeProxy):
        def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> Any:
            if self.number == 0:
                raise ValueError("no model here")
            return GetParametersRes(
                Status(Code.GET_PARAMETERS_NOT_IMPLEMENTED, "no"), Parameters(tensors=[], tensor_type="")
            )

    strategy = BSFL(clients_per_round=2, min_latency=0.1, seed=0, wait_timeout=5.0)
    federation = Federation(strategy)

    def arrive() -> None:
        time.sleep(0.2)
        for proxy in (Broken("a", "a", number=0), Broken("b", "b", number=1), FakeProxy("c", "c", number=2)):
            federation.manager.register(proxy)

    thread = threading.Thread(target=arrive)
    thread.start()
    federation.play(1)
    thread.join()
    assert [array.shape for array in federation.arrays()] == [array.shape for array in model()]


def test_no_initial_model_within_the_bound_is_an_error() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, wait_timeout=0.3)
    with pytest.raises(FedSelError, match="initial model"):
        run_rounds(strategy, [], 1)


def test_a_base_that_samples_a_client_for_its_initial_model_is_bounded_too() -> None:
    class Asks(FedAvg):
        def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
            return client_manager.sample(1)[0].get_parameters(GetParametersIns({}), None, None).parameters

    with pytest.raises(RunError, match="0 are connected"):
        run_rounds(_strategy(2, Asks(fraction_evaluate=0.0)), [], 1)
    strategy = _strategy(2, Asks(fraction_evaluate=0.0))
    Federation(strategy, fleet(3)).play(1)
    assert strategy.history.rounds[0].num_completed == 2


# ---- the client manager is alive -------------------------------------------------------------------------------------


def test_the_live_dict_is_not_walked_while_it_changes() -> None:
    """``SimpleClientManager.all()`` is the dict itself: copy it before walking it."""

    class Impatient(dict[str, ClientProxy]):
        """Another thread registers a client as soon as someone walks through the dict."""

        arrivals = 0

        def _arrive(self) -> None:
            Impatient.arrivals += 1
            self[f"late-{Impatient.arrivals}"] = FakeProxy(f"late-{Impatient.arrivals}", f"z{Impatient.arrivals}")

        def __iter__(self) -> Any:
            for key in super().__iter__():
                yield key
                if Impatient.arrivals < 50:
                    self._arrive()

    manager = SimpleClientManager()
    manager.clients = Impatient()
    for proxy in fleet(6):
        dict.__setitem__(manager.clients, proxy.cid, proxy)
    handed_out = dict(dict.items(manager.clients))
    strategy = _strategy(3)
    pairs = strategy.configure_fit(server_round=1, parameters=initial(), client_manager=manager)
    assert len(pairs) == 3
    assert {client.cid for client, _ in pairs} <= handed_out.keys()


def test_clients_coming_and_going_during_the_rounds_do_no_harm() -> None:
    strategy = _strategy(4, min_available=4, roll_call_timeout=5.0)
    federation = Federation(strategy, fleet(8))
    stop = threading.Event()

    def churn() -> None:
        number = 100
        while not stop.is_set():
            passing = [FakeProxy(f"node-{number + i}", f"p{i}", number=i) for i in range(20)]
            for proxy in passing:
                federation.manager.register(proxy)
            for proxy in passing:
                federation.manager.unregister(proxy)
            number += 20

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        federation.play(15)
    finally:
        stop.set()
        thread.join()
    assert [r.num_selected for r in strategy.history.rounds] == [4] * 15


def test_the_real_manager_is_left_as_it_was() -> None:
    class Removes(FedAvg):
        """A base that tampers with the manager it is handed."""

        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            pairs = super().configure_fit(server_round, parameters, client_manager)
            client_manager.all().clear()
            for client, _ in pairs:
                client_manager.unregister(client)
            return pairs

    federation = Federation(_strategy(3, Removes(fraction_evaluate=0.0, initial_parameters=initial())), fleet(5))
    federation.play(3)
    assert federation.manager.num_available() == 5


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
