"""What the selector hears of clients before they train."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import Random
from tests.rounds.written import Written, core_of, play_round
from tests.strategies.either_api import Server, selection
from tests.strategies.scripted import A, C, Counted, Scripted, Spy, play_scripted, two_examples


def test_a_client_without_a_number_does_not_hide_those_of_the_others(api: str) -> None:
    """Client 1 says neither its examples nor its energy score: the selector hears of clients 0 and 2."""
    spy = Spy("energy_score")
    said: dict[int, dict[str, Any]] = {
        0: {"num_examples": 7, "energy_score": 0.25}, 1: {"energy_score": 1.5},
        2: {"num_examples": 9, "energy_score": 1.0},
    }  # fmt: skip
    play_scripted(
        api, spy, lambda k, t, w: w, 1, start=[1.0], clients=3, facts=lambda k: said[k],
        report=lambda k, t: {"energy_score": 0.5},
    )  # fmt: skip
    told = [(rows, columns) for rows, columns in spy.informed if columns]
    assert told == [([0, 2], {"num_examples": [7.0, 9.0]}), ([0, 2], {"energy_score": [0.25, 1.0]})]
    assert spy.num_clients == 3


def _of_accuracy(spy: Spy) -> list[tuple[list[int], list[float]]]:
    return [(rows, columns["accuracy"]) for rows, columns in spy.informed if "accuracy" in columns]


def test_newcomers_start_with_the_initial_models_accuracy_too(api: str) -> None:
    """One newcomer a round: they hear w0's accuracy, although the model is right on both by then."""
    spy, predict = Spy("accuracy"), Counted()
    first = [Scripted(k, lambda k, t, w: A, lambda k, t: {}, lambda k: {}) for k in range(2)]
    late = Scripted(2, lambda k, t, w: A, lambda k, t: {}, lambda k: {})
    strategy = selection(api, spy, min_available=1, validation=two_examples(predict))
    server = Server(api, strategy, first, start=[np.array(C)]).play(2)
    server.connect(late)
    server.play(2)
    assert _of_accuracy(spy) == [([0, 1], [0.5, 0.5]), ([2], [0.5])]
    assert predict.models.count(C) == 1
    assert [report.clients.tolist() for report in spy.reports] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_a_flood_of_connections_fills_neither_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands a round claim one id, or never say who they are, and come back under other names."""
    core = core_of(Random(clients_per_round=1, seed=0))
    play_round(core, ["victim"], transport=Written({"victim": {"client_id": "v"}}))
    for number in range(6):
        thieves = [f"t{number}-{k}" for k in range(2000)]
        hanging = [f"h{number}-{k}" for k in range(2000)]
        claims = Written({one: {"client_id": "v"} for one in thieves})
        play_round(core, ["victim", *thieves, *hanging], transport=claims)
    assert core.parts.roster.ids == ["v"]
    state = core.state_dict()
    assert len(state["roster"]["refused"]) == 2000  # of those connected now
    assert len(state["roll_call"]["not_before"]) == len(state["roll_call"]["in_vain"]) == 10_000
    kinds = Counter(record.getMessage().split(":")[0].split(" ")[0] for record in caplog.records)
    assert kinds["connection"] <= 6 * 20
    assert kinds["roll"] <= 6 * 21
    assert sum("and 1980 more like these" in record.getMessage() for record in caplog.records) == 12
