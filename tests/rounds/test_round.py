"""Energy scores, reported or from joules; staleness."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategies.scripted import MAX_LATENCY, Spy, play_scripted


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
    strategy, _ = play_scripted(
        api, spy, lambda k, t, w: w, 3, start=[1.0], report=lambda k, t: {"energy_j": joules[t - 1][k]}
    )
    assert [report.energy_score.tolist() for report in spy.reports] == expected  # type: ignore[union-attr]
    assert strategy.history.problem_counts() == {}, "a score that follows from joules is not missing"


def test_a_reported_energy_score_goes_before_joules(api: str) -> None:
    said = {0: {"energy_j": 2.0, "energy_score": 0.875}, 1: {"energy_j": 4.0}, 2: {"energy_score": 0.25}}
    spy = Spy("energy_score")
    play_scripted(api, spy, lambda k, t, w: w, 1, start=[1.0], clients=3, report=lambda k, t: said[k])
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
    play_scripted(
        api, spy, lambda k, t, w: w, 4, start=[1.0], report=lambda k, t: {"energy_j": joules[t][k]},
        availability=lambda client_id, server_round, seconds: server_round > 1,
    )  # fmt: skip
    scores = [report.energy_score.tolist() for report in spy.reports]  # type: ignore[union-attr]
    assert scores == [[1.0, 1.0], [0.0, 0.75], [0.0, 0.5]]
    assert all(report.completed.all() for report in spy.reports)


def test_no_update_of_a_synchronous_round_is_stale(api: str) -> None:
    spy = Spy("staleness")
    play_scripted(api, spy, lambda k, t, w: w, 2, start=[1.0])
    assert [report.staleness.tolist() for report in spy.reports] == [[0.0, 0.0]] * 2  # type: ignore[union-attr]
