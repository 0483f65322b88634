"""CS-UCB-Q meets its fairness constraint (6), sooner the larger beta is: Xia et al. (2020), Theorem 3 and Fig. 5.

K = 3 clients, m = 2 a round, c = (.6, .5, .4), each client available with probability .9, max_latency 5 s. "Meets c"
means that the fraction of rounds in which a client was chosen is at least c_k - .01.

"beta = 1e-5 never meets c_1" (Fig. 5) was confirmed for latencies well apart, and in no placement of the model as
printed: docs/papers/xia.md has the numbers.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.theory.playing import play

ROUNDS, MAX_LATENCY, AVAILABILITY = 8_000, 5.0, 0.9
FAIRNESS = np.array([0.6, 0.5, 0.4])


def gaps(queue_weight: float) -> np.ndarray:
    """Return by how much each share of the rounds is above c_k; latencies within 20 % of 3, 1.5 and .5 s."""
    latency = np.array([3.0, 1.5, 0.5]) * np.random.default_rng(11).uniform(0.8, 1.2, (ROUNDS, 3))
    here = np.random.default_rng(7).random(latency.shape) < AVAILABILITY
    parameters = {"max_latency": MAX_LATENCY, "fairness": FAIRNESS, "queue_weight": queue_weight}
    chosen = play("cs-ucb-q", latency, 2, available=here, **parameters)
    assert (chosen <= here).all()
    np.testing.assert_array_equal(chosen.sum(axis=1), np.minimum(here.sum(axis=1), 2))
    return chosen.mean(axis=0) - FAIRNESS


@pytest.mark.parametrize("queue_weight", [0.01, 0.1])
def test_fairness_is_met(queue_weight: float) -> None:
    """Theorem 3, within .01."""
    assert (gaps(queue_weight) >= -0.01).all()


def test_a_tiny_weight_does_not_serve_the_slowest_client() -> None:
    """Fig. 5: with 1e-5 client 1's constraint is violated, by far; the two fast ones are served."""
    first, second, third = gaps(1e-5)
    assert first < -0.3
    assert min(second, third) > 0.3
