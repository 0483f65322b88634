"""True means of a system model: what no selector knows, and what regret and genies are measured by."""

from __future__ import annotations

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.delays import System

POINTS = 4096
"""Over how many points means are taken; their error is about a thousandth of the spread."""
PLASTIC = 1.2207440846057596
"""The root of x^4 = x + 1, which generalizes the golden ratio to three dimensions."""


def cube() -> FloatArray:
    """Return points that are evenly spread over the unit cube, shape (n, 3), none of them on a face.

    References:
        M. Roberts, "The unreasonable effectiveness of quasirandom sequences", 2018 (the sequence R_3).
    """
    steps = PLASTIC ** -np.arange(1.0, 4.0)
    return np.asarray((0.5 + np.arange(1, POINTS + 1)[:, np.newaxis] * steps) % 1.0)


def mean_latencies(system: System) -> FloatArray:
    """Return each client's mean latency over the rounds, capped at the deadline, s, shape (num_clients,).

    Args:
        system: The system model of a run.

    Example:
        >>> from fedsel_flwr.clients.system import SystemModel
        >>> mean_latencies(SystemModel(num_clients=3, seed=1)).round(2).tolist()
        [0.2, 0.15, 0.31]
    """
    return system.mean_latencies(cube())
