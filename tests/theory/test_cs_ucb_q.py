"""CS-UCB-Q's claims, Xia et al. (2020), sections IV and V-C: Theorems 3 and 4, Fig. 5.

Theorem 4 could not be confirmed in general: see the docstring that says so.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from fedsel_flwr.theory import cs_ucb_q_regret_bound, fair_optimum, fair_regret
from tests.theory.playing import lowest_first, noisy, play

# Theorem 4's counterexample: three clients of reward 0 with a fair share, three of reward 1 without; m = 3.
COUNTER_ROUNDS = 60_000
COUNTER_MEAN = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
COUNTER_FAIRNESS = np.array([0.34, 0.35, 0.36, 0.0, 0.0, 0.0])
COUNTER_BETA = 1 / math.sqrt(COUNTER_ROUNDS)


def queues(fairness: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The queues after each round, shape (rounds, K)."""
    lengths = np.zeros((len(chosen) + 1, fairness.size))
    for t, now in enumerate(chosen):
        lengths[t + 1] = np.maximum(lengths[t] + fairness - now, 0.0)  # (27)
    return lengths[1:]


@pytest.mark.parametrize("seed", range(3))
def test_every_feasible_fairness_is_met(seed: int) -> None:
    """Theorem 3 and (59): the queues stay bounded, so that n_k >= c_k T - D_k. Seen: no queue above 12.2.

    The fairness is epsilon = .05 below what a random policy gives the clients, under random availability: strictly
    feasible. The bound of (59) is Xi / epsilon with Xi = Omega/2 + (1 - beta) m / beta. Choosing the fastest, without
    fairness, breaks it.
    """
    generator = np.random.default_rng(seed)
    num_clients, rounds, beta = 5, 4000, 0.2
    m, availability = 1 + seed % 3, generator.uniform(0.3, 1.0, num_clients)
    served = np.zeros(num_clients)
    for size in range(1, num_clients + 1):
        for e in combinations(range(num_clients), size):
            chance = math.prod(availability[k] if k in e else 1 - availability[k] for k in range(num_clients))
            sets = list(combinations(e, min(m, size)))
            for chosen_set, q in zip(sets, generator.dirichlet(np.full(len(sets), 0.4)), strict=True):
                served[list(chosen_set)] += chance * q
    fairness = served - 0.05
    mean = generator.uniform(0.1, 0.9, num_clients)
    fair_optimum(mean, availability, fairness, m)  # feasible, or this raises
    available = generator.random((rounds, num_clients)) < availability
    chosen = play(
        "cs-ucb-q", noisy(mean, 0.1, rounds), m, available=available,
        max_latency=5.0, fairness=fairness, queue_weight=beta,
    )  # fmt: skip
    queue, without = queues(fairness, chosen), queues(fairness, lowest_first(-mean, m, available))
    omega = np.maximum(fairness**2, (1 - fairness) ** 2).sum()
    bound = (omega / 2 + (1 - beta) * m / beta) / 0.05  # (59)
    assert queue.sum(axis=1).mean() <= bound < without.sum(axis=1).mean()
    assert queue[rounds // 2 :].max() < 30 < without[rounds // 2 :].max()
    assert (chosen.mean(axis=0) >= fairness - queue[-1] / rounds - 1e-9).all()
    assert (chosen.mean(axis=0) >= fairness - 0.01).all()


def test_a_small_beta_is_sub_linear() -> None:
    """(30), where fairness asks for fast clients only: K = 4, m = 2, c = (.5, .5, 0, 0), beta = 1/sqrt(T)."""
    mean, fairness = np.array([0.9, 0.8, 0.4, 0.2]), [0.5, 0.5, 0.0, 0.0]
    per_round = []
    for rounds in (625, 2_500, 10_000):
        beta = 1 / math.sqrt(rounds)
        latency = noisy(mean, 0.1, rounds)
        chosen = play("cs-ucb-q", latency, 2, max_latency=5.0, fairness=fairness, queue_weight=beta)
        regret = fair_regret(mean, chosen, fair_optimum(mean, 1.0, fairness, 2)[0], 2)[-1]
        assert regret > 0
        per_round.append(regret / rounds)
    slowest = fair_regret(mean, [[2, 3]] * rounds, mean[1], 2)[-1]
    assert regret <= cs_ucb_q_regret_bound(fairness, 2, beta, rounds) < slowest
    assert per_round[1] < 0.5 * per_round[0]
    assert per_round[2] < 0.5 * per_round[1]


@pytest.mark.parametrize("rounds", [100, 10_000, 10**6])
def test_bound_30_covers_29(rounds: int) -> None:
    """For beta <= 1/sqrt(T), (29) is at most (30)."""
    simple = 0.97 * math.sqrt(rounds) / 2 + (math.pi**2 / 3 + 1) * 3 + 4 * math.sqrt(12 * rounds * math.log(rounds))
    for beta in (1e-6, 0.5 / math.sqrt(rounds), 1 / math.sqrt(rounds)):
        assert cs_ucb_q_regret_bound([0.6, 0.5, 0.4], 2, beta, rounds) <= simple  # (30)


@pytest.fixture(scope="module")
def counterexample() -> np.ndarray:
    """Choices of CS-UCB-Q with beta = 1/sqrt(T) where a client takes 5 s or no time at all."""
    latency = np.tile(5.0 * (1.0 - COUNTER_MEAN), (COUNTER_ROUNDS, 1))
    return play("cs-ucb-q", latency, 3, max_latency=5.0, fairness=COUNTER_FAIRNESS, queue_weight=COUNTER_BETA)


@pytest.mark.slow
def test_theorem_4_not_confirmed_for_the_smallest_mean(counterexample: np.ndarray) -> None:
    """NOT CONFIRMED: regret 21,363 after 60,000 rounds, .36 in every round, above the bound (29) of 19,968.

    The best policy of (23) serves the slow clients together and leaves 64 % of the rounds to the fast ones alone:
    r* = .64. The choice (28) adds up over the set and sees no gain in company. Each queue goes its own way, some slow
    client is in 72 % of the rounds, and each of these rounds is worth 0. The step (63) of the proof puts the
    difference of the smallest means below the difference of the sums; for S* = {3, 4, 5} against {0, 3, 4} that is
    1 <= 1, but for S* = {0, 1, 2} against {0, 3, 4} it is 0 <= -2, and on average over the rounds .36 <= -.01. So
    CS-UCB-Q as printed is not optimal for (25) however long it learns, with a fairness that is strictly feasible.
    """
    best_reward, _ = fair_optimum(COUNTER_MEAN, 1.0, COUNTER_FAIRNESS, 3)
    assert best_reward == pytest.approx(0.64, abs=1e-9)
    regret = fair_regret(COUNTER_MEAN, counterexample, best_reward, 3)
    before, last = np.diff(regret[[COUNTER_ROUNDS // 4 - 1, COUNTER_ROUNDS // 2 - 1, COUNTER_ROUNDS - 1]])
    assert last == pytest.approx(2 * before, rel=0.05)
    assert regret[-1] > 1.03 * cs_ucb_q_regret_bound(COUNTER_FAIRNESS, 3, COUNTER_BETA, COUNTER_ROUNDS)
    slow = counterexample[:, :3]
    assert slow.any(axis=1).mean() == pytest.approx(0.716, abs=0.02)
    assert (slow.mean(axis=0) <= COUNTER_FAIRNESS[:3]).all()  # not for serving them too often


@pytest.mark.slow
def test_theorem_4_for_the_sum_of_means(counterexample: np.ndarray) -> None:
    """What the proof does show: with rewards that add up, r* = 3 - 1.05, and the same run stays below (29)."""
    regret = np.cumsum(3 - COUNTER_FAIRNESS.sum() - (counterexample * COUNTER_MEAN).sum(axis=1))
    for t in (10_000, COUNTER_ROUNDS):  # always the slow three would lose 3 - 1.05 in every round
        assert regret[t - 1] <= cs_ucb_q_regret_bound(COUNTER_FAIRNESS, 3, COUNTER_BETA, t) < (3 - 1.05) * t
    assert regret[-1] == pytest.approx(-701, abs=20)  # the queues' debt: fairness not quite met


FAIRNESS = np.array([0.6, 0.5, 0.4])


def gaps(queue_weight: float) -> np.ndarray:
    """Return by how much each share of the rounds is above c_k; latencies within 20 % of 3, 1.5 and .5 s."""
    latency = np.array([3.0, 1.5, 0.5]) * np.random.default_rng(11).uniform(0.8, 1.2, (8_000, 3))
    here = np.random.default_rng(7).random(latency.shape) < 0.9
    parameters = {"max_latency": 5.0, "fairness": FAIRNESS, "queue_weight": queue_weight}
    chosen = play("cs-ucb-q", latency, 2, available=here, **parameters)
    assert (chosen <= here).all()
    np.testing.assert_array_equal(chosen.sum(axis=1), np.minimum(here.sum(axis=1), 2))
    return chosen.mean(axis=0) - FAIRNESS


def test_fairness_is_met_unless_its_weight_is_tiny() -> None:
    """Theorem 3, within .01. Fig. 5: with 1e-5 client 1's constraint is violated, by far; the two fast are served."""
    assert (gaps(0.01) >= -0.01).all()
    first, second, third = gaps(1e-5)
    assert first < -0.3
    assert min(second, third) > 0.3
