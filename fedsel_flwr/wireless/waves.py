"""Waves: time of a round whose clients share a limited number of channels."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedsel_flwr.checks import FloatArray, whole
from fedsel_flwr.errors import ParameterError


def round_time(latency_s: ArrayLike, channels: int) -> float:
    """Return the time of one round.

    A round waits for its slowest client. Xia selects as many clients as there are channels. A larger cohort (ours) runs
    in waves of `channels` clients, in the order of the array. A wave starts when the previous wave has ended.

    Args:
        latency_s: Seconds of each client of the cohort, shape (n,), already capped at the deadline.
        channels: Number of clients that can transmit at the same time, at least 1.

    Returns:
        Seconds: the sum of the waves' maxima; 0 for an empty cohort.

    Raises:
        ParameterError: If a latency is negative or not finite, the shape is wrong, or `channels` is below 1.

    References:
        Xia et al., "Multi-armed bandit-based client scheduling for federated learning", equation (7).

    Example:
        >>> round_time([1.0, 3.0, 2.0], 2)
        5.0
    """
    latency, width = _checked(latency_s, channels)
    if latency.size == 0:
        return 0.0
    return float(_slowest_per_wave(latency, width).sum())


def finish_times(latency_s: ArrayLike, channels: int) -> FloatArray:
    """Return the time at which each client of a cohort finishes.

    Args:
        latency_s: Seconds of each client of the cohort, shape (n,), already capped at the deadline.
        channels: Number of clients that can transmit at the same time, at least 1.

    Returns:
        Seconds from the start of the round, shape (n,): the time of the earlier waves plus the client's latency. The
        latest of these times is the result of :func:`round_time`.

    Raises:
        ParameterError: As for :func:`round_time`.

    Example:
        >>> finish_times([1.0, 3.0, 2.0], 2).tolist()
        [1.0, 3.0, 5.0]
    """
    latency, width = _checked(latency_s, channels)
    if latency.size == 0:
        return latency
    ends = np.cumsum(_slowest_per_wave(latency, width))
    starts = np.concatenate([[0.0], ends[:-1]])
    return np.asarray(starts[np.arange(latency.size) // width] + latency)


def _slowest_per_wave(latency: FloatArray, width: int) -> FloatArray:
    """Return each wave's largest latency."""
    return np.asarray(np.maximum.reduceat(latency, np.arange(0, latency.size, width)))  # (7), once per wave


def _checked(latency_s: ArrayLike, channels: int) -> tuple[FloatArray, int]:
    """Check both arguments and convert them."""
    latency = np.asarray(latency_s, dtype=np.float64)
    if latency.ndim != 1:
        raise ParameterError(f"latency_s must have shape (n,), got {latency.shape}. Give one number per client")
    if not np.all(np.isfinite(latency) & (latency >= 0)):
        raise ParameterError(f"latency_s must be finite and at least 0, got {latency_s!r}. Cap it at the deadline")
    return latency, whole("channels", channels, 1)
