"""How far clients' models are from the global one."""

from __future__ import annotations

import math

import numpy as np

from fedsel_flwr.rounds.models import Arrays


def update_norm(arrays: Arrays, reference: Arrays) -> float:
    """The L2 norm of a client's update over all its arrays, computed in float64.

    Args:
        arrays: The client's model, finite and in the form of the global one.
        reference: The global model it received.

    >>> update_norm([np.ones((2, 2)), np.array([3.0])], [np.zeros((2, 2)), np.zeros(1)])  # sqrt(4 + 9)
    3.605551275463989
    """
    squares = 0.0
    for array, own in zip(arrays, reference, strict=True):
        difference = np.subtract(array, own, dtype=np.float64).ravel()
        squares += float(np.dot(difference, difference))
    return math.sqrt(squares)


def fault_in_norm(arrays: Arrays, reference: Arrays, limit: float | None) -> str:
    """Why an update is too large; empty if it is not, or there is no limit."""
    if limit is None or (norm := update_norm(arrays, reference)) <= limit:
        return ""
    return f"update norm: {norm:.6g} is above max_update_norm = {limit:g}"
