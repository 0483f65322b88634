"""Client apps that raise, die, hang or are late, on SuperNodes that go on: docs/reliability.md."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.told import asked, check_statistics, problems

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
BSFL = {"clients_per_round": 3, "min_available": 3, "min_latency": 1.0, "max_latency": 100.0}
TIMEOUT_S = 60.0


def test_a_client_that_raises_fails_alone_and_is_asked_again(fleet: Fleet, api: str) -> None:
    fleet.order("n0", **{"raise": "the battery is empty", "in_round": 2})
    rounds = fleet.run(api, rounds=3, **BSFL).wait(600)
    assert [one["num_completed"] for one in rounds] == [3, 2, 3]
    assert problems(rounds[1]) == {"n0": "exception: RuntimeError: the battery is empty"}
    check_statistics(rounds, BSFL["min_latency"])


def test_a_client_process_that_is_killed_fails_alone_and_its_supernode_goes_on(fleet: Fleet, api: str) -> None:
    fleet.order("n0", sleep=600.0, in_round=2)
    run = fleet.run(api, rounds=3, timeout_s=200.0, **BSFL)
    os.kill(fleet.wait_for_training("n0", round=2), signal.SIGKILL)
    killed = time.time()
    rounds = run.wait(600)
    assert [one["num_completed"] for one in rounds] == [3, 2, 3]
    assert set(problems(rounds[1])) == {"n0"}
    assert rounds[1]["at"] - killed < 120.0  # Flower's SuperNode notices within about 65 s
    check_statistics(rounds, BSFL["min_latency"])


def test_a_client_that_hangs_is_not_asked_again_before_its_time(fleet: Fleet, api: str) -> None:
    fleet.order("n0", sleep=3600.0, in_round=1)
    fleet.order("n1", sleep=10.0)
    run = fleet.run(api, rounds=6, timeout_s=TIMEOUT_S, busy_timeout=40.0, **BSFL)
    try:
        rounds = run.wait(600)
    finally:
        os.kill(fleet.wait_for_training("n0", round=1), signal.SIGKILL)  # else its SuperNode would wait for it
    first, again = asked(rounds, "n0")
    assert first == 1
    assert again > 2
    assert rounds[again - 2]["at"] - rounds[0]["at"] > 30.0
    assert all(problems(rounds[number - 1]) == {"n0": "no answer within 60 s"} for number in (first, again))
    assert [one["num_timeouts"] for one in rounds] == [int(one["round"] in (first, again)) for one in rounds]
    check_statistics(rounds, BSFL["min_latency"])


def test_a_straggler_past_the_timeout_is_asked_again_when_it_has_answered(fleet: Fleet, api: str) -> None:
    fleet.order("n0", sleep=90.0, in_round=1)
    fleet.order("n1", sleep=10.0)
    rounds = fleet.run(api, rounds=7, timeout_s=TIMEOUT_S, **BSFL).wait(600)
    again = asked(rounds, "n0")[1]
    assert problems(rounds[0]) == {"n0": "no answer within 60 s"}
    assert again > 2
    assert asked(rounds, "n0")[1:] == list(range(again, 8))
    assert not any(problems(one) for one in rounds[1:])
    check_statistics(rounds, BSFL["min_latency"])
