"""FedCor: select clients whose training is expected to lower all losses, by a Gaussian process (Tang et al.).

The covariance of the process is s^2 I + X^T X. It is never written out. X has D rows and a column for each of n
clients. A fit to T samples takes O(T n D^2) time, and a selection O(n D) for each selected client. The memory
is O((T + D) n).
:class:`Evidence` is the likelihood of X, :class:`Posterior` the covariance during a selection.

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
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, one_of, real, whole
from fedsel_flwr.selectors.base import Probe, SizedSelector

DIMENSION = 15
"""Numbers in a client's embedding."""
NOISE = 0.01
"""Standard deviation of the noise of a loss change, nats."""
WARMUP_STEPS, STEPS = 150, 100
"""Steps of Adam in a round of the warm-up, and in a later round."""
KEPT = 32
"""Largest number of stored samples of loss changes."""
FITS = ("closed-form", "adam")
"""Ways to fit the embeddings."""
FIRST, SECOND, TINY = 0.9, 0.999, 1e-8
"""Adam's constants."""
EM_STEPS = 10
"""Steps of expectation-maximization, for samples with gaps."""
RIDGE = 1e-12
"""Share of a matrix's mean diagonal that is added to the matrix, so that rounding never makes it singular."""
EM_BLOCK = 4096
"""Clients per batched solve."""
TINIEST = 1e-300
"""Added to a sum that may be 0 and is a divisor."""
LOG_2_PI = math.log(2.0 * math.pi)


