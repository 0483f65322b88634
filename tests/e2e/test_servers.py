"""Servers that are killed, and a server that all SuperNodes leave: docs/reliability.md."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import NODES
from tests.e2e.fleet import Fleet, Run, wait_until
from tests.e2e.told import Rounds, asked, check_kept, check_statistics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
BSFL = {"clients_per_round": 3, "min_available": 3, "min_latency": 1.0, "max_latency": 100.0}


def check_whole(run: Run, before: Rounds, timeout: float = 600.0) -> None:
    """The run goes on to its end; what it had before it was cut off is as it was, and nobody's place has changed."""
    rounds = run.wait(timeout)
    assert len(rounds) == 5
    check_kept(rounds, before)
    assert all(one["ids"] == before[0]["ids"] for one in rounds)
    assert all(asked(rounds, name) == [1, 2, 3, 4, 5] for name in NODES)
    check_statistics(rounds, BSFL["min_latency"])


def test_a_killed_server_app_goes_on_in_a_new_run(fleet: Fleet, api: str) -> None:
    fleet.order("n0", sleep=20.0, in_round=3)
    run = fleet.run(api, rounds=5, **BSFL)
    fleet.wait_for_training("n0", round=3)
    before = run.rounds
    assert len(before) == 2
    fleet.kill_servers()
    check_whole(run.resumed(), before)


def test_after_a_killed_superlink_a_new_run_goes_on_with_the_same_supernodes(fleet: Fleet, api: str) -> None:
    fleet.order("n0", sleep=20.0, in_round=3)
    run = fleet.run(api, rounds=5, **BSFL)
    fleet.wait_for_training("n0", round=3)
    before = run.rounds
    assert len(before) == 2
    fleet.superlink.kill()
    fleet.superlink.wait(10)
    fleet.start_superlink()
    # The run's server sees at its next look that it has lost the SuperLink, in the legacy API after its round's timeout
    # at the latest; until then it holds its checkpoints.
    wait_until(lambda: not fleet.processes("flwr-serverapp"), 300, "the end of the run's server")
    check_whole(run.resumed(), before)


def test_a_run_that_all_supernodes_leave_ends_with_the_reason_and_goes_on_when_they_are_back(
    fleet: Fleet, api: str
) -> None:
    run = fleet.run(api, rounds=5, wait_timeout=20.0, **BSFL)
    run.wait_for_round(2, 400)
    for name in NODES:
        fleet.end(name)
    before = run.wait(600)
    assert "waited 20 s for 3 nodes" in run.log or "waited 20 s for 3 clients" in run.log
    fleet.restore(*NODES)
    check_whole(run.resumed(), before)
