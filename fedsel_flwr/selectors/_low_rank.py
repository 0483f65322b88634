"""A Gaussian process over clients whose covariance is s^2 I + X^T X, never written out (FedCor).

X has D rows and a column for each of n clients, so everything here costs O(n D^2) time and O(n D) memory.

============  =============  ====================================================
FedCor        here           meaning
============  =============  ====================================================
X             ``x``          embeddings, shape (D, n)
Sigma         (nothing)      s^2 I + X^T X, the prior covariance of loss changes
sigma         ``noise``      s, standard deviation of a loss change's own noise
============  =============  ====================================================
"""

from __future__ import annotations

import math

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray

FIRST, SECOND, TINY = 0.9, 0.999, 1e-8
"""Adam's constants."""
LOG_2_PI = math.log(2.0 * math.pi)


class Evidence:
    """Samples of loss changes of mean 0, and how unlikely an embedding makes them.

    Args:
        samples: Shape (T, n); NaN where a client has none, which leaves it out of that sample.
        weights: Shape (T,).
        noise: s, above 0.

    >>> value, gradient = Evidence(np.ones((1, 1)), np.ones(1), 1.0).cost(np.zeros((1, 1)))
    >>> round(value, 4), gradient.tolist()  # log sqrt(2 pi) + 1/2
    (1.4189, [[0.0]])
    """

    def __init__(self, samples: FloatArray, weights: FloatArray, noise: float) -> None:
        there = ~np.isnan(samples)
        masks, group = np.unique(there, axis=0, return_inverse=True)  # samples of the same clients share a matrix
        self._group: IntArray = np.asarray(group).ravel()
        self._masks: FloatArray = masks.astype(np.float64)  # (G, n)
        self._there, self._samples = there, np.where(there, samples, 0.0)
        self._weights, self._noise = weights, noise

    def cost(self, x: FloatArray) -> tuple[float, FloatArray]:
        """The weighted negative log marginal likelihood, nats, and its gradient in ``x``, both of shape (D, n)."""
        size, variance, weights = len(x), self._noise**2, self._weights
        seen = x[None] if self._there.all() else x * self._masks[:, None, :]  # (G, D, n)
        inner = variance * np.eye(size) + seen @ x.T  # s^2 I + X X^T of each group's clients
        inverse = np.linalg.inv(inner)
        held = self._samples @ x.T  # X y, (T, D)
        solved = (inverse[self._group] @ held[:, :, None])[:, :, 0]
        alpha = self._there * (self._samples - solved @ x) / variance  # Sigma^-1 y, by Woodbury
        counts = self._masks.sum(axis=1)
        log_det = (counts - size) * np.log(variance) + np.linalg.slogdet(inner)[1]
        squares = (self._samples * alpha).sum(axis=1)
        value = 0.5 * float(weights @ (squares + (log_det + counts * LOG_2_PI)[self._group]))  # -log N(y; 0, Sigma)
        mass = np.bincount(self._group, weights=weights)
        spread = ((inverse * mass[:, None, None]) @ seen).sum(axis=0)  # X Sigma^-1
        return value, spread - (solved * weights[:, None]).T @ alpha  # X Sigma^-1 - (X alpha) alpha^T


def fit(
    x: FloatArray, samples: FloatArray, weights: FloatArray, noise: float, *, steps: int, rate: float
) -> FloatArray:
    """Return ``x``, shape (D, n), after so many steps of Adam down :meth:`Evidence.cost`; ``x`` stays as it is.

    Args:
        x: Embeddings to begin with.
        samples: Shape (T, n), as :class:`Evidence` takes them.
        weights: Shape (T,).
        noise: s.
        steps: Steps of Adam, which starts anew.
        rate: Its learning rate.
    """
    evidence = Evidence(samples, weights, noise)
    x = np.array(x, order="C")
    first, second, held = np.zeros_like(x), np.zeros_like(x), np.empty_like(x)
    for step in range(1, steps + 1):
        gradient = evidence.cost(x)[1]
        first *= FIRST
        first += np.multiply(gradient, 1.0 - FIRST, out=held)
        second *= SECOND
        second += np.multiply(np.square(gradient, out=gradient), 1.0 - SECOND, out=held)
        np.sqrt(np.divide(second, 1.0 - SECOND**step, out=held), out=held)
        held += TINY
        np.divide(first, held, out=held)
        held *= rate / (1.0 - FIRST**step)
        x -= held
    return x


class Posterior:
    """The covariance of the clients that are not conditioned on yet, s^2 I + X^T M X.

    Args:
        x: Embeddings, shape (D, n).
        noise: s.
    """

    def __init__(self, x: FloatArray, noise: float) -> None:
        self._x, self._noise = x, noise
        self._inner = np.eye(len(x))  # M

    def variance(self, clients: IntArray) -> FloatArray:
        """S_kk of ``clients``, shape (k,)."""
        x = self._x[:, clients]
        return np.asarray(self._noise**2 + (x * (self._inner @ x)).sum(axis=0))

    def toward(self, clients: IntArray, weights: FloatArray) -> FloatArray:
        """Sum over i of weights_i S_ik for each k of ``clients``, weights of shape (n,) and 0 where conditioned on."""
        pull = self._inner @ (self._x @ weights)
        return np.asarray(self._noise**2 * weights[clients] + self._x[:, clients].T @ pull)

    def condition(self, client: int) -> None:
        """S - S_k S_k^T / S_kk, on the other clients."""
        column = self._inner @ self._x[:, client]
        self._inner -= np.outer(column, column) / (self._noise**2 + self._x[:, client] @ column)
