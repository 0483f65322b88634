"""Late and lost answers of a simulation: one warning a run, a line each at the level INFO."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fedsel_flwr.simulations import compare, engine, load_scenario, simulate
from tests.simulations.inprocess import in_process

KEYS = {
    "num_clients": 8, "clients_per_round": 8, "rounds": 4, "wireless.max_latency_s": 0.2, "model.name": "logistic",
    "clients.failure_probability": 0.2, "selector": "random",
}  # fmt: skip


def _lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "fedsel_flwr"]


@pytest.mark.parametrize("name", ["vectorized", "ray"])
def test_a_run_warns_once_and_counts(name: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine, "run_simulation", in_process)
    history = simulate(load_scenario("smoke", {**KEYS, "api": "message"}), engine=name).history
    counts = history.problem_counts()
    assert counts["late"] > 3
    assert counts["lost"] > 3
    said = [record.getMessage() for record in _lines(caplog) if record.levelno >= logging.WARNING]
    assert said == [
        f"{counts['late']} late, {counts['lost']} lost of 32 answers in 4 rounds; the history names the clients"
    ]


def test_a_comparison_has_a_line_a_run(caplog: pytest.LogCaptureFixture) -> None:
    compare(load_scenario("smoke", KEYS), ["random", "bsfl"], seeds=2)
    assert len([record for record in _lines(caplog) if record.levelno >= logging.WARNING]) == 4


def test_each_late_client_is_named_at_the_level_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedsel_flwr")
    history = simulate(load_scenario("smoke", KEYS), engine="vectorized").history
    named = [record for record in _lines(caplog) if ": late: " in record.getMessage()]
    assert len(named) == history.problem_counts()["late"]
    assert {record.levelno for record in named} == {logging.INFO}


def test_a_run_without_them_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    simulate(load_scenario("smoke", {"rounds": 2}), engine="vectorized")
    assert not _lines(caplog)
