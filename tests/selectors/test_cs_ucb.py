"""CS-UCB against a round worked by hand and against every subset, (18) of Xia et al. (2020)."""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.selectors import CSUCB, RoundReport, create
from tests.selectors.oracles import CSUCBOracle, World, follow

ROUNDS = 150


def report(latencies: dict[int, float], failed: tuple[int, ...] = ()) -> RoundReport:
    """Build a round's report from client -> seconds."""
    clients = np.array(list(latencies), dtype=np.int64)
    completed = np.array([client not in failed for client in latencies], dtype=bool)
    return RoundReport(clients=clients, completed=completed, latency=np.array(list(latencies.values())))


def chosen_set(selector: CSUCB, available: list[int]) -> set[int]:
    """Ask for one round's choice."""
    chosen = selector.select(np.array(available, dtype=np.int64)).tolist()
    assert len(chosen) == len(set(chosen))
    return set(chosen)


def test_rounds_by_hand() -> None:
    """Four clients, two a round, max_latency 10 s, so r = 1 - tau/10.

    Rounds 1, 2 (opening) play everyone once, whatever the order: client 0 takes 2 s (r .8), 1 takes 3 s (.7), 2 takes
    5 s (.5), 3 fails (0, and it counts as a play: unplayed, it would have to be asked in round 3).
    Round 3: n = 1 everywhere, so equal bonuses; the largest means are 0 and 1. They take 6.8 s (.32) and 9 s (.1):
    means .56 and .4, n = 2.
    Round 4: (m+1) ln t = 3 ln 4 = 4.1589; bonus sqrt(4.1589/2) = 1.4420 and sqrt(4.1589/1) = 2.0393.
        client 0: .56 + 1.4420 = 2.0020     client 1: .4 + 1.4420 = 1.8420
        client 2: .5 + 2.0393 = 2.5393      client 3: 0 + 2.0393 = 2.0393     -> {2, 3}
    (With ln 3, or m in place of m+1, or (26)'s 2 ln t, client 0 would beat client 3.)
    Client 2 takes 12 s (over the cap: r 0, mean .25), client 3 fails again (mean 0): n = 2 everywhere.
    Round 5: equal bonuses again, means .56, .4, .25, 0 -> {0, 1}.
    """
    seconds = {0: 2.0, 1: 3.0, 2: 5.0, 3: 10.0}
    for seed in range(20):
        selector = CSUCB(clients_per_round=2, max_latency=10.0, seed=seed)
        seen: set[int] = set()
        for _ in range(2):
            chosen = chosen_set(selector, [0, 1, 2, 3])
            assert not chosen & seen
            seen |= chosen
            selector.observe(report({client: seconds[client] for client in chosen}, failed=(3,)))
        assert chosen_set(selector, [0, 1, 2, 3]) == {0, 1}
        selector.observe(report({0: 6.8, 1: 9.0}))
        assert chosen_set(selector, [0, 1, 2, 3]) == {2, 3}
        selector.observe(report({2: 12.0, 3: 10.0}, failed=(3,)))
        assert chosen_set(selector, [0, 1, 2, 3]) == {0, 1}


def test_newcomer_by_hand() -> None:
    """One a round, max_latency 1 s: an unplayed client is first whenever it is there; the rest follows (18).

    Round 1 plays 0 (r .9), round 2 plays 1 (r .2), round 3 nobody is available, round 4 client 2 appears and is
    chosen but never reported: it stays unplayed, so round 5 asks it again, unless (round 5) only 0 and 1 are there:
    n = 1 for both, .9 > .2 -> 0, r .1, mean .5, n = 2. Round 6 without client 2: (m+1) ln 6 = 2 ln 6 = 3.5835;
        client 0: .5 + sqrt(3.5835/2) = 1.8386     client 1: .2 + sqrt(3.5835) = 2.0930     -> 1
    Round 7: everyone is there -> 2, the only unplayed one.
    """
    selector = CSUCB(clients_per_round=1, max_latency=1.0, seed=0)
    assert chosen_set(selector, [0]) == {0}
    selector.observe(report({0: 0.1}))
    assert chosen_set(selector, [0, 1]) == {1}
    selector.observe(report({1: 0.8}))
    assert chosen_set(selector, []) == set()
    assert chosen_set(selector, [0, 2, 1]) == {2}
    assert chosen_set(selector, [0, 1]) == {0}
    selector.observe(report({0: 0.9}))
    assert chosen_set(selector, [0, 1]) == {1}
    selector.observe(report({1: 1.0}))
    assert chosen_set(selector, [1, 2, 0]) == {2}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("inform", [True, False], ids=["informed", "seen"])
