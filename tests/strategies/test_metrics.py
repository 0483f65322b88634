"""The option ``metrics_address``: what Prometheus fetches of real runs in both APIs and in the vectorized engine."""

from __future__ import annotations

import math
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.callbacks.prometheus import reason_label
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.history import History
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.on_flower.building import make_strategy
from fedsel_flwr.simulations.worlds.world import world_of
from tests.callbacks.test_prometheus import Figures, is_open, scrape
from tests.strategies.either_api import Server, selection
from tests.strategies.flower_world import Run
from tests.strategies.helpers import FakeProxy, fleet

ROUNDS = 4


def of_history(history: History) -> dict[str, float]:
    """The figures that a history has, computed from its records."""
    rounds, done = list(history.rounds), [row.latency_s for row in history.clients if row.completed]
    failed = Counter(reason_label(row) for row in history.clients if not row.completed and not row.spare)
    evaluated = [one for one in rounds if not math.isnan(one.accuracy)]
    return {
        "round": rounds[-1].round,
        "rounds_total": len(rounds),
        "round_duration_seconds_count": len(rounds),
        "round_duration_seconds_sum": sum(one.round_s for one in rounds),
        "selected_clients_total": sum(one.num_selected for one in rounds),
        "completed_clients_total": len(done),
        "spare_clients_total": sum(one.num_spares for one in rounds),
        "last_round_available_clients": rounds[-1].num_available,
        "last_round_selected_clients": rounds[-1].num_selected,
        "last_round_completed_clients": rounds[-1].num_completed,
        "client_latency_seconds_count": len(done),
        "client_latency_seconds_sum": sum(done),
        "energy_joules_total": sum(one.energy_j for one in rounds if not math.isnan(one.energy_j)),
        "accuracy_ratio": evaluated[-1].accuracy if evaluated else math.nan,
        **{f"failed_clients_total reason={reason}": count for reason, count in failed.items()},
    }


def check(found: Figures, history: History) -> None:
    """The figures of a scrape are those of the history, and no failure is missing."""
    expected = of_history(history)
    got = {name: found[(f"fedsel_{name.partition(' ')[0]}", name.partition(" ")[2])] for name in expected}
    assert got == pytest.approx(expected, nan_ok=True)
    failed = sum(value for (name, _), value in found.items() if name == "fedsel_failed_clients_total")
    assert failed == sum(one.num_failed for one in history.rounds)


class Scraper:
    """A callback that scrapes after each round."""

    def __init__(self) -> None:
        self.strategy: Any = None
        self.urls: list[str] = []
        self.found: list[Figures] = []

    def __call__(self, record: Any) -> None:
        self.urls.append(self.strategy.metrics_url)
        self.found.append(scrape(self.urls[-1]))
        assert self.found[-1]["fedsel_round", ""] == record.round


FAULTY = ("raises", "nan", "status", "straggler", "no-examples")
SECRET = "10.0.0.7-secret"


def test_a_run_with_failures_has_the_figures_of_its_history(api: str) -> None:
    scraper = Scraper()
    strategy = scraper.strategy = selection(api, 8, metrics_address=0, on_round=scraper, total_rounds=ROUNDS)
    clients = [FakeProxy(f"node-{fault}", f"{SECRET}-{fault}", number=3, fault=fault) for fault in FAULTY]
    Server(api, strategy, [*fleet(3, f"{SECRET}-"), *clients], timeout=0.3).play(ROUNDS)
    assert len(scraper.found) == ROUNDS
    check(last := scraper.found[-1], strategy.history)
    reasons = {labels for (name, labels), value in last.items() if value and name.endswith("failed_clients_total")}
    assert {"reason=exception", "reason=model", "reason=metrics"} <= reasons
    assert "reason=other" not in reasons
    # Neither an id nor an error's text, in any name, label or value.
    assert SECRET not in repr(scraper.found)
    assert "battery" not in repr(scraper.found)
    # The run is over, and so are its metrics.
    assert strategy.metrics_url is None
    assert not is_open(scraper.urls[-1])


def test_the_vectorized_engine_has_them_too() -> None:
    scraper = Scraper()
    scenario = load_scenario("smoke", {"engine": "vectorized", "clients.failure_probability": 0.4, "rounds": 6})
    strategy = make_strategy(world_of(scenario), scraper, checkpointing={"metrics_address": "0"})
    scraper.strategy = strategy
    result = simulate(scenario, strategy=strategy)
    check(scraper.found[-1], result.history)
    assert scraper.found[-1]["fedsel_failed_clients_total", "reason=dropout"] > 0
    assert scraper.found[-1]["fedsel_energy_joules_total", ""] > 0
    assert not is_open(scraper.urls[-1])


def test_a_taken_port_ends_the_run_before_its_first_round(api: str) -> None:
    clients = fleet(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        strategy = selection(api, 1, metrics_address=taken.getsockname()[1])
        said = r"^metrics_address '127\.0\.0\.1:\d+' cannot be used: Address already in use"
        with pytest.raises(RunError, match=said):
            Server(api, strategy, clients).play(1)
    assert (clients[0].asked, clients[0].fit_rounds, len(strategy.history.rounds)) == (0, [], 0)


def test_an_error_that_ends_the_run_ends_its_metrics(api: str) -> None:
    urls = []

    def fail(record: Any) -> None:
        urls.append(strategy.metrics_url)
        raise KeyError("mine")

    strategy = selection(api, 1, metrics_address=0, on_round=fail)
    with pytest.raises(KeyError, match="mine"):
        Server(api, strategy, fleet(2)).play(1)
    assert not is_open(urls[0])
    assert selection(api, 1).metrics_url is None


@pytest.mark.usefixtures("no_syncs")
def test_a_resumed_run_is_the_same_and_counts_from_0(api: str, tmp_path: Path) -> None:
    scraped: list[Figures] = []

    def watch(strategy: Any) -> None:
        told = strategy._on_round
        strategy._on_round = lambda record: (told(record), scraped.append(scrape(strategy.metrics_url)))

    run, plain = Run(api, rounds=3, options={"metrics_address": 0}, watch=watch), Run(api, rounds=5).play()
    first = run.play(tmp_path)
    assert scraped[-1]["fedsel_rounds_total", ""] == 3
    assert 0 <= scraped[-1]["fedsel_checkpoint_age_seconds", ""] < 30
    scraped.clear()
    again = replace(run, rounds=5).play(tmp_path, resume="must")
    # Metrics change nothing in a run.
    assert again.model == plain.model
    assert first.model != again.model
    # First the end of round 3 is repeated, which this process has not run.
    assert [(one["fedsel_round", ""], one["fedsel_rounds_total", ""]) for one in scraped] == [(3, 0), (4, 1), (5, 2)]


@pytest.mark.usefixtures("no_syncs")
def test_a_run_that_was_finished_before_leaves_no_server(api: str, tmp_path: Path) -> None:
    made: list[Any] = []
    for resume in (False, "must"):
        Run(api, rounds=2, options={"metrics_address": 0}, watch=made.append).play(tmp_path, resume=resume)
        assert made[-1].metrics_url is None
    assert len(made) == 2
