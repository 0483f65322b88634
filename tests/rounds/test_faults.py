"""What the log says of a round: some of the faulty clients by name, all of them counted, one line with the figures."""

from __future__ import annotations

import itertools
import logging
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.selectors import Random
from fedsel_flwr.simulations import engine, load_scenario, simulate
from fedsel_flwr.strategies import SelectionStrategy
from tests.rounds.written import core_of, play_round, reply
from tests.simulations.inprocess import in_process
from tests.strategies.helpers import FakeProxy, Federation, fedavg, fleet

FIELDS = ["round", "available", "selected", "completed", "kept", "late", "timeouts", "round_s", "simulated_s", "joules",
          "loss", "accuracy", "failures"]  # fmt: skip
REPLIES = {
    "good": reply(energy_j=2.0),
    "no answer": Reply(error="no answer within 30 s"),
    "exception": Reply(error="exception: OSError: no battery"),
    "blank": Reply(error=" \n "),
    "arrays": reply(arrays=[np.full((2, 2), np.nan)]),
    "no arrays": reply(arrays=None),
    "num_examples": reply(num_examples=-1),
    "late": reply(99.0, energy_j=-1.0),
    "spare": Reply(error="late: enough others were there", spare=True),
    "arrays and late": reply(99.0, arrays=[]),
}


def played(replies: list[Reply], **options: Any) -> Any:
    """A core after one round with these replies, from clients 00, 01, ..."""
    core = core_of(Random(clients_per_round=len(replies), seed=0), max_latency=10.0, **options)
    nodes = [f"{i:04d}" for i in range(len(replies))]
    play_round(core, nodes, dict(zip(nodes, replies, strict=True)))
    return core


@pytest.mark.parametrize("deadline", [None, 0.5])
@pytest.mark.parametrize("kinds", [*itertools.combinations(REPLIES, 2), tuple(REPLIES)])
def test_every_failure_has_its_reason_in_the_history(kinds: tuple[str, ...], deadline: float | None) -> None:
    history = played([REPLIES[kind] for kind in kinds], round_deadline_s=deadline).parts.history
    for kind, row in zip(kinds, history.clients, strict=True):
        assert row.completed == (kind == "good" and deadline is None)
        assert bool(row.problem) != row.completed, kind


def test_a_thousand_faulty_clients_are_counted_and_few_are_named(caplog: pytest.LogCaptureFixture) -> None:
    core = played([REPLIES["exception"]] * 990 + [REPLIES["arrays"]] * 9 + [REPLIES["late"]])
    assert len(caplog.messages) == 8 + 8 + 2 + 1
    assert caplog.messages[0] == "round 1, client 0000: exception: OSError: no battery"
    assert caplog.messages[-1] == ("round 1: 983 more problems, counted by kind: exception (982), arrays (1)")
    assert core.parts.history.problem_counts() == {"exception": 990, "arrays": 9, "late": 1, "energy": 1}


def parsed(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in shlex.split(line))


@pytest.mark.parametrize("on_disk", [False, True])
def test_one_line_a_round_with_the_same_fields_always(on_disk: bool, caplog: Any, tmp_path: Path) -> None:
    proxies = [*fleet(3, latency=1.0), FakeProxy("x", 7, fault="raises"), FakeProxy("late", 8, latency=99.0)]
    base = fedavg(evaluate_fn=lambda number, arrays, config: (0.5, {"accuracy": 0.25}) if number != 2 else None)
    strategy = SelectionStrategy(Random(clients_per_round=5, seed=0), base, max_latency=10.0, min_available=1)
    if on_disk:
        strategy.history.write_to(Journal(tmp_path / "j"))
    with caplog.at_level(logging.INFO, logger="fedsel_flwr"):
        federation = Federation(strategy, proxies).play(2)
        for proxy in proxies[1:]:
            federation.manager.unregister(proxy)
        federation.play(1)
    records = [record for record in caplog.records if hasattr(record, "fedsel")]
    assert {(record.name, record.levelname) for record in records} == {("fedsel_flwr", "INFO")}
    lines = [parsed(record.getMessage()) for record in records]
    assert [list(line) for line in lines] == [FIELDS] * 3
    first, second, third = lines
    assert (first["round"], first["available"], first["selected"], first["completed"]) == ("1", "5", "5", "3")
    assert (first["kept"], first["late"], first["failures"]) == ("3", "1", "exception:1")
    assert (first["round_s"], first["simulated_s"], second["simulated_s"]) == ("10", "10", "20")
    assert (first["loss"], first["accuracy"], second["loss"], second["accuracy"]) == ("0.5", "0.25", "nan", "nan")
    assert (third["available"], third["selected"], third["failures"], third["late"]) == ("1", "1", "", "0")
    for record, line in zip(records, lines, strict=True):
        told = record.fedsel
        assert list(told) == FIELDS
        assert {key: f"{value:.6g}" if isinstance(value, float) else str(value) for key, value in told.items()} == line
    for record in strategy.history.rounds:
        line = lines[record.round - 1]
        failed = sum(int(part.split(":")[1]) for part in line["failures"].split(",") if part)
        lost = failed + int(line["late"]) + int(line["timeouts"])
        assert record.num_selected - record.num_completed == lost


def test_reasons_are_those_that_cost_the_update_and_few_of_them_are_named(caplog: pytest.LogCaptureFixture) -> None:
    replies = [REPLIES[kind] for kind in REPLIES]
    with caplog.at_level(logging.INFO, logger="fedsel_flwr"):
        core = played([*replies, *replies, REPLIES["exception"]])
        core.parts.history.close_round()
        core.parts.history.close_round()
    [line] = [record.getMessage() for record in caplog.records if hasattr(record, "fedsel")]
    told = parsed(line)
    reasons = Counter({name: int(count) for name, count in (one.split(":") for one in told["failures"].split(","))})
    assert reasons == {"arrays": 6, "exception": 3, "num_examples": 2, "no answer within 30 s": 2, "failed": 2}
    assert told["late"] == "4"
    assert told["failures"].startswith("arrays:6,exception:3,")
    with caplog.at_level(logging.INFO, logger="fedsel_flwr"):
        caplog.clear()
        core = played([Reply(error=f'kind "{i}" \x00: why') for i in range(12)])
        core.parts.history.close_round()
    assert caplog.messages[-1].endswith(',other:4"')
    assert len(caplog.messages[-1].splitlines()) == 1


@pytest.mark.parametrize("name", ["vectorized", "ray"])
def test_a_simulation_warns_once_and_counts(name: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine, "run_simulation", in_process)
    caplog.set_level(logging.INFO, "fedsel_flwr")
    scenario = load_scenario("smoke", {
        "num_clients": 8, "clients_per_round": 8, "rounds": 4, "wireless.max_latency_s": 0.2, "model.name": "logistic",
        "clients.failure_probability": 0.2, "selector": "random", "api": "message",
    })  # fmt: skip
    counts = simulate(scenario, engine=name).history.problem_counts()
    assert min(counts["late"], counts["lost"]) > 3
    ours = [record for record in caplog.records if record.name == "fedsel_flwr"]
    assert [record.getMessage() for record in ours if record.levelno >= logging.WARNING] == [
        f"{counts['late']} late, {counts['lost']} lost of 32 expected replies in 4 rounds. "
        "The history lists the clients"
    ]
    assert len([record for record in ours if ": late: " in record.getMessage()]) == counts["late"]
