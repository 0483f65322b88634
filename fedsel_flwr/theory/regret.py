"""Regret: the loss of a run's selections against each paper's genie, which knows every client's mean; its bounds.

References:
    [1] W. Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE Transactions on
        Wireless Communications 19(11), 2020, equations (13), (14), (25), Theorems 1 and 4.
    [2] D. Ben Ami, K. Cohen, Q. Zhao, Client selection for generalization in accelerated federated learning: a
        multi-armed bandit approach, IEEE Access 13, 2025, equations (3)-(7), Theorem 1.

The mean reward of a set is the minimum of its members' *means*. The mean of the minimum, which a realized round shows,
is smaller. With that number even a genie would lose in every round.

Deviations: (14), (25) and (7) print the expectation of the realized reward r(S(t)), a minimum of random numbers. The
genie's term is a minimum of means. Because E[min] < min E, even the genie's own regret would then grow linearly, and no
bound could hold. Both terms are means here (the pseudo-regret), as in the proofs (37), (63) and (21).

Symbols of the bounds:

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
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, column, indices, one_of, real, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.bsfl import maximize

Choices = BoolArray | Sequence[npt.ArrayLike]
Rounding = Literal["down", "nearest"]
ROUNDING = 1e-12
"""Largest difference of equal means, as a share of the largest mean."""


def xia_genie(mean_reward: npt.ArrayLike, clients_per_round: int) -> tuple[IntArray, float]:
    """Return the set with the largest mean reward: the m clients with the largest means.

    Args:
        mean_reward: mu_k, each client's mean reward, shape (K,).
        clients_per_round: m, the paper's N; for m >= K the result is all K clients.

    Returns:
        Indices of the set, ascending, and its mean reward, the smallest of its members' means. Of equal means the lower
        index wins.

    Raises:
        ParameterError: ``mean_reward`` is empty or not finite, or ``clients_per_round`` < 1.

    References:
        [1], equation (13).

    >>> xia_genie([0.2, 0.9, 0.5, 0.9], 3)
    (array([1, 2, 3]), 0.5)
    """
    mean = finite_means("mean_reward", mean_reward)
    m = whole("clients_per_round", clients_per_round, 1)
    chosen = np.sort(np.argsort(-mean, kind="stable")[:m])  # (13)
    return chosen, float(mean[chosen].min())  # mu(S*), below (14)


def sorted_groups(mean_latency: npt.ArrayLike, clients_per_round: int) -> list[IntArray]:
    """Return the groups with the shortest rounds if every client is selected equally often.

    The groups are m clients at a time, sorted by mean latency. A round lasts as long as its slowest client, so clients
    of similar latency belong together. No other partition into groups of m has a smaller sum of largest means.

    Args:
        mean_latency: Each client's mean latency, s, shape (K,).
        clients_per_round: m; if it does not divide K, the fastest group is smaller.

    Returns:
        The groups, from fast to slow, each with ascending indices.

    Raises:
        ParameterError: ``mean_latency`` is empty or not finite, or ``clients_per_round`` < 1.

    >>> [group.tolist() for group in sorted_groups([0.2, 0.9, 0.5, 0.8], 2)]
    [[0, 2], [1, 3]]
    """
    mean = finite_means("mean_latency", mean_latency)
    m = whole("clients_per_round", clients_per_round, 1)
    order = np.argsort(mean, kind="stable")
    # The fastest clients form the small group, because it costs least there.
    first = mean.size % m
    cuts = range(first, mean.size, m) if first else range(m, mean.size, m)
    return [np.sort(group) for group in np.split(order, list(cuts))]


def bsfl_genie(
    mean_speed: npt.ArrayLike, generalization: npt.ArrayLike, clients_per_round: int, alpha: float
) -> tuple[IntArray, float]:
    """Return the set with the largest mean reward of one round, for the history behind ``generalization``.

    Args:
        mean_speed: mu_k, each client's mean of tau_min / tau_k, shape (K,).
        generalization: g_k at the beginning of the round, shape (K,).
        clients_per_round: m; for m >= K the result is all K clients.
        alpha: Weight of the generalization term, at least 0.

    Returns:
        Indices of the set, ascending, and its mean reward: min mu + (alpha / m) sum of g over the set.

    Raises:
        ParameterError: An array is empty, not finite or of another length, ``clients_per_round`` < 1, or ``alpha`` < 0.

    References:
        [2], equation (6), solved exactly by :func:`fedsel_flwr.selectors.bsfl.maximize`.

    >>> chosen, value = bsfl_genie([0.9, 0.8, 0.1], [0.0, -0.1, 0.9], 2, 1.0)
    >>> chosen, round(value, 6)
    (array([0, 1]), 0.75)
    """
    mean = finite_means("mean_speed", mean_speed)
    g = finite_means("generalization", generalization)
    m, alpha = whole("clients_per_round", clients_per_round, 1), real("alpha", alpha, at_least=0.0)
    chosen = maximize(mean, g, m, alpha)  # (6)
    return chosen, float(mean[chosen].min() + alpha / m * g[chosen].sum())  # r*(t), (6)


def finite_means(name: str, values: Any) -> FloatArray:
    """Return ``values`` as a copied array of shape (K,), K >= 1, of finite numbers."""
    array = column(name, values, np.shape(values)[0] if np.ndim(values) else 0)
    if array.size == 0 or not np.isfinite(array).all():
        raise ParameterError(
            f"{name} must hold one finite number per client, got {values!r}. Give every client's number"
        )
    return array


def xia_regret(mean_reward: npt.ArrayLike, choices: Choices, clients_per_round: int) -> FloatArray:
    """Return the cumulative regret of Xia's ideal scenario after each round.

    Args:
        mean_reward: mu_k, each client's mean reward, shape (K,).
        choices: The selected clients: a boolean array of shape (rounds, K), or a sequence with one array of indices per
            round. A round without selected clients has reward 0.
        clients_per_round: m of the genie, the paper's N.

    Returns:
        Regret after rounds 1, 2, …, shape (rounds,). It falls only in rounds with fewer than m clients.

    Raises:
        ParameterError: An argument has the wrong shape, or a round has an unknown client or more than m clients.

    References:
        [1], equation (14).

    >>> xia_regret([0.9, 0.5, 0.7], [[0, 1], [0, 2]], 2).round(6).tolist()
    [0.2, 0.2]
    """
    _, best = xia_genie(mean_reward, clients_per_round)
    return fair_regret(mean_reward, choices, best, clients_per_round)


def fair_regret(
    mean_reward: npt.ArrayLike, choices: Choices, best_reward: float, clients_per_round: int | None = None
) -> FloatArray:
    """Return the cumulative regret against a policy that earns ``best_reward`` on average in every round.

    Args:
        mean_reward: mu_k, each client's mean reward, shape (K,).
        choices: The selected clients, as in :func:`xia_regret`.
        best_reward: r*, from :func:`~fedsel_flwr.theory.program.fair_optimum`.
        clients_per_round: m; None skips the check of the number of selected clients.

    Returns:
        Regret after rounds 1, 2, …, shape (rounds,). It is negative for a policy that ignores the fairness, or that has
        not met it yet.

    Raises:
        ParameterError: An argument has the wrong shape, or a round has an unknown client or more than m clients.

    References:
        [1], equation (25).

    >>> fair_regret([0.9, 0.5, 0.7], [[0, 1], [0, 2]], 0.6).round(6).tolist()
    [0.1, 0.0]
    """
    mean = finite_means("mean_reward", mean_reward)
    chosen = _as_matrix(choices, mean.size, clients_per_round)
    return np.asarray(np.cumsum(real("best_reward", best_reward) - _smallest_mean(mean, chosen)))  # (14), (25)


def bsfl_regret(
    mean_speed: npt.ArrayLike,
    choices: Choices,
    clients_per_round: int,
    alpha: float,
    beta: int = 1,
    data_weights: npt.ArrayLike | None = None,
    quantized: tuple[float, Rounding] | None = None,
) -> FloatArray:
    """Return the cumulative regret of BSFL's reward along the policy's own history.

    In each round the genie selects the best set for that round alone, with the history of the policy. Every client is
    available.

    Args:
        mean_speed: mu_k, each client's mean of tau_min / tau_k, shape (K,).
        choices: The selected clients, as in :func:`xia_regret`.
        clients_per_round: m.
        alpha: Weight of the generalization term, at least 0.
        beta: Exponent of g_k, a natural number.
        data_weights: d_k of (4), shape (K,), any positive scale; None for the i.i.d. balanced target m/K of (3).
        quantized: Step of the rewards, above 0, and "down" or "nearest": rewards are rounded to multiples of the step.
            The analysis assumes such rewards (below (6)) and gives no step. None for the rewards (5) themselves.

    Returns:
        Regret after rounds 1, 2, …, shape (rounds,). It never falls if every round has m clients.

    Raises:
        ParameterError: An argument has the wrong shape or is out of range, or a round has an unknown client or more
            than m clients.

    References:
        [2], equations (3)-(7), Theorem 1.

    >>> bsfl_regret([0.9, 0.5, 0.4], [[0], [0], [0]], 1, 2.0).round(6).tolist()  # round 2: 1's .5 + 2(1/3) beat .567
    [0.0, 0.6, 1.533333]
    """
    mean = finite_means("mean_speed", mean_speed)
    m, beta = whole("clients_per_round", clients_per_round, 1), whole("beta", beta, 1)
    alpha = real("alpha", alpha, at_least=0.0)
    chosen = _as_matrix(choices, mean.size, m)
    weights = np.ones(mean.size) if data_weights is None else finite_means("data_weights", data_weights)
    if weights.size != mean.size or weights.min() < 0 or not weights.sum() > 0:
        raise ParameterError(f"data_weights must be {mean.size} numbers of at least 0, not all 0, got {data_weights!r}")
    plays_before: IntArray = np.cumsum(chosen, axis=0) - chosen  # c_{k,t}
    rounds = np.arange(1, len(chosen) + 1)[:, None]
    below = m * weights / weights.sum() - plays_before / rounds  # (3), (4)
    g = np.abs(below) ** beta * np.sign(below)  # (3), (4)
    best = np.array([bsfl_genie(mean, row, m, alpha)[1] for row in g])  # r*(t), (6)
    reward = _smallest_mean(mean, chosen) + alpha / m * np.where(chosen, g, 0.0).sum(axis=1)  # (5)
    if quantized is not None:
        step, rounding = real("step", quantized[0], above=0.0), one_of("rounding", quantized[1], get_args(Rounding))
        best, reward = (np.floor(own / step + (rounding == "nearest") / 2) * step for own in (best, reward))
    return np.asarray(np.cumsum(best - reward))  # (7)


def _smallest_mean(mean: FloatArray, chosen: BoolArray) -> FloatArray:
    """Return mu(S), the smallest mean of the selected clients of each round; 0 for an empty round."""
    smallest = np.where(chosen, mean, np.inf).min(axis=1)  # mu(S), below (14)
    return np.asarray(np.where(np.isfinite(smallest), smallest, 0.0))


def _as_matrix(choices: Choices, num_clients: int, clients_per_round: int | None) -> BoolArray:
    """Return ``choices`` as a boolean array of shape (rounds, K)."""
    if isinstance(choices, np.ndarray) and choices.dtype == np.bool_:
        if choices.ndim != 2 or choices.shape[1] != num_clients:
            raise ParameterError(f"choices must have shape (rounds, {num_clients}), got {choices.shape}")
        chosen = choices
    else:
        chosen = np.zeros((len(choices), num_clients), dtype=np.bool_)
        for row, clients in zip(chosen, choices, strict=True):
            chosen_now = indices("every round of choices", clients)
            if chosen_now.max(initial=-1) >= num_clients:
                raise ParameterError(f"choices must name clients below {num_clients}, got {int(chosen_now.max())}")
            row[chosen_now] = True
    most = int(chosen.sum(axis=1).max(initial=0))
    if clients_per_round is not None and most > clients_per_round:
        raise ParameterError(f"choices must name at most m = {clients_per_round} clients a round, got {most}. Raise m")
    return chosen


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
