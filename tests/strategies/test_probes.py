"""Questions before the choice, in both APIs: request, round trip, ``inform``; their time and energy are charged."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, MessageType

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import Selector, create
from fedsel_flwr.strategies import MetricKeys
from tests.strategies.either_api import BASES, Server, base_of, private, selection
from tests.strategies.helpers import model, parameters_to_ndarrays
from tests.strategies.message.helpers import ProbeProxy
from tests.strategies.scripted import MAX_LATENCY, Curious


def _run(api: str, selector: Selector, proxies: list[ProbeProxy], rounds: int = 1, **options: Any) -> Any:
    """A selector's history, after these rounds."""
    strategy = selection(api, selector, **{"max_latency": MAX_LATENCY, "min_available": 1, **options})
    Server(api, strategy, proxies).play(rounds)
    return strategy.history


def _proxies(count: int = 6, **kwargs: Any) -> list[ProbeProxy]:
    return [ProbeProxy(f"node-{k}", k, number=k, probe_s=0.25 + 0.125 * k, **kwargs) for k in range(count)]


def test_request_round_trip_inform_choice(api: str) -> None:
    """The lowest local accuracies of each round are chosen, at the model of that round, which is then sent."""
    proxies = _proxies(6)
    history = _run(api, create("local-accuracy", clients_per_round=3, seed=0), proxies, 3)
    for server_round in (1, 2, 3):
        cohort = [row.client_id for row in history.clients if row.round == server_round]
        worst = sorted(proxies, key=lambda p: p.accuracy(server_round))[:3]
        assert cohort == sorted(str(p.client_id) for p in worst)
    asked = [[array.tobytes() for array in one] for one in proxies[0].models]
    assert asked[0] == [array.tobytes() for array in model()]
    assert len({arrays[0] for arrays in asked}) == 3  # each round at a new one
    for proxy in proxies:
        assert [config["round"] for config in proxy.probed] == [1, 2, 3]
        assert [config["probe"] for config in proxy.probed] == ["local_accuracy"] * 3
        assert [[array.tobytes() for array in one] for one in proxy.models] == asked
        sent = [[array.tobytes() for array in parameters_to_ndarrays(ins.parameters)] for ins in proxy.fits]
        assert sent == [asked[number - 1] for number in proxy.fit_rounds]


@pytest.mark.parametrize("channels", [1, 4, 6])
def test_time_is_that_of_the_slowest_in_each_wave_and_energy_the_sum(api: str, channels: int) -> None:
    proxies = _proxies(6)
    history = _run(api, Curious(clients_per_round=2), proxies, 2, channels=channels)
    seconds = [p.probe_s for p in proxies]
    waves = sum(max(seconds[i : i + channels]) for i in range(0, 6, channels))
    training = 0.625 if channels > 1 else 0.5 + 0.625  # clients 0 and 1 train in 0.5 and 0.625 s
    for n, record in enumerate(history.rounds, start=1):
        assert (record.probe_s, record.probe_j) == pytest.approx((waves, 6 * 0.125))
        assert record.num_probed == 6
        assert (record.round_s, record.energy_j) == pytest.approx((waves + training, 6 * 0.125 + 2 * 0.25))
        assert (record.simulated_s, record.total_energy_j) == pytest.approx((n * record.round_s, n * record.energy_j))


def test_only_those_named_in_the_request_are_asked_and_several_columns_arrive_together(api: str) -> None:
    proxies = _proxies(6, answer=lambda p, m: {**m, "loss": 2.0 + p.number, "rms_loss": 0.5 * p.number})
    selector = Curious("loss", "rms_loss", clients_per_round=2, asks=[1, 4])
    history = _run(api, selector, proxies, 2)
    assert [len(p.probed) for p in proxies] == [0, 2, 0, 0, 2, 0]
    assert proxies[1].probed[0]["probe"] == "loss,rms_loss"
    answers = [entry for entry in selector.informed if entry[1].keys() == {"loss", "rms_loss"}]
    assert answers == [([1, 4], {"loss": [3.0, 6.0], "rms_loss": [0.5, 2.0]})] * 2
    assert [r.probe_s for r in history.rounds] == [0.75] * 2  # client 4's


