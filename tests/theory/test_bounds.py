"""The bounds (19), (29) of Xia et al. and (15) of Ben Ami et al.: by hand, against all sets, and above real runs.

Each run below its bound stands beside a policy without learning, the control, that breaks the same bound: a bound that
anything would pass says nothing. docs/papers/xia.md and ben-ami.md have the numbers.

Where a bound says nothing: before a few thousand rounds, as no policy can lose that much; at m = 5 of 20 with means .01
apart, where (19) stays above what can be lost for more than 10^10 rounds; in the model of Fig. 4 (K = 3, m = 2, means
.4 .7 .9, c = (.6, .5, .4)), where the slowest two lose 1806 in 20,000 rounds and (29) is above 6000 for every beta; and
with alpha > 0 where g decides in the long run, as a loss may then be as small as two clients' g are close.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from fedsel_flwr import theory
from fedsel_flwr.errors import ParameterError
from tests.theory.playing import lowest_first, noisy, play

ROUNDS = 10_000  # before, (15) and (19) are above what can be lost at all


def test_cs_ucb_bound_by_hand() -> None:
    """K = 4, m = 2, T = 100, means .9 .8 .5 .2: Delta_min = .8 - .5, Delta_max = 1.7 - .7.

    1.0 [4/2 + 1 + 4 * 4 * 3 * 4 * ln(100) / .09 + 4 + 8 pi^2/3] = 7 + 9824.363 + 26.319 = 9857.682
    """
    assert theory.cs_ucb_gaps([0.9, 0.8, 0.5, 0.2], 2) == pytest.approx((0.3, 1.0))
    assert 192 * math.log(100) / 0.09 == pytest.approx(9824.363, abs=1e-3)
    assert theory.cs_ucb_regret_bound([0.9, 0.8, 0.5, 0.2], 2, 100) == pytest.approx(9857.682, abs=1e-3)
    assert theory.cs_ucb_regret_bound([0.2, 0.5, 0.9, 0.8], 2, 1) == pytest.approx(7 + 8 * math.pi**2 / 3)


def test_cs_ucb_q_bound_by_hand() -> None:
    """c = (.6, .5, .4): Omega = .36 + .25 + .36 = .97. m = 2, beta = .1, T = 100.

    .1 * .97 * 50 + .9 [(pi^2/3 + 1) 3 + 4 sqrt(1200 ln 100)] = 4.85 + .9 (12.8696 + 297.3538) = 284.051
    """
    assert theory.cs_ucb_q_regret_bound([0.6, 0.5, 0.4], 2, 0.1, 100) == pytest.approx(284.051, abs=1e-3)
    assert theory.cs_ucb_q_regret_bound([0.6, 0.5, 0.4], 2, 1.0, 100) == pytest.approx(0.97 * 50)
    assert theory.cs_ucb_q_regret_bound([0.6, 0.5, 0.4], 2, 0.0, 1) == pytest.approx(3 * (math.pi**2 / 3 + 1))


def test_bsfl_bound_by_hand() -> None:
    """K = 4, m = 2, n = 100, Delta_min = .5, Delta_max = 3: 12 (12 ln(100)/.25 + 1 + pi^2/3) = 2704.057"""
    losses = {"smallest_loss": 0.5, "largest_loss": 3.0}
    bound = theory.bsfl_regret_bound(num_clients=4, clients_per_round=2, rounds=100, **losses)
    assert bound == pytest.approx(2704.057, abs=1e-3)
    assert theory.bsfl_largest_loss([0.9, 0.2, 0.4], 10.0) == pytest.approx(20.7)


def test_cs_ucb_gaps_equal_all_sets() -> None:
    """The closed forms against every set of m clients; means on a grid tie, also at the genie's edge."""
    generator = np.random.default_rng(9)
    for case in range(300):
        num_clients = int(generator.integers(2, 8))
        m = int(generator.integers(1, num_clients))
        mean = generator.random(num_clients)
        mean = np.round(mean * 4) / 4 if case % 2 else mean
        sums = [mean[list(s)].sum() for s in combinations(range(num_clients), m)]
        losses = np.array([max(sums) - value for value in sums])
        if losses.max() < 1e-12:
            continue
        assert theory.cs_ucb_gaps(mean, m) == pytest.approx((losses[losses > 1e-12].min(), losses.max()), abs=1e-12)


