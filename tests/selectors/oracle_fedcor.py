"""FedCor's Gaussian process with the covariance written out, and its greedy choice step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def covariance(x: Array, noise: float) -> Array:
    """X^T X + s^2 I."""
    return np.asarray(x.T @ x + noise**2 * np.eye(x.shape[1]))


def cost(x: Array, samples: Array, weights: Sequence[float], noise: float) -> float:
    """The weighted negative log density of the samples, each over the clients that it has."""
    total = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        there = [k for k in range(len(sample)) if not math.isnan(sample[k])]
        sigma, y = covariance(x[:, there], noise), sample[there]
        total += weight * 0.5 * (y @ np.linalg.solve(sigma, y) + np.linalg.slogdet(2 * math.pi * sigma)[1])
    return float(total)


def slope(x: Array, samples: Array, weights: Sequence[float], noise: float, step: float = 1e-6) -> Array:
    """The gradient of :func:`cost` by central differences."""
    found = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        both = (cost(x + sign * moved, samples, weights, noise) for sign in (1, -1))
        found[place] = (next(both) - next(both)) / (2 * step)
    return found


def adam(x: Array, samples: Array, weights: Sequence[float], noise: float, steps: int, rate: float) -> Array:
    """Adam as printed (Kingma and Ba, Algorithm 1), with the slope above."""
    first, second = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, steps + 1):
        g = slope(x, samples, weights, noise)
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        x = x - rate * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
    return x


def posterior(sigma: Array, seen: Sequence[int], left: Sequence[int]) -> Array:
    """The covariance of ``left`` given the values of ``seen``, in one formula."""
    if not seen:
        return sigma[np.ix_(left, left)]
    cross = sigma[np.ix_(seen, left)]
    return np.asarray(sigma[np.ix_(left, left)] - cross.T @ np.linalg.solve(sigma[np.ix_(seen, seen)], cross))


def greedy(
    sigma: Array, share: Sequence[float], discount: Sequence[float], available: Sequence[int], count: int
) -> list[int]:
    """Argmax of a_k / sqrt(S_kk) times the sum over those not chosen of p_i S_ik, one after the other."""
    chosen: list[int] = []
    for _ in range(count):
        left = [k for k in range(len(sigma)) if k not in chosen]
        now = posterior(sigma, chosen, left)
        scores = {
            k: discount[k] / math.sqrt(now[place, place]) * sum(share[i] * now[j, place] for j, i in enumerate(left))
            for place, k in enumerate(left)
            if k in available
        }
        chosen.append(max(scores, key=lambda k: scores[k]))
    return chosen
