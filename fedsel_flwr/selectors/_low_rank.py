"""A Gaussian process over clients whose covariance is s^2 I + X^T X, never written out (FedCor).

X has D rows and a column for each of n clients. A fit costs O(T n D^2) time for T samples, a choice O(n D) for each
client chosen; memory is O((T + D) n).

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
EM_STEPS = 10
"""Steps of expectation-maximization where samples have gaps."""
RIDGE = 1e-12
"""Part of a matrix's mean diagonal that is added to it, so that rounding never makes it singular."""
EM_BLOCK = 4096
"""Clients whose embeddings are solved for at a time."""
TINIEST = 1e-300
"""Keeps a sum of nothing from dividing by 0."""
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

    def improved(self, x: FloatArray) -> FloatArray:
        """Embeddings of shape (D, n) after a step of expectation-maximization: their cost is not above that of ``x``.

        A sample is y = X^T z + noise over its clients, with z standard normal: z is expected first, then each client's
        embedding is the regression of its loss changes on z.
        """
        mean, square = self._expected(x)
        better = np.zeros_like(x)
        for start in range(0, x.shape[1], EM_BLOCK):
            some = slice(start, start + EM_BLOCK)
            share = self._there[:, some].T * self._weights  # (k, T)
            share /= np.maximum(share.sum(axis=1, keepdims=True), TINIEST)
            inner = np.tensordot(share, square, axes=1)  # (k, D, D)
            ridge = RIDGE * np.trace(inner, axis1=1, axis2=2) / len(x) + TINIEST
            held = (share * self._samples[:, some].T) @ mean
            better[:, some] = np.linalg.solve(inner + ridge[:, None, None] * np.eye(len(x)), held[:, :, None])[..., 0].T
        return better

    def _expected(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """E z and E z z^T of each sample, given what it holds; shapes (T, D) and (T, D, D)."""
        variance, inverse = self._noise**2, np.zeros((len(self._masks), len(x), len(x)))
        for mask, one in zip(self._masks, inverse, strict=True):
            values, vectors = np.linalg.eigh((x * mask) @ x.T)
            one[:] = (vectors / (np.maximum(values, 0.0) + variance)) @ vectors.T  # (s^2 I + X X^T)^-1
        mean = (inverse[self._group] @ (self._samples @ x.T)[:, :, None])[:, :, 0]  # E z
        return mean, variance * inverse[self._group] + mean[:, :, None] * mean[:, None, :]  # E z z^T


def closed_form(samples: FloatArray, weights: FloatArray, noise: float, size: int) -> FloatArray:
    """Embeddings of shape (size, n) of the least :meth:`Evidence.cost` that complete samples allow.

    This is probabilistic principal component analysis with known noise: of S = sum_t w_t y_t y_t^T / sum_t w_t the
    ``size`` largest eigenvalues less s^2, and their eigenvectors. They come from the T x T Gram matrix of the samples.
    The embeddings are determined up to a rotation of all of them, on which no choice depends. Gaps are taken for 0.

    Args:
        samples: Shape (T, n), as :class:`Evidence` takes them.
        weights: Shape (T,).
        noise: s.
        size: D.

    References:
        M. E. Tipping, C. M. Bishop, Probabilistic principal component analysis, JRSS B 1999, (7) and (8).

    >>> np.abs(closed_form(np.array([[0.5, 1.2]]), np.ones(1), 0.5, 2)).round(3)  # 1.3^2 - 0.5^2 = 1.2^2
    array([[0.462, 1.108],
           [0.   , 0.   ]])
    """
    scaled = np.nan_to_num(samples) * np.sqrt(weights / weights.sum())[:, None]
    values, vectors = np.linalg.eigh(scaled @ scaled.T)
    values, vectors = values[::-1][:size], vectors[:, ::-1][:, :size]
    length = np.sqrt(np.maximum(values - noise**2, 0.0) / np.maximum(values, noise**2))
    x = np.zeros((size, samples.shape[1]))
    x[: len(values)] = (vectors * length).T @ scaled
    return x


def likeliest(samples: FloatArray, weights: FloatArray, noise: float, size: int) -> FloatArray:
    """:func:`closed_form`, and if samples have gaps, :data:`EM_STEPS` steps of :meth:`Evidence.improved` from there."""
    x = closed_form(samples, weights, noise, size)
    if np.isnan(samples).any():
        evidence = Evidence(samples, weights, noise)
        for _ in range(EM_STEPS):
            x = evidence.improved(x)
    return x


def adam(
    x: FloatArray, samples: FloatArray, weights: FloatArray, noise: float, *, steps: int, rate: float
) -> FloatArray:
    """Return ``x``, shape (D, n), after so many steps of Adam down :meth:`Evidence.cost`; ``x`` stays as it is.

    Args:
        x: Embeddings to begin with.
        samples: Shape (T, n), as :class:`Evidence` takes them.
        weights: Shape (T,).
        noise: s.
        steps: Steps of Adam, whose means begin at 0.
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
    """The covariance S = s^2 I + X^T M X of the clients that are not conditioned on yet, as far as a choice reads it.

    Args:
        x: Embeddings, shape (D, n).
        noise: s.
        weights: p, shape (n,).
        clients: Whose numbers are kept, shape (k,).

    Attributes:
        variance: S_kk of ``clients``, shape (k,).
        toward: Sum over i of p_i S_ik for each k of ``clients``, i being every client that is not conditioned on.

    >>> posterior = Posterior(np.array([[2.0, 1.0]]), 1.0, np.array([0.5, 0.5]), np.arange(2))
    >>> posterior.variance, posterior.toward  # S = (5 2; 2 2)
    (array([5., 2.]), array([3.5, 2. ]))
    >>> posterior.condition(0)
    >>> posterior.variance, posterior.toward  # 2 - 2^2 / 5, halved in the sum: 0 is conditioned on
    (array([1. , 1.2]), array([0. , 0.6]))
    """

    def __init__(self, x: FloatArray, noise: float, weights: FloatArray, clients: IntArray) -> None:
        self._x, self._floor = np.ascontiguousarray(x[:, clients]), noise**2
        self._inner = np.eye(len(x))  # M
        self.variance: FloatArray = self._floor + np.square(self._x).sum(axis=0)
        self.toward: FloatArray = self._floor * weights[clients] + (x @ weights) @ self._x

    def condition(self, place: int) -> None:
        """Condition on the client at ``place``: S - S_c S_c^T / S_cc; what is left of S_cc is never read.

        The sum toward k loses p_c S_ck too: the row of c is 0 after that, whatever its weight.
        """
        column = self._inner @ self._x[:, place]
        variance = self.variance[place]
        shared = column @ self._x
        shared[place] = variance  # S_cc holds the noise too
        self._inner -= np.outer(column, column) / variance
        self.toward -= shared * (self.toward[place] / variance)  # v_k - S_kc v_c / S_cc
        self.variance -= np.square(shared) / variance  # S_kk - S_kc^2 / S_cc
        np.maximum(self.variance, self._floor, out=self.variance)
