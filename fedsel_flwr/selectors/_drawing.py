"""Weighted draws without replacement, and whole parts of products of decimals."""

from __future__ import annotations

import math

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.selectors._top import top


def draw(generator: np.random.Generator, clients: IntArray, log_weight: FloatArray, count: int) -> IntArray:
    """Draw clients one after the other without replacement, each in proportion to its weight among those left.

    These are the largest of ln(weight) + Gumbel noise (W. Kool et al., Stochastic beams and where to find them, ICML
    2019). Clients of weight 0 come after all others, in random order.

    Args:
        generator: Draws.
        clients: Whom to draw from, shape (n,).
        log_weight: Logarithm of each one's weight, any scale, -inf for weight 0, shape (n,).
        count: How many to draw, at least 0; n and more draw everybody.

    Returns:
        Clients, shape (min(count, n),), in the order drawn.

    >>> import numpy as np
    >>> generator = np.random.default_rng(0)
    >>> first = [int(draw(generator, np.array([4, 7]), np.log([1.0, 9.0]), 1)[0]) for _ in range(2000)]
    >>> round(first.count(7) / 2000, 1)
    0.9
    """
    if count < 1 or not clients.size:
        return clients[:0]
    order = generator.permutation(clients.size)
    noise = generator.gumbel(size=clients.size)
    return clients[order[top(log_weight[order] + noise, count)]]


def whole_part(number: float) -> int:
    """Return floor(number); what lies below a whole number by rounding counts as that number.

    >>> whole_part(10 * (1 - 0.9)), whole_part(0.75 * 7)
    (1, 5)
    """
    return math.floor(number + 1e-9)