class FedCor(SizedSelector):
    """Learns how the clients' losses change together, and selects clients that lower the others' losses most.

    Clients whose losses fall in the same rounds are correlated, so one of them can represent the others.

    ===============  =====================  ======================================================================
    paper            here                   meaning
    ===============  =====================  ======================================================================
    X                ``_embedding``         column k: client k's 15 numbers
    Sigma            (nothing)              X^T X + 0.01^2 I, the prior covariance of loss changes, never written out
    S                ``Posterior``          covariance of the changes, given the clients selected so far
    Delta l          ``_changes``           samples: loss changes over a round of random clients
    p_i              ``_size``              client i's share of the examples
    alpha_k, beta    ``_discount``, beta    discount of a client: beta for each selection
    gamma            ``gamma``              weight of a sample, to the power of its age in rounds
    Delta t          ``interval``           rounds between new samples
    ===============  =====================  ======================================================================

    Clients are selected at random in the warm-up, and in every ``interval``-th round after the warm-up. Before such a
    round, and before the next round, a probe asks every available client for its loss. The differences of the two
    losses are a sample.

    The embeddings maximize the likelihood of all samples, each weighted by its age. If every sample contains all
    clients, the embeddings have a closed form. A difference in the last bits of the losses then changes no selection.

    When not to use:
        * The clients' connections are slow. The warm-up probes all clients in every round.
        * Other clients are available in each round. A sample needs clients that are available before and after a round.

    Deviations:
        * After the warm-up, the paper takes a new sample by training random clients on a copy of the model, and
          discards the copy. Here, the round of the sample is an ordinary round with random clients.
        * A sample contains the clients that reported their loss before and after the round. The likelihood ignores the
          other clients of this sample. If samples have gaps, ten steps of expectation-maximization follow the closed
          form. The closed form counts gaps as 0.
        * A client without a sample is independent of all others (X_k = 0).
        * Covariances include all registered clients that are not selected yet, available or not.
        * A client of unknown size counts as one of average size.
        * The samples of the warm-up need random clients. If all selectors have a common warm-up, FedCor's warm-up
          therefore starts after it. In the common warm-up no client is asked for a loss, and nothing is learned.
        * Models are averaged without weights, as in the authors' code (commit d941083, ``average_weights``). With the
          strategy's ``averaging="fedpdp"``, the numbers of examples are the weights.
        * Ties between scores are broken at random. ``max_clients`` is ours, because each client takes 425 bytes.
        * The authors' code (``GPR.py``, ``federated_main.py``, commit d941083) maximizes the likelihood by Adam with a
          learning rate of 1e-2. It takes 150 steps in the warm-up and 100 after it, from the embeddings of the last
          fit. The steps are as long as the noise's standard deviation, and the fit never converges. After a few fits, a
          difference in the last bits of the losses changes the selections. ``fit="adam"`` follows the code. A new
          client then draws its embedding from N(0, 1/15).
        * The code drops samples older than ``group_size`` rounds: 10 by default, 100 and 500 in its commands. Here, the
          32 latest samples are stored.
        * Since February 2023, the commands of the code have ``--update_mean``. The mean of the process is then the mean
          of the samples. One fit of 1,000 steps ends the warm-up, and replaces the fits in each round. Here, the mean
          is 0.
        * The warm-up of the code has ``warmup`` + 1 rounds. Here, the warm-up has ``warmup_rounds``. The code counts
          ``interval`` from the first round of the run. Here, it is counted from the last round of the warm-up.

    Args:
        clients_per_round: m.
        warmup_rounds: Number of random rounds at the beginning, at least 1: 15 (Fashion-MNIST) and 20 (CIFAR-10) in the
            paper.
        interval: Rounds between new samples, at least 1: 10 (Fashion-MNIST) and 50 (CIFAR-10) in the paper.
        gamma: Factor of a sample's weight from round to round, in (0, 1]: 0.95 and 0.99 in the paper.
        beta: Factor of a client's score for each selection since the last sample, in (0, 1]: 0.95 and 0.9 in the paper.
        fit: Fit of the embeddings: "closed-form", or "adam" as in the authors' code.
        learning_rate: Learning rate of Adam, above 0. The closed form has none.
        max_clients: Largest number of clients, at least 1.
        seed: Seed of the generator of random rounds, Adam's first embeddings and ties.

    Raises:
        ParameterError: A parameter is out of range, or there are more than ``max_clients`` clients later.

    References:
        M. Tang, X. Ning, Y. Wang, J. Sun, Y. Wang, H. Li, Y. Chen, FedCor: correlation-based active client selection
        strategy for heterogeneous federated learning, CVPR 2022: the prior, its likelihood, and the greedy choice;
        constants as in the authors' code, https://github.com/Yoruko-Tang/FedCor.
        M. E. Tipping, C. M. Bishop, Probabilistic principal component analysis, JRSS B 1999: the closed form.

    >>> selector = FedCor(clients_per_round=1, warmup_rounds=1, seed=0)
    >>> selector.probe(np.arange(3)).columns
    ('loss',)
    >>> losses = np.array([[2.0, 2.0, 2.0], [1.5, 1.6, 2.0]])  # 0 and 1 improve together
    >>> for loss in losses:
    ...     selector.inform(np.arange(3), loss=loss)
    ...     chosen = selector.select(np.arange(3))
    >>> int(chosen[0]) in (0, 1)
    True
    """

    name: ClassVar[str] = "fedcor"
    citations: ClassVar[tuple[str, ...]] = ("tang2022fedcor",)
    asks: ClassVar[frozenset[str]] = frozenset({"loss"})
    buffers: ClassVar[bool] = False
    paper_options: ClassVar[dict[str, str]] = {"averaging": "mean"}
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {
        "_embedding": np.zeros(DIMENSION), "_changes": np.full(KEPT, np.nan), "_discount": 1.0,
        "_loss": 0.0, "_asked_for": -2, "_former": 0.0, "_asked_before": -2,
    }  # fmt: skip
    free_state: ClassVar[Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]] = {"_sampled": (int, ())}

    _embedding: FloatArray
    _changes: FloatArray
    _discount: FloatArray
    # The latest loss, asked for before round _asked_for, and the one before it, before round _asked_before.
    _loss: FloatArray
    _asked_for: IntArray
    _former: FloatArray
    _asked_before: IntArray
    # The rounds of the last columns of _changes.
    _sampled: IntArray

    def __init__(
        self,
        *,
        clients_per_round: int,
        warmup_rounds: int = 25,
        interval: int = 5,
        gamma: float = 0.8,
        beta: float = 0.9,
        fit: str = "closed-form",
        learning_rate: float = 1e-2,
        max_clients: int = 100_000,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.warmup_rounds = whole("warmup_rounds", warmup_rounds, 1)
        self.interval = whole("interval", interval, 1)
        self.gamma = real("gamma", gamma, above=0.0, at_most=1.0)
        self.beta = real("beta", beta, above=0.0, at_most=1.0)
        self.fit = one_of("fit", fit, FITS)
        self.learning_rate = real("learning_rate", learning_rate, above=0.0)
        self.max_clients = whole("max_clients", max_clients, 1)

    def _is_sample(self, number: int) -> bool:
        """Return whether a round selects clients at random. The loss changes of such a round are a sample."""
        number -= self.common_warmup
        after = number - self.warmup_rounds
        return number >= 1 and (after <= 0 or after % self.interval == 0)

    def _probe(self, available: IntArray) -> Probe | None:
        upcoming = self.round + 1
        if not (self._is_sample(upcoming) or self._is_sample(upcoming - 1)):
            return None
        return Probe(clients=available, columns=("loss",))

    def _select(self, available: IntArray) -> IntArray:
        if self._is_sample(self.round - 1):
            self._fit_embeddings()
        # Permuted, so that the first of equal scores is a random one.
        order = self._generator.permutation(available)
        if self._is_sample(self.round):
            self._discount[:] = 1.0
            return order[: self.asked_per_round]
        return self._greedy(order)

    def _greedy(self, candidates: IntArray) -> IntArray:
        """Return the m candidates with the largest expected reduction of the total loss, selected one by one."""
        share = np.where(self._registered, self._sizes(), 0.0)
        share /= max(1e-300, float(share.sum()))  # p_i
        posterior = Posterior(self._embedding.T, NOISE, share, candidates)
        discount = self._discount[candidates]
        left = np.ones(candidates.size, dtype=np.bool_)
        places: list[int] = []
        for _ in range(min(self.asked_per_round, candidates.size)):
            score = discount * posterior.toward / np.sqrt(posterior.variance)  # (13), the authors' code
            best = int(np.argmax(np.where(left, score, -np.inf)))
            posterior.condition(best)
            left[best] = False
            places.append(best)
        chosen = candidates[places]
        self._discount[chosen] *= self.beta  # alpha_k
        return chosen

    def _fit_embeddings(self) -> None:
        """Store the previous round's loss changes as a sample, and fit the embeddings to all stored samples."""
        reported = (self._asked_for == self.round) & (self._asked_before == self.round - 1)
        if not reported.any():
            return
        first = reported & np.isnan(self._changes).all(axis=1)
        self._changes[:, :-1] = self._changes[:, 1:]
        self._changes[:, -1] = np.where(reported, self._loss - self._former, np.nan)  # Delta l
        self._sampled = np.append(self._sampled, self.round - 1)[-KEPT:]
        rows = np.flatnonzero(~np.isnan(self._changes).all(axis=1))
        samples = self._changes[rows, KEPT - len(self._sampled) :].T
        weights: FloatArray = np.power(self.gamma, self.round - 1.0 - self._sampled)
        if self.fit == "adam":
            self._fit_by_adam(rows, samples, weights, first)
        else:
            self._embedding[:] = 0.0
            self._embedding[rows] = likeliest(samples, weights, NOISE, DIMENSION).T

    def _fit_by_adam(self, rows: IntArray, samples: FloatArray, weights: FloatArray, first: BoolArray) -> None:
        """Fit by Adam from the last embeddings, as the authors do. Clients in ``first`` draw new embeddings."""
        self._embedding[first] = self._generator.normal(0.0, DIMENSION**-0.5, (int(first.sum()), DIMENSION))
        steps = WARMUP_STEPS if self.own_round - 1 <= self.warmup_rounds else STEPS
        fitted = adam(self._embedding[rows].T, samples, weights, NOISE, steps=steps, rate=self.learning_rate)
        self._embedding[rows] = fitted.T

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        super()._inform(clients, columns)
        if "loss" not in columns:
            return
        finite = np.isfinite(columns["loss"])
        reported, upcoming = clients[finite], self.round + 1
        older = reported[self._asked_for[reported] != upcoming]
        self._former[older], self._asked_before[older] = self._loss[older], self._asked_for[older]
        self._loss[reported], self._asked_for[reported] = columns["loss"][finite], upcoming


class Evidence:
    """The negative log marginal likelihood of embeddings, given samples of loss changes of mean 0.

    Args:
        samples: Shape (T, n); a client with NaN is left out of that sample.
        weights: Shape (T,).
        noise: s, above 0.

    >>> value, gradient = Evidence(np.ones((1, 1)), np.ones(1), 1.0).cost(np.zeros((1, 1)))
    >>> round(value, 4), gradient.tolist()  # log sqrt(2 pi) + 1/2
    (1.4189, [[0.0]])
    """

    def __init__(self, samples: FloatArray, weights: FloatArray, noise: float) -> None:
        there = ~np.isnan(samples)
        # Samples of the same clients share a covariance matrix.
        masks, group = np.unique(there, axis=0, return_inverse=True)
        self._group: IntArray = np.asarray(group).ravel()
        self._masks: FloatArray = masks.astype(np.float64)  # (G, n)
        self._there, self._samples = there, np.where(there, samples, 0.0)
        self._weights, self._noise = weights, noise

    def cost(self, x: FloatArray) -> tuple[float, FloatArray]:
        """Return the weighted negative log marginal likelihood, nats, and its gradient in ``x``, shape (D, n)."""
        # Woodbury: only D x D matrices are inverted, one for each group of samples.
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
        """Return embeddings of shape (D, n) after a step of expectation-maximization. The cost does not rise.

        A sample is y = X^T z + noise over its clients, with z standard normal. The step first computes the expectation
        of z. Each client's embedding is then the regression of its loss changes on z.
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
        """Return E z and E z z^T given each sample, of shapes (T, D) and (T, D, D)."""
        variance, inverse = self._noise**2, np.zeros((len(self._masks), len(x), len(x)))
        for mask, one in zip(self._masks, inverse, strict=True):
            # By eigenvalues: rounding may leave some just below 0.
            values, vectors = np.linalg.eigh((x * mask) @ x.T)
            one[:] = (vectors / (np.maximum(values, 0.0) + variance)) @ vectors.T  # (s^2 I + X X^T)^-1
        mean = (inverse[self._group] @ (self._samples @ x.T)[:, :, None])[:, :, 0]  # E z
        return mean, variance * inverse[self._group] + mean[:, :, None] * mean[:, None, :]  # E z z^T


def closed_form(samples: FloatArray, weights: FloatArray, noise: float, size: int) -> FloatArray:
    """Return the embeddings of the least :meth:`Evidence.cost` for complete samples, shape (size, n).

    This is probabilistic principal component analysis with known noise. Let S = sum_t w_t y_t y_t^T / sum_t w_t. The
    embeddings follow from the ``size`` largest eigenvalues of S, minus s^2, and their eigenvectors. These come from the
    T x T Gram matrix of the samples. A common rotation of the embeddings is free, but no selection depends on it. Gaps
    count as 0.

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
    """Return :func:`closed_form`, after :data:`EM_STEPS` steps of :meth:`Evidence.improved` if samples have gaps."""
    x = closed_form(samples, weights, noise, size)
    if np.isnan(samples).any():
        evidence = Evidence(samples, weights, noise)
        for _ in range(EM_STEPS):
            x = evidence.improved(x)
    return x


def adam(
    x: FloatArray, samples: FloatArray, weights: FloatArray, noise: float, *, steps: int, rate: float
) -> FloatArray:
    """Return ``x``, shape (D, n), after ``steps`` steps of Adam down :meth:`Evidence.cost`, without changing ``x``.

    Args:
        x: Initial embeddings.
        samples: Shape (T, n), as :class:`Evidence` takes them.
        weights: Shape (T,).
        noise: s.
        steps: Number of steps. The moments begin at 0.
        rate: Learning rate.
    """
    evidence = Evidence(samples, weights, noise)
    x = np.array(x, order="C")
    first, second = np.zeros_like(x), np.zeros_like(x)
    for step in range(1, steps + 1):
        gradient = evidence.cost(x)[1]
        first = FIRST * first + (1.0 - FIRST) * gradient
        second = SECOND * second + (1.0 - SECOND) * np.square(gradient)
        length = np.sqrt(second / (1.0 - SECOND**step)) + TINY
        x = x - first / length * (rate / (1.0 - FIRST**step))
    return x


class Posterior:
    """The entries of the covariance S = s^2 I + X^T M X that a selection reads, for clients not conditioned on yet.

    Args:
        x: Embeddings, shape (D, n).
        noise: s.
        weights: p, shape (n,).
        clients: The candidates, shape (k,).

    Attributes:
        variance: S_kk of ``clients``, shape (k,).
        toward: Sum over i of p_i S_ik for each k of ``clients``, over all clients i that are not conditioned on.

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
        """Condition on the client at ``place``, by S - S_c S_c^T / S_cc. The entry of this client is never read again.

        The sum toward k loses p_c S_ck too, because the row of c is 0 afterwards.
        """
        column = self._inner @ self._x[:, place]
        variance = self.variance[place]
        shared = column @ self._x
        # S_cc includes the noise.
        shared[place] = variance
        self._inner -= np.outer(column, column) / variance
        self.toward -= shared * (self.toward[place] / variance)  # v_k - S_kc v_c / S_cc
        self.variance -= np.square(shared) / variance  # S_kk - S_kc^2 / S_cc
        # Rounding must not take a variance below the noise.
        np.maximum(self.variance, self._floor, out=self.variance)
