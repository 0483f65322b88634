"""Registered SuperNodes whose clients say that they are somebody else: docs/reliability.md."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import NODES
from tests.e2e.fleet import Fleet, wait_until
from tests.e2e.told import check_statistics, client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
BSFL = {"clients_per_round": 4, "min_available": 3, "min_latency": 1.0, "max_latency": 100.0}


def test_an_impostor_of_a_connected_client_is_himself(fleet: Fleet, api: str) -> None:
    fleet.node("impostor", claim="n0", sleep=12.0)
    rounds = fleet.run(api, rounds=3, **BSFL | {"min_available": 4}).wait(600)
    assert set(rounds[-1]["ids"]) == {*NODES, "impostor"}
    assert all(one["num_completed"] == 4 for one in rounds)
    # From round 2: nothing is learnt of first times, which contain a process's start, so round 1 gives all the same.
    assert all(client(one, "impostor")["latency_s"] > client(one, "n0")["latency_s"] for one in rounds[1:])
    check_statistics(rounds, BSFL["min_latency"])


def test_an_impostor_of_an_absent_client_does_not_get_his_row(fleet: Fleet, api: str) -> None:
    run = fleet.run(api, rounds=8, **BSFL)
    before = run.wait_for_round(1, 400)
    fleet.end("n0")
    fleet.node("impostor", claim="n0")
    wait_until(lambda: fleet.trainings("impostor"), 400, "the impostor's first training")
    fleet.restore("n0")
    rounds = run.wait(600)
    assert rounds[-1]["ids"] == [*before["ids"], "impostor"]
    assert client(rounds[-1], "n0")["completed"]
    assert client(rounds[-1], "n0")["client"] == client(before, "n0")["client"]
    assert client(rounds[-1], "impostor")["completed"]
    check_statistics(rounds, BSFL["min_latency"])