@pytest.mark.parametrize("grid", [(), (0.1, 0.5, 1.0, 2.5)], ids=["continuous", "ties"])
@pytest.mark.parametrize(("num_clients", "m"), [(5, 2), (6, 3), (7, 2), (7, 3)])
def test_every_choice_maximizes(num_clients: int, m: int, grid: tuple[float, ...], inform: bool, seed: int) -> None:
    """Random availability, failures, unreported rounds and two newcomers, against all subsets."""
    selector = CSUCB(clients_per_round=m, max_latency=1.0, seed=seed)
    oracle = CSUCBOracle(m, max_latency=1.0)
    if inform:
        selector.inform(np.arange(num_clients))
        oracle.inform(range(num_clients))
    world = World(num_clients=num_clients, newcomers={0: 40, num_clients - 1: 90}, grid=grid)
    assert follow(selector, oracle, RoundReport, world=world, rounds=ROUNDS, seed=1000 + seed) == []
    assert oracle.decided > ROUNDS / 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_clients", "m"), [(5, 2), (6, 2), (7, 3)])
def test_every_choice_maximizes_when_all_are_there(num_clients: int, m: int, seed: int) -> None:
    """The paper's ideal scenario: always available, ceil(K/m) opening rounds, then (18)."""
    selector = create("cs-ucb", clients_per_round=m, max_latency=1.0, seed=seed)
    oracle = CSUCBOracle(m, max_latency=1.0)
    world = World(num_clients=num_clients, presence=1, failure=0.1, unreported=0)
    assert follow(selector, oracle, RoundReport, world=world, rounds=ROUNDS, seed=seed) == []
    assert oracle.decided > ROUNDS / 2


def test_oracle_faults_a_random_choice() -> None:
    """The oracle can say no: a uniform choice is wrong in most rounds."""

    class Uniform:
        """Choose anyone."""

        rng = np.random.default_rng(0)

        def select(self, available: np.ndarray) -> np.ndarray:
            """Choose two."""
            return self.rng.permutation(available)[:2]

        def observe(self, report: RoundReport) -> None:
            """Learn nothing."""

    world = World(num_clients=6)
    faults = follow(Uniform(), CSUCBOracle(2, 1.0), RoundReport, world=world, rounds=ROUNDS, seed=0)
    assert len(faults) > ROUNDS / 2


def test_opening_order_is_random() -> None:
    """Ties between unplayed clients go to the generator: each of 6 is in round 1's pair in a third of 300 seeds.

    Binomial(300, 1/3): mean 100, standard deviation 8.2.
    """
    counts = np.zeros(6)
    for seed in range(300):
        counts[CSUCB(clients_per_round=2, max_latency=1.0, seed=seed).select(np.arange(6))] += 1
    assert counts.min() > 65
    assert counts.max() < 135


def test_last_opening_round_is_topped_up_at_random() -> None:
    """Algorithm 1, line 4: five clients, two a round; the third round is the last unplayed client and anyone else.

    Client k takes k/10 s, so (18) would always top up with the smallest index played.
    """
    partners = {client: set() for client in range(5)}
    for seed in range(200):
        selector = CSUCB(clients_per_round=2, max_latency=1.0, seed=seed)
        played: set[int] = set()
        for _ in range(2):
            chosen = chosen_set(selector, [0, 1, 2, 3, 4])
            played |= chosen
            selector.observe(report({client: client / 10 + 0.01 for client in chosen}))
        (last,) = {0, 1, 2, 3, 4} - played
        chosen = chosen_set(selector, [0, 1, 2, 3, 4])
        assert last in chosen
        partners[last] |= chosen - {last}
    assert all(partners[client] == {0, 1, 2, 3, 4} - {client} for client in range(5))


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_latency", 0.0), ("max_latency", -1.0), ("max_latency", float("nan")), ("clients_per_round", 0)],
)
def test_wrong_parameters_are_refused_by_name(name: str, value: float) -> None:
    """The message names the parameter and the value that came."""
    parameters = {"clients_per_round": 2, "max_latency": 1.0, name: value}
    with pytest.raises(ValueError, match=f"(?s)(?=.*{name})(?=.*{value:g})"):
        create("cs-ucb", **parameters)
    with pytest.raises(ValueError, match=name):
        CSUCB(**parameters)
