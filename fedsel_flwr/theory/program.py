"""Fair optimum: the best stationary policy under fairness and availability, by linear programming.

References:
    W. Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE Transactions on Wireless
    Communications 19(11), 2020, equations (21)-(24).

===============  ======================  =====================================================================
paper            here                    meaning
===============  ======================  =====================================================================
N                ``clients_per_round``   clients per round (wireless channels)
mu_k             ``mean_reward``         mean reward of client k; mu(S) is the smallest mean in S
P_A(e)           ``availability``        probability that e is the set of available clients
c_k              ``fairness``            smallest fraction of the rounds for client k
q_S(e)           ``policy[e][S]``        probability of selecting S when e is available
r*               ``best_reward``         mean reward of the best policy that meets the fairness
===============  ======================  =====================================================================

Deviations:
    * (23) prints the sum of q_S(e) over e. Here the sum over S is 1 for each e, as in the text before (21).
    * Q(e) holds only sets of exactly min(N, |e|) clients, (10), and no smaller sets, (5). Smaller sets have larger
      minima, so without fairness a single client would win. mu of the empty set is 0.
"""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, real, whole
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.theory.regret import finite_means

Clients = tuple[int, ...]
MAX_VARIABLES = 20_000
"""Largest number of variables: about 10 clients that come and go, or m = 5 of 20 that are always available."""


def fair_optimum(
    mean_reward: npt.ArrayLike, availability: npt.ArrayLike, fairness: npt.ArrayLike, clients_per_round: int
) -> tuple[float, dict[Clients, dict[Clients, float]]]:
    """Return the largest mean reward of any policy that knows only the available clients, and that policy.

    Args:
        mean_reward: mu_k, each client's mean reward, shape (K,).
        availability: Each client's probability of being available, independent of other clients, shape (K,) or one
            number for all.
        fairness: c_k, the smallest fraction of the rounds for each client, shape (K,) or one number for all, in [0, 1].
        clients_per_round: m, the paper's N.

    Returns:
        ``(best_reward, policy)``: r*, and for each available set the selections with a probability above 0.

    Raises:
        ParameterError: An argument is out of range, no policy meets the fairness, or the program is too large.
        RunError: SciPy's solver did not finish.

    References:
        Xia et al., equations (23) and (24).

    >>> best_reward, policy = fair_optimum([0.4, 0.7, 0.9], 1.0, [0.6, 0.5, 0.4], 2)
    >>> round(best_reward, 6)  # the slow client 0 takes part in exactly 60 % of the rounds
    0.52
    >>> round(policy[0, 1, 2][1, 2], 6)
    0.4
    """
    mean = finite_means("mean_reward", mean_reward)
    m = whole("clients_per_round", clients_per_round, 1)
    share = _probabilities("fairness", fairness, mean.size)
    chances = _available_sets(availability, mean.size, m)
    pairs = [(e, chosen) for e in chances for chosen in combinations(e, min(m, len(e)))]  # the variables q_S(e)
    weight = np.array([chances[e] for e, _ in pairs])
    value = np.array([mean[list(chosen)].min() if chosen else 0.0 for _, chosen in pairs])  # mu(S), below (14)
    q = _solve(weight, value, pairs, list(chances), share)
    if q is None:
        raise ParameterError(
            f"fairness cannot be met with m = {m} and availability = {availability!r}: got {fairness!r}. Lower it"
        )
    policy: dict[Clients, dict[Clients, float]] = {e: {} for e in chances}
    for (e, chosen), probability in zip(pairs, q.tolist(), strict=True):
        if probability > 0.0:
            policy[e][chosen] = probability
    return float((weight * value) @ q), policy  # (24)


def _solve(
    weight: FloatArray, value: FloatArray, pairs: list[tuple[Clients, Clients]], sets: list[Clients], share: FloatArray
) -> FloatArray | None:
    """Solve (23), whose variables are the pairs (e, S); None if no policy meets the fairness."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    row_of = {e: row for row, e in enumerate(sets)}
    rows = np.array([row_of[e] for e, _ in pairs])
    members = np.array([(k, j) for j, (_, chosen) in enumerate(pairs) for k in chosen], dtype=np.int64).reshape(-1, 2)
    served = csr_array((weight[members[:, 1]], members.T), shape=(share.size, len(pairs)))  # E[b_k], (21)
    of_set = csr_array((np.ones(len(pairs)), (rows, np.arange(len(pairs)))), shape=(len(sets), len(pairs)))
    result: Any = linprog(
        -weight * value, A_ub=-served, b_ub=-share, A_eq=of_set, b_eq=np.ones(len(sets)), method="highs"
    )  # (23); q >= 0 is linprog's default, and q <= 1 follows
    # linprog's status 2: infeasible.
    if result.status == 2:
        return None
    if result.status != 0:
        raise RunError(f"the linear program (23) was not solved: {result.message}")
    # HiGHS may return a probability outside [0, 1] by its tolerance.
    return np.array(np.clip(result.x, 0.0, 1.0), dtype=np.float64)


def _available_sets(availability: npt.ArrayLike, num_clients: int, m: int) -> dict[Clients, float]:
    """Return the probability of every set that can be available, the sets ascending."""
    chance_of = _probabilities("availability", availability, num_clients).tolist()
    always, sometimes = chance_of.count(1.0), sum(0.0 < p < 1.0 for p in chance_of)
    sizes = ((math.comb(sometimes, n), always + n) for n in range(sometimes + 1))
    num_variables = sum(ways * math.comb(size, min(m, size)) for ways, size in sizes)
    # Before it takes minutes and memory.
    if num_variables > MAX_VARIABLES:
        raise ParameterError(
            f"the linear program (23) must have at most {MAX_VARIABLES} variables, got {num_variables}. Use fewer "
            "clients: about 10 that come and go, or 20 that are always available"
        )
    # Clients that are always available get one state, because a second state would double the product.
    states = [[(k, 1.0)] if p == 1.0 else [(-1, 1.0 - p), (k, p)] for k, p in enumerate(chance_of) if p > 0.0]
    return {
        tuple(k for k, _ in outcome if k >= 0): math.prod(p for _, p in outcome) for outcome in sorted(product(*states))
    }


def _probabilities(name: str, values: Any, num_clients: int) -> FloatArray:
    """Return one probability for each client; a single number applies to all clients."""
    array = np.full(num_clients, real(name, values)) if np.ndim(values) == 0 else finite_means(name, values)
    if array.shape != (num_clients,) or array.min() < 0.0 or array.max() > 1.0:
        raise ParameterError(f"{name} must be {num_clients} numbers in [0, 1], one per client, got {values!r}")
    return array