def test_flowers_own_results_serve_where_a_client_knows_no_probes(api: str) -> None:
    """``loss`` and ``accuracy`` of an ordinary ``evaluate``; they cost max_latency, as no time is told."""
    proxies = _proxies(3, answer=lambda p, m: {"accuracy": 0.25 * p.number})
    selector = Curious("loss", "local_accuracy", clients_per_round=2, asks=[0, 1])
    history = _run(api, selector, proxies)
    rows, columns = selector.informed[-1]
    assert (rows, columns["local_accuracy"]) == ([0, 1], [0.0, 0.25])
    assert columns["loss"] == pytest.approx([0.1, 0.2])
    assert history.rounds[0].probe_s == MAX_LATENCY


HOSTILE: dict[str, Any] = {"nan": np.nan, "infinite": np.inf, "minus": -np.inf, "list": [0.1, 0.2], "huge": 2**63 - 1}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("key", ["local_accuracy", "latency_s", "energy_j"])
def test_a_hostile_answer_poisons_neither_selector_nor_history(api: str, kind: str, key: str) -> None:
    # the legacy API knows text, not lists
    value = "fast" if (api, kind) == ("legacy", "list") else HOSTILE[kind]
    proxies = _proxies(4, answer=lambda p, m: {**m, key: value} if p.number == 2 else m)
    selector = create("local-accuracy", clients_per_round=2, seed=0)
    for record in _run(api, selector, proxies, 3).rounds:
        assert np.isfinite([record.probe_s, record.probe_j, record.round_s, record.energy_j]).all()
        assert 0 <= record.probe_s <= 2 * MAX_LATENCY  # two waves of two channels
        assert record.probe_j >= 3 * 0.125
        assert key != "latency_s" or record.probe_s == 0.375 + MAX_LATENCY
        assert key != "energy_j" or kind == "huge" or record.probe_j == pytest.approx(3 * 0.125)
    assert all(np.isfinite(np.asarray(v, dtype=float)).all() for v in selector.state_dict().values())


def test_an_answer_cannot_speak_for_another_client(api: str) -> None:
    proxies = _proxies(3, answer=lambda p, m: {**m, "client_id": 0, "local_accuracy": 0.1 * p.number})
    selector = Curious("local_accuracy", clients_per_round=1)
    _run(api, selector, proxies)
    assert selector.informed[-1] == ([0, 1, 2], {"local_accuracy": [0.0, 0.1, 0.2]})


def test_metric_keys_name_the_cost_of_a_probe(api: str) -> None:
    keys = MetricKeys(latency="seconds", energy="joules")
    proxies = _proxies(2, extra={"seconds": 1.0}, answer=lambda p, m: {**m, "seconds": 3.0, "joules": 4.0})
    (record,) = _run(api, Curious(clients_per_round=2), proxies, metric_keys=keys).rounds
    assert (record.probe_s, record.probe_j, record.round_s) == (3.0, 8.0, 4.0)


def test_a_probe_carries_what_an_evaluation_carries_and_the_base_configures_none(api: str) -> None:
    """An app that reads its own key in every evaluation finds it, and a wrapper's inner base names the records."""

    class Unasked(BASES[api].FedAvg):  # type: ignore[misc]
        configured = 0

        def configure_evaluate(self, *args: Any, **kwargs: Any) -> list[Any]:
            self.configured += 1
            return []

    names = {"arrayrecord_key": "weights", "configrecord_key": "settings"}
    asked: list[int] = []

    def config(server_round: int) -> dict[str, Any]:
        asked.append(server_round)
        return {"lr": 0.5 * server_round}

    own = {"on_evaluate_config_fn": config} if api == "legacy" else names
    base = private(api, base_of(api, Unasked, **own))
    strategy = selection(api, Curious(clients_per_round=2), base)
    proxies = _proxies(3, answer=lambda proxy, metrics: {**metrics, "loss": proxy.probed[-1]["lr"]})
    server = Server(api, strategy, proxies)
    server.play(2, **({"evaluate_config": ConfigRecord({"lr": 0.5})} if api == "message" else {}))
    probes = [one for node in server.grid.nodes.values() for one in node.messages(MessageType.EVALUATE)]
    assert [set(one.content) for one in probes] == [{"weights", "settings"}] * len(probes)
    assert len(probes) == (0 if api == "legacy" else 6)
    sent = [
        {"lr": 0.5 * n, "probe": "loss", "round": n} if api == "legacy"
        else {"lr": 0.5, "server-round": n, "probe": "loss", "round": n}
        for n in (1, 2)
    ]  # fmt: skip
    assert [proxy.probed for proxy in proxies] == [sent] * 3
    told = [columns["loss"] for _, columns in strategy.selector.informed if "loss" in columns]
    assert told == [[one["lr"]] * 3 for one in sent]
    assert asked == ([1, 2] if api == "legacy" else [])
    assert base.strategy.configured == 2, "Flower's own evaluations alone"


