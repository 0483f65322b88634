"""What CI runs: a deployment with TLS and SuperNode keys, both APIs, and four rows of docs/operating.md.

The runs of both APIs are submitted at the same time, to the same SuperNodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.fleet import Fleet, wait_until
from tests.e2e.told import check_kept, check_statistics, problems

pytestmark = [pytest.mark.e2e, pytest.mark.e2e_ci, pytest.mark.timeout(1200)]
APIS = ("message", "legacy")
NODES = ("n0", "n1", "n2", "n3")
ALL_HERE = {"min_available": 4}


@pytest.fixture
def fleet(deployed: Fleet) -> Iterator[Fleet]:
    """The SuperLink with four SuperNodes."""
    deployed.restore(*NODES)
    return deployed


def test_bandits_learn_who_is_slow_from_the_servers_timing_and_strangers_are_refused(fleet: Fleet) -> None:
    # With two runs at once on two cores, quick nodes take up to 8 s.
    fleet.order("n3", sleep=15.0)
    runs = [fleet.run(api, rounds=5, clients_per_round=2, **ALL_HERE) for api in APIS]
    fleet.node("stranger", key=False)
    wait_until(lambda: fleet.nodes["stranger"].poll() is not None, 200, "the stranger's end")
    for run in runs:
        rounds = run.wait(600)
        assert [one["num_completed"] for one in rounds] == [2] * 5
        assert set(rounds[-1]["ids"]) == set(NODES)
        check_statistics(rounds)
        mean = dict(zip(rounds[-1]["ids"], rounds[-1]["selector"]["mean"], strict=True))
        slow = mean.pop("n3")
        assert 0.0 < slow < sum(mean.values()) / len(mean)  # not below each: one may have waited for the cores
    assert fleet.nodes.pop("stranger").returncode == 1
    assert "All SuperNodes must be registered" in fleet.log("stranger")


def test_an_exception_an_impostor_and_killed_server_apps(fleet: Fleet) -> None:
    fleet.order("n0", **{"raise": "the battery is empty", "in_round": 1})
    fleet.order("n1", claim="n2")
    fleet.order("n3", sleep=6.0, in_round=2)
    runs = [fleet.run(api, rounds=3, clients_per_round=4, **ALL_HERE) for api in APIS]
    wait_until(
        lambda: all([round for round, _ in fleet.trainings(name)].count(2) == 2 for name in NODES),
        400,
        "everybody's trainings in round 2",
    )  # a SuperNode that had not got its message yet would wait for it until the SuperLink misses the run's server
    fleet.kill_servers(2)
    before = [run.rounds for run in runs]
    for run, finished in zip([run.resumed() for run in runs], before, strict=True):
        rounds = run.wait(600)
        check_kept(rounds, finished)
        assert problems(rounds[0]) == {"n0": "exception: RuntimeError: the battery is empty"}
        assert [one["num_completed"] for one in rounds] == [3, 4, 4]
        assert all(set(one["ids"]) == set(NODES) for one in rounds)
        check_statistics(rounds)