@pytest.mark.parametrize(
    ("mean", "m", "smallest", "largest"),
    [
        # {0, 1} and {0, 2} are both optimal; the next swaps lose .3 and .4
        ([0.9, 0.5, 0.5, 0.2], 2, 0.3, 0.7),
        # .1 + .2 and .3 are one mean: their difference of 5.6e-17 would make (19) about 10^30 times as large
        ([0.9, 0.1 + 0.2, 0.3, 0.2], 2, 0.1, 0.7),
        ([9e5, 1e6 * (0.1 + 0.2), 3e5, 2e5], 2, 1e5, 7e5),
        # a true gap counts, however small against 1
        ([0.9, 0.3 + 1e-9, 0.3, 0.2], 2, 1e-9, 0.7),
        ([3e-17, 1e-17], 1, 2e-17, 2e-17),
    ],
)
def test_ties_and_rounding_are_no_gaps(mean: list[float], m: int, smallest: float, largest: float) -> None:
    assert theory.cs_ucb_gaps(mean, m) == pytest.approx((smallest, largest), rel=1e-6)


@pytest.mark.parametrize(("mean", "m"), [([0.5] * 3, 2), ([0.1, 0.9], 2), ([0.1, 0.9], 3), ([0.1 + 0.2, 0.3, 0.3], 2)])
def test_nothing_to_lose_has_no_smallest_loss(mean: list[float], m: int) -> None:
    with pytest.raises(ParameterError, match="Delta_min"):
        theory.cs_ucb_regret_bound(mean, m, 10)