def test_an_error_comes_as_nan_costs_max_latency_and_is_shown_with_its_reason(api: str, aloud: Any) -> None:
    def raises(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
        return {**metrics, "lr": proxy.probed[-1]["lr"]} if proxy.number in failing else metrics

    failing, proxies = [1], _proxies(4, answer=raises)
    selector = Curious("local_accuracy", clients_per_round=4)
    history = _run(api, selector, proxies, 2)
    for server_round, (rows, columns) in enumerate(selector.informed[-2:], start=1):
        assert rows == [0, 1, 2, 3]
        assert np.isnan(columns["local_accuracy"]).tolist() == [False, True, False, False]
        assert columns["local_accuracy"][2] == proxies[2].accuracy(server_round)
    assert [(r.probe_s, r.probe_j) for r in history.rounds] == [(MAX_LATENCY, pytest.approx(3 * 0.125))] * 2
    told = [text for text in aloud.messages if re.search(r"client \d:", text)]
    assert told == [f"round {n}, client 1: probe: KeyError: 'lr'" for n in (1, 2)]
    assert [row.problem for row in history.clients] == ["", "probe: KeyError: 'lr'", "", ""] * 2
    assert history.problem_counts() == {"probe": 2}
    assert [r.num_completed for r in history.rounds] == [4, 4]  # the rounds go on
    failing = [0, 1, 2, 3]
    with pytest.raises(RunError, match=r"4 clients answered with an error \(probe: KeyError: 'lr'\)"):
        _run(api, Curious(clients_per_round=4), _proxies(4, answer=raises))


def test_silence_and_errors_of_the_superlink() -> None:
    faults: dict[int, Any] = {1: lambda n, m, c: None, 2: lambda n, m, c: Error(5, "gone")}
    selector = Curious("local_accuracy", clients_per_round=2)
    server = Server("message", selection("message", selector, channels=4, roll_call_timeout=0.5))
    for proxy in _proxies(4):
        server.connect(proxy, evaluate_fault=faults.get(proxy.number))
    server.play(2)
    answers = [np.isnan(columns["local_accuracy"]).tolist() for _, columns in selector.informed[-2:]]
    assert answers == [[False, True, True, False], [False, True, False]]  # silence is not asked again
    assert [r.probe_s for r in server.strategy.history.rounds] == [MAX_LATENCY] * 2


def test_in_the_legacy_api_a_client_that_hangs_holds_up_a_probe_no_longer_than_the_bound() -> None:
    over = threading.Event()

    def hang(proxy: ProbeProxy, metrics: dict[str, Any]) -> dict[str, Any]:
        if proxy.number == 1:
            over.wait(20)
        return metrics

    selector = Curious("local_accuracy", clients_per_round=2)
    try:
        history = _run("legacy", selector, _proxies(3, answer=hang), roll_call_timeout=0.3)
    finally:
        over.set()
    assert np.isnan(selector.informed[-1][1]["local_accuracy"]).tolist() == [False, True, False]
    assert history.rounds[0].probe_s == MAX_LATENCY + 0.5  # two waves: 0 and 1, then 2
