"""Questions before the choice, in both APIs: request, round trip, ``inform``; their time and energy are charged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, MessageType

from fedsel_flwr.selectors import create
from fedsel_flwr.selectors.base import Probe, Selector
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.helpers import Federation, chosen, fedavg, model
from tests.strategies.message import helpers as message
from tests.strategies.message.helpers import FakeGrid, FakeNode, ProbeProxy, node_id

pytestmark = pytest.mark.timeout(30)
MAX_LATENCY = 9.0


class Curious(Selector):
    """Asks clients for columns and keeps the answers; takes the lowest indices."""

    name = "curious"

    def __init__(self, *, columns: tuple[str, ...] = ("loss",), asks: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.columns, self.asks = columns, asks
        self.requests: list[list[int]] = []
        self.informed: list[tuple[list[int], dict[str, list[float]]]] = []

    def _probe(self, available: Any) -> Probe | None:
        asked = available if self.asks is None else np.intersect1d(available, self.asks)
        self.requests.append(asked.tolist())
        return Probe(clients=asked, columns=self.columns)

    def _select(self, available: Any) -> Any:
        return available[: self.clients_per_round]

    def _inform(self, clients: Any, columns: Mapping[str, Any]) -> None:
        self.informed.append((clients.tolist(), {k: v.tolist() for k, v in columns.items()}))


def _legacy(selector: Selector, proxies: list[ProbeProxy], rounds: int, **options: Any) -> Any:
    strategy = LegacyStrategy(selector, fedavg(), max_latency=MAX_LATENCY, **options)
    federation = Federation(strategy, proxies).play(rounds)
    return strategy, federation.models


def _message(selector: Selector, proxies: list[ProbeProxy], rounds: int, **options: Any) -> Any:
    strategy = MessageStrategy(selector, message.fedavg(), max_latency=MAX_LATENCY, **options)
    grid = FakeGrid({node_id(p.number): FakeNode(p) for p in proxies})
    _, models = message.play(strategy, grid, rounds)
    return strategy, models


Run = Callable[..., Any]
APIS = pytest.mark.parametrize("run", [_legacy, _message], ids=["legacy", "message"])


def _proxies(count: int = 6, **kwargs: Any) -> list[ProbeProxy]:
    return [ProbeProxy(f"node-{k}", k, number=k, probe_s=0.25 + 0.125 * k, **kwargs) for k in range(count)]


def _run_logged(run: Run, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fedsel_flwr").addHandler(handler)
    try:
        return run(*args, **kwargs)[0], messages
    finally:
        logging.getLogger("fedsel_flwr").removeHandler(handler)


@APIS
def test_request_round_trip_inform_choice(run: Run) -> None:
    """The lowest local accuracies of each round are chosen, at the model of that round."""
    proxies = _proxies(8)
    strategy, _ = run(create("local-accuracy", clients_per_round=3, seed=0), proxies, 4)
    for server_round, cohort in enumerate(chosen(strategy), start=1):
        worst = sorted(proxies, key=lambda p: p.accuracy(server_round))[:3]
        assert cohort == sorted(str(p.client_id) for p in worst)
    for proxy in proxies:
        assert [config["round"] for config in proxy.probed] == [1, 2, 3, 4]
        assert [config["probe"] for config in proxy.probed] == ["local_accuracy"] * 4
    first = proxies[0].models
    assert [array.tolist() for array in first[0]] == [array.tolist() for array in model()]
    for server_round in range(4):  # everybody is asked at the same model, and each round at a new one
        assert all(
            a.tobytes() == b.tobytes()
            for p in proxies
            for a, b in zip(p.models[server_round], first[server_round], strict=True)
        )
    assert len({m[0].tobytes() for m in first}) == 4


@APIS
def test_the_model_that_is_asked_about_is_the_one_that_is_sent(run: Run) -> None:
    proxies = _proxies(3)
    run(create("local-accuracy", clients_per_round=3, seed=0), proxies, 3)
    from flwr.common import parameters_to_ndarrays

    for proxy in proxies:
        for asked, ins in zip(proxy.models, proxy.fits, strict=True):
            sent = parameters_to_ndarrays(ins.parameters)
            assert [a.tobytes() for a in asked] == [a.tobytes() for a in sent]


@APIS
@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_time_is_that_of_the_slowest_in_each_wave_and_energy_the_sum(run: Run, channels: int) -> None:
    proxies = _proxies(6)
    strategy, _ = run(Curious(clients_per_round=2), proxies, 3, channels=channels)
    seconds = [p.probe_s for p in proxies]
    waves = sum(max(seconds[i : i + channels]) for i in range(0, 6, channels))
    training = 0.625 if channels > 1 else 0.5 + 0.625  # clients 0 and 1 train in 0.5 and 0.625 s
    for n, record in enumerate(strategy.history.rounds, start=1):
        assert record.probe_s == pytest.approx(waves)
        assert record.probe_j == pytest.approx(6 * 0.125)
        assert record.round_s == pytest.approx(waves + training)
        assert record.energy_j == pytest.approx(6 * 0.125 + 2 * 0.25)
        assert record.simulated_s == pytest.approx(n * record.round_s)
        assert record.total_energy_j == pytest.approx(n * record.energy_j)


@APIS
def test_without_a_probe_nothing_is_asked_or_charged(run: Run) -> None:
    proxies = _proxies(4)
    strategy, _ = run(create("random", clients_per_round=2, seed=0), proxies, 3)
    assert not any(p.probed or p.evaluations for p in proxies)
    assert [(r.probe_s, r.probe_j) for r in strategy.history.rounds] == [(0.0, 0.0)] * 3


@APIS
def test_only_those_named_in_the_request_are_asked(run: Run) -> None:
    proxies = _proxies(6)
    selector = Curious(clients_per_round=2, asks=[1, 4], columns=("local_accuracy",))
    strategy, _ = run(selector, proxies, 2)
    assert [len(p.probed) for p in proxies] == [0, 2, 0, 0, 2, 0]
    answers = [entry for entry in selector.informed if entry[1].keys() == {"local_accuracy"}]
    assert [rows for rows, _ in answers] == [[1, 4], [1, 4]]
    assert answers[0][1]["local_accuracy"] == [proxies[1].accuracy(1), proxies[4].accuracy(1)]
    assert [r.probe_s for r in strategy.history.rounds] == [0.75] * 2  # client 4's


@APIS
def test_a_request_for_nobody_asks_nobody(run: Run) -> None:
    proxies = _proxies(3)
    selector = Curious(clients_per_round=2, asks=[77])
    strategy, _ = run(selector, proxies, 2)
    assert not any(p.probed for p in proxies)
    assert [r.probe_s for r in strategy.history.rounds] == [0.0, 0.0]


@APIS
def test_probes_go_only_to_available_clients(run: Run) -> None:
    proxies = _proxies(6)

    def there(client_id: str, server_round: int, seconds: float) -> bool:
        return (int(client_id) + server_round) % 2 == 0

    run(create("local-accuracy", clients_per_round=2, seed=0), proxies, 4, availability=there)
    for proxy in proxies:
        assert [c["round"] for c in proxy.probed] == [r for r in (1, 2, 3, 4) if there(str(proxy.client_id), r, 0)]


@APIS
def test_several_columns_arrive_together(run: Run) -> None:
    proxies = _proxies(3, answer=lambda p, m: {**m, "loss": 2.0 + p.number, "rms_loss": 0.5 * p.number})
    selector = Curious(clients_per_round=2, columns=("loss", "rms_loss"))
    run(selector, proxies, 1)
    assert selector.informed[-1] == ([0, 1, 2], {"loss": [2.0, 3.0, 4.0], "rms_loss": [0.0, 0.5, 1.0]})
    assert proxies[0].probed[0]["probe"] == "loss,rms_loss"


@APIS
def test_flowers_own_results_serve_where_a_client_knows_no_probes(run: Run) -> None:
    """``loss`` and ``accuracy`` of an ordinary ``evaluate``; they cost max_latency, as no time is told."""
    proxies = _proxies(3, answer=lambda p, m: {"accuracy": 0.25 * p.number})
    selector = Curious(clients_per_round=2, columns=("loss", "local_accuracy"), asks=[0, 1])
    strategy, _ = run(selector, proxies, 1)
    rows, columns = selector.informed[-1]
    assert (rows, columns["local_accuracy"]) == ([0, 1], [0.0, 0.25])
    assert columns["loss"] == pytest.approx([0.1, 0.2])
    assert strategy.history.rounds[0].probe_s == MAX_LATENCY


@APIS
def test_what_is_not_answered_comes_as_nan_and_costs_max_latency(run: Run) -> None:
    def refuse(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
        if proxy.number == 1:
            raise ValueError("no evaluation here")
        return metrics

    proxies = _proxies(4, answer=refuse)
    selector = Curious(clients_per_round=4, columns=("local_accuracy",))
    strategy, messages = _run_logged(run, selector, proxies, 2)
    for server_round, (rows, columns) in enumerate(selector.informed[-2:], start=1):
        assert rows == [0, 1, 2, 3]
        assert np.isnan(columns["local_accuracy"]).tolist() == [False, True, False, False]
        assert columns["local_accuracy"][2] == proxies[2].accuracy(server_round)
    assert [r.probe_s for r in strategy.history.rounds] == [MAX_LATENCY] * 2
    assert [r.probe_j for r in strategy.history.rounds] == [pytest.approx(3 * 0.125)] * 2
    assert [m for m in messages if "client 1: probe: no local_accuracy" in m]
    assert not [m for m in messages if "client 0" in m]
    assert [r.num_completed for r in strategy.history.rounds] == [4, 4]  # the round goes on


@APIS
def test_those_that_did_not_answer_are_chosen_last(run: Run) -> None:
    proxies = _proxies(5, answer=lambda p, m: m if p.number >= 2 else {"latency_s": 0.1})
    strategy, _ = run(create("local-accuracy", clients_per_round=3, seed=0), proxies, 3)
    assert chosen(strategy) == [["2", "3", "4"]] * 3


HOSTILE: dict[str, Any] = {
    "nan": float("nan"),
    "infinite": float("inf"),
    "minus-infinite": float("-inf"),
    "list": [0.1, 0.2],
    "huge": 2**63 - 1,
}


@APIS
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("key", ["local_accuracy", "latency_s", "energy_j"])
def test_a_hostile_answer_poisons_neither_selector_nor_history(run: Run, kind: str, key: str) -> None:
    value = HOSTILE[kind]
    if run is _legacy and isinstance(value, list):
        value = "fast"  # the legacy API knows text, not lists
    proxies = _proxies(4, answer=lambda p, m: {**m, key: value} if p.number == 2 else m)
    selector = create("local-accuracy", clients_per_round=2, seed=0)
    strategy, _ = run(selector, proxies, 3)
    assert all(np.isfinite(np.asarray(v, dtype=float)).all() for v in selector.state_dict().values())
    for record in strategy.history.rounds:
        assert np.isfinite([record.probe_s, record.probe_j, record.round_s, record.energy_j]).all()
        assert 0 <= record.probe_s <= 2 * MAX_LATENCY  # two waves of two channels
        assert record.probe_j >= 3 * 0.125
        if key == "latency_s":
            assert record.probe_s == 0.375 + MAX_LATENCY
        if key == "energy_j" and kind != "huge":
            assert record.probe_j == pytest.approx(3 * 0.125)


@APIS
@pytest.mark.parametrize("value", [-1.0, -1e-9, 1e9])
def test_a_latency_out_of_range_costs_max_latency_and_a_negative_energy_nothing(run: Run, value: float) -> None:
    proxies = _proxies(1, answer=lambda p, m: {**m, "latency_s": value, "energy_j": -5.0})
    strategy, _ = run(Curious(clients_per_round=1), proxies, 1, min_available=1)
    assert strategy.history.rounds[0].probe_s == MAX_LATENCY
    assert np.isnan(strategy.history.rounds[0].probe_j)  # nobody measured any


@APIS
def test_an_answer_cannot_speak_for_another_client(run: Run) -> None:
    proxies = _proxies(3, answer=lambda p, m: {**m, "client_id": 0, "local_accuracy": 0.1 * p.number})
    selector = Curious(clients_per_round=1, columns=("local_accuracy",))
    run(selector, proxies, 1)
    assert selector.informed[-1] == ([0, 1, 2], {"local_accuracy": [0.0, 0.1, 0.2]})


@APIS
def test_metric_keys_name_the_cost_of_a_probe(run: Run) -> None:
    from fedsel_flwr.strategies import MetricKeys

    keys = MetricKeys(latency="seconds", energy="joules")
    proxies = _proxies(2, extra={"seconds": 1.0}, answer=lambda p, m: {**m, "seconds": 3.0, "joules": 4.0})
    strategy, _ = run(Curious(clients_per_round=2), proxies, 1, metric_keys=keys)
    assert (strategy.history.rounds[0].probe_s, strategy.history.rounds[0].probe_j) == (3.0, 8.0)
    assert strategy.history.rounds[0].round_s == 4.0


def test_messages_a_probe_is_an_evaluate_message_with_config_and_arrays_of_its_own() -> None:
    proxies = _proxies(4)
    strategy = MessageStrategy(
        create("local-accuracy", clients_per_round=2, seed=0), message.fedavg(), max_latency=MAX_LATENCY
    )
    grid = FakeGrid({node_id(p.number): FakeNode(p) for p in proxies})
    message.play(strategy, grid, 1)
    (batch,) = [b for b in grid.sent if b and b[0].metadata.message_type == MessageType.EVALUATE]
    assert len(batch) == 4
    assert all(dict(m.content["config"]) == {"probe": "local_accuracy", "round": 1} for m in batch)
    assert len({id(m.content["config"]) for m in batch}) == 4


def test_messages_silence_and_errors_of_the_superlink() -> None:
    proxies = _proxies(4)
    faults: dict[int, Any] = {1: lambda n, m, c: None, 2: lambda n, m, c: Error(5, "gone")}
    nodes = {node_id(p.number): FakeNode(p, evaluate_fault=faults.get(p.number)) for p in proxies}
    selector = Curious(clients_per_round=2, columns=("local_accuracy",))
    strategy = MessageStrategy(selector, message.fedavg(), max_latency=MAX_LATENCY, channels=4)
    message.play(strategy, FakeGrid(nodes), 2)
    answers = [np.isnan(columns["local_accuracy"]).tolist() for _, columns in selector.informed[-2:]]
    assert answers == [[False, True, True, False], [False, True, False]]  # silence is not asked again
    assert [r.probe_s for r in strategy.history.rounds] == [MAX_LATENCY] * 2


def test_legacy_a_client_that_hangs_holds_up_a_probe_no_longer_than_the_bound() -> None:
    import threading

    over = threading.Event()

    def hang(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
        if proxy.number == 1:
            over.wait(20)
        return metrics

    proxies = _proxies(3, answer=hang)
    selector = Curious(clients_per_round=2, columns=("local_accuracy",))
    strategy = LegacyStrategy(selector, fedavg(), max_latency=MAX_LATENCY, roll_call_timeout=0.3)
    try:
        Federation(strategy, proxies).play(1)
    finally:
        over.set()
    assert np.isnan(selector.informed[-1][1]["local_accuracy"]).tolist() == [False, True, False]
    assert strategy.history.rounds[0].probe_s == MAX_LATENCY + 0.5  # two waves: 0 and 1, then 2
