"""Bounds: the papers' upper bounds on the expected regret.

References:
    [1] W. Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE Transactions on
        Wireless Communications 19(11), 2020, Theorems 1 and 4.
    [2] D. Ben Ami, K. Cohen, Q. Zhao, Client selection for generalization in accelerated federated learning: a
        multi-armed bandit approach, IEEE Access 13, 2025, Theorem 1.

==================  ======================  ===========================================================
paper               here                    meaning
==================  ======================  ===========================================================
T [1], n [2]        ``rounds``              number of rounds
K                   ``num_clients``         clients
N [1], m [2]        ``clients_per_round``   clients per round
Delta_S [1]                                 sum of the m largest means minus the sum of the means of S
Delta_min           ``smallest_loss``       smallest loss of a set with a loss
Delta_max           ``largest_loss``        largest loss of a set
c, beta [1]         ``fairness``,           smallest shares of the rounds, weight of the queues
                    ``queue_weight``
==================  ======================  ===========================================================
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.theory.regret import finite_means, xia_genie

ROUNDING = 1e-12
"""Largest difference of equal means, as a share of the largest mean."""


def cs_ucb_gaps(mean_reward: npt.ArrayLike, clients_per_round: int) -> tuple[float, float]:
    """Return Delta_min and Delta_max of (19), exactly and without an enumeration of the sets.

    Swaps turn the genie's set into any other set. Each swap loses the difference of two means, which is at least 0. So
    the smallest loss is that of one swap. The set with the largest loss holds the m smallest means.

    Deviations:
        (19) takes the minimum over all S with r(S) <= r(S*). S* itself is one of them, so the minimum would be 0. The
        proof counts only sets that are not optimal, and sets without a loss are left out here too. Means that differ
        by at most 1e-12 of the largest mean in size are equal: .1 + .2 and .3 have no gap.

    Args:
        mean_reward: mu_k, each client's mean reward, shape (K,).
        clients_per_round: m, the paper's N.

    Returns:
        ``(smallest_loss, largest_loss)``, in the sum of the means, not in their minimum.

    Raises:
        ParameterError: Delta_min is undefined because every set of m clients is optimal (m >= K, or all means are
            equal). Or an argument is out of range.

    References:
        [1], below (19).

    >>> smallest, largest = cs_ucb_gaps([0.9, 0.8, 0.5, 0.1], 2)
    >>> round(smallest, 6), round(largest, 6)  # 0.8 - 0.5 and 1.7 - 0.6
    (0.3, 1.1)
    """
    mean = finite_means("mean_reward", mean_reward)
    best, _ = xia_genie(mean, clients_per_round)
    swaps = mean[best][:, None] - np.delete(mean, best)
    losing = swaps[swaps > ROUNDING * np.abs(mean).max()]
    if not losing.size:
        raise ParameterError(
            f"mean_reward makes every set of m = {clients_per_round} of the {mean.size} clients optimal, so the "
            "regret is 0 and Delta_min of (19) is undefined. Use a smaller m or other means"
        )
    slowest = np.sort(mean)[: best.size]
    return float(losing.min()), float(mean[best].sum() - slowest.sum())  # Delta_min, Delta_max, below (19)


def cs_ucb_regret_bound(mean_reward: npt.ArrayLike, clients_per_round: int, rounds: int) -> float:
    """Return the bound on CS-UCB's regret (14), logarithmic in the rounds.

    Args:
        mean_reward: mu_k, each client's mean reward in [0, 1], shape (K,).
        clients_per_round: m, the paper's N.
        rounds: T, at least 1.

    Returns:
        The bound, in units of the reward.

    Raises:
        ParameterError: An argument is out of range, or every set is optimal (see :func:`cs_ucb_gaps`).

    References:
        [1], Theorem 1, equation (19).

    >>> round(cs_ucb_regret_bound([0.9, 0.1], 1, 1000), 3)  # .8 (2 + 1 + 16 ln(1000) / .64 + 2 + 2 pi^2 / 3)
    147.419
    """
    smallest, largest = cs_ucb_gaps(mean_reward, clients_per_round)
    n, k, t = int(clients_per_round), len(finite_means("mean_reward", mean_reward)), whole("rounds", rounds, 1)
    learning = 4 * n**2 * (n + 1) * k * math.log(t) / smallest**2  # (19)
    return largest * (k / n + 1 + learning + k + math.pi**2 / 3 * n * k)  # (19)


def cs_ucb_q_regret_bound(fairness: npt.ArrayLike, clients_per_round: int, queue_weight: float, rounds: int) -> float:
    """Return the bound on CS-UCB-Q's regret (25), sub-linear if queue_weight <= 1 / sqrt(rounds).

    This is the bound as printed. Two steps of its proof do not hold in general:

    * (63) goes from the regret (25), in smallest means, to sums of means. That needs a best policy that selects the
      fastest clients. If the fairness forbids such a policy, the regret can be linear and exceed this bound
      (``tests/theory/test_cs_ucb_q.py`` has a case with K = 6). In sums of means, or for m = 1, the theorem holds.
    * (62) drops the factor 1 - beta of Upsilon_1. The sum over (61) is this bound divided by 1 - beta.

    Args:
        fairness: c_k, the smallest fraction of the rounds for each client, shape (K,), in [0, 1].
        clients_per_round: m, the paper's N.
        queue_weight: beta, in [0, 1].
        rounds: T, at least 1.

    Returns:
        The bound, in units of the reward.

    Raises:
        ParameterError: An argument is out of range.

    References:
        [1], Theorem 4, equation (29).

    >>> round(cs_ucb_q_regret_bound([0.6, 0.5, 0.4], 2, 0.01, 20_000), 2)
    6214.87
    """
    c = finite_means("fairness", fairness)
    n, t = whole("clients_per_round", clients_per_round, 1), whole("rounds", rounds, 1)
    beta = real("queue_weight", queue_weight, at_least=0.0)
    if beta > 1.0 or c.min() < 0.0 or c.max() > 1.0:
        raise ParameterError(f"queue_weight and fairness must be in [0, 1], got {queue_weight!r} and {fairness!r}")
    omega = float(np.maximum(c**2, (1 - c) ** 2).sum())  # Omega, below (29)
    learning = (math.pi**2 / 3 + 1) * c.size + 4 * math.sqrt(2 * c.size * n * t * math.log(t))  # (29)
    return beta * omega * t / 2 + (1 - beta) * learning  # (29)


def bsfl_largest_loss(mean_speed: npt.ArrayLike, alpha: float) -> float:
    """Return the paper's bound on Delta_max: 2 alpha + mu_max - mu_min.

    The bound holds for g_k in [-1, 1], as the paper defines g_k. With beta > 1, a target m d_k / sum(d) above 1 moves
    g_k of (4) out of that range, and a loss may be larger. An example is K = 6, m = 5, d = (100, 1, 1, 1, 1, 1), beta
    = 3 and equal means. A first round without client 0 then loses 21.6 alpha.

    Args:
        mean_speed: mu_k, each client's mean of tau_min / tau_k, shape (K,).
        alpha: Weight of the generalization term, at least 0.

    Returns:
        The bound, in units of the reward.

    Raises:
        ParameterError: An argument is out of range.

    References:
        [2], below (14).

    >>> bsfl_largest_loss([0.75, 0.5, 0.25], 1.0)
    2.5
    """
    return 2 * real("alpha", alpha, at_least=0.0) + float(np.ptp(finite_means("mean_speed", mean_speed)))  # below (14)


def bsfl_regret_bound(
    *, num_clients: int, clients_per_round: int, rounds: int, smallest_loss: float, largest_loss: float
) -> float:
    """Return the bound on BSFL's regret (7), logarithmic in the rounds.

    Args:
        num_clients: K.
        clients_per_round: m.
        rounds: n, at least 1.
        smallest_loss: Delta_min, the smallest difference of two rewards. The paper assumes quantized rewards. The proof
            needs only the smallest loss above 0 of any selection that the policy makes.
        largest_loss: Delta_max (14); if every g_k is in [-1, 1], at most :func:`bsfl_largest_loss`.

    Returns:
        The bound, in units of the reward.

    Raises:
        ParameterError: An argument is out of range; ``smallest_loss`` must be above 0.

    References:
        [2], Theorem 1, equation (15).

    >>> bound = bsfl_regret_bound(num_clients=4, clients_per_round=2, rounds=1000, smallest_loss=0.5, largest_loss=1.0)
    >>> round(bound, 3)  # 4 (12 ln(1000) / .25 + 1 + pi^2 / 3)
    1343.448
    """
    k, m = whole("num_clients", num_clients, 1), whole("clients_per_round", clients_per_round, 1)
    low = real("smallest_loss", smallest_loss, above=0.0)
    high = real("largest_loss", largest_loss, at_least=low)
    n = whole("rounds", rounds, 1)
    return high * k * (4 * (m + 1) * math.log(n) / low**2 + 1 + math.pi**2 / 3)  # (15)
