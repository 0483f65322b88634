"""CS-UCB-Q meets its fairness constraint (6), sooner the larger beta is: Xia et al. (2020), Theorem 3 and Fig. 5.

K = 3 clients, m = 2 a round, c = (.6, .5, .4), each client available with probability .9, max_latency 5 s. "Meets c"
means that the fraction of rounds in which a client was chosen is at least c_k - .01.

In Xia's own latency model (section V) yhat of (26) is cut at 1 for as long as the bonus is larger than a client's
normalized mean latency. While all three are cut the queues alone decide, whatever beta is: "beta = 1e-5 never meets
c_1" (Fig. 5) was confirmed for latencies well apart, and in no placement of the model as printed. docs/papers/xia.md
has the numbers.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fedsel_flwr.clients.system import SystemModel
from tests.theory.playing import play, xia_latencies

ROUNDS, MAX_LATENCY, AVAILABILITY = 20_000, 5.0, 0.9
FAIRNESS = np.array([0.6, 0.5, 0.4])


@cache
def latencies(placement: int | None) -> np.ndarray:
    """Return latencies of one of Xia's placements, or within 20 % of means well apart, in s, shape (rounds, 3)."""
    if placement is not None:
        return xia_latencies(SystemModel(num_clients=3, seed=placement, max_latency_s=MAX_LATENCY), ROUNDS, 11)
    return np.array([3.0, 1.5, 0.5]) * np.random.default_rng(11).uniform(0.8, 1.2, (ROUNDS, 3))


@cache
def gaps(queue_weight: float, placement: int | None = None, since: int = 0, rounds: int = ROUNDS) -> np.ndarray:
    """Return by how much each client's fraction of the rounds after round ``since`` is above c_k."""
    latency = latencies(placement)[:rounds]
    here = np.random.default_rng(7).random(latency.shape) < AVAILABILITY
    parameters = {"max_latency": MAX_LATENCY, "fairness": FAIRNESS, "queue_weight": queue_weight}
    chosen = play("cs-ucb-q", latency, 2, available=here, **parameters)
    assert (chosen <= here).all()
    np.testing.assert_array_equal(chosen.sum(axis=1), np.minimum(here.sum(axis=1), 2))
    return chosen[since:].mean(axis=0) - FAIRNESS


@pytest.mark.parametrize("queue_weight", [0.01, 0.1])
def test_fairness_is_met(queue_weight: float) -> None:
    """Theorem 3, within .01."""
    assert (gaps(queue_weight, rounds=8000) >= -0.01).all()


def test_a_tiny_weight_does_not_serve_the_slowest_client() -> None:
    """Fig. 5: with 1e-5 client 1's constraint is violated, by far; the two fast ones are served."""
    first, second, third = gaps(1e-5, rounds=8000)
    assert first < -0.3
    assert min(second, third) > 0.3


@pytest.mark.slow
def test_a_smaller_weight_is_slower() -> None:
    """Client 1's fraction after 20,000 rounds grows with beta."""
    first = [gaps(queue_weight)[0] for queue_weight in (1e-5, 1e-4, 1e-3, 1e-2)]
    assert (np.diff(first) > 0.01).all()


@pytest.mark.slow
@pytest.mark.parametrize("placement", [2, 5])
def test_fairness_is_met_in_xias_model(placement: int) -> None:
    assert (gaps(0.01, placement) >= -0.01).all()


@pytest.mark.slow
def test_a_tiny_weight_suffices_while_the_estimates_are_cut() -> None:
    """Placement 2: yhat stays at 1 for all 20,000 rounds, so 1e-5 chooses as .01 does and meets c."""
    tiny, usual = (gaps(queue_weight, 2) for queue_weight in (1e-5, 0.01))
    assert (tiny >= 0.05).all()
    np.testing.assert_allclose(tiny, usual, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [1, 5])
def test_a_tiny_weight_meets_fairness_by_its_early_rounds(placement: int) -> None:
    """The slowest client is served as the others while yhat is cut, then less than c_k; c is met on the whole."""
    slowest = int(np.argmax(latencies(placement).mean(axis=0)))
    late = gaps(1e-5, placement, since=ROUNDS // 2)
    assert (gaps(1e-5, placement) >= -0.01).all()
    assert late[slowest] < -0.01
    assert (np.delete(late, slowest) > 0.1).all()
