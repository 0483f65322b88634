"""SuperNodes that are killed, stopped, started again, and new ones: docs/reliability.md."""

from __future__ import annotations

import signal
import time

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.told import asked, check_statistics, client, problems

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
BSFL = {"clients_per_round": 3, "min_available": 3, "min_latency": 1.0, "max_latency": 100.0}


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_supernode_that_ends_in_a_round_fails_alone_and_comes_back_as_who_it_was(
    fleet: Fleet, api: str, sign: signal.Signals
) -> None:
    fleet.order("n0", sleep=30.0, in_round=2)
    run = fleet.run(api, rounds=4, **BSFL)
    before = run.wait_for_round(1, 400)
    fleet.wait_for_training("n0", round=2)
    fleet.kill("n0", sign)
    killed = time.time()
    cut_off = run.wait_for_round(2, 400)
    fleet.restore("n0")
    rounds = run.wait(600)

    assert set(problems(cut_off)) == {"n0"}
    assert problems(cut_off)["n0"].startswith("node unavailable")
    assert cut_off["at"] - killed < 90.0  # Flower counts 60 s after the last heartbeat
    assert rounds[-1]["ids"] == before["ids"], "it came back as somebody else"
    assert client(rounds[-1], "n0")["completed"]
    assert client(rounds[-1], "n0")["client"] == client(before, "n0")["client"]
    assert [one["num_completed"] for one in rounds] == [3, 2, 3, 3]
    check_statistics(rounds, BSFL["min_latency"])


def test_a_new_supernode_joins(fleet: Fleet, api: str) -> None:
    run = fleet.run(api, rounds=6, **BSFL | {"clients_per_round": 4})
    run.wait_for_round(1, 400)
    fleet.node("newcomer")
    rounds = run.wait(600)
    first = asked(rounds, "newcomer")[0]
    assert 2 <= first <= 5
    assert asked(rounds, "newcomer") == list(range(first, 7))
    assert len(rounds[0]["ids"]) == 3
    assert rounds[-1]["ids"][3] == "newcomer"
    assert all(not problems(one) for one in rounds)
    check_statistics(rounds, BSFL["min_latency"])