@pytest.mark.parametrize("changed", [{"rounds": 0}, {"smallest_loss": 0.0}, {"largest_loss": 0.1}, {"num_clients": 0}])
def test_bsfl_bound_refuses(changed: dict[str, float]) -> None:
    values = {"num_clients": 4, "clients_per_round": 2, "rounds": 10, "smallest_loss": 0.5, "largest_loss": 3.0}
    with pytest.raises(ParameterError, match=next(iter(changed))):
        theory.bsfl_regret_bound(**(values | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(("c", "beta", "t"), [([1.2], 0.5, 10), ([0.5], 1.5, 10), ([0.5], 0.5, 0), ([], 0.5, 10)])
def test_cs_ucb_q_bound_refuses(c: list[float], beta: float, t: int) -> None:
    with pytest.raises(ParameterError):
        theory.cs_ucb_q_regret_bound(c, 1, beta, t)


def test_largest_loss_of_bsfl_covers_every_set_and_history() -> None:
    """(14) <= 2 alpha + mu_max - mu_min, with g anywhere in [-1, 1]."""
    generator = np.random.default_rng(2)
    for _ in range(300):
        mean, g = generator.random(6), generator.uniform(-1, 1, 6)
        m, alpha = int(generator.integers(1, 7)), float(generator.uniform(0, 5))
        worst = min(mean[list(s)].min() + alpha * g[list(s)].mean() for s in combinations(range(6), m))
        assert theory.bsfl_genie(mean, g, m, alpha)[1] - worst <= theory.bsfl_largest_loss(mean, alpha) + 1e-12


def test_largest_loss_of_bsfl_needs_g_of_at_most_one() -> None:
    """K = 6, m = 5, d = (100, 1, 1, 1, 1, 1), equal means: the target of client 0 is 500/105 = 4.76.

    A first round without it loses alpha/5 (4.76^beta - (1/21)^beta): .943 alpha for beta = 1, and 21.6 alpha for
    beta = 3, where the paper's bound is 2 alpha.
    """
    mean, weights = np.full(6, 0.5), np.array([100.0, 1, 1, 1, 1, 1])
    lost = {beta: theory.bsfl_regret(mean, [[1, 2, 3, 4, 5]], 5, 1.0, beta, weights)[0] for beta in (1, 3)}
    assert lost == pytest.approx({1: (100 - 1) / 105, 3: (4 + 16 / 21) ** 3 / 5 - (1 / 21) ** 3 / 5})
    assert lost[1] <= theory.bsfl_largest_loss(mean, 1.0) == 2.0
    assert lost[3] > 10 * theory.bsfl_largest_loss(mean, 1.0)


def check(bound: float, regret: np.ndarray, *controls: np.ndarray) -> None:
    """The regret is below the bound, and every control's above it."""
    assert regret[-1] <= bound < min(control[-1] for control in controls)


def test_cs_ucb_stays_below_its_bound() -> None:
    mean = np.array([0.9, 0.9, 0.1, 0.1])
    latency = noisy(mean, 0.1, ROUNDS)
    regret = theory.xia_regret(mean, play("cs-ucb", latency, 2, max_latency=5.0), 2)
    slowest = theory.xia_regret(mean, lowest_first(mean, 2, latency > 0), 2)
    check(theory.cs_ucb_regret_bound(mean, 2, ROUNDS), regret, slowest)


@pytest.mark.parametrize(
    ("alpha", "mean", "spread", "smallest_loss"),
    [
        pytest.param(0.0, [0.9, 0.8, 0.5, 0.2], 0.1, 0.3, marks=pytest.mark.slow),
        (0.25, [0.9, 0.8, 0.3, 0.1], 0.05, 0.377),
    ],
)
def test_bsfl_stays_below_its_bound(alpha: float, mean: list[float], spread: float, smallest_loss: float) -> None:
    """Delta_min is the smallest loss of this very run, whose value guards against losses of rounding."""
    latency = 0.1 / (np.array(mean) + np.random.default_rng(3).uniform(-spread, spread, (ROUNDS, 4)))
    regret = theory.bsfl_regret(mean, play("bsfl", latency, 2, min_latency=0.1, alpha=alpha), 2, alpha)
    losses = np.diff(regret, prepend=0.0)
    gaps = {"smallest_loss": losses[losses > 1e-9].min(), "largest_loss": theory.bsfl_largest_loss(mean, alpha)}
    assert gaps["smallest_loss"] == pytest.approx(smallest_loss, abs=2e-3)
    slowest = theory.bsfl_regret(mean, lowest_first(np.array(mean), 2, latency > 0), 2, alpha)
    check(theory.bsfl_regret_bound(num_clients=4, clients_per_round=2, rounds=ROUNDS, **gaps), regret, slowest)


@pytest.mark.parametrize(
    ("mean", "fairness", "availability", "m", "spread", "beta"),
    [
        # At m = 1 the smallest mean of the set is its sum, so that nothing is wrong with (63). Only the fast client has
        # a fair share, so that the regret cannot go below 0 by missing it.
        ([0.1, 0.9], [0.0, 0.5], 1.0, 1, 0.1, 0.01),
        # The slow client comes without a choice in 17.1 % of the rounds, so that its fair share costs the fast ones
        # 2.9 %. At beta = 1 CS-UCB-Q serves by queues alone and loses as much as random.
        ([0.05, 0.95, 0.95], [0.2, 0.5, 0.5], 0.9, 2, 0.04, 1.0),
        ([0.05, 0.95, 0.95], [0.2, 0.5, 0.5], 0.9, 2, 0.04, 1 / math.sqrt(ROUNDS)),
    ],
)
def test_cs_ucb_q_stays_below_its_bound(
    mean: list[float], fairness: list[float], availability: float, m: int, spread: float, beta: float
) -> None:
    available = np.random.default_rng(6).random((ROUNDS, len(mean))) < availability
    best_reward, _ = theory.fair_optimum(mean, availability, fairness, m)
    latency = noisy(np.array(mean), spread, ROUNDS)
    chosen = play("cs-ucb-q", latency, m, available=available, max_latency=5.0, fairness=fairness, queue_weight=beta)
    controls = [lowest_first(np.array(mean), m, available)]
    controls += [play("random", latency, m)] * (m == 1)
    regret, *others = (theory.fair_regret(mean, policy, best_reward, m) for policy in (chosen, *controls))
    check(theory.cs_ucb_q_regret_bound(fairness, m, beta, ROUNDS), regret, *others)
