"""What the selector hears of clients: before they train, and of a round."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.selectors import Random
from tests.rounds.written import Written, core_of, play_round
from tests.strategies.either_api import Server, selection
from tests.strategies.scripted import MAX_LATENCY, A, C, Counted, Scripted, Spy, play_scripted, play_still, two_examples


def test_a_client_without_a_number_does_not_hide_those_of_the_others(api: str) -> None:
    """Client 1 says neither its examples nor its energy score: the selector hears of clients 0 and 2."""
    spy = Spy("energy_score")
    said: dict[int, dict[str, Any]] = {
        0: {"num_examples": 7, "energy_score": 0.25}, 1: {"energy_score": 1.5},
        2: {"num_examples": 9, "energy_score": 1.0},
    }  # fmt: skip
    play_still(api, spy, clients=3, facts=said.get, report=lambda k, t: {"energy_score": 0.5})
    told = [(rows, columns) for rows, columns in spy.informed if columns]
    assert told == [([0, 2], {"num_examples": [7.0, 9.0]}), ([0, 2], {"energy_score": [0.25, 1.0]})]
    assert spy.num_clients == 3


def test_newcomers_start_with_the_initial_models_accuracy_too(api: str) -> None:
    """One newcomer a round: they hear w0's accuracy, although the model is right on both by then."""
    spy, predict = Spy("accuracy"), Counted()
    *first, late = [Scripted(k, lambda k, t, w: A, lambda k, t: {}, lambda k: {}) for k in range(3)]
    strategy = selection(api, spy, min_available=1, validation=two_examples(predict))
    server = Server(api, strategy, first, start=[np.array(C)]).play(2)
    server.connect(late)
    server.play(2)
    told = [(rows, columns["accuracy"]) for rows, columns in spy.informed if "accuracy" in columns]
    assert told == [([0, 1], [0.5, 0.5]), ([2], [0.5])]
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


# ---- of a round -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        # joules (1, 4), (8, 2), (16, 4): E_max grows to 8 in the warm-up of two rounds; 1 - 16/8 is cut at 0
        (2, [[0.75, 0.0], [0.0, 0.75], [0.0, 0.5]]),
        # without a warm-up E_max is that of round 1: 4
        (0, [[0.75, 0.0], [0.0, 0.5], [0.0, 0.0]]),
        (3, [[0.75, 0.0], [0.0, 0.75], [0.0, 0.75]]),
    ],
)
def test_energy_scores_from_joules(api: str, warmup: int, expected: list[list[float]]) -> None:
    joules = [(1.0, 4.0), (8.0, 2.0), (16.0, 4.0)]
    spy = Spy("energy_score", warmup_rounds=warmup)
    strategy, _ = play_still(api, spy, 3, report=lambda k, t: {"energy_j": joules[t - 1][k]})
    assert [report.energy_score.tolist() for report in spy.reports] == expected  # type: ignore[union-attr]
    assert strategy.history.problem_counts() == {}, "a score that follows from joules is not missing"


def test_a_reported_energy_score_goes_before_joules(api: str) -> None:
    said = {0: {"energy_j": 2.0, "energy_score": 0.875}, 1: {"energy_j": 4.0}, 2: {"energy_score": 0.25}}
    spy = Spy("energy_score")
    play_still(api, spy, clients=3, report=lambda k, t: said[k])
    assert spy.reports[0].energy_score.tolist() == [0.875, 0.0, 0.25]  # type: ignore[union-attr]


def test_a_client_without_score_and_joules_counts_as_failed_for_the_selector_only(api: str, caplog: Any) -> None:
    spy = Spy("energy_score", requires=("energy_score",))
    strategy, models = play_scripted(
        api, spy, lambda k, t, w: w + k, 1, start=[1.0],
        report=lambda k, t: {"energy_score": 0.5} if k == 0 else {"energy_score": 1.5},
    )  # fmt: skip
    (report,) = spy.reports
    assert report.completed.tolist() == [True, False]
    assert report.latency.tolist() == [1.0, MAX_LATENCY]
    assert strategy.history.rounds[0].num_completed == 2
    assert models == [[1.5]]  # its model is averaged all the same
    assert "clients ['1'] lack energy_score and count as failed for the selector" in caplog.text


def test_the_largest_energy_is_looked_for_until_there_was_one(api: str) -> None:
    """Nobody is there in round 1, and nobody reports joules above 0 in round 2: E_max is round 3's 4 J."""
    joules = {2: (0.0, 0.0), 3: (4.0, 1.0), 4: (8.0, 2.0)}
    spy = Spy("energy_score")
    there = {"availability": lambda client_id, server_round, seconds: server_round > 1}
    play_still(api, spy, 4, report=lambda k, t: {"energy_j": joules[t][k]}, **there)
    assert [report.energy_score.tolist() for report in spy.reports] == [[1.0, 1.0], [0.0, 0.75], [0.0, 0.5]]  # type: ignore[union-attr]
    assert all(report.completed.all() for report in spy.reports)


def test_no_update_of_a_synchronous_round_is_stale(api: str) -> None:
    spy = Spy("staleness")
    play_still(api, spy, 2)
    assert [report.staleness.tolist() for report in spy.reports] == [[0.0, 0.0]] * 2  # type: ignore[union-attr]
