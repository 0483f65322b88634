"""FedCor: clients whose training is expected to lower everybody's loss, by a Gaussian process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, one_of, real, whole
from fedsel_flwr.errors import StateError
from fedsel_flwr.selectors._limit import refuse_more, registered_with
from fedsel_flwr.selectors._low_rank import Posterior, adam, likeliest
from fedsel_flwr.selectors._sizes import filled_sizes, take_sizes
from fedsel_flwr.selectors.base import Probe, Selector

DIMENSION = 15
"""Numbers in a client's embedding."""
NOISE = 0.01
"""Standard deviation of the noise of a loss change, nats."""
WARMUP_STEPS, STEPS = 150, 100
"""Steps of Adam in a round of the warm-up and after."""
KEPT = 32
"""Samples of loss changes that are kept."""
FITS = ("closed-form", "adam")


class FedCor(Selector):
    """Learns how the clients' losses change together and chooses those that pull the others' losses along.

    ===============  =====================  ======================================================================
    paper            here                   meaning
    ===============  =====================  ======================================================================
    X                ``_embedding``         column k: client k's 15 numbers
    Sigma            (nothing)              X^T X + 0.01^2 I, the prior covariance of loss changes; never written out
    Delta l          ``_changes``           loss changes over a round of random clients, a sample each
    p_i              ``_size``              client i's share of the examples
    alpha_k, beta    ``_discount``, beta    discount of a client that was chosen, by beta each time
    gamma            ``gamma``              weight of a sample, to the power of its age in rounds
    Delta t          ``interval``           rounds between new samples
    ===============  =====================  ======================================================================

    The warm-up and every ``interval``-th round after it choose at random; before such a round and before the next one
    every available client is asked for its loss, and the difference is a sample.

    The embeddings are those of the largest likelihood of all samples, each weighted by its age. For samples that hold
    every client they have a closed form, so that a difference in the losses' last bits changes no choice.

    Deviations:
        * After the warm-up the paper takes a new sample by training random clients on a copy of the model, which is
          thrown away; here that round itself is random and counts.
        * A sample holds the clients that told their loss before and after; the others are left out of its likelihood.
          Then ten steps of expectation-maximization follow the closed form, which takes gaps for 0.
        * A client without a sample is independent of all others (X_k = 0).
        * Covariances are taken to all registered clients that are not chosen yet, whether they are there or not.
        * Unknown numbers of examples are taken for the mean of the known ones.
        * The warm-up's samples want random clients; so it begins after a common warm-up of all selectors, in which
          nobody is asked for a loss and nothing is learned.
        * Models are averaged without weights, as in the authors' code (commit d941083, ``average_weights``); the
          strategy's ``averaging="fedpdp"`` weighs them by their examples.
        * Equal scores are decided at random. ``max_clients`` is ours: a client takes 425 bytes.
        * The authors' code (``GPR.py``, ``federated_main.py``, commit d941083) climbs the likelihood by Adam at a rate
          of 1e-2, 150 steps in the warm-up and 100 after it, from the embeddings of the fit before. ``fit="adam"`` does
          that; a new client then draws its embedding from N(0, 1/15). Those steps are as long as the noise's standard
          deviation, and the fit never settles. After a few fits a difference in the losses' last bits changes choices.
        * That code drops samples older than ``group_size`` rounds: 10 by default, 100 and 500 in its commands. Here the
          32 latest samples are kept.
        * Its commands since February 2023 take ``--update_mean``. The mean of the process is then that of the samples,
          and one fit of 1,000 steps ends the warm-up, in place of one in each round. Here the mean is 0.
        * Its warm-up takes ``warmup`` + 1 rounds, here it takes ``warmup_rounds``. It counts ``interval`` from the
          run's first round, here from the warm-up's last.

    Args:
        clients_per_round: m.
        warmup_rounds: Random rounds at the beginning; 15 for Fashion-MNIST, 20 for CIFAR-10 in the paper.
        interval: Rounds between new samples; 10, 50.
        gamma: Weight of a sample a round later, in (0, 1]; .95, .99.
        beta: Factor of the score of a client each time it is chosen, until the next sample, in (0, 1]; .95, .9.
        fit: "closed-form", or "adam", as the authors' code does it.
        learning_rate: Of Adam; the closed form has none.
        max_clients: More clients are refused.
        seed: Seed of the generator of random rounds, Adam's first embeddings and ties.

    Raises:
        ParameterError: A parameter is out of range; later, there are too many clients.

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
    asks: ClassVar[frozenset[str]] = frozenset({"loss"})
    paper_options: ClassVar[dict[str, str]] = {"averaging": "mean"}
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {
        "_embedding": np.zeros(DIMENSION), "_changes": np.full(KEPT, np.nan), "_discount": 1.0, "_size": -1.0,
        "_loss": 0.0, "_asked_for": -2, "_former": 0.0, "_asked_before": -2,
    }  # fmt: skip
    free_state: ClassVar[Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]] = {"_sampled": (int, ())}

    _embedding: FloatArray
    _changes: FloatArray
    _discount: FloatArray
    _size: FloatArray
    _loss: FloatArray  # the latest loss, told before round _asked_for; before it _former, before round _asked_before
    _asked_for: IntArray
    _former: FloatArray
    _asked_before: IntArray
    _sampled: IntArray  # the rounds of the last columns of _changes

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
        """Whether a round is random, and its loss changes a sample."""
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
            self._learn()
        order = self._generator.permutation(available)  # the first of equals is a random one
        if self._is_sample(self.round):
            self._discount[:] = 1.0
            return order[: self.asked_per_round]
        return self._greedy(order)

    def _greedy(self, candidates: IntArray) -> IntArray:
        """The m candidates of the largest expected reduction of the total loss, one after the other."""
        share = np.where(self._registered, filled_sizes(self._size, self._registered), 0.0)
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

    def _learn(self) -> None:
        """Take the loss changes of the round before as a sample, and fit the embeddings to all that are kept."""
        told = (self._asked_for == self.round) & (self._asked_before == self.round - 1)
        if not told.any():
            return
        first = told & np.isnan(self._changes).all(axis=1)
        self._changes[:, :-1] = self._changes[:, 1:]
        self._changes[:, -1] = np.where(told, self._loss - self._former, np.nan)  # Delta l
        self._sampled = np.append(self._sampled, self.round - 1)[-KEPT:]
        rows = np.flatnonzero(~np.isnan(self._changes).all(axis=1))
        samples = self._changes[rows, KEPT - len(self._sampled) :].T
        weights: FloatArray = np.power(self.gamma, self.round - 1.0 - self._sampled)
        if self.fit == "adam":
            self._climb(rows, samples, weights, first)
        else:
            self._embedding[:] = 0.0
            self._embedding[rows] = likeliest(samples, weights, NOISE, DIMENSION).T

    def _climb(self, rows: IntArray, samples: FloatArray, weights: FloatArray, first: BoolArray) -> None:
        """The authors' fit: steps of Adam from the embeddings of the fit before; ``first`` ones draw theirs."""
        self._embedding[first] = self._generator.normal(0.0, DIMENSION**-0.5, (int(first.sum()), DIMENSION))
        steps = WARMUP_STEPS if self.own_round - 1 <= self.warmup_rounds else STEPS
        fitted = adam(self._embedding[rows].T, samples, weights, NOISE, steps=steps, rate=self.learning_rate)
        self._embedding[rows] = fitted.T

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        take_sizes(self._size, clients, columns)
        if "loss" not in columns:
            return
        finite = np.isfinite(columns["loss"])
        told, upcoming = clients[finite], self.round + 1
        older = told[self._asked_for[told] != upcoming]
        self._former[older], self._asked_before[older] = self._loss[older], self._asked_for[older]
        self._loss[told], self._asked_for[told] = columns["loss"][finite], upcoming

    def _register(self, clients: IntArray) -> None:
        advice = "raise max_clients (a client takes 425 bytes), or choose among fewer"
        refuse_more(self.name, self.max_clients, registered_with(self._registered, clients), advice)
        super()._register(clients)

    def _check_loaded(self, loaded: Mapping[str, Any]) -> None:
        if loaded["_sampled"].size > KEPT:
            raise StateError(f"state 'sampled' must name at most {KEPT} rounds, got {loaded['_sampled'].size}")
