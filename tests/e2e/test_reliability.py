"""What docs/operating.md says of clients, SuperNodes, impostors and servers, on real deployments."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.e2e.conftest import NODES
from tests.e2e.fleet import Fleet, Run, wait_until
from tests.e2e.told import Rounds, asked, check_kept, check_statistics, client, problems

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
BSFL = {"clients_per_round": 3, "min_available": 3, "min_latency": 1.0, "max_latency": 100.0}
ALL_FOUR = BSFL | {"clients_per_round": 4}
TIMEOUT_S = 60.0

# ---- client apps that raise, die, hang or are late, on SuperNodes that keep running ---------------------------------


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
    # The SuperNode may need a minute before it notices that the last test ended its client.
    rounds = fleet.run(api, rounds=10, timeout_s=TIMEOUT_S, **BSFL).wait(600)
    again = asked(rounds, "n0")[1]
    assert problems(rounds[0]) == {"n0": "no answer within 60 s"}
    assert again > 2
    assert asked(rounds, "n0")[1:] == list(range(again, 11))
    assert not any(problems(one) for one in rounds[1:])
    check_statistics(rounds, BSFL["min_latency"])


# ---- SuperNodes that are killed, stopped, started again, and new ones -----------------------------------------------


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
    run = fleet.run(api, rounds=6, **ALL_FOUR)
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


def test_an_impostor_of_an_absent_client_does_not_get_his_row(fleet: Fleet, api: str) -> None:
    run = fleet.run(api, rounds=8, **ALL_FOUR)
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


# ---- servers that are killed, and a server that all SuperNodes leave ------------------------------------------------


def check_whole(run: Run, before: Rounds, timeout: float = 600.0) -> None:
    """The run goes on to its end; what it had before it was cut off is as it was, and nobody's place has changed."""
    rounds = run.wait(timeout)
    assert len(rounds) == 5
    check_kept(rounds, before)
    assert all(one["ids"] == before[0]["ids"] for one in rounds)
    assert all(asked(rounds, name) == [1, 2, 3, 4, 5] for name in NODES)
    check_statistics(rounds, BSFL["min_latency"])


def run_into_round_3(fleet: Fleet, api: str) -> tuple[Run, Rounds]:
    """A run in whose third round a client takes long, and its rounds so far."""
    fleet.order("n0", sleep=20.0, in_round=3)
    run = fleet.run(api, rounds=5, **BSFL)
    fleet.wait_for_training("n0", round=3)
    before = run.rounds
    assert len(before) == 2
    return run, before


def test_after_a_killed_superlink_a_new_run_goes_on_with_the_same_supernodes(fleet: Fleet, api: str) -> None:
    run, before = run_into_round_3(fleet, api)
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


def test_buffered_rounds_go_on_while_a_node_works_and_after_each_killed_server(fleet: Fleet) -> None:
    """Three nodes are quick, n3 takes 20 s: the rounds do not wait, and its update counts with its staleness.

    After each kill, n3 first finishes the training that the killed run asked for. It is quicker from the first kill on,
    or the runs would end before it has caught up.
    """
    fleet.restore(*NODES, "n3")
    fleet.order("n3", sleep=20.0)
    run, finished = fleet.run("message", rounds=80, clients_per_round=1, concurrency=4, min_available=4), 0
    for kill in range(5):
        finished += 5
        wait_until(lambda: len(run.rounds) >= finished, 300, f"{finished} rounds")  # noqa: B023
        if not kill:
            assert all(row["client_id"] != "n3" for one in run.rounds[:4] for row in one["clients"])
            fleet.order("n3", sleep=5.0)
        fleet.kill_servers(1)
        before = run.rounds
        run = run.resumed()
        run.wait_for_round(len(before) + 1, 300)
        check_kept(run.rounds, before)
    rounds = run.wait(600)
    assert [one["num_selected"] for one in rounds] == [1] * 80
    rows = [row for one in rounds for row in one["clients"]]
    assert all(row["completed"] for row in rows)
    slow = [row["staleness"] for row in rows if row["client_id"] == "n3"]
    assert slow
    assert max(slow) >= 3
    # No update counts twice: a client has trained at least as often as the history has it.
    assert all(sum(row["client_id"] == name for row in rows) <= len(fleet.trainings(name)) for name in (*NODES, "n3"))


def test_nobody_waits_for_one_site_and_a_killed_server_repeats_no_written_training(fleet: Fleet) -> None:
    """Of six sites n3 takes 30 s, n4 is frozen, n5 is killed in round 2; the server in round 6, with two replies."""
    sites = [f"n{k}" for k in range(6)]
    fleet.restore(*sites)
    for name in sites:
        fleet.order(name, sleep=1.0)
    fleet.order("n3", sleep=30.0)
    fleet.order("n4", sleep=600.0)
    run = fleet.run(
        "message", rounds=10, selector="everyone", round_deadline_s="auto", late="use", keep_arrivals=True,
        min_available=3,
    )  # fmt: skip
    fleet.wait_for_training("n5", 2)
    fleet.kill("n5")
    run.wait_for_round(5, 300)
    fleet.order("n2", sleep=25.0, in_round=6)
    fleet.wait_for_training("n2", 6)
    arrivals = run.folder / "checkpoints" / "arrivals"
    wait_until(lambda: len(list(arrivals.glob("client-*/round-000006.safetensors"))) >= 2, 60, "two written replies")
    written = len(list(arrivals.glob("client-*/round-000006.safetensors")))
    fleet.kill_servers(1)
    before = run.rounds
    run = run.resumed()
    rounds = run.wait(600)
    check_kept(rounds, before)
    assert [one["round"] for one in rounds] == list(range(1, 11))
    assert all(one["num_completed"] >= 2 for one in rounds)
    assert sum(one["num_late"] for one in rounds) >= 1
    assert any("n3: late by " in one["note"] for one in rounds)
    assert f"round {rounds[-1]['round']}: {rounds[-1]['note']}" in run.log
    assert all(client(rounds[5], name)["completed"] for name in ("n0", "n1"))
    # Whose reply was written has trained once for round 6.
    trained = [[number for number, _ in fleet.trainings(name)].count(6) for name in sites]
    assert written >= 2
    assert trained[:2] == [1, 1]
    assert not arrivals.exists()
    print(f"{len(rounds)} rounds in {(rounds[-1]['at'] - rounds[0]['at'] + rounds[0]['round_s']) / 60:.1f} minutes")
    print("\n".join(f"round {one['round']}: {one['note']}" for one in rounds))
    assert len(asked(rounds, "n4")) <= 2
